"""A small thread pool that never keeps the process from exiting."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds that :meth:`Crew.close` waits for running jobs, over all threads."""


class Job(Generic[T]):
    """A call and, once done, its result or error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._pid = os.getpid()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the call and stores its result or error."""
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> T:
        """Waits for the result; raises the job's error. After a fork, runs the job here."""
        if not self._done.is_set() and os.getpid() != self._pid:
            return self._work()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Later(Job[T]):
    """Runs lazily, in the caller's thread."""

    def result(self) -> T:
        """Runs the call; returns its result or raises its error."""
        return self._work()


class Crew:
    """A thread pool that starts jobs in the order in which they were submitted.

    The threads end when the pool is closed or no longer referenced. They are daemons, so the
    interpreter does not wait for them; it closes the pool at exit, because a thread inside a C
    library could crash it then.

    Args:
        size: maximum number of threads; a job starts one if none is idle.
    """

    def __init__(self, size: int) -> None:
        self._size, self._pid = size, os.getpid()
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self.stopping = threading.Event()
        """Set by :meth:`close`: results are no longer needed."""
        self._finalizer = weakref.finalize(
            self, _dismiss, self._pid, self.stopping, self._jobs, self._threads
        )

    def submit(self, job: Job[T]) -> Job[T]:
        """Queues `job` and returns it."""
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
            arguments = (self._jobs, self._idle, self.stopping)
            thread = threading.Thread(
                target=_serve, args=arguments, name="packstore reader", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        self._jobs.put(job)  # type: ignore[arg-type]  # a queue of jobs of any result
        return job

    def close(self) -> None:
        """Ends the threads; drops queued jobs, and waits a moment for running ones."""
        self._finalizer()


def _serve(
    jobs: queue.SimpleQueue[Job[object] | None],
    idle: threading.Semaphore,
    stopping: threading.Event,
) -> None:
    while (job := jobs.get()) is not None and not stopping.is_set():
        job.run()
        del job
        idle.release()


def _dismiss(
    pid: int,
    stopping: threading.Event,
    jobs: queue.SimpleQueue[Job[object] | None],
    threads: list[threading.Thread],
) -> None:
    if os.getpid() != pid:  # a forked child has none of the threads, and locks in any state
        return
    stopping.set()
    for _ in threads:
        jobs.put(None)
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))
    threads.clear()
