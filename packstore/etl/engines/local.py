"""Runs work on this machine: in threads, and in worker processes where threads wait for the GIL.

Each worker process loads the work once. Items and results travel through a pipe of its own, with
arrays as buffers beside the pickle. So a process is worked for by one thread here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from packstore.errors import PackstoreError

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS, MAX_PROCESSES = 4, 16
"""More threads would only wait for the GIL; one process reads and writes for all workers."""

WORTH_SECONDS = 1.0
"""Time of this process alone, if `num_workers` is unset, before it starts worker processes: each
takes two to three seconds of a core to load packages and a tokenizer."""

ITEM_SECONDS = 900
"""Processor time of a worker process for an item, which mostly takes less than a second; beyond it
the job fails."""


def run(work: Callable[[T], R], items: Iterable[T], num_workers: int | None) -> Iterator[R]:
    """Yields ``work(item)`` for every item, in order; holds at most two for each worker.

    Each worker process gets `work` once and calls ``work.load()``; if it has them, the process runs
    ``work.begin(item)``, and this one ``work.finish`` on the result. `num_workers` counts this
    process; None: its threads if ``work.suits_threads``, else a process per core after some time.
    """
    threads = num_workers is None and getattr(work, "suits_threads", False)
    most = min(_cores(), MAX_THREADS if threads else MAX_PROCESSES)
    if num_workers is not None:
        most = max(num_workers, 1)
    if most == 1:
        yield from map(work, items)
        return
    start = time.monotonic() + (WORTH_SECONDS if num_workers is None else 0)
    workers = _Workers()
    for _ in range(most if threads else 1):
        workers.idle.put(work)
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(most, "packstore-work") as pool, contextlib.closing(workers):
        for item in items:
            if not (threads or workers.processes) and time.monotonic() >= start:
                workers.add_processes(work, most - 1)
            pending.append(pool.submit(workers, item))
            if len(pending) > 2 * most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


class _Workers:
    """Functions of an item, here or in processes; each thread takes one that is idle for a call."""

    def __init__(self) -> None:
        self.idle: queue.SimpleQueue[Callable[[Any], Any]] = queue.SimpleQueue()
        self.processes: list[_Process] = []
        self._closed = False

    def __call__(self, item: Any) -> Any:
        worker = self.idle.get()
        try:
            return None if self._closed else worker(item)
        finally:
            self.idle.put(worker)

    def add_processes(self, work: Callable[[Any], Any], number: int) -> None:
        """Starts worker processes; each is idle once it has loaded the work."""
        for _ in range(number):
            self.processes.append(_Process(work))
            threading.Thread(target=self.processes[-1].load, args=(self.idle,)).start()

    def close(self) -> None:
        """Ends the processes, whatever they do; items that wait are not worked on."""
        self._closed = True
        for process in self.processes:
            process.kill()


class _Process:
    """A worker process: a function of an item, once it has loaded the work."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        # Spawned, not forked: numba's OpenMP layer, s3fs and obstore do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._work = work
        self._error: BaseException | None = None
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end,), daemon=True)
        try:
            with _no_main_module():
                self._process.start()
        except OSError as error:
            text = f"a worker process cannot be started ({error}); nothing was written."
            raise PackstoreError(f"{text} Run again with a smaller --num-workers.") from error
        its_end.close()

    def load(self, idle: queue.SimpleQueue[Callable[[Any], Any]]) -> None:
        """Sends the work, and waits until it is loaded; an error is raised for the next item."""
        try:
            self._answer(self._work)
        except BaseException as error:
            self._error = error
        idle.put(self)

    def __call__(self, item: Any) -> Any:
        """Returns the result of an item."""
        if self._error is not None:
            raise self._error
        result = self._answer(item)
        finish = getattr(self._work, "finish", None)
        return result if finish is None else finish(result)

    def _answer(self, item: Any) -> Any:
        try:
            _send(self._pipe, item)
            succeeded, result = _receive(self._pipe)
        except (EOFError, OSError) as error:
            raise self._death() from error
        if not succeeded:
            raise result
        return result

    def _death(self) -> PackstoreError:
        self._process.join()
        code = self._process.exitcode or 0
        cause, remedy = f"exit code {code}; its own error is above", "Run again"
        with contextlib.suppress(ValueError):
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Run again with a smaller --num-workers, in case memory ran out"
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            cause = f"more than {ITEM_SECONDS} s of processor time for one block"
            remedy = "Look for a slow regular expression in the tokenizer"
        return PackstoreError(f"a worker process died ({cause}); nothing was written. {remedy}.")

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """Runs in a worker process: receives the work, then items, until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # One process per core already: threads inside each would only contend.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["POLARS_MAX_THREADS"] = "1"
    work: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                item = _receive(pipe)
                if work is None:
                    work, result = item, None
                    getattr(work, "load", lambda: None)()
                else:
                    if hasattr(signal, "setitimer"):
                        signal.setitimer(signal.ITIMER_PROF, ITEM_SECONDS)
                    result = getattr(work, "begin", work)(item)
                answer = True, result
            except Exception as error:
                answer = False, _portable(error)
            _send(pipe, answer)  # fails if there was no item, as the parent has ended
            item = None
            del answer


def _portable(error: Exception) -> Exception:
    """Returns the error, or one with its text if it does not survive a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PackstoreError(f"{type(error).__name__}: {error}")
    return error


def _send(pipe: Connection, value: object) -> None:
    """Sends a value, its arrays as raw bytes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
    pipe.send([part.nbytes for part in parts])
    for part in parts:
        pipe.send_bytes(part)


def _receive(pipe: Connection) -> Any:
    """Receives what :func:`_send` sent; arrays can be written to."""
    parts = []
    for size in pipe.recv():
        parts.append(bytearray(size))
        pipe.recv_bytes_into(parts[-1])
    return pickle.loads(parts[0], buffers=parts[1:])


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keeps a spawned child from running the user's script again.

    Spawn imports ``__main__`` in each child: a script that calls ``packstore.pack`` without an
    ``if __name__ == "__main__"`` guard would start over. No work is defined in it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
