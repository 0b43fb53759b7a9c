"""Runs work on this machine: in threads, and in worker processes where threads wait for the GIL.

Each worker process loads the work once. Items and results travel through pipes of its own, with
arrays as buffers beside the pickle. So each process has one thread here that serves it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, TypeVar

from packstore.errors import PackstoreError
from packstore.etl.engines import in_order
from packstore.tokenizer.chat import limits

log = logging.getLogger("packstore")

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS, MAX_PROCESSES = 4, 16
"""More threads would only wait for the GIL; one process reads and writes for all workers."""

WORTH_SECONDS, QUICK_SECONDS = 1.0, 4.0
"""Time of the first worker alone, if `num_workers` is unset, before others are started: each takes
one to three seconds of a core to load packages and a tokenizer. The quick one is done with 100 MB
by then, which is mostly all there is."""

WAIT_SECONDS = 60.0
"""Time for which a worker process without a job waits for the next one."""

ITEM_SECONDS = 900
"""Processor time of a worker process for an item, which mostly takes less than a second; beyond it
the job fails."""

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
}
"""Environment of a worker process: there is one per core, so threads inside would only contend."""

_ENDED = (EOFError, OSError, pickle.UnpicklingError)
"""What a pipe raises whose other process has ended, perhaps amid an answer."""


def run(work: Callable[[T], R], items: Iterable[T], num_workers: int | None) -> Iterator[R]:
    """Yields ``work(item)`` for every item, in order; holds at most two for each worker.

    Each worker process gets `work` once and calls ``work.load()``, if it has that. `num_workers`
    counts this process, which works until `work` raises :class:`NeedsWorkerProcess`: then one works
    in its place. None: a process per core after ``work.alone`` seconds, or threads if that is None.
    """
    alone = getattr(work, "alone", WORTH_SECONDS)
    threads = num_workers is None and alone is None
    most = min(cores(), MAX_THREADS if threads else MAX_PROCESSES)
    if num_workers is not None:
        most = max(num_workers, 1)
    workers = _Workers(work, most if threads else 1)
    with ThreadPoolExecutor(most, "packstore-work") as pool, contextlib.closing(workers):
        if most == 1:
            yield from map(workers, items)
            return
        if not threads:
            workers.add_processes(most - 1, alone if num_workers is None else 0)

        def submit(item: T) -> Future[R]:
            return pool.submit(workers, item)

        yield from in_order(submit, items, 2 * most, Future.result, Future.cancel)


def prepare() -> None:
    """Starts a worker process, for a job that will need one: it loads packages meanwhile."""
    if not _spare:
        _keep_spare(_Process())


def cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


class _Workers:
    """Functions of an item, here or in processes; each thread takes one that is idle for a call."""

    def __init__(self, work: Callable[[Any], Any], here: int) -> None:
        self._work = work
        self._idle: queue.SimpleQueue[Callable[[Any], Any]] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        self._works_here = True
        self._stopped = threading.Event()
        for _ in range(here):
            self._idle.put(work)

    def __call__(self, item: Any) -> Any:
        worker = self._idle.get()
        try:
            if self._stopped.is_set():
                return None
            try:
                return worker(item)
            except limits.NeedsWorkerProcess:
                worker = self._start_process()
                worker.load(self._work)
                return worker(item)
        finally:
            if worker is not self._work or self._works_here:
                self._idle.put(worker)

    def add_processes(self, number: int, seconds: float) -> None:
        """Starts worker processes after so much time; each is idle once it has loaded the work."""

        def add() -> None:
            if self._stopped.wait(seconds):
                return
            try:
                process = self._start_process()
            except PackstoreError as error:  # then there are fewer
                log.warning("%s", error)
                return
            process.load(self._work)
            self._idle.put(process)
            # For several, this process reads 200 MB/s; 80 beside a thread of it that tokenizes.
            self._works_here = number == 1

        for _ in range(number):
            threading.Thread(target=add, daemon=True).start()

    def _start_process(self) -> _Process:
        process = _take_spare() or _Process()
        process.is_idle = False  # until it has loaded the work
        self._processes.append(process)
        if self._stopped.is_set():  # by another thread, meanwhile
            process.kill()
        return process

    def close(self) -> None:
        """Ends the processes, whatever they do; items that wait are not worked on."""
        self._stopped.set()
        if (idle := next((p for p in self._processes if p.is_idle), None)) and not _spare:
            self._processes.remove(idle)
            idle.load(None)  # frees the memory of the work
            _keep_spare(idle)
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.kill()


class _Process:
    """A worker process: a function of an item, once it has loaded the work."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from packstore.etl.engines import local; "
            f"local.serve({limits.SECONDS}, {limits.MEMORY})"
        )
        self._error: BaseException | None = None
        self.is_idle = False
        try:
            # Not by multiprocessing: its forks break numba's OpenMP layer, s3fs and obstore, and
            # what it spawns runs a user's script again. Ctrl-C is for this process only.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )
        except OSError as error:
            raise PackstoreError(f"a worker process cannot be started: {error}") from error

    @property
    def is_alive(self) -> bool:
        """True unless the process has ended."""
        return self._process.poll() is None

    def load(self, work: Callable[[Any], Any] | None) -> None:
        """Sends the work, and waits until it is loaded; an error is raised for the next item."""
        self._error = None
        try:
            self._answer(work, True)
        except BaseException as error:
            self._error = error

    def __call__(self, item: Any) -> Any:
        """Returns the result of an item."""
        if self._error is not None:
            raise self._error
        return self._answer(item, False)

    def _answer(self, item: Any, is_work: bool) -> Any:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        self.is_idle = False  # until there is a whole answer
        try:
            _send(questions, (is_work, item))
            succeeded, result = _receive(answers)
        except _ENDED as error:
            raise self._death_error() from error
        self.is_idle = True
        if not succeeded:
            raise result
        return result

    def _death_error(self) -> PackstoreError:
        code = self._process.wait()
        cause, remedy = f"exit code {code}; its own error is above", "Run again"
        with contextlib.suppress(ValueError):
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Run again with a smaller --num-workers, in case memory ran out"
        if limits.SIGNAL is not None and code == -limits.SIGNAL:
            return limits.too_long()
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            cause = f"more than {ITEM_SECONDS} s of processor time for one block"
            remedy = "Look for a slow regular expression in the tokenizer"
        return PackstoreError(f"a worker process died ({cause}); nothing was committed. {remedy}.")

    def end(self) -> None:
        """Asks the process to end, and to remove its files before."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process, whatever it does; it has two seconds to remove its files."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass


_spare: list[_Process] = []
"""Processes, mostly one, that wait for a job; they end with this process."""
_timer: threading.Timer | None = None
"""What ends them."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)  # they serve the parent


def _keep_spare(process: _Process) -> None:
    """Lets a process wait for a job, for a minute."""
    global _timer
    _spare.append(process)
    if _timer is not None:
        _timer.cancel()
    _timer = threading.Timer(WAIT_SECONDS, _end_spare)
    _timer.daemon = True
    _timer.start()


def _end_spare() -> None:
    if process := _take_spare():
        process.kill()


def _take_spare() -> _Process | None:
    """Takes a process that waits, if there is one."""
    with contextlib.suppress(IndexError):  # another thread may take it first
        while True:
            process = _spare.pop()
            if process.is_alive:
                return process
    return None


def serve(seconds: float, memory: int) -> None:
    """Runs in a worker process: receives the work, then items, until the parent ends.

    A record may take so many seconds of processor time and bytes of memory to render.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not end up among the answers
    limits.allow_rendering(seconds, memory)
    signal.signal(signal.SIGTERM, _end)
    work: Any = None
    with contextlib.suppress(*_ENDED):
        while True:
            item = result = answer = None  # frees the previous ones
            try:
                is_work, item = _receive(questions)
                if is_work:
                    work, result = item, None
                    gc.unfreeze()
                    getattr(work, "load", lambda: None)()
                    gc.freeze()  # what is loaded is not searched for garbage again and again
                else:
                    if hasattr(signal, "setitimer"):
                        signal.setitimer(signal.ITIMER_PROF, ITEM_SECONDS)
                    result = work(item)
                answer = True, result
            except Exception as error:
                answer = False, _picklable(error)
            _send(answers, answer)  # fails if there was no item: the parent has ended


def _end(*_: Any) -> None:
    """Ends this process, so that it removes its temporary files; a second request changes nothing.

    The interpreter would otherwise report it on stderr as an exception ignored at exit.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _picklable(error: Exception) -> Exception:
    """Returns the error, or one with its text if it does not survive a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PackstoreError(f"{type(error).__name__}: {error}")
    return error


def _send(pipe: IO[bytes], value: object) -> None:
    """Sends a value, its arrays beside its pickle: what cannot be read is received whole, too."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    pickle.dump((data, buffers), pipe, 5)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """Receives what :func:`_send` sent."""
    data, buffers = pickle.load(pipe)
    return pickle.loads(data, buffers=buffers)
