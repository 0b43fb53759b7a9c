"""Strategies that keep the order of the input."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.jit import jit


def sequential(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """End a pack where the next example does not fit (next fit): the loosest
    strategy.
    """
    order = np.arange(len(lengths), dtype=np.int32)
    return order, _cut(lengths, capacity)


def none(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Make one pack per example."""
    order = np.arange(len(lengths), dtype=np.int32)
    return order, np.arange(len(lengths) + 1)


@jit
def _cut(lengths: Int32, capacity: int) -> Int64:
    """Return the offsets of the packs: int64 `[P + 1]`."""
    offsets = np.empty(len(lengths) + 1, np.int64)
    num_packs = 0
    room = 0
    for i in range(len(lengths)):
        if lengths[i] > room:
            offsets[num_packs] = i
            num_packs += 1
            room = capacity
        room -= lengths[i]
    offsets[num_packs] = len(lengths)
    return offsets[: num_packs + 1].copy()
