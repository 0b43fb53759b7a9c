"""Runs work on this machine: in threads, and in worker processes where threads wait for
the GIL.

Each worker process loads the *work* once: a function with its data, such as a
tokenizer. Then it applies it to one *item* after another, such as blocks of records,
while one thread here waits for its answers. Requests and answers are pickles in pipes.
When a job is done, one process is kept for the next job, in the reserve.

Why not multiprocessing: its forks break numba's OpenMP layer, s3fs and obstore, and its
other children run a user's script again. Why not loky: a daemon of multiprocessing may
not use it, its workers outlive a killed job by a minute and more, and it ends them
before they can remove their files.
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
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

from packstore.errors import PackstoreError
from packstore.etl.engines import in_order
from packstore.tokenizer.dialogue import template

log = logging.getLogger("packstore")

T = TypeVar("T")
R = TypeVar("R")

MAX_PROCESSES = 16
"""One process reads and writes for all workers."""

SECONDS_ALONE = 1.0
"""Time for which the first worker works alone, before others are started: each takes
one to three seconds of a core to load packages and a tokenizer.
"""

SECONDS_ALONE_IF_QUICK = 4.0
"""The same for quick work, without a chat template: in this time one worker tokenizes
100 MB, more than most inputs have.
"""

WAIT_SECONDS = 60
"""Maximum seconds after which a waiting process is given another job; it ends by itself
30 seconds later, so none is given a job while it ends.
"""

ITEM_SECONDS = 900
"""Maximum processor time of a worker process for an item, which mostly takes less than
a second; beyond it the job fails.
"""

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
}
"""Environment of a worker process: there is one per core, so threads inside would only
contend.
"""

_PIPE_ERRORS = (EOFError, OSError, pickle.UnpicklingError)
"""Errors of a pipe if the other process has ended, perhaps amid an answer."""


def run(
    work: Callable[[T], R], items: Iterable[T], num_workers: int | None
) -> Iterator[R]:
    """Yield ``work(item)`` for every item, in order; hold at most two for each worker.

    - If `num_workers` is None and ``work.in_threads`` is true, threads of this process
      work, one per core.
    - Else this process works by itself for ``work.seconds_alone`` seconds (default 0).
      If `work` raises :class:`NeedsWorkerProcess`, a worker process does it instead.
      Then `num_workers` processes work; None: one per core. Each calls ``work.load()``
      once, if `work` has that method.
    """
    if num_workers is None:
        max_workers = min(cores(), MAX_PROCESSES)
    else:
        max_workers = max(num_workers, 1)
    with (
        ThreadPoolExecutor(max_workers, "packstore-work") as threads,
        contextlib.closing(_ProcessPool(work, threads, max_workers)) as processes,
    ):
        if num_workers is None and getattr(work, "in_threads", False):
            yield from in_order(
                processes.submit_here, items, max_pending=2 * max_workers
            )
        else:
            seconds_alone = getattr(work, "seconds_alone", 0.0)
            if max_workers == 1:
                seconds_alone = math.inf
            elif num_workers is not None and seconds_alone:
                seconds_alone = SECONDS_ALONE
                processes.start(max_workers)  # they load packages meanwhile
            yield from _run_in_processes(processes, items, max_workers, seconds_alone)
        processes.keep_one()


def _run_in_processes(
    processes: _ProcessPool,
    items: Iterable[Any],
    max_workers: int,
    seconds_alone: float,
) -> Iterator[Any]:
    """Yield the results of this process for `seconds_alone`, then of all workers."""
    remaining_items = iter(items)
    alone_until = time.monotonic() + seconds_alone
    for item in remaining_items:
        if time.monotonic() >= alone_until:
            remaining_items = itertools.chain([item], remaining_items)
            break
        yield processes.work_here(item)
    yield from in_order(processes.submit, remaining_items, max_pending=2 * max_workers)


def prepare() -> None:
    """Start a worker process for a job that will need one, to load its packages."""
    if not _reserve:
        _reserve.append(WorkerProcess())


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The pool of a job.


class _ProcessPool:
    """The worker processes of a job; each works on one item at a time.

    Args:
        work: the function of an item.
        threads: wait for the results of the processes.
        max_processes: maximum number of processes.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        threads: ThreadPoolExecutor,
        max_processes: int,
    ) -> None:
        self._work = work
        self._threads = threads
        self._max_processes = max_processes
        self._processes: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._needs_process = False  # True once this process could not do an item

    def start(self, count: int) -> None:
        """Start processes until there are `count`, or as many as the system allows."""
        while len(self._processes) < count:
            try:
                process = _take_from_reserve() or WorkerProcess()
            except PackstoreError as error:
                if not self._processes:
                    raise
                log.warning("%s", error)
                self._max_processes = len(self._processes)
                return
            self._processes.append(process)
            self._idle.put(process)

    def submit(self, item: Any) -> Future[Any]:
        """Give an item to an idle process; start one more, up to the maximum.

        A thread waits for the result.
        """
        self._start_one_more()
        return self._threads.submit(self._work_in_process, item)

    def submit_here(self, item: Any) -> Future[Any]:
        """Let a thread of this process work on an item."""
        return self._threads.submit(self.work_here, item)

    def work_here(self, item: Any) -> Any:
        """Work on an item in this thread.

        If an item needs a worker process, such a process does it and all later ones,
        and the thread waits.
        """
        if not self._needs_process:
            try:
                return self._work(item)
            except template.NeedsWorkerProcess:
                self._needs_process = True
        with self._starting:
            if self._idle.empty():
                self._start_one_more()
        return self._work_in_process(item)

    def _start_one_more(self) -> None:
        self.start(min(len(self._processes) + 1, self._max_processes))

    def _work_in_process(self, item: Any) -> Any:
        process = self._idle.get()
        try:
            if not process.has_work:
                process.load(self._work)
            return process.work_on(item)
        finally:
            self._idle.put(process)

    def keep_one(self) -> None:
        """Put a process into the reserve, without the memory of this work.

        To be called when all processes are idle.
        """
        if _reserve:
            return
        for process in self._processes:
            if process.has_work:
                with contextlib.suppress(PackstoreError):  # it died meanwhile
                    process.load(None)
                    self._processes.remove(process)
                    _reserve.append(process)
                return

    def close(self) -> None:
        """End the processes, whatever they do."""
        _end_processes(self._processes)


# Processes that wait for a job.


_reserve: list[WorkerProcess] = []
"""Processes, at most one or two, that wait for the next job of this process, so that it
need not wait until packages are loaded. They end by themselves after a while (see
:data:`WAIT_SECONDS`), or with this process.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reserve.clear)  # they serve the parent


def _take_from_reserve() -> WorkerProcess | None:
    while _reserve:
        try:
            process = _reserve.pop()
        except IndexError:  # another thread took it
            return None
        if process.is_waiting:
            return process
        _end_processes([process])
    return None


# A worker process, as this process sees it.


class _Request(NamedTuple):
    """A message to a worker process."""

    is_work: bool
    value: Any  # the work to load, or an item to work on


class _Answer(NamedTuple):
    """The answer to a request."""

    has_succeeded: bool
    value: Any  # the result, or the error to raise


class WorkerProcess:
    """A process that works on items, once it has loaded the work.

    Attributes:
        has_work: True if it has loaded the work of a job.

    Raises:
        PackstoreError: the system starts no more processes.
    """

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from packstore.etl.engines import local; "
            f"local.serve({template.RENDER_SECONDS}, {template.RENDER_MEMORY})"
        )
        self._waits_since = time.monotonic()
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
    def is_waiting(self) -> bool:
        """True if it still waits for a job."""
        seconds = time.monotonic() - self._waits_since
        return seconds < WAIT_SECONDS and self._process.poll() is None

    def load(self, work: Callable[[Any], Any] | None) -> None:
        """Send the work, and wait until it is loaded; None: free it."""
        self._waits_since = time.monotonic()
        self._ask(_Request(is_work=True, value=work))
        self.has_work = work is not None

    def work_on(self, item: Any) -> Any:
        """Return the result of an item.

        Raises:
            PackstoreError: the process died.
            Exception: the error of the work.
        """
        return self._ask(_Request(is_work=False, value=item))

    def _ask(self, request: _Request) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, request)
            answer: _Answer = _decode(_receive(self._process.stdout))
        except _PIPE_ERRORS as error:
            raise self._death_error() from error
        if not answer.has_succeeded:
            raise answer.value
        return answer.value

    def _death_error(self) -> PackstoreError:
        """Return an error with the cause of the end of the process."""
        code = self._process.wait()
        if template.TIMEOUT_SIGNAL is not None and code == -template.TIMEOUT_SIGNAL:
            return template.timeout_error()

        cause = f"exit code {code}; its own error is above"
        remedy = "Run again"
        with contextlib.suppress(ValueError):  # it was not ended by a signal
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Run again with a smaller --num-workers, in case memory ran out"
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            cause = f"more than {ITEM_SECONDS} s of processor time for one block"
            remedy = "Look for a slow regular expression in the tokenizer"
        return PackstoreError(
            f"a worker process died ({cause}); nothing was committed. {remedy}."
        )

    def terminate(self) -> None:
        """Ask the process to end; it may remove its files."""
        self._process.terminate()

    def kill(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of the process, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # A request that was not sent whole cannot be sent any more.
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


def _end_processes(processes: Sequence[WorkerProcess]) -> None:
    """End processes, whatever they do; they have two seconds to remove their files."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.kill(timeout=2)


# In a worker process.


def serve(seconds: float, memory: int) -> None:
    """Answer requests in a worker process, until the process that started it ends.

    Args:
        seconds: maximum processor time to render a record.
        memory: maximum bytes to render a record.
    """
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not end up among the answers
    template.allow_rendering(seconds, memory)
    signal.signal(signal.SIGTERM, _exit)
    worker = _Worker()
    with contextlib.suppress(*_PIPE_ERRORS):
        while True:
            wait_seconds = 0 if worker.has_work else WAIT_SECONDS + 30
            _end_after(wait_seconds, ITEM_SECONDS)
            # Without variables for messages and results, each is freed before the next
            # wait.
            _send(answers, worker.answer(_receive(requests)))


def _exit(*_: object) -> NoReturn:
    """End the process by an exception, which removes its temporary files."""
    sys.exit(1)


class _Worker:
    """Loads the work, and works on items."""

    def __init__(self) -> None:
        self._work: Any = None

    @property
    def has_work(self) -> bool:
        """True if it has loaded the work of a job."""
        return self._work is not None

    def answer(self, message: _Message) -> _Answer:
        """Return the result of a request, or its error."""
        _end_after(0, ITEM_SECONDS)
        try:
            request: _Request = _decode(message)
            if request.is_work:
                self._load(request.value)
                return _Answer(has_succeeded=True, value=None)
            return _Answer(has_succeeded=True, value=self._work(request.value))
        except Exception as error:
            return _Answer(has_succeeded=False, value=_picklable(error))

    def _load(self, work: Any) -> None:
        self._work = work
        gc.unfreeze()
        if hasattr(work, "load"):
            work.load()
        # A tokenizer shall not be searched for garbage again and again.
        gc.freeze()


def _end_after(seconds: float, processor_seconds: float) -> None:
    """Let the kernel end this process after `seconds`, or `processor_seconds` of its
    own processor time; 0: never.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, processor_seconds)


def _picklable(error: Exception) -> Exception:
    """Return the error, or one with its text if it does not survive a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PackstoreError(f"{type(error).__name__}: {error}")
    return error


# Messages.


class _Message(NamedTuple):
    """A pickled value, and its arrays beside the pickle, which are not copied."""

    data: bytes
    buffers: list[pickle.PickleBuffer]


def _send(pipe: IO[bytes], value: object) -> None:
    """Send a value.

    It is a pickle inside a pickle: a message that cannot be decoded is received whole,
    too, and the next one begins behind it.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    pickle.dump(_Message(data, buffers), pipe, 5)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> _Message:
    """Receive a message."""
    message: _Message = pickle.load(pipe)
    return message


def _decode(message: _Message) -> Any:
    """Return the value of a message."""
    return pickle.loads(message.data, buffers=message.buffers)
