"""What packing would give, from a sample of the records: nothing is written.

The sample is tokenized once; each combination of pack size, layout and strategy is then planned
from lengths alone. Counts are those of all records: of a sample they are estimated as ratios to
records, and their error from how much neighbouring places of the sample differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packstore.config import PackConfig
from packstore.errors import ConfigError, InputError, sentence
from packstore.intake import RecordIntake, open_intake
from packstore.io.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.pack.algorithms import STRATEGIES as KNOWN
from packstore.pack.plan import MAX_PACK_SIZE
from packstore.records import Int32, Tally
from packstore.sampled import Choice, Measured, Training, choice_of

__all__ = ["Choice", "Forecast", "Options", "Training", "forecast"]

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool", "best_fit_decreasing")
LAYOUTS = ("concat", "shared_prefix")

SAMPLE = 20_000
"""Records that are looked at by default, at most: fill is then known to about 0.1 %."""

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""What a recommended pack size fills at least, and the share of records that it keeps, of those
that the combination keeps which loses fewest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """What packing would give.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        tally: what became of the records of the sample, before any is too long.
        sample: how the sample was taken.
        scale: records in all, over those of the sample.
        choices: every combination.
        recommended: the smallest pack size that loses little; None if none does.
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
    """What is tried.

    Attributes:
        pack_sizes, layouts, strategies: every combination of these. None: what the settings
            `pack_size`, `layout` and `strategy` say; where they are not given, `PACK_SIZES`,
            `LAYOUTS` and `STRATEGIES`.
        sample: records that are looked at, at most.
        records: records in all, if they are more than the input has: counts are scaled to them.
        training: how an epoch is cut into steps.
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
    progress: Callable[[str, int, int | None, str], None] | None = None,
    **settings: Any,
) -> Forecast:
    """Tokenizes a sample of the records of `source` and plans every combination of `options`.

    The input is read to its end; an iterable of unknown length is not, only its first records are
    looked at.

    Args:
        source, tokenizer, storage_options: as ``packstore.pack`` takes them.
        options: what is tried.
        config: further settings, as of ``packstore.pack``. Its `pack_size`, `layout` and
            `strategy` are not used; `seed` also decides the sample.
        progress: told how many records were read.
        settings: fields of :class:`packstore.PackConfig`, over `config`.

    Raises:
        ConfigError: a setting that a forecast cannot follow, or that `options` says otherwise.
        InputError: not one record could be used.
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
        must = "a forecast counts all records, so they must not be set"
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
        """Sizes of the examples as they are cut for packs of a size and layout."""
        if not (base.overlong.startswith("truncate") and isinstance(intake, RecordIntake)):
            return measured
        return measure(intake.sized(pack_size, layout), {"concat", layout})

    choices = [
        choice_of(cut(one.pack_size, one.layout), one, options.training) for one in combinations
    ]
    return Forecast(
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
    """Values of one setting that are tried."""
    if name not in settings:
        return usual if asked is None else asked
    if asked is not None:
        found = f"{settings[name]!r}, and {list(asked)} in the options"
        raise ConfigError(sentence(f"setting {name}", "must be given once", found))
    return (settings[name],)


def _limitless(config: PackConfig) -> PackConfig:
    """`config` such that no record is too long for any of the combinations."""
    if config.overlong.startswith("truncate"):
        return config
    return replace(config, pack_size=MAX_PACK_SIZE, max_length=None, overlong="drop")


def _recommended(choices: Sequence[Choice]) -> Choice | None:
    """The smallest pack size that fills well and keeps the records; there the fullest choice.

    A small sample leaves its last pack open, which says nothing of the dataset: the emptiest is not
    counted.
    """
    most = max(c.examples for c in choices)
    good = [
        c
        for c in choices
        if c.fill_but_emptiest >= ENOUGH_FILL and c.examples >= ENOUGH_RECORDS * most
    ]
    return min(good, key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate), default=None)
