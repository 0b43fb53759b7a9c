"""Chooses a strategy by the lengths: pool if its plan is tight, else the tightest plan."""

from __future__ import annotations

import logging

import numpy as np

from packstore.errors import MissingExtraError
from packstore.format.arrays import Int32, Int64
from packstore.pack.algorithms.column_generation import column_generation
from packstore.pack.algorithms.exact_fill import exact_fill
from packstore.pack.algorithms.pool import pool
from packstore.pack.bounds import lower_bound

logger = logging.getLogger(__name__)

NEAR = 2e-4
"""A plan is accepted at once if it exceeds the bound by at most this fraction, or by one pack."""

LONG_SHARE = 0.4
"""Pool is not tried if a larger fraction of tokens is in examples longer than half a pack: filling
in arrival order uses up the short examples that they need, and searching for these is slow."""


def auto(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs with the first of pool, exact_fill and column_generation that is near the bound.

    If none is, takes the tightest plan.
    """
    return choose(lengths, capacity, seed)[1]


def choose(lengths: Int32, capacity: int, seed: int) -> tuple[str, tuple[Int32, Int64]]:
    """Returns the name of the strategy chosen for these lengths, and its order and offsets.

    Without `highspy`, column_generation is skipped; a warning is logged where it might have helped.
    """
    near = lower_bound(lengths, capacity)
    near += max(1, int(NEAR * near))
    plans: dict[str, tuple[Int32, Int64]] = {}
    if _long_share(lengths, capacity) <= LONG_SHARE:
        plans["pool"] = pool(lengths, capacity, seed)
    for strategy in (exact_fill, column_generation):
        if any(len(offsets) - 1 <= near for _, offsets in plans.values()):
            break
        try:
            plans[strategy.__name__] = strategy(lengths, capacity, seed)
        except MissingExtraError as error:
            logger.warning("strategy 'auto': packs may be tighter with another package: %s", error)
    chosen = min(plans, key=lambda name: len(plans[name][1]))
    return chosen, plans[chosen]


def _long_share(lengths: Int32, capacity: int) -> float:
    """Fraction of the tokens in examples longer than half a pack."""
    tokens = int(lengths.sum(dtype=np.int64))
    return int(lengths[lengths > capacity // 2].sum(dtype=np.int64)) / tokens if tokens else 0.0
