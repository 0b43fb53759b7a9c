"""Runs work on this machine: in threads, and in worker processes where threads wait for the GIL.

Each worker process loads the work once. Items and results travel through pipes of its own, with
arrays as buffers beside the pickle. So each process has one thread here that serves it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from packstore.errors import PackstoreError
from packstore.etl.engines import in_order
from packstore.etl.engines._worker import WorkerProcess
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
        _keep_spare(WorkerProcess())


def cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


class _Workers:
    """Functions of an item, here or in processes; each thread takes one that is idle for a call."""

    def __init__(self, work: Callable[[Any], Any], here: int) -> None:
        self._work = work
        self._idle: queue.SimpleQueue[Callable[[Any], Any]] = queue.SimpleQueue()
        self._processes: list[WorkerProcess] = []
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

    def _start_process(self) -> WorkerProcess:
        process = _take_spare() or WorkerProcess()
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


_spare: list[WorkerProcess] = []
"""Processes, mostly one, that wait for a job; they end with this process."""
_timer: threading.Timer | None = None
"""What ends them."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)  # they serve the parent


def _keep_spare(process: WorkerProcess) -> None:
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


def _take_spare() -> WorkerProcess | None:
    """Takes a process that waits, if there is one."""
    with contextlib.suppress(IndexError):  # another thread may take it first
        while True:
            process = _spare.pop()
            if process.is_alive:
                return process
    return None
