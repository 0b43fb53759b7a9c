"""Lower bounds of the number of packs of any strategy, from the histogram of lengths."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.statistics import counts_of

LAST_K = 100
"""The dual-feasible functions u(k) are tried for k = 1..LAST_K."""


def lower_bound(lengths: Int32, capacity: int) -> int:
    """Returns the best of the bounds below, in packs.

    Args:
        lengths: int32 `[n]`, each 1..capacity.
        capacity: most tokens of a pack.
    """
    return bound_of_counts(counts_of(lengths, capacity), capacity)


def bound_of_counts(counts: Int64, capacity: int) -> int:
    """Returns the best bound from the number of examples of each length, `[capacity + 1]`."""
    return max(martello_toth(counts, capacity), fekete_schepers(counts, capacity))


def martello_toth(counts: Int64, capacity: int) -> int:
    """Returns the bound L2, which is at least L1 = ceil(tokens / capacity).

    For a threshold t <= capacity / 2: examples over ``capacity - t`` and those over half a pack
    need a pack each, and examples of at least t that do not fit beside the latter need further
    packs. Source: Martello, Toth, "Lower bounds and reduction procedures for the bin packing
    problem", Discrete Applied Mathematics 28, 1990.

    Args:
        counts: int64 `[capacity + 1]`, examples of each length.
        capacity: most tokens of a pack.
    """
    number = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * np.arange(capacity + 1))])
    half = capacity // 2
    t = np.arange(half + 1)
    alone = number[-1] - number[half + 1]
    room_beside = (number[capacity - t + 1] - number[half + 1]) * capacity - (
        tokens[capacity - t + 1] - tokens[half + 1]
    )
    small = tokens[half + 1] - tokens[t]
    more = np.maximum(0, -((room_beside - small) // capacity))
    return int(alone + more.max())


def fekete_schepers(counts: Int64, capacity: int) -> int:
    """Returns the best bound by the dual-feasible functions u(k).

    u(k) maps x in 0..1 to itself if (k + 1) x is whole, else to floor((k + 1) x) / k; the sum over
    all examples, rounded up, is a bound. Source: Fekete, Schepers, "New classes of fast lower
    bounds for bin packing problems", Mathematical Programming 91, 2001.

    Args:
        counts: int64 `[capacity + 1]`, examples of each length.
        capacity: most tokens of a pack.
    """
    sizes = np.flatnonzero(counts)
    number = counts[sizes]
    best = 0
    for k in range(1, LAST_K + 1):
        whole, part = np.divmod((k + 1) * sizes, capacity)
        # Scaled by k * capacity to stay in integers.
        weight = np.where(part == 0, k * sizes, whole * capacity)
        best = max(best, -(-int(weight @ number) // (k * capacity)))
    return best
