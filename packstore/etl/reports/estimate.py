"""Estimates the results of packing from a sample of the records; writes nothing.

The sample is tokenized once; then each combination of pack size, layout and strategy is planned
from lengths alone. Counts are scaled to all records with ratio estimates, whose errors come from
the differences of neighbouring places of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from packstore.config import PackConfig
from packstore.errors import ConfigError, InputError, sentence
from packstore.etl.reports.sampled import Choice, Measured, choice_of
from packstore.etl.sources import RecordExampleReader, open_examples
from packstore.format.arrays import Int32, Tally
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.pack.algorithms import STRATEGIES as KNOWN
from packstore.pack.plan import MAX_PACK_SIZE
from packstore.progress import Progress

__all__ = ["Choice", "Estimate", "estimate"]

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool",)
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
        kind: ``preference``, ``sft`` or ``ranked``.
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


def estimate(
    source: Any,
    tokenizer: Any = None,
    *,
    pack_sizes: Sequence[int] | None = None,
    layouts: Sequence[Literal["concat", "shared_prefix"]] | None = None,
    strategies: Sequence[str] | None = None,
    sample: int = SAMPLE,
    records: int | None = None,
    world_size: int = 1,
    packs_per_batch: int = 1,
    accumulation: int = 1,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Estimate:
    """Tokenizes a sample of the records of `source` and plans every combination of settings.

    Reads the whole input; of an iterable of unknown length, only the first records.

    Args:
        source, tokenizer, storage_options: see :func:`packstore.pack`.
        pack_sizes, layouts, strategies: values to combine. None: the settings `pack_size`,
            `layout` and `strategy` if given, else `PACK_SIZES`, `LAYOUTS` and `STRATEGIES`.
        sample: maximum number of sampled records.
        records: total number of records to scale counts to, if larger than the input.
        world_size: number of ranks of a training run, for the steps of an epoch.
        packs_per_batch: packs of a batch on one rank.
        accumulation: batches of an optimizer step.
        config: other settings of :func:`packstore.pack`. Its `pack_size`, `layout` and `strategy`
            are not used; `seed` also decides the sample.
        progress: called with the number of records read.
        settings: fields of :class:`packstore.PackConfig`, which override `config`.

    Raises:
        ConfigError: a setting is not supported here, is out of range, or is given twice.
        InputError: no record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    numbers = {
        "sample": sample,
        "world_size": world_size,
        "packs_per_batch": packs_per_batch,
        "accumulation": accumulation,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(sentence(f"setting {name}", "must be at least 1", str(value)))
    tried = [
        _tried("pack_size", pack_sizes, settings, PACK_SIZES),
        _tried("layout", layouts, settings, LAYOUTS),
        _tried("strategy", strategies, settings, STRATEGIES),
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
    reader = open_examples(
        source, tokenizer, _limitless(base), dict(storage_options or {}), SAMPLE_BLOCK_BYTES
    )
    report = None if progress is None else lambda n: progress("read", n, None, "records")
    drawn = reader.sample(sample, base.seed, report)
    total = max(drawn.records, records or drawn.total or 0)
    measure = functools.partial(Measured, multiple=base.pad_to_multiple, sample=drawn, total=total)
    measured = measure(reader, {"concat", *tried[1]})
    if not measured.tally.kept:
        raise InputError("no record of the sample could be used: run `packstore doctor` on it.")

    @functools.cache
    def cut(pack_size: int, layout: str) -> Measured:
        """Measures the examples, truncated for a pack size and layout."""
        if not (base.overlong.startswith("truncate") and isinstance(reader, RecordExampleReader)):
            return measured
        return measure(reader.sized(pack_size, layout), {"concat", layout})

    step = world_size * packs_per_batch * accumulation
    choices = [choice_of(cut(one.pack_size, one.layout), one, step) for one in combinations]
    return Estimate(
        kind=reader.kind,
        tally=measured.tally,
        sample=drawn,
        scale=total / drawn.records,
        choices=tuple(choices),
        recommended=_recommended(choices),
        example_tokens={layout: measured.tokens[layout] for layout in ("concat", *tried[1])},
        sequence_tokens=measured.sequence_tokens,
    )


def _tried(
    name: str, asked: Sequence[Any] | None, settings: Mapping[str, Any], usual: Sequence[Any]
) -> Sequence[Any]:
    """Returns the values of a setting to combine."""
    if asked is not None and not asked:
        raise ConfigError(sentence(f"values of {name}", "must be at least one", "none"))
    if name not in settings:
        return usual if asked is None else asked
    if asked is not None:
        found = f"{settings[name]!r}, and {list(asked)} to try"
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
