"""Values of tokens, from side datasets, as pages and terminals show them."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from packstore.format.arrays import Float32, Int64, Packs, TopK

MAX_TOP = 20
"""Most probable ids that a page lists for a token."""

_TAIL = 0.02
"""Fraction of the numbers beyond each end of a scale."""


class Scale(NamedTuple):
    """The range of numbers that a range of colours stands for.

    It leaves out the lowest and the highest 2 %, which get the colours of its ends.
    """

    low: float
    high: float

    @classmethod
    def of(cls, numbers: Float32) -> Self:
        """Return the scale of numbers; NaN is left out."""
        finite_numbers = numbers[np.isfinite(numbers)]
        if not len(finite_numbers):
            return cls(0.0, 0.0)
        low, high = np.quantile(finite_numbers, [_TAIL, 1 - _TAIL]).tolist()
        return cls(low, high)

    def levels(self, numbers: Float32, num_levels: int) -> Int64:
        """Return the level of each number, from 0 at the low end; NaN gets 0."""
        width = (self.high - self.low) / num_levels
        if width == 0:
            return np.zeros(len(numbers), np.int64)
        levels: Int64 = np.nan_to_num((numbers - self.low) / width).astype(np.int64)
        return levels.clip(0, num_levels - 1)

    def edges(self, num_levels: int) -> list[float]:
        """Return the `num_levels` + 1 numbers at which levels begin and end."""
        edges: list[float] = np.linspace(self.low, self.high, num_levels + 1).tolist()
        return edges


def numbers_of(pack: Packs, column: str) -> Float32:
    """Return a number for each supervised token of a pack, float32 `[n]`.

    For a top k it is the log-prob of the token itself; NaN: it is not among the k.
    """
    values = pack.token_columns[column]
    if not isinstance(values, TopK):
        return values.astype(np.float32)
    targets = pack.signed_ids[pack.supervised]
    tokens, places = np.nonzero(values.ids == targets[:, None])
    numbers = np.full(len(targets), np.nan, np.float32)
    numbers[tokens] = values.logps[tokens, places]
    return numbers


def rounded(numbers: Float32) -> list[Any]:
    """Return numbers with 5 digits, as JSON values; None for NaN."""
    return [
        None if np.isnan(number) else float(f"{number:.5g}")
        for number in numbers.tolist()
    ]


def aligned_values(pack: Packs, column: str) -> list[Any]:
    """Return the value of each token of a pack as a JSON value, None where it is not
    supervised; of a top k ``{"ids": […], "logps": […]}``.
    """
    values = pack.token_columns[column]
    if isinstance(values, TopK):
        of_targets: list[Any] = [
            {"ids": ids, "logps": logps}
            for ids, logps in zip(
                values.ids.tolist(), values.logps.tolist(), strict=True
            )
        ]
    else:
        of_targets = values.tolist()
    following = iter(of_targets)
    return [
        next(following) if is_supervised else None
        for is_supervised in pack.supervised.tolist()
    ]
