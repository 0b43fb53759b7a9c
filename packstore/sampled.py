"""A sample of the examples: their sizes, what packs of them come to, and its error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.config import PackConfig
from packstore.intake import Intake
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.pack.statistics import sums
from packstore.records import Bool, Int32, Int64, Tally

UNSEEN = 3
"""Of what a sample holds none of, it would with a chance of 95 % hold one if there were so many for
every time that the input is as large as the sample."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How an epoch is cut into optimizer steps.

    Attributes:
        world_size: ranks.
        packs_per_batch: packs of one batch on one rank.
        accumulation: batches of one optimizer step.
    """

    world_size: int = 1
    packs_per_batch: int = 1
    accumulation: int = 1

    @property
    def packs_per_step(self) -> int:
        """Packs of one optimizer step, over all ranks."""
        return self.world_size * self.packs_per_batch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One combination of settings, and what it comes to; counts are scaled to all records.

    Attributes:
        strategy: what was asked for.
        chosen: what chose the examples of each pack: `strategy`, or what ``auto`` came to.
        packs, examples: of the dataset.
        overlong: examples that do not fit.
        packs_error, overlong_error: two standard errors of `packs` and `overlong`; 0 where all
            records were read, None where only the first ones were.
        fill_rate: tokens / (packs * pack_size).
        fill_but_emptiest: the same without the emptiest pack, which a small sample leaves open.
        aligned_fill_rate: the same with sequences padded to `pad_to_multiple`.
        gap: packs over the lower bound, of the sample.
        examples_per_pack: mean.
        tokens_saved: share of the tokens of layout ``concat`` that this layout leaves out.
        steps: optimizer steps of an epoch.
        examples_per_step: mean.
    """

    pack_size: int
    layout: str
    strategy: str
    chosen: str
    packs: int
    examples: int
    overlong: int
    packs_error: int | None
    overlong_error: int | None
    fill_rate: float
    fill_but_emptiest: float
    aligned_fill_rate: float
    gap: int
    examples_per_pack: float
    tokens_saved: float
    steps: int
    examples_per_step: float


class Measured:
    """Sizes of the examples of a sample.

    Attributes:
        tally: what became of the records, those apart that are too long.
        read: int64 `[B]`, records read of each place of the sample.
        overlong: int64 `[B]`, those that no cut makes short enough.
        place: int64 `[E]`, the place of each example.
        longest: int32 `[E]`, tokens of its longest sequence.
        tokens: layout -> int32 `[E]`.
        padded: layout -> int32 `[E]`, with every sequence padded.
        sequence_tokens: int32 `[S]`.
    """

    def __init__(self, intake: Intake, layouts: set[str], multiple: int) -> None:
        self.tally = Tally()
        read: list[int] = []
        overlong: list[int] = []
        place: list[Int64] = []
        longest: list[Int32] = []
        sequences: list[Int32] = []
        tokens: dict[str, list[Int32]] = {layout: [] for layout in layouts}
        padded: dict[str, list[Int32]] = {layout: [] for layout in layouts}
        for number, (examples, part) in enumerate(intake):
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
        """float64 `[B]`: sums of values `[E]`."""
        return np.asarray(np.bincount(self.place, values, len(self.read)), np.float64)

    def error(self, values: npt.NDArray[Any], scale: float) -> float:
        """Two standard errors of the sum of `values` `[B]`, as an estimate of `scale` times it."""
        return 2 * scale * standard_error(values, self.read, 1 / scale)


def standard_error(values: npt.NDArray[Any], records: npt.NDArray[Any], known: float) -> float:
    """Standard error of the sum of `values` of an even sample, as an estimate by records.

    By successive differences of neighbouring places: that the places are spread evenly makes it
    smaller. Source: Wolter, "Introduction to Variance Estimation", chapter 8, estimator v2.

    Args:
        values: `[B]`, of the places of the sample, in the order of the input.
        records: `[B]`, of each place.
        known: share of the input that is in the sample, 0..1.
    """
    if len(values) < 2:
        return 0.0 if known >= 1 else float(np.sum(values))
    off = values - values.sum() / records.sum() * records
    variance = np.sum(np.diff(off) ** 2) / (2 * (len(off) - 1))
    return float(np.sqrt(max(1 - known, 0) * len(off) * variance))


def choice_of(
    measured: Measured, config: PackConfig, training: Training, scale: float, known: bool
) -> Choice:
    """Plans one combination.

    Args:
        measured: the sample.
        config: all settings.
        training: how an epoch is cut into steps.
        scale: records in all, over those of the sample.
        known: whether the sample is from all over the input, so that its error can be told.
    """
    layout = config.layout
    tokens, padded = measured.tokens[layout], measured.padded[layout]
    fits: Bool = (padded <= config.pack_size) & (measured.longest <= config.sequence_limit)
    found = plan(padded[fits], config=config)
    found = replace(found, tokens=int(tokens[fits].sum()))
    overlong = measured.by_place(~fits) + measured.overlong
    packs_error, overlong_error = None, None
    if known:
        stored = measured.error(measured.by_place(tokens * fits), scale)
        # The plan of all records need not have the gap that the plan of a few has.
        gap = max(found.gap, 1) * (scale - 1)
        packs_error = round(stored / max(found.tokens, 1) * found.num_packs + gap)
        overlong_error = round(max(measured.error(overlong, scale), UNSEEN * (scale - 1)))
    packs = round(found.num_packs * scale)
    per_pack = found.examples_per_pack[1]
    return Choice(
        pack_size=found.pack_size,
        layout=layout,
        strategy=found.strategy,
        chosen=found.chosen,
        packs=packs,
        examples=round(found.num_examples * scale),
        overlong=round(overlong.sum() * scale),
        packs_error=packs_error,
        overlong_error=overlong_error,
        fill_rate=found.fill_rate,
        fill_but_emptiest=_fill_but_emptiest(found, tokens[fits]),
        aligned_fill_rate=found.aligned_fill_rate,
        gap=found.gap,
        examples_per_pack=per_pack,
        tokens_saved=float(1 - tokens.sum() / max(measured.tokens["concat"].sum(), 1)),
        steps=packs // training.packs_per_step,
        examples_per_step=per_pack * training.packs_per_step,
    )


def _fill_but_emptiest(found: Plan, tokens: Int32) -> float:
    if found.num_packs < 2:
        return found.fill_rate
    filled = sums(tokens[found.order], found.offsets)
    return float((filled.sum() - filled.min()) / ((found.num_packs - 1) * found.pack_size))
