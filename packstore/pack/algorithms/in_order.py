"""Strategies that keep the order of the input."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.kernels import jit


def sequential(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Ends a pack where the next example does not fit (next fit): the loosest
    strategy.
    """
    return np.arange(len(lengths), dtype=np.int32), _cut(lengths, capacity)


def none(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Makes one pack per example."""
    return np.arange(len(lengths), dtype=np.int32), np.arange(len(lengths) + 1)


@jit
def _cut(lengths: Int32, capacity: int) -> Int64:
    offsets = np.empty(len(lengths) + 1, np.int64)
    packs = 0
    free = 0
    for i in range(len(lengths)):
        if lengths[i] > free:
            offsets[packs] = i
            packs += 1
            free = capacity
        free -= lengths[i]
    offsets[packs] = len(lengths)
    return offsets[: packs + 1].copy()
