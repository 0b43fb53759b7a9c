"""Runs work on this machine: in threads, and in worker processes where threads wait for the GIL.

Each worker process loads the work once, and has one thread here that serves it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from packstore.errors import PackstoreError
from packstore.etl.engines import in_order
from packstore.etl.engines._worker import WorkerProcess
from packstore.tokenizer.dialogue import limits

log = logging.getLogger("packstore")

T = TypeVar("T")
R = TypeVar("R")

MAX_PROCESSES = 16
"""One process reads and writes for all workers."""

WORTH_SECONDS, QUICK_SECONDS = 1.0, 4.0
"""Time of the first worker alone, before others are started: each takes one to three seconds of a
core to load packages and a tokenizer. The quick one is done with 100 MB by then, which is mostly
all there is."""

_waiting: list[WorkerProcess] = []
"""Processes, at most one or two, that wait for a job; they end after a while, or with this one."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # they serve the parent


def run(work: Callable[[T], R], items: Iterable[T], num_workers: int | None) -> Iterator[R]:
    """Yields ``work(item)`` for every item, in order; holds at most two for each worker.

    First this process works, for ``work.alone`` seconds (default 0), or one in its place if `work`
    raises :class:`NeedsWorkerProcess`. Then `num_workers` processes work, by default one per core,
    each of which calls ``work.load()`` once, if there is that. Where no number is set and
    ``work.in_threads`` is true, threads of this process work instead.
    """
    most = max(num_workers, 1) if num_workers is not None else min(cores(), MAX_PROCESSES)
    alone = getattr(work, "alone", 0.0)
    with (
        ThreadPoolExecutor(most, "packstore-work") as pool,
        contextlib.closing(_Processes(work, pool, most)) as processes,
    ):
        if num_workers is None and getattr(work, "in_threads", False):
            yield from in_order(lambda item: pool.submit(processes.here, item), items, 2 * most)
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
    """Starts a worker process, for a job that will need one: it loads packages meanwhile."""
    if not _waiting:
        _waiting.append(WorkerProcess())


def cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


class _Processes:
    """Worker processes: a function of an item, which one that is idle works on."""

    def __init__(self, work: Callable[[Any], Any], pool: ThreadPoolExecutor, most: int) -> None:
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
        """Lets a thread wait for the result of an item; one more process may work on it."""
        self.start(min(len(self._all) + 1, self._most))
        return self._pool.submit(self, item)

    def here(self, item: Any) -> Any:
        """Works on an item in this thread; from the first that needs a process on, in one."""
        if not self._needed:
            try:
                return self._work(item)
            except limits.NeedsWorkerProcess:
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
        """Lets a process wait for the next job, without the memory of this work; all are idle."""
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
