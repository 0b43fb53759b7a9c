"""Measures a sample of the examples, and estimates packs and their errors from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.config import PackConfig
from packstore.etl.sources import ExampleReader
from packstore.format.arrays import Bool, Int32, Int64, Tally
from packstore.io.inputs.sampling import Sampling
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan

UNSEEN = 3
"""95 % upper limit of hits in a sample without any (rule of three); scaled to all records."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A combination of settings with its estimated results; counts are scaled to all records.

    Attributes:
        strategy: name of the strategy.
        packs, examples: of the dataset.
        overlong: examples that do not fit.
        packs_error, overlong_error: two standard errors of `packs` and `overlong`; 0 if all
            records were read, None if only the first ones were.
        fill_rate: tokens / (packs * pack_size).
        fill_but_emptiest: the same without the emptiest pack, which a small sample leaves open.
        aligned_fill_rate: the same with sequences padded to `pad_to_multiple`.
        examples_per_pack: mean.
        tokens_saved: fraction of the tokens of layout ``concat`` that this layout saves.
        steps: optimizer steps of an epoch.
        examples_per_step: mean.
    """

    pack_size: int
    layout: str
    strategy: str
    packs: int
    examples: int
    overlong: int
    packs_error: int | None
    overlong_error: int | None
    fill_rate: float
    fill_but_emptiest: float
    aligned_fill_rate: float
    examples_per_pack: float
    tokens_saved: float
    steps: int
    examples_per_step: float


class Measured:
    """Sizes of the examples of a sample.

    Args:
        reader: yields the sample, place by place.
        layouts: layouts to measure.
        multiple: multiple to which sequences are padded.
        sample: figures of the sample.
        total: number of records to scale to.

    Attributes:
        tally: counts of records, without those too long.
        read: int64 `[B]`, records read of each place of the sample.
        overlong: int64 `[B]`, records too long even after truncation.
        place: int64 `[E]`, the place of each example.
        longest: int32 `[E]`, tokens of its longest sequence.
        tokens: layout -> int32 `[E]`.
        padded: layout -> int32 `[E]`, with every sequence padded.
        sequence_tokens: int32 `[S]`.
    """

    def __init__(
        self, reader: ExampleReader, layouts: set[str], multiple: int, sample: Sampling, total: int
    ) -> None:
        self.tally, self.sample, self.total = Tally(), sample, total
        read: list[int] = []
        overlong: list[int] = []
        place: list[Int64] = []
        longest: list[Int32] = []
        sequences: list[Int32] = []
        tokens: dict[str, list[Int32]] = {layout: [] for layout in layouts}
        padded: dict[str, list[Int32]] = {layout: [] for layout in layouts}
        for number, (examples, part) in enumerate(reader):
            read.append(part.read)
            overlong.append(part.dropped.pop("overlong", 0))
            self.tally.add(part)
            place.append(np.full(examples.num_examples, number))
            sequences.append(examples.lengths)
            if examples.num_examples:
                starts = examples.example_offsets[:-1]
                longest.append(np.maximum.reduceat(examples.lengths, starts))
            for layout in layouts:
                tokens[layout].append(sizes(examples, layout))
                padded[layout].append(sizes(examples, layout, multiple))
        self.read, self.overlong = np.array(read), np.array(overlong)
        self.place = np.concatenate(place)
        self.longest = np.concatenate([np.empty(0, np.int32), *longest])
        self.sequence_tokens = np.concatenate(sequences)
        self.tokens = {layout: np.concatenate(parts) for layout, parts in tokens.items()}
        self.padded = {layout: np.concatenate(parts) for layout, parts in padded.items()}

    def by_place(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Returns float64 `[B]`: sums of values `[E]` over each place."""
        return np.asarray(np.bincount(self.place, values, len(self.read)), np.float64)

    def estimate(self, values: npt.NDArray[Any]) -> tuple[float, float]:
        """Estimates the sum over all records from the sums `[B]` in the places of the sample.

        Returns:
            The ratio estimate of the sum, and two standard errors.
        """
        weights = np.full(len(self.read), float(self.sample.run))
        weights[-1] = self.sample.last_run
        weights /= weights @ self.read / self.total
        known = self.read.sum() / self.total
        return float(weights @ values), 2 * standard_error(values, self.read, weights, known)


def standard_error(
    values: npt.NDArray[Any],
    records: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    known: float,
) -> float:
    """Estimates the standard error of the weighted sum of `values`, as a ratio to records.

    Uses differences of neighbouring places, as one place was drawn from each run of neighbours.
    Source: Wolter, "Introduction to Variance Estimation", chapter 8, successive differences.

    Args:
        values, records, weights: `[B]`, of the places of the sample, in input order.
        known: sampled fraction of the input, 0..1.
    """
    if known >= 1:
        return 0.0
    if len(values) < 2:
        return float(weights @ values)
    off = weights * (values - (weights @ values) / (weights @ records) * records)
    variance = np.sum(np.diff(off) ** 2) / (2 * (len(off) - 1))
    return float(np.sqrt((1 - known) * len(off) * variance))


def choice_of(measured: Measured, config: PackConfig, packs_per_step: int) -> Choice:
    """Plans one combination.

    Args:
        measured: the sample.
        config: all settings.
        packs_per_step: packs of an optimizer step, over all ranks.
    """
    layout = config.layout
    tokens, padded = measured.tokens[layout], measured.padded[layout]
    fits: Bool = (padded <= config.pack_size) & (measured.longest <= config.sequence_limit)
    found = plan(padded[fits], config=config)
    found = replace(found, tokens=int(tokens[fits].sum()))
    examples, _ = measured.estimate(measured.by_place(fits))
    overlong, overlong_error = measured.estimate(measured.by_place(~fits) + measured.overlong)
    stored, stored_error = measured.estimate(measured.by_place(tokens * fits))
    packs = round(stored / max(found.tokens, 1) * found.num_packs)
    scale = measured.total / measured.sample.records
    errors: tuple[int | None, int | None] = (None, None)
    if measured.sample.total is not None:
        # The plan of all records may have fewer packs over the tokens than that of a few.
        spare = found.num_packs - found.aligned_tokens // found.pack_size
        gap = max(spare, 1) * (scale - 1)
        errors = (
            round(stored_error / max(found.tokens, 1) * found.num_packs + gap),
            round(max(overlong_error, UNSEEN * (scale - 1))),
        )
    per_pack = found.examples_per_pack[1]
    return Choice(
        pack_size=found.pack_size,
        layout=layout,
        strategy=found.strategy,
        packs=packs,
        examples=round(examples),
        overlong=round(overlong),
        packs_error=errors[0],
        overlong_error=errors[1],
        fill_rate=found.fill_rate,
        fill_but_emptiest=_fill_but_emptiest(found, tokens[fits]),
        aligned_fill_rate=found.aligned_fill_rate,
        examples_per_pack=per_pack,
        tokens_saved=float(1 - tokens.sum() / max(measured.tokens["concat"].sum(), 1)),
        steps=packs // packs_per_step,
        examples_per_step=per_pack * packs_per_step,
    )


def _fill_but_emptiest(found: Plan, tokens: Int32) -> float:
    if found.num_packs < 2:
        return found.fill_rate
    filled = np.add.reduceat(tokens[found.order], found.offsets[:-1], dtype=np.int64)
    return float((filled.sum() - filled.min()) / ((found.num_packs - 1) * found.pack_size))
