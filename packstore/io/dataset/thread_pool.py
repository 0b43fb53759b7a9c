"""A small thread pool that never keeps the process from exiting.

Instead of concurrent.futures: at exit the interpreter would wait for the threads of its executors,
and a fork may leave the locks of its futures taken.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 2.0
"""Seconds that :meth:`ThreadPool.close` waits for running jobs, over all threads."""


class Job(Generic[T]):
    """A call and, once a pool has run it, its result or error.

    Runs lazily, in the caller's thread, if no pool of this process has it.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self.call, self.pid = call, 0
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the call and stores its result or error."""
        try:
            self._value = self.call()
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> T:
        """Waits for the result; raises the job's error."""
        if not self._done.is_set() and os.getpid() != self.pid:
            return self.call()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


_Jobs = queue.SimpleQueue[Job[object] | None]


class ThreadPool:
    """Starts calls in the order in which they were submitted.

    The threads end when the pool is closed or no longer referenced. They are daemons, so the
    interpreter does not wait for them; it closes the pool at exit, because a thread inside a C
    library could crash it then.

    Args:
        size: maximum number of threads; a call starts one if none is idle.

    Attributes:
        stopping: set by :meth:`close`: results are no longer needed.
    """

    def __init__(self, size: int) -> None:
        self._size, self._jobs = size, _Jobs()
        self._idle, self.stopping = threading.Semaphore(0), threading.Event()
        self._threads: list[threading.Thread] = []
        shared = (os.getpid(), self.stopping, self._jobs, self._threads)
        self._finalizer = weakref.finalize(self, _close, *shared)

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Queues a call."""
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
            arguments = (self._jobs, self._idle, self.stopping)
            name = "packstore reader"
            thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        job = Job(call)
        job.pid = os.getpid()
        self._jobs.put(job)  # type: ignore[arg-type]  # a queue of jobs of any result
        return job

    def close(self) -> None:
        """Ends the threads; drops queued calls, and waits a moment for running ones."""
        self._finalizer()


def _serve(jobs: _Jobs, idle: threading.Semaphore, stopping: threading.Event) -> None:
    while (job := jobs.get()) is not None and not stopping.is_set():
        job.run()
        del job
        idle.release()


def _close(
    pid: int, stopping: threading.Event, jobs: _Jobs, threads: list[threading.Thread]
) -> None:
    if os.getpid() != pid:  # a forked child has none of the threads, and locks in any state
        return
    stopping.set()
    for _ in threads:
        jobs.put(None)
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))
    threads.clear()
