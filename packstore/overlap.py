"""Stages side by side in threads: numpy, numba, zstd and the tokenizers let go of Python's lock."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_END: Any = object()


class _Failed:
    """An error on its way from one thread to the other."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def ahead(
    items: Iterable[T], depth: int = 1, stop: threading.Event | None = None
) -> Generator[T, None, None]:
    """The same items, made in a thread of their own, which is at most `depth` items in front.

    Closing the generator ends the thread: it stops before the next item. It sets `stop` then, by
    which an item that takes long may end early.

    Raises:
        whatever `items` raises, in its place.
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
    """Does something in a thread that nobody waits for; what is wrong shows where it is needed.

    The process does not end before it: a compiler does not like to be cut off.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=quietly, name="packstore-beside").start()


COLLECT_AFTER = 256
"""Pauses that overlap all the time are interrupted after so many."""

_pauses = _since = 0
_lock = threading.Lock()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the collector of reference cycles: it would look at every record again and again.

    Pauses may overlap; the last one ends them, if the collector was on before.
    """
    global _pauses, _since
    with _lock:
        on = gc.isenabled()
        if on or _pauses:
            _pauses += 1
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _pauses:
                _pauses -= 1
                _since += 1
                if not _pauses:
                    gc.enable()
                    _since = 0
                elif _since >= COLLECT_AFTER:
                    gc.collect()
                    _since = 0
