"""Estimates the results of packing from a sample of the records; writes nothing.

The sample is tokenized once; then each combination of pack size, layout and strategy is planned
from lengths alone. Counts are scaled to all records with ratio estimates, whose errors come from
the differences of neighbouring places of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from packstore.build.reports.sampled import Choice, Measured, Training, choice_of
from packstore.build.sources import RecordIntake, open_intake
from packstore.config import PackConfig
from packstore.config.keywords import PackSettings
from packstore.errors import ConfigError, InputError, sentence
from packstore.format.arrays import Int32, Tally
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.pack.algorithms import STRATEGIES as KNOWN
from packstore.pack.plan import MAX_PACK_SIZE

__all__ = ["Choice", "Estimate", "Options", "Training", "estimate"]

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool", "best_fit_decreasing")
LAYOUTS = ("concat", "shared_prefix")

SAMPLE = 20_000
"""Default maximum of sampled records; the error of the fill rate is then about 0.1 %."""

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""Minimum fill rate of a recommended pack size, and the minimum fraction of records that it keeps,
relative to the combination that keeps most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The result of :func:`estimate`.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        tally: counts of the sample's records, without those too long.
        sample: figures of the sample.
        scale: number of all records, divided by those of the sample.
        choices: all combinations.
        recommended: the smallest pack size that drops few records; None if there is none.
        example_tokens: layout -> int32 `[E]`, tokens of each example of the sample.
        sequence_tokens: int32 `[S]`, logical tokens of each sequence of the sample.
    """

    kind: str
    tally: Tally
    sample: Sampling
    scale: float
    choices: tuple[Choice, ...]
    recommended: Choice | None
    example_tokens: Mapping[str, Int32]
    sequence_tokens: Int32


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :func:`estimate`.

    Attributes:
        pack_sizes, layouts, strategies: values to combine. None: the settings `pack_size`,
            `layout` and `strategy` if given, else `PACK_SIZES`, `LAYOUTS` and `STRATEGIES`.
        sample: maximum number of sampled records.
        records: total number of records to scale counts to, if larger than the input.
        training: batch sizes, from which the optimizer steps follow.
    """

    pack_sizes: Sequence[int] | None = None
    layouts: Sequence[str] | None = None
    strategies: Sequence[str] | None = None
    sample: int = SAMPLE
    records: int | None = None
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        t = self.training
        numbers = (self.sample, t.world_size, t.packs_per_batch, t.accumulation)
        tried = (self.pack_sizes, self.layouts, self.strategies)
        small = min(*numbers, *(self.pack_sizes or ())) < 1
        if small or any(values is not None and not values for values in tried):
            raise ConfigError(
                "an estimate needs at least one pack size, layout and strategy, and whole numbers "
                f"of at least 1; found {self}."
            )


def estimate(
    source: Any,
    tokenizer: Any = None,
    options: Options | None = None,
    *,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int | None, str], None] | None = None,
    **settings: Unpack[PackSettings],
) -> Estimate:
    """Tokenizes a sample of the records of `source` and plans every combination of `options`.

    Reads the whole input; of an iterable of unknown length, only the first records.

    Args:
        source, tokenizer, storage_options: see :func:`packstore.pack`.
        options: the combinations and the sample.
        config: other settings of :func:`packstore.pack`. Its `pack_size`, `layout` and `strategy`
            are not used; `seed` also decides the sample.
        progress: called with the number of records read.
        settings: fields of :class:`packstore.PackConfig`, which override `config`.

    Raises:
        ConfigError: a setting is not supported here, or contradicts `options`.
        InputError: no record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    options = options or Options()
    tried = [
        _tried(name, getattr(options, many), settings, usual)
        for name, many, usual in (
            ("pack_size", "pack_sizes", PACK_SIZES),
            ("layout", "layouts", LAYOUTS),
            ("strategy", "strategies", STRATEGIES),
        )
    ]
    base = PackConfig.of(config, **settings)
    if base.selects:
        must = "an estimate counts all records, so they must not be set"
        found = f"dedup={base.dedup!r}, validation_fraction={base.validation_fraction}"
        raise ConfigError(sentence("settings dedup and validation_fraction", must, found))
    combinations = [
        replace(base, pack_size=pack_size, layout=layout, strategy=strategy)
        for pack_size in sorted(set(tried[0]))
        for layout in tried[1]
        for strategy in tried[2]
    ]
    for one in combinations:
        KNOWN.check(one.strategy)
    intake = open_intake(
        source, tokenizer, _limitless(base), dict(storage_options or {}), SAMPLE_BLOCK_BYTES
    )
    report = None if progress is None else lambda n: progress("read", n, None, "records")
    sample = intake.sample(options.sample, base.seed, report)
    total = max(sample.records, options.records or sample.total or 0)
    measure = functools.partial(Measured, multiple=base.pad_to_multiple, sample=sample, total=total)
    measured = measure(intake, {"concat", *tried[1]})
    if not measured.tally.kept:
        raise InputError("no record of the sample could be used: run `packstore doctor` on it.")

    @functools.cache
    def cut(pack_size: int, layout: str) -> Measured:
        """Measures the examples, truncated for a pack size and layout."""
        if not (base.overlong.startswith("truncate") and isinstance(intake, RecordIntake)):
            return measured
        return measure(intake.sized(pack_size, layout), {"concat", layout})

    choices = [
        choice_of(cut(one.pack_size, one.layout), one, options.training) for one in combinations
    ]
    return Estimate(
        kind=intake.kind,
        tally=measured.tally,
        sample=sample,
        scale=total / sample.records,
        choices=tuple(choices),
        recommended=_recommended(choices),
        example_tokens={layout: measured.tokens[layout] for layout in ("concat", *tried[1])},
        sequence_tokens=measured.sequence_tokens,
    )


def _tried(
    name: str, asked: Sequence[Any] | None, settings: Mapping[str, Any], usual: Sequence[Any]
) -> Sequence[Any]:
    """Returns the values of a setting to combine."""
    if name not in settings:
        return usual if asked is None else asked
    if asked is not None:
        found = f"{settings[name]!r}, and {list(asked)} in the options"
        raise ConfigError(sentence(f"setting {name}", "must be given once", found))
    return (settings[name],)


def _limitless(config: PackConfig) -> PackConfig:
    """Returns `config` changed so that no record is too long for any combination."""
    if config.overlong.startswith("truncate"):
        return config
    return replace(config, pack_size=MAX_PACK_SIZE, max_length=None, overlong="drop")


def _recommended(choices: Sequence[Choice]) -> Choice | None:
    """Returns the fullest choice of the smallest pack size that fills well and keeps the records.

    Ignores the emptiest pack: a small sample leaves its last pack open, unlike the whole dataset.
    """
    most = max(c.examples for c in choices)
    good = [
        c
        for c in choices
        if c.fill_but_emptiest >= ENOUGH_FILL and c.examples >= ENOUGH_RECORDS * most
    ]
    return min(good, key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate), default=None)
