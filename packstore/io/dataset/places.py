"""Measures how well packs and steps mix examples from all over the input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import SOURCE_SHIFT, Int64
from packstore.io.manifest.manifest import Manifest

Float64 = npt.NDArray[np.float64]

STEP = 64
"""Packs of an optimizer step that these statistics assume."""

NEIGHBOURS, DEVIATIONS = 1.5, 4
"""Design effect, and standard deviations above it, from which on packs count as holding neighbours
of the input. Lengths that correlate with places alone reach 1.2, in completely full packs."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Spread of places in the input (ranks of example ids) and source files, against random draws.

    Attributes:
        packs: number of packs.
        design_effect: variance of the mean place between packs, relative to random draws, for
            which it is 1; None: fewer than two packs or examples.
        step_design_effect: the same between steps of 64 packs in dataset order.
        sources: number of source files.
        sources_per_example: distinct sources, summed over packs, divided by examples; None: fewer
            than two sources.
        sources_of_a_draw: the same for examples drawn at random from the whole dataset.
    """

    packs: int
    design_effect: float | None
    step_design_effect: float | None
    sources: int
    sources_per_example: float | None
    sources_of_a_draw: float | None

    @property
    def deviation(self) -> float:
        """Standard deviation of the design effect of randomly drawn packs."""
        return math.sqrt(2 / max(self.packs - 1, 1))

    @property
    def step_deviation(self) -> float:
        """Standard deviation of the design effect of randomly drawn steps."""
        return math.sqrt(2 / max(self.packs // STEP - 1, 1))

    @property
    def neighbours(self) -> bool:
        """True if packs contain neighbours of the input more often than by chance."""
        limit = NEIGHBOURS + DEVIATIONS * self.deviation
        return self.design_effect is not None and self.design_effect > limit


def knows_places(manifest: Manifest) -> bool:
    """Returns True if example ids encode places in the input; imported packs' ids do not."""
    return manifest.strategy != "imported"


def places_of(parts: Sequence[tuple[Int64, Int64]], every: Int64) -> Places:
    """Computes the spread of the examples of some packs.

    Args:
        parts: for each run of neighbouring packs, the ids of their examples in order, int64
            `[e]`, and the number of examples of each pack, int64 `[p]`, all above 0.
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
    """Returns the distinct values of a sorted array, and their counts."""
    first = np.flatnonzero(np.diff(source, prepend=-1))
    return source[first], np.diff(first, append=len(source))


def _by_step(values: Float64 | Int64) -> Float64:
    """Returns sums over steps; omits a shorter last step."""
    steps = len(values) // STEP
    found: Float64 = values[: steps * STEP].reshape(steps, STEP).sum(axis=1, dtype=np.float64)
    return found


def _design_effect(sums: Float64, size: Float64 | Int64, n: int) -> float | None:
    """Returns the mean square between groups of ranks over the variance of 0..n-1 (Kish, 1965).

    `sums` and `size` are `[G]`: sum and number of the ranks of each group.
    """
    if len(sums) < 2 or n < 2:
        return None
    means = sums / size
    between = float(size @ (means - (n - 1) / 2) ** 2) / (len(sums) - 1)
    return between / ((n * n - 1) / 12)


def _drawn(counts: Int64, size: Int64) -> float:
    """Returns the expected distinct sources, summed over packs, of randomly drawn examples.

    `counts` are the examples of each source, `size` those of each pack.
    """
    other = 1 - counts / counts.sum()
    packs = np.bincount(size)
    return float(sum(packs[m] * (1 - other**m).sum() for m in np.flatnonzero(packs).tolist()))


def source_names(manifest: Manifest) -> list[str]:
    """Returns the names of the input files, or their whole paths where names repeat."""
    paths = [str(source.get("path")) for source in manifest.provenance.get("sources") or ()]
    last = [PurePosixPath(path).name for path in paths]
    often = Counter(last)
    return [n if often[n] == 1 else p for n, p in zip(last, paths, strict=True)]
