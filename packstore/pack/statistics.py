"""What a plan does to training statistics: how like the lengths are that meet in a pack or step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packstore.records import Int32, Int64

Float64 = npt.NDArray[np.float64]

_AT_ONCE = 1 << 18
"""Values, or packs, that are worked on at once: a plan may have as many as fit in memory."""


def intraclass_correlation(values: Float64, offsets: Int64) -> float | None:
    """One-way intraclass correlation of `values` in the groups of `offsets`.

    1: equal inside a group; 0: as in random groups; below 0: complementary. Source: Donner, "A
    review of inference procedures for the intraclass correlation coefficient", Int. Stat. Review
    54, 1986 (the estimator from the analysis of variance, groups of unequal size).

    Args:
        values: float64 `[n]`.
        offsets: int64 `[G + 1]`, no group empty.

    Returns:
        None where it is not defined: all values alike, fewer than two groups, or groups of one.
    """
    between, within = _mean_squares(values, offsets)
    if between is None or within is None or between + within == 0:
        return None
    sizes, n = np.diff(offsets), len(values)
    typical = (n - (sizes @ sizes) / n) / (len(sizes) - 1)
    return float((between - within) / (between + (typical - 1) * within))


def same_decile(lengths: Int32, offsets: Int64) -> float | None:
    """Probability that two examples of one pack lie in the same decile of length.

    Random packs have 0.1 (more where many lengths are equal). None: no pack has two examples.
    """
    sizes = np.diff(offsets)
    pairs = int((sizes * (sizes - 1)).sum())
    if pairs == 0:
        return None
    counts = counts_of(lengths, int(lengths.max()))
    decile_of = (np.cumsum(counts) - counts) * 10 // len(lengths)
    found = 0
    for first in range(0, len(sizes), _AT_ONCE):
        some = sizes[first : first + _AT_ONCE]
        own = lengths[offsets[first] : offsets[first + len(some)]]
        cell = np.repeat(np.arange(len(some)), some) * 10 + decile_of[own]
        same = np.bincount(cell, minlength=10 * len(some))
        found += int((same * (same - 1)).sum())
    return found / pairs


def counts_of(lengths: Int32, longest: int) -> Int64:
    """int64 `[longest + 1]`, examples of each length; without a wider copy of all lengths."""
    counts = np.zeros(longest + 1, np.int64)
    for first in range(0, len(lengths), _AT_ONCE):
        counts += np.bincount(lengths[first : first + _AT_ONCE], minlength=longest + 1)
    return counts


def design_effect(values: Float64, offsets: Int64, packs: int) -> float | None:
    """How much more the mean of `values` varies from step to step than if examples were drawn.

    1: as much as with examples drawn at random; 10: as if a step had a tenth of its examples.
    Source: Kish, "Survey Sampling", 1965.

    Args:
        values: float64 `[n]`.
        offsets: int64 `[P + 1]`, of packs in the order of delivery.
        packs: packs of a step; a last, shorter step is left out.

    Returns:
        None where it is not defined: fewer than two steps, or all values alike.
    """
    steps = offsets[::packs]
    between, _ = _mean_squares(values[: steps[-1]], steps)
    variance = _squares(values) / len(values) if len(values) else 0.0
    return None if between is None or variance == 0 else float(between / variance)


def _mean_squares(values: Float64, offsets: Int64) -> tuple[float | None, float | None]:
    """Mean squares between and within groups, None for want of degrees of freedom."""
    groups, n = len(offsets) - 1, len(values)
    if groups < 2:
        return None, None
    sums = np.add.reduceat(values, offsets[:-1])
    means = sums / np.diff(offsets)
    centre = values.mean()
    between = float(np.diff(offsets) @ (means - centre) ** 2)
    within = max(0.0, _squares(values) - between)
    return between / (groups - 1), within / (n - groups) if n > groups else None


def _squares(values: Float64) -> float:
    """Sum of the squared distances from the mean."""
    centre = values.mean()
    parts = (values[i : i + _AT_ONCE] for i in range(0, len(values), _AT_ONCE))
    return float(sum(((part - centre) ** 2).sum() for part in parts))
