"""Loads the compiled loops beside the work, and says so if they must be compiled first."""

from __future__ import annotations

import logging
import threading

import numpy as np

from packstore.config import PackConfig
from packstore.format.arrays import Examples
from packstore.pack.fill import fill, gather
from packstore.pack.kernels import compiles
from packstore.pack.layout import sizes
from packstore.pack.plan import plan

log = logging.getLogger("packstore")


def warm_up(config: PackConfig) -> None:
    """Loads the compiled loops of planning and filling, so that no later step waits for them."""
    done = threading.Event()
    threading.Thread(target=_tell_of_compiling, args=(done,), daemon=True).start()
    try:
        _run_loops(config)
    finally:
        done.set()


def _tell_of_compiling(done: threading.Event) -> None:
    while not done.wait(0.5):
        if compiles():
            log.info("compiling the loops that plan and fill packs, once in this environment")
            return


def _run_loops(config: PackConfig) -> None:
    ones = np.ones(2, np.int32)
    packing = plan(ones, config=config)
    packing.statistics()
    sample = Examples(
        input_ids=ones,
        supervised=ones.astype(np.bool_),
        sequence_offsets=np.arange(3),
        example_offsets=np.arange(3),
        reward=ones.astype(np.float32),
        example_ids=np.arange(2),
    )
    sizes(sample, config.layout)
    for array in (sample.input_ids, sample.supervised, sample.sequence_offsets):
        array.flags.writeable = False  # like those of a spill
    gather(sample, packing.order)
    fill(sample, packing.offsets, config.layout, packing.order)
