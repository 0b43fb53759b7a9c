"""Statistics of a plan: how similar the lengths in a pack or step are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int32, Int64

Float64 = npt.NDArray[np.float64]

_AT_ONCE = 1 << 18
"""Approximate number of values processed at once, to bound memory."""


class Drawn:
    """Values of the examples of a plan, pack by pack, computed for one slice at a time.

    Args:
        lengths: int32 `[n]`, length of each example.
        order: int32 `[n]`, the examples, pack by pack.
        table: float64, maps lengths to values; None: the length is the value.
    """

    def __init__(self, lengths: Int32, order: Int32, table: Float64 | None = None) -> None:
        self._lengths, self._order, self._table = lengths, order, table

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        own = self._lengths[self._order[part]]
        return own if self._table is None else self._table[own]


Values: TypeAlias = npt.NDArray[Any] | Drawn


def sums(values: Values, offsets: Int64) -> npt.NDArray[Any]:
    """Sums each group of `offsets`, none of which is empty: int64 or float64 `[G]`."""
    wide = np.int64 if values[:1].dtype.kind == "i" else np.float64
    parts = (np.add.reduceat(values[a:b], s - a, dtype=wide) for a, b, s in _stretches(offsets))
    return np.concatenate(list(parts))


def _stretches(offsets: Int64) -> Iterator[tuple[int, int, Int64]]:
    """Yields runs of groups of about `_AT_ONCE` values: first value, end, start of each group."""
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + _AT_ONCE, "right")) - 1
        last = max(last, first + 1)
        yield int(offsets[first]), int(offsets[last]), offsets[first:last]
        first = last


def intraclass_correlation(values: Values, offsets: Int64) -> float | None:
    """Computes the one-way intraclass correlation of `values` in the groups of `offsets`.

    1: equal inside a group; 0: as in random groups; below 0: complementary. Source: Donner, "A
    review of inference procedures for the intraclass correlation coefficient", Int. Stat. Review
    54, 1986 (the estimator from the analysis of variance, groups of unequal size).

    Args:
        values: float64 `[n]`.
        offsets: int64 `[G + 1]`, no group empty.

    Returns:
        None if undefined: all values are equal, there are fewer than two groups, or groups of one.
    """
    between, within = _mean_squares(values, offsets)
    if between is None or within is None or between + within == 0:
        return None
    sizes, n = np.diff(offsets), len(values)
    typical = (n - (sizes @ sizes) / n) / (len(sizes) - 1)
    return float((between - within) / (between + (typical - 1) * within))


def same_decile(lengths: Values, offsets: Int64) -> float | None:
    """Computes the probability that two examples of a pack lie in the same decile of length.

    Random packs have 0.1 (more where many lengths are equal). None if no pack has two examples.
    """
    sizes = np.diff(offsets)
    pairs = int((sizes * (sizes - 1)).sum())
    if pairs == 0:
        return None
    longest = max(int(lengths[i : i + _AT_ONCE].max()) for i in range(0, len(lengths), _AT_ONCE))
    counts = counts_of(lengths, longest)
    decile_of = (np.cumsum(counts) - counts) * 10 // len(lengths)
    found = 0
    for first, last, starts in _stretches(offsets):
        own = np.diff(starts, append=last)
        cell = np.repeat(np.arange(len(own)), own) * 10 + decile_of[lengths[first:last]]
        same = np.bincount(cell, minlength=10 * len(own))
        found += int((same * (same - 1)).sum())
    return found / pairs


def counts_of(lengths: Values, longest: int) -> Int64:
    """Counts the examples of each length, int64 `[longest + 1]`, without widening all lengths."""
    counts = np.zeros(longest + 1, np.int64)
    for first in range(0, len(lengths), _AT_ONCE):
        counts += np.bincount(lengths[first : first + _AT_ONCE], minlength=longest + 1)
    return counts


def design_effect(values: Values, offsets: Int64, packs: int) -> float | None:
    """Variance of a step's mean of `values`, relative to steps of randomly drawn examples.

    1: as with random examples; 10: as if a step had a tenth of its examples. Source: Kish, "Survey
    Sampling", 1965.

    Args:
        values: float64 `[n]`.
        offsets: int64 `[P + 1]`, of packs in training order.
        packs: packs of a step; a last, shorter step is ignored.

    Returns:
        None if undefined: there are fewer than two steps, or all values are equal.
    """
    steps = offsets[::packs]
    between, _ = _mean_squares(values, steps)
    variance = _squares(values, len(values)) / len(values) if len(values) else 0.0
    return None if between is None or variance == 0 else float(between / variance)


def _mean_squares(values: Values, offsets: Int64) -> tuple[float | None, float | None]:
    """Mean squares between and within groups; None without degrees of freedom."""
    groups, n = len(offsets) - 1, int(offsets[-1])
    if groups < 2:
        return None, None
    total = sums(values, offsets)
    means = total / np.diff(offsets)
    centre = _mean(values, n)
    between = float(np.diff(offsets) @ (means - centre) ** 2)
    within = max(0.0, _squares(values, n) - between)
    return between / (groups - 1), within / (n - groups) if n > groups else None


def _mean(values: Values, n: int) -> float:
    """Mean of the first `n` values."""
    return float(sum(part.sum() for part in _parts(values, n)) / n)


def _squares(values: Values, n: int) -> float:
    """Sum of squared deviations of the first `n` values from their mean."""
    centre = _mean(values, n)
    return float(sum(((part - centre) ** 2).sum() for part in _parts(values, n)))


def _parts(values: Values, n: int) -> Iterator[npt.NDArray[Any]]:
    return (values[i : min(i + _AT_ONCE, n)] for i in range(0, n, _AT_ONCE))
