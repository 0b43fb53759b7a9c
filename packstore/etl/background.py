"""Runs stages concurrently in threads: numpy, numba, zstd and the tokenizers release the GIL."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
    stop = stop or threading.Event()
    stream, end = iter(items), object()
    thread = ThreadPoolExecutor(1, "packstore-ahead")
    try:
        pending = deque(thread.submit(next, stream, end) for _ in range(depth + 1))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, stream, end))
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.shutdown(cancel_futures=True)


def warm_up(config: PackConfig) -> None:
    """Loads the compiled loops of planning and filling in a thread; logs if it must compile them.

    Errors are ignored, as they recur where the loops are needed. The process waits for the thread
    at its end, as a compiler must not be interrupted.
    """
    done = threading.Event()

    def load() -> None:
        with contextlib.suppress(Exception):
            _run_loops(config)
        done.set()

    def log_compiling() -> None:
        while not done.wait(0.5):
            if compiles():
                log.info("compiling the loops that plan and fill packs, once in this environment")
                return

    threading.Thread(target=load, name="packstore-warm-up").start()
    threading.Thread(target=log_compiling, daemon=True).start()


def _run_loops(config: PackConfig) -> None:
    """Plans and fills a pack of two examples."""
    ones = np.ones(2, np.int32)
    sample = Examples(
        input_ids=ones,
        supervised=ones.astype(np.bool_),
        sequence_offsets=np.arange(3),
        example_offsets=np.arange(3),
        reward=ones.astype(np.float32),
        example_ids=np.arange(2),
    )
    packing = plan(ones, config=config)
    packing.statistics()
    sizes(sample, config.layout)
    for array in (sample.input_ids, sample.supervised, sample.sequence_offsets):
        array.flags.writeable = False  # like those of a spill
    gather(sample, packing.order)
    fill(sample, packing.offsets, config.layout, packing.order)
