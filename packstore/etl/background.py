"""Runs stages concurrently in threads: numpy, numba, zstd and the tokenizers release the GIL."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import numpy as np

from packstore.config import PackConfig
from packstore.format.arrays import Examples
from packstore.pack.fill import fill, gather
from packstore.pack.kernels import compiles
from packstore.pack.layout import sizes
from packstore.pack.plan import plan

T = TypeVar("T")

log = logging.getLogger("packstore")


def ahead(
    items: Iterable[T], depth: int = 1, stop: threading.Event | None = None
) -> Generator[T, None, None]:
    """Yields the items, which another thread computes at most `depth` ahead; raises its errors.

    Closing the generator sets `stop`, so that a slow item can end early, and ends the thread before
    the next item.
    """
    ready: queue.Queue[tuple[Any, BaseException | None] | None] = queue.Queue(depth)
    stop = stop or threading.Event()

    def put(entry: tuple[Any, BaseException | None] | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(entry, timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                put((item, None))
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=make, name="packstore-ahead", daemon=True)
    thread.start()
    try:
        while (entry := ready.get()) is not None:
            item, error = entry
            if error is not None:
                raise error
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


def warm_up(config: PackConfig) -> None:
    """Loads the compiled loops of planning and filling, so that no later step waits for them.

    Logs if they must be compiled first.
    """
    done = threading.Event()

    def tell_of_compiling() -> None:
        while not done.wait(0.5):
            if compiles():
                log.info("compiling the loops that plan and fill packs, once in this environment")
                return

    threading.Thread(target=tell_of_compiling, daemon=True).start()
    ones = np.ones(2, np.int32)
    sample = Examples(
        input_ids=ones,
        supervised=ones.astype(np.bool_),
        sequence_offsets=np.arange(3),
        example_offsets=np.arange(3),
        reward=ones.astype(np.float32),
        example_ids=np.arange(2),
    )
    try:
        packing = plan(ones, config=config)
        packing.statistics()
        sizes(sample, config.layout)
        for array in (sample.input_ids, sample.supervised, sample.sequence_offsets):
            array.flags.writeable = False  # like those of a spill
        gather(sample, packing.order)
        fill(sample, packing.offsets, config.layout, packing.order)
    finally:
        done.set()
