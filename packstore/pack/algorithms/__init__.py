"""Packing strategies; each takes one line here.

A strategy assigns examples to packs from their lengths alone. Random choices are drawn from
:mod:`packstore.format.seeds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from packstore.registry import Registry

if TYPE_CHECKING:
    from packstore.format.arrays import Int32, Int64


class Strategy(Protocol):
    """The type of a strategy."""

    def __call__(self, lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
        """Assigns every example to a pack."""


STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {
        "pool": "packstore.pack.algorithms.pool:pool",
        "first_fit_decreasing": "packstore.pack.algorithms.first_fit:first_fit_decreasing",
        "first_fit_shuffle": "packstore.pack.algorithms.first_fit:first_fit_shuffle",
        "sequential": "packstore.pack.algorithms.in_order:sequential",
        "none": "packstore.pack.algorithms.in_order:none",
    },
)
