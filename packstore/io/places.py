"""How random the places in the input are, of the examples that meet in a pack or a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packstore.io.manifest import Manifest
from packstore.records import SOURCE_SHIFT, Int64

Float64 = npt.NDArray[np.float64]

STEP = 64
"""Packs of one optimizer step, as far as statistics are concerned."""

NEIGHBOURS, DEVIATIONS = 1.5, 4
"""Packs are said to hold neighbours of the input from this design effect on, and so many deviations
more. Lengths that belong to places bring it to 1.2, in packs that are as full as can be."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places in the input (ranks of example ids) and source files, beside those of a random draw.

    Attributes:
        packs: of the dataset.
        design_effect: how much more the mean place varies from pack to pack than if examples were
            drawn at random, which is 1; None: fewer than two packs or examples.
        step_design_effect: the same from step to step of 64 packs in the order of the dataset.
        sources: source files.
        sources_per_example: distinct sources of the packs, together, over examples; None: there
            are fewer than two sources.
        sources_of_a_draw: the same where each example is drawn from the whole dataset.
    """

    packs: int
    design_effect: float | None
    step_design_effect: float | None
    sources: int
    sources_per_example: float | None
    sources_of_a_draw: float | None

    @property
    def deviation(self) -> float:
        """Standard deviation of the design effect of packs that are drawn at random."""
        return math.sqrt(2 / max(self.packs - 1, 1))

    @property
    def step_deviation(self) -> float:
        """Standard deviation of the design effect of steps that are drawn at random."""
        return math.sqrt(2 / max(self.packs // STEP - 1, 1))

    @property
    def neighbours(self) -> bool:
        """Whether packs hold neighbours of the input, beyond chance."""
        limit = NEIGHBOURS + DEVIATIONS * self.deviation
        return self.design_effect is not None and self.design_effect > limit


def knows_places(manifest: Manifest) -> bool:
    """Whether example ids tell places in the input: not those of imported packs."""
    return manifest.strategy != "imported"


def places_of(parts: Sequence[tuple[Int64, Int64]], every: Int64) -> Places:
    """The places of the examples of some packs.

    Args:
        parts: of neighbouring packs each: ids of their examples, int64 `[e]`, in their order, and
            the examples of each pack, int64 `[p]`, none of them 0.
        every: int64 `[E]`, the ids of all parts, sorted.
    """
    sources, counts = _counted(every >> SOURCE_SHIFT)
    sums, distinct = [np.empty(0)], 0
    for ids, examples in parts:
        starts = np.cumsum(examples) - examples
        ranks = np.searchsorted(every, ids)
        sums.append(np.add.reduceat(ranks, starts, dtype=np.float64))
        if len(sources) > 1:
            pack = np.repeat(np.arange(len(examples)), examples)
            distinct += len(np.unique(pack << (63 - SOURCE_SHIFT) | ids >> SOURCE_SHIFT))
    total = np.concatenate(sums)
    size = np.concatenate([np.empty(0, np.int64), *(examples for _, examples in parts)])
    some = len(sources) > 1
    return Places(
        packs=len(size),
        design_effect=_design_effect(total, size, len(every)),
        step_design_effect=_design_effect(_by_step(total), _by_step(size), len(every)),
        sources=len(sources),
        sources_per_example=distinct / len(every) if some else None,
        sources_of_a_draw=_drawn(counts, size) / len(every) if some else None,
    )


def _counted(source: Int64) -> tuple[Int64, Int64]:
    """Distinct values of a sorted array, and how often each occurs."""
    first = np.flatnonzero(np.diff(source, prepend=-1))
    return source[first], np.diff(first, append=len(source))


def _by_step(values: Float64 | Int64) -> Float64:
    """Sums over steps; a last, shorter step is left out."""
    steps = len(values) // STEP
    found: Float64 = values[: steps * STEP].reshape(steps, STEP).sum(axis=1, dtype=np.float64)
    return found


def _design_effect(sums: Float64, size: Float64 | Int64, n: int) -> float | None:
    """Mean square between groups of ranks, over the variance of 0..n-1 (Kish, 1965).

    Args:
        sums: float64 `[G]`, of the ranks of each group.
        size: `[G]`, of each group.
        n: ranks that groups draw from.
    """
    if len(sums) < 2 or n < 2:
        return None
    means = sums / size
    between = float(size @ (means - (n - 1) / 2) ** 2) / (len(sums) - 1)
    return between / ((n * n - 1) / 12)


def _drawn(counts: Int64, size: Int64) -> float:
    """Distinct sources that packs of these sizes are expected to hold, in all of them together.

    Args:
        counts: int64 `[sources]`, examples of each.
        size: int64 `[P]`, examples of each pack.
    """
    other = 1 - counts / counts.sum()
    packs = np.bincount(size)
    return float(sum(packs[m] * (1 - other**m).sum() for m in np.flatnonzero(packs).tolist()))
