"""Runs work in processes or threads of this machine; small input in this process."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from packstore.errors import PackstoreError

T = TypeVar("T")
R = TypeVar("R")

SERIAL_ITEMS = 16
"""Items processed here before processes are started, if `num_workers` is unset."""


MAX_THREADS = 4
"""Maximum threads: more would only wait for the GIL."""


def run(work: Callable[[T], R], items: Iterable[T], num_workers: int | None) -> Iterator[R]:
    """Yields ``work(item)`` for every item, in order.

    Args:
        work: picklable; sent to each worker once.
        items: picklable; at most two per worker are held at a time.
        num_workers: processes; 0 or 1: work in this process; None: threads if
            ``work.suits_threads``, else this process for the first items, and one process per
            core if there are more.

    Raises:
        PackstoreError: a worker died (probably out of memory); errors of `work` are unchanged.
    """
    stream = iter(items)
    if num_workers is None and getattr(work, "suits_threads", False):
        yield from _in_threads(work, stream)
        return
    if num_workers is None:
        yield from map(work, itertools.islice(stream, SERIAL_ITEMS))
        num_workers = os.cpu_count() or 1
    if num_workers < 2:
        yield from map(work, stream)
        return
    yield from _in_processes(work, stream, num_workers)


def _in_threads(work: Callable[[T], R], stream: Iterator[T]) -> Iterator[R]:
    number = min(os.cpu_count() or 1, MAX_THREADS)
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(number, "packstore-work") as pool:
        try:
            for item in stream:
                pending.append(pool.submit(work, item))
                if len(pending) > number:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _in_processes(work: Callable[[T], R], stream: Iterator[T], num_workers: int) -> Iterator[R]:
    first = next(stream, _END)
    if first is _END:
        return
    # Spawned, not forked: numba's OpenMP layer, s3fs and obstore do not survive a fork.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work,),
    )
    pending: deque[Future[R]] = deque()
    try:
        for item in itertools.chain([first], stream):
            with _no_main_module():
                pending.append(pool.submit(_work_on, item))
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise PackstoreError(
            "a worker process died (out of memory, or killed); nothing was written. "
            "Run again with a smaller --num-workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_END: Any = object()
_work: Callable[[Any], Any]


def _start_worker(work: Callable[[Any], Any]) -> None:
    global _work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One process per core already: threads inside each would only contend.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["POLARS_MAX_THREADS"] = "1"
    _work = work


def _end_with_parent() -> None:
    """Ends this process when its parent has died."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_on(item: Any) -> Any:
    return _work(item)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keeps spawned children from running the user's script again.

    Spawn re-imports ``__main__`` in each child, so a script that calls ``packstore.pack`` without
    an ``if __name__ == "__main__"`` guard would start itself over. Nothing sent to
    a worker is defined in it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
