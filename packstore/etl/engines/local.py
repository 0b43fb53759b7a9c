"""Runs work on this machine: in threads, and in worker processes where threads wait for
the GIL.

Each worker process loads the work once, and has one thread here that serves it.
Questions and answers are pickles, in pipes of its own. It is not one of
multiprocessing, whose forks break numba's OpenMP layer, s3fs and obstore, and whose
other children run a user's script again; nor of loky, which no daemon of
multiprocessing may use, whose workers outlive a job that is killed by a minute and
more, and which ends them before they can remove their files.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, TypeVar

from packstore.errors import PackstoreError
from packstore.etl.engines import in_order
from packstore.tokenizer.dialogue import template

log = logging.getLogger("packstore")

T = TypeVar("T")
R = TypeVar("R")

MAX_PROCESSES = 16
"""One process reads and writes for all workers."""

WORTH_SECONDS, QUICK_SECONDS = 1.0, 4.0
"""Time of the first worker alone, before others are started: each takes one to three
seconds of a core to load packages and a tokenizer. The quick one is done with 100 MB by
then, which is mostly all there is.
"""

WAIT_SECONDS = 60
"""Time for which a process that waits for a job is given one; it ends half a minute
later.
"""

ITEM_SECONDS = 900
"""Processor time of a worker process for an item, which mostly takes less than a
second; beyond it the job fails.
"""

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
}
"""Environment of a worker process: there is one per core, so threads inside would only
contend.
"""

_ENDED = (EOFError, OSError, pickle.UnpicklingError)
"""What a pipe raises whose other process has ended, perhaps amid an answer."""

_waiting: list[WorkerProcess] = []
"""Processes, at most one or two, that wait for a job; they end after a while, or with
this one.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # they serve the parent


def run(
    work: Callable[[T], R], items: Iterable[T], num_workers: int | None
) -> Iterator[R]:
    """Yields ``work(item)`` for every item, in order; holds at most two for each
    worker.

    First this process works, for ``work.alone`` seconds (default 0), or one in its
    place if `work` raises :class:`NeedsWorkerProcess`. Then `num_workers` processes
    work, by default one per core, each of which calls ``work.load()`` once, if there is
    that. Where no number is set and ``work.in_threads`` is true, threads of this
    process work instead.
    """
    most = (
        max(num_workers, 1) if num_workers is not None else min(cores(), MAX_PROCESSES)
    )
    alone = getattr(work, "alone", 0.0)
    with (
        ThreadPoolExecutor(most, "packstore-work") as pool,
        contextlib.closing(_Processes(work, pool, most)) as processes,
    ):
        if num_workers is None and getattr(work, "in_threads", False):
            yield from in_order(
                lambda item: pool.submit(processes.here, item), items, 2 * most
            )
        else:
            if most == 1:
                alone = math.inf
            elif num_workers is not None and alone:
                alone = WORTH_SECONDS
                processes.start(most)  # they load packages meanwhile
            end, items = time.monotonic() + alone, iter(items)
            for item in items:
                if time.monotonic() >= end:
                    items = itertools.chain([item], items)
                    break
                yield processes.here(item)
            yield from in_order(processes.submit, items, 2 * most)
        processes.keep_one()


def prepare() -> None:
    """Starts a worker process, for a job that will need one: it loads packages
    meanwhile.
    """
    if not _waiting:
        _waiting.append(WorkerProcess())


def cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


class _Processes:
    """Worker processes: a function of an item, which one that is idle works on."""

    def __init__(
        self, work: Callable[[Any], Any], pool: ThreadPoolExecutor, most: int
    ) -> None:
        self._work, self._pool, self._most = work, pool, most
        self._all: list[WorkerProcess] = []
        self._starting, self._needed = threading.Lock(), False
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()

    def start(self, number: int) -> None:
        """Starts processes until there are so many, or as many as the system allows."""
        while len(self._all) < number:
            try:
                self._all.append(_take_waiting() or WorkerProcess())
            except PackstoreError as error:
                if not self._all:
                    raise
                log.warning("%s", error)
                self._most = number = len(self._all)
            else:
                self._idle.put(self._all[-1])

    def submit(self, item: Any) -> Future[Any]:
        """Lets a thread wait for the result of an item; one more process may work on
        it.
        """
        self.start(min(len(self._all) + 1, self._most))
        return self._pool.submit(self, item)

    def here(self, item: Any) -> Any:
        """Works on an item in this thread; from the first that needs a process on, in
        one.
        """
        if not self._needed:
            try:
                return self._work(item)
            except template.NeedsWorkerProcess:
                self._needed = True
        with self._starting:
            if self._idle.empty():
                self.start(min(len(self._all) + 1, self._most))
        return self(item)

    def __call__(self, item: Any) -> Any:
        process = self._idle.get()
        try:
            if not process.has_work:
                process.load(self._work)
            return process(item)
        finally:
            self._idle.put(process)

    def keep_one(self) -> None:
        """Lets a process wait for the next job, without the memory of this work; all
        are idle.
        """
        kept = next((process for process in self._all if process.has_work), None)
        if kept is not None and not _waiting:
            with contextlib.suppress(PackstoreError):  # it died meanwhile
                kept.load(None)
                self._all.remove(kept)
                _waiting.append(kept)

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        WorkerProcess.end(self._all)


def _take_waiting() -> WorkerProcess | None:
    while _waiting:
        with contextlib.suppress(IndexError):  # another thread took it
            if (process := _waiting.pop()).waits:
                return process
            WorkerProcess.end([process])
    return None


class WorkerProcess:
    """A function of an item, in a process of its own, once it has loaded the work."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from packstore.etl.engines "
            "import local; "
            f"local.serve({template.RENDER_SECONDS}, {template.RENDER_MEMORY})"
        )
        self._waits_from = time.monotonic()
        self.has_work = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the job's own process
            )
        except OSError as error:
            raise PackstoreError(
                f"a worker process cannot be started: {error}"
            ) from error

    @property
    def waits(self) -> bool:
        """True if it still waits for a job."""
        waited = time.monotonic() - self._waits_from
        return waited < WAIT_SECONDS and self._process.poll() is None

    def load(self, work: Callable[[Any], Any] | None) -> None:
        """Sends the work, and waits until it is loaded; None: waits for that of another
        job.
        """
        self._waits_from = time.monotonic()
        self._ask(True, work)
        self.has_work = work is not None

    def __call__(self, item: Any) -> Any:
        """Returns the result of an item."""
        return self._ask(False, item)

    def _ask(self, is_work: bool, value: Any) -> Any:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        try:
            _send(questions, (is_work, value))
            succeeded, result = _receive(answers)
        except _ENDED as error:
            raise self._death_error() from error
        if not succeeded:
            raise result
        return result

    def _death_error(self) -> PackstoreError:
        code = self._process.wait()
        cause, remedy = f"exit code {code}; its own error is above", "Run again"
        with contextlib.suppress(ValueError):
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Run again with a smaller --num-workers, in case memory ran out"
        if template.TIMEOUT_SIGNAL is not None and code == -template.TIMEOUT_SIGNAL:
            return template.timeout_error()
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            cause = f"more than {ITEM_SECONDS} s of processor time for one block"
            remedy = "Look for a slow regular expression in the tokenizer"
        return PackstoreError(
            f"a worker process died ({cause}); nothing was committed. {remedy}."
        )

    @staticmethod
    def end(processes: Sequence[WorkerProcess]) -> None:
        """Ends processes, whatever they do; they have two seconds to remove their
        files.
        """
        for process in processes:
            process._process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process._process.wait(2)
            process._process.kill()
            with contextlib.suppress(OSError), process._process:
                pass


def serve(seconds: float, memory: int) -> None:
    """Runs in a worker process: receives the work, then items, until the other process
    ends.

    A record may take so many seconds of processor time and bytes of memory to render.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not end up among the answers
    template.allow_rendering(seconds, memory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes its temporary files
    work: Any = None
    with contextlib.suppress(*_ENDED):
        while True:
            item = result = answer = None  # frees the previous ones
            _end_after(WAIT_SECONDS + 30 if work is None else 0, ITEM_SECONDS)
            try:
                is_work, item = _receive(questions)
                _end_after(0, ITEM_SECONDS)
                if is_work:
                    work, result = item, None
                    gc.unfreeze()
                    getattr(work, "load", lambda: None)()
                    # what is loaded is not searched for garbage again and again
                    gc.freeze()
                else:
                    result = work(item)
                answer = True, result
            except Exception as error:
                answer = False, _picklable(error)
            _send(
                answers, answer
            )  # fails if there was no item: the other process has ended


def _end_after(seconds: float, processor_seconds: float) -> None:
    """Lets the kernel end this process after so much time, or processor time;
    0: not.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, processor_seconds)


def _picklable(error: Exception) -> Exception:
    """Returns the error, or one with its text if it does not survive a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PackstoreError(f"{type(error).__name__}: {error}")
    return error


def _send(pipe: IO[bytes], value: object) -> None:
    """Sends a value, its arrays beside its pickle: what cannot be read is received
    whole, too.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    pickle.dump((data, buffers), pipe, 5)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """Receives what :func:`_send` sent."""
    data, buffers = pickle.load(pipe)
    return pickle.loads(data, buffers=buffers)
