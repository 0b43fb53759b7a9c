"""What packing would give, from a sample of the records: nothing is written.

The sample is tokenized once; each combination of pack size, layout and strategy is then planned
from lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packstore.config import PackConfig, PlanConfig
from packstore.errors import ConfigError, InputError
from packstore.intake import open_intake
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.records import Int32, Tally

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool", "best_fit_decreasing")
LAYOUTS = ("concat", "shared_prefix")

SAMPLE = 20_000
"""Records that are looked at by default: shares of fill are then known to about 0.1 %."""

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""What a recommended pack size fills at least, and the share of records that it keeps, compared
with the largest pack size that was tried."""


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
        fill_rate: tokens / (packs * pack_size).
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
    fill_rate: float
    aligned_fill_rate: float
    gap: int
    examples_per_pack: float
    tokens_saved: float
    steps: int
    examples_per_step: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """What packing would give.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        tally: what became of the records of the sample.
        scale: records in all, over those of the sample.
        choices: every combination.
        recommended: the smallest pack size that loses little; None if none does.
        example_tokens: layout -> int32 `[E]`, tokens of each example of the sample.
        sequence_tokens: int32 `[S]`, logical tokens of each sequence of the sample.
    """

    kind: str
    tally: Tally
    scale: float
    choices: tuple[Choice, ...]
    recommended: Choice | None
    example_tokens: Mapping[str, Int32]
    sequence_tokens: Int32


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is tried.

    Attributes:
        pack_sizes, layouts, strategies: every combination of these.
        sample: records that are looked at.
        records: records in all, if known: counts are scaled to them.
        training: how an epoch is cut into steps.
    """

    pack_sizes: Sequence[int] = PACK_SIZES
    layouts: Sequence[str] = LAYOUTS
    strategies: Sequence[str] = STRATEGIES
    sample: int = SAMPLE
    records: int | None = None
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        t = self.training
        numbers = (*self.pack_sizes, self.sample, t.world_size, t.packs_per_batch, t.accumulation)
        if not (self.pack_sizes and self.layouts and self.strategies) or min(numbers) < 1:
            raise ConfigError(
                "a forecast needs at least one pack size, layout and strategy, and whole numbers "
                f"of at least 1; found {self}."
            )


def forecast(
    source: Any,
    tokenizer: Any = None,
    options: Options | None = None,
    *,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Forecast:
    """Tokenizes the first records of `source` and plans every combination of `options`.

    Args:
        source, tokenizer, config, storage_options, settings: as ``packstore.pack`` takes them.
        options: what is tried.

    Raises:
        InputError: not one record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    options = options or Options()
    # What shares prefixes in the largest pack is all that any of the combinations holds.
    widest = {"pack_size": max(options.pack_sizes), "layout": max(options.layouts)}
    base = PackConfig.of(config, **{**settings, **widest})
    intake = open_intake(source, tokenizer, base, dict(storage_options or {}))
    tally = Tally()
    tokens: dict[str, list[Int32]] = {"concat": [], **{layout: [] for layout in options.layouts}}
    padded: dict[str, list[Int32]] = {layout: [] for layout in tokens}
    sequences: list[Int32] = []
    for examples, part in intake:
        tally.add(part)
        sequences.append(examples.lengths)
        for layout, parts in tokens.items():
            parts.append(sizes(examples, layout))
            padded[layout].append(sizes(examples, layout, base.pad_to_multiple))
        if tally.read >= options.sample:
            break
    if not tally.kept:
        raise InputError("no record of the sample could be used: run `packstore doctor` on it.")
    lengths = {layout: np.concatenate(parts) for layout, parts in tokens.items()}
    scale = max(1.0, (options.records or 0) / tally.read)
    aligned = {layout: np.concatenate(parts) for layout, parts in padded.items()}
    choices = tuple(_choices((lengths, aligned), options, base, scale))
    return Forecast(
        kind=intake.kind,
        tally=tally,
        scale=scale,
        choices=choices,
        recommended=_recommended(choices),
        example_tokens=lengths,
        sequence_tokens=np.concatenate(sequences),
    )


def _choices(
    measured: tuple[Mapping[str, Int32], ...], options: Options, config: PackConfig, scale: float
) -> Iterator[Choice]:
    lengths, aligned = measured
    for pack_size in sorted(set(options.pack_sizes)):
        for layout in options.layouts:
            fits = aligned[layout] <= pack_size
            saved = 1 - lengths[layout].sum() / lengths["concat"].sum()
            for strategy in options.strategies:
                settings = PlanConfig(
                    pack_size=pack_size,
                    pad_to_multiple=config.pad_to_multiple,
                    strategy=strategy,
                    seed=config.seed,
                    shuffle=config.shuffle,
                )
                found = plan(aligned[layout][fits], config=settings)
                found = replace(found, tokens=int(lengths[layout][fits].sum()))
                yield _choice(found, layout, int((~fits).sum()), float(saved), options, scale)


def _choice(
    found: Plan, layout: str, overlong: int, saved: float, options: Options, scale: float
) -> Choice:
    packs = round(found.num_packs * scale)
    steps = packs // options.training.packs_per_step
    return Choice(
        pack_size=found.pack_size,
        layout=layout,
        strategy=found.strategy,
        chosen=found.chosen,
        packs=packs,
        examples=round(found.num_examples * scale),
        overlong=round(overlong * scale),
        fill_rate=found.fill_rate,
        aligned_fill_rate=found.aligned_fill_rate,
        gap=found.gap,
        examples_per_pack=found.examples_per_pack[1],
        tokens_saved=saved,
        steps=steps,
        examples_per_step=found.examples_per_pack[1] * options.training.packs_per_step,
    )


def _recommended(choices: Sequence[Choice]) -> Choice | None:
    """The smallest pack size that fills well and keeps the records; there the fullest choice.

    A small sample leaves its last pack open, which says nothing of the dataset: it is not counted.
    """
    most = max(c.examples for c in choices)
    good = [
        c
        for c in choices
        if c.fill_rate * c.packs >= ENOUGH_FILL * (c.packs - 1)
        and c.examples >= ENOUGH_RECORDS * most
    ]
    return min(good, key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate), default=None)
