"""Runs stages concurrently in threads: numpy, numba, zstd and the tokenizers release the GIL."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_END: Any = object()


class _Failed:
    """An error passed from one thread to the other."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def ahead(
    items: Iterable[T], depth: int = 1, stop: threading.Event | None = None
) -> Generator[T, None, None]:
    """Yields the items, which another thread computes at most `depth` ahead.

    Closing the generator sets `stop`, so that a slow item can end early, and ends the thread before
    the next item.

    Raises:
        the errors of `items`, at their position.
    """
    made: queue.Queue[Any] = queue.Queue(depth)
    stop = stop or threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                made.put(item, timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(_END)
        except BaseException as error:
            put(_Failed(error))

    thread = threading.Thread(target=make, name="packstore-ahead", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        stop.set()
        thread.join()


def beside(work: Callable[[], object]) -> None:
    """Runs `work` in a thread, and ignores its errors: they recur where the work is needed.

    The process waits for the thread at its end, as a compiler must not be interrupted.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=quietly, name="packstore-beside").start()
