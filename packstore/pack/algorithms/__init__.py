"""Packing strategies: one file and one line each.

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
        """Assigns every example to a pack.

        Args:
            lengths: int32 `[n]`, C-contiguous, tokens of each example in input order, each
                1..capacity (:func:`packstore.pack.plan.plan` checks it).
            capacity: most tokens of a pack.
            seed: source of every random choice.

        Returns:
            order: int32 `[n]`, the examples, pack by pack.
            offsets: int64 `[P + 1]`; pack i holds ``order[offsets[i]:offsets[i + 1]]``.
        """


STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {
        "pool": "packstore.pack.algorithms.pool:pool",
        "auto": "packstore.pack.algorithms.auto:auto",
        "best_fit_decreasing": "packstore.pack.algorithms.best_fit_decreasing:best_fit_decreasing",
        "exact_fill": "packstore.pack.algorithms.exact_fill:exact_fill",
        "column_generation": "packstore.pack.algorithms.column_generation:column_generation",
        "first_fit_decreasing": (
            "packstore.pack.algorithms.first_fit_decreasing:first_fit_decreasing"
        ),
        "first_fit_shuffle": "packstore.pack.algorithms.first_fit_shuffle:first_fit_shuffle",
        "sequential": "packstore.pack.algorithms.sequential:sequential",
        "none": "packstore.pack.algorithms.none:none",
    },
)

VERSIONS: dict[str, int] = {"exact_fill": 2, "column_generation": 2}
"""Name -> version of a strategy whose plans have changed since version 1."""
