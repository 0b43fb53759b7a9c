"""A few threads that work through a queue, and that never keep a process from ending."""

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
"""Seconds that :meth:`Crew.close` waits for what is being done, over all threads."""


class Job(Generic[T]):
    """One piece of work: what it returned or raised, once it is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._pid = os.getpid()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Does it."""
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> T:
        """Waits for it; raises what it raised. After a fork, where no thread is, does it."""
        if not self._done.is_set() and os.getpid() != self._pid:
            return self._work()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Later(Job[T]):
    """Work that nobody does before its result is asked for; then who asks does it."""

    def result(self) -> T:
        """What it returns; raises what it raises."""
        return self._work()


class Crew:
    """Threads that do jobs in the order in which they were submitted.

    They end when the crew is closed or no longer referenced. They are daemons, which the end of the
    interpreter does not wait for; but it closes the crew first, as a thread that is inside a C
    library then could crash it.

    Args:
        size: threads at most; each is started when a job finds no idle one.
    """

    def __init__(self, size: int) -> None:
        self._size, self._pid = size, os.getpid()
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self.stopping = threading.Event()
        """Is set once nobody waits for results any more."""
        self._finalizer = weakref.finalize(
            self, _dismiss, self._pid, self.stopping, self._jobs, self._threads
        )

    def submit(self, job: Job[T]) -> Job[T]:
        """Has `job` done; returns it."""
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
        """Ends the threads; what is queued is not done. Waits a moment for what is being done."""
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
    if os.getpid() != pid:  # a fork has none of the threads, and their locks in any state
        return
    stopping.set()
    for _ in threads:
        jobs.put(None)
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))
    threads.clear()
