"""Loads the compiled loops before they are needed, while a job still reads."""

from __future__ import annotations

import contextlib
import logging
import threading

import numpy as np

from packstore.config import PackConfig
from packstore.format.arrays import Examples
from packstore.pack import kernels
from packstore.pack.fill import fill, gather
from packstore.pack.layout import sizes
from packstore.pack.plan import plan

log = logging.getLogger("packstore")


def warm_up(config: PackConfig) -> None:
    """Loads the compiled loops of planning and filling in a thread; logs if it compiles
    them.
    """
    kernels.load()
    done = threading.Event()

    def load() -> None:
        with contextlib.suppress(Exception):  # it recurs where the loops are needed
            _run_loops(config)
        done.set()

    def log_compiling() -> None:
        while not done.wait(0.5):
            if kernels.compiles():
                log.info(
                    "compiling the loops that plan and fill packs, once in this "
                    "environment"
                )
                return

    # Not a daemon: the process waits for it at its end, as a compiler must not be
    # interrupted.
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
    gather(sample, packing.order)
    fill(sample, packing.offsets, config.layout, packing.order)
