"""Packing strategies; each takes one line here.

A strategy assigns examples to packs from their lengths alone. Random choices are drawn
from :mod:`packstore.format.seeds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packstore.registry import Registry

if TYPE_CHECKING:
    from packstore.format.arrays import Int32, Int64

    Strategy = Callable[[Int32, int, int], tuple[Int32, Int64]]

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {
        "pool": "packstore.pack.algorithms.pool:pool",
        "first_fit_decreasing": (
            "packstore.pack.algorithms.first_fit:first_fit_decreasing"
        ),
        "first_fit_shuffle": "packstore.pack.algorithms.first_fit:first_fit_shuffle",
        "sequential": "packstore.pack.algorithms.in_order:sequential",
        "none": "packstore.pack.algorithms.in_order:none",
    },
)
