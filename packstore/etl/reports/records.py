"""Reads records, or a sample of them, once, and tells what a job would make of them.

No dataset is written. What packing would drop or note, what lint finds, and the packs
of a sample come from the same pass.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, Literal

from packstore.config import CHECK_RETRIES, BatchConfig, PackConfig
from packstore.config.reading import large_steps_warning
from packstore.errors import ConfigError, InputError, sentence
from packstore.etl.pipeline import with_adapter
from packstore.etl.reports.lint import find, linted
from packstore.etl.reports.place import Finding, try_place
from packstore.etl.reports.projection import Choice, Projection, Report
from packstore.etl.sources import ExampleReader, RecordExampleReader, open_examples
from packstore.etl.totals import count_unrequested_drops
from packstore.format.arrays import Sample, Tally
from packstore.format.schema import LAYOUTS
from packstore.io.dataset.dataset import find_dataset
from packstore.io.inputs.files import BLOCK_BYTES
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.io.store.location import Location
from packstore.pack.algorithms import STRATEGIES as KNOWN
from packstore.pack.plan import MAX_PACK_SIZE
from packstore.progress import Progress

log = logging.getLogger("packstore")

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool",)

SAMPLE = 20_000
"""Default maximum of sampled records; the error of the fill rate is then about 0.1 %.
"""


def doctor(
    source: Any,
    tokenizer: Any,
    *,
    sample: int | None = None,
    config: PackConfig | None = None,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Tokenizes all records like ``packstore.pack`` and counts their errors.

    Policies set to ``error`` count here instead of stopping. Memory: 16 bytes for every
    record. Duplicates are the examples that `dedup` would drop.

    Args:
        source, tokenizer, config, adapter, storage_options, progress, settings: see
            :func:`packstore.pack`.
        sample: most records to tokenize, from all over the input; None: all.

    Raises:
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    config, loaded = with_adapter(PackConfig.of(config, **settings), adapter)
    config = _with_keys(_lenient(config))
    block_bytes = BLOCK_BYTES if sample is None else SAMPLE_BLOCK_BYTES
    reader = open_examples(
        source, tokenizer, config, storage_options or {}, block_bytes, loaded
    )
    if sample is not None:
        _draw(reader, sample, config.seed, progress)
    return _read(reader, config, progress, lint=True)


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
    packs_per_batch: int | None = None,
    gradient_accumulation_steps: int = 1,
    examples_per_step: int | None = None,
    config: PackConfig | None = None,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Tokenizes a sample of the records of `source` and plans every combination of
    settings.

    Reads the whole input; of an iterable of unknown length, only the first records.

    Args:
        source, tokenizer, adapter, storage_options, progress: see
        :func:`packstore.pack`. pack_sizes, layouts, strategies: values to combine.
        None: the settings `pack_size`,
            `layout` and `strategy` if given, else `PACK_SIZES`, `LAYOUTS` and
            `STRATEGIES`.
        sample: maximum number of sampled records.
        records: total number of records to scale counts to, if larger than the input.
        world_size: ranks of a training run, for the steps of an epoch.
        packs_per_batch, gradient_accumulation_steps, examples_per_step: see
            :class:`packstore.config.BatchConfig`; logs a warning where steps are far
            larger.
        config: other settings of :func:`packstore.pack`. Its `pack_size`, `layout` and
            `strategy` are not used; `seed` also decides the sample.
        settings: fields of :class:`packstore.PackConfig`, which override `config`.

    Raises:
        ConfigError: a setting is not supported here, is out of range, or is given
            twice.
        InputError: no record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    batching = BatchConfig(
        packs_per_batch=packs_per_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
        examples_per_step=examples_per_step,
    )
    _require_positive("world_size", world_size)
    axes = (
        sorted(set(_tried("pack_size", pack_sizes, settings, PACK_SIZES))),
        _tried("layout", layouts, settings, LAYOUTS),
        _tried("strategy", strategies, settings, STRATEGIES),
    )
    base, loaded = with_adapter(PackConfig.of(config, **settings), adapter)
    if base.selects:
        rule = "must not be set, as an estimate counts all records"
        raise ConfigError(sentence("settings dedup and validation_fraction", rule))
    configs = [
        replace(base, pack_size=size, layout=layout, strategy=KNOWN.check(strategy))
        for size, layout, strategy in product(*axes)
    ]
    truncates = base.on["overlong"].startswith("truncate")
    if not truncates:  # no record is too long for all combinations
        on = {**base.on, "overlong": "drop"}
        base = replace(base, pack_size=MAX_PACK_SIZE, max_length=None, on=on)
    options = storage_options or {}
    reader = open_examples(source, tokenizer, base, options, SAMPLE_BLOCK_BYTES, loaded)
    drawn = _draw(reader, sample, base.seed, progress)
    total = max(drawn.total or drawn.records, records or 0)
    measured = projection = Projection(drawn, total, axes[1], base.pad_to_multiple)
    report = _read(reader, base, progress, measured)
    report.tally.dropped.pop("overlong", None)  # of no combination
    if not report.tally.kept:
        raise InputError(
            "no record of the sample could be used; `packstore pack --dry-run` "
            "says why."
        )
    choices: list[Choice] = []
    for (pack_size, layout), alike in groupby(
        configs, lambda c: (c.pack_size, c.layout)
    ):
        if truncates and isinstance(
            reader, RecordExampleReader
        ):  # the cut depends on both
            again = reader.sized(pack_size, layout)
            projection = Projection(drawn, total, [layout], base.pad_to_multiple, again)
        choices += [projection.choice(config, batching, world_size) for config in alike]
    report = measured.planned(report, choices)
    if examples_per_step is not None:
        _warn_of_large_steps(report, examples_per_step, world_size)
    return report


def dry_run(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    sample: int = SAMPLE,
    config: PackConfig | None = None,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[Report, list[Finding]]:
    """Lints and plans a sample of the records, in one pass, and tries the destination
    of a job.

    At most `sample` records are tokenized; all lines of them that are no JSON are
    listed. All other arguments: see :func:`packstore.pack`.

    Returns:
        A report with the settings of the job as its only choice, and the findings at
        the destination. If these are all ok, the job can be expected to commit.
    """
    config, loaded = with_adapter(PackConfig.of(config, **settings), adapter)
    options = (
        storage_options if source_storage_options is None else source_storage_options
    )
    lint = tokenizer is not None  # else they are token ids, or a dataset
    read_by = _lenient(config)
    if lint:
        read_by = _with_keys(read_by)
    # The name of a file of rejects makes tallies list every dropped record; nothing is
    # written.
    read_by = replace(read_by, rejects=os.devnull)
    reader = open_examples(
        source, tokenizer, read_by, options or {}, SAMPLE_BLOCK_BYTES, loaded
    )
    drawn = _draw(reader, sample, config.seed, progress)
    total = drawn.total or drawn.records
    projection = Projection(drawn, total, [config.layout], config.pad_to_multiple)
    report = _read(reader, read_by, progress, projection, lint)
    report = projection.planned(report, [projection.choice(config, BatchConfig(), 1)])
    place = Location(out, {**CHECK_RETRIES, **(storage_options or {})})
    findings = list(try_place(place))
    if all(finding.ok for finding in findings):  # else looking for a version may raise
        findings += _version(place, config)
    return report, [*findings, _drops(report.tally, config)]


def _lenient(config: PackConfig) -> PackConfig:
    """Return settings that count what would stop a job."""
    on = {
        reason: "drop" if answer == "error" else answer
        for reason, answer in config.on.items()
    }
    return replace(config, on=on)


def _with_keys(config: PackConfig) -> PackConfig:
    """Return settings by which examples have the keys of duplicates."""
    return replace(config, dedup="pair")


def _draw(
    reader: ExampleReader, sample: int, seed: int, progress: Progress | None
) -> Sampling:
    """Reduces what a reader reads to a sample."""
    _require_positive("sample", sample)
    report = (
        None if progress is None else lambda n: progress("sample", n, None, "records")
    )
    return reader.sample(sample, seed, report)


def _read(
    reader: ExampleReader,
    config: PackConfig,
    progress: Progress | None,
    projection: Projection | None = None,
    lint: bool = False,
) -> Report:
    """Reads everything once; adds the lengths to a projection, if there is one."""
    if isinstance(reader, RecordExampleReader):
        reader.announce()
    tally = Tally()
    broken_lines: list[Sample] = []
    for examples, part in linted(reader) if lint else reader:
        tally.add(part)
        broken_lines += [s for s in part.rejected or () if s.reason == "not_json"]
        if projection is not None:
            projection.add(examples, part)
        if progress is not None:
            progress("read", tally.read, None, "records")
    if broken_lines:  # all of them, so that they can be corrected at once
        other_samples = [s for s in tally.samples if s.reason != "not_json"]
        tally.samples = [*other_samples, *broken_lines]
    return Report(
        kind=reader.kind, tally=tally, findings=[*find(tally, reader.kind, config)]
    )


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(sentence(f"setting {name}", "must be at least 1", str(value)))


def _tried(
    name: str,
    asked: Sequence[Any] | None,
    settings: Mapping[str, Any],
    usual: Sequence[Any],
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


def _warn_of_large_steps(report: Report, wanted: int, world_size: int) -> None:
    best = report.best
    tokens = report.lengths[best.layout]
    longest = int(tokens[tokens <= best.pack_size].max(initial=0))
    steps = best.examples_per_step, best.largest_step
    if text := large_steps_warning(wanted, *steps, world_size, best.pack_size, longest):
        log.warning("pack size %d, layout %s: %s", best.pack_size, best.layout, text)


def _version(place: Location, config: PackConfig) -> Iterator[Finding]:
    there = find_dataset(place.url, place.storage_options)
    if there is not None:
        then = (
            "the job replaces it"
            if config.overwrite
            else "another job needs --overwrite"
        )
        level: Literal["ok", "remark"] = "ok" if config.overwrite else "remark"
        yield Finding("version", level, f"version {there.version} is there; {then}")


def _drops(tally: Tally, config: PackConfig) -> Finding:
    """Finds out whether refused records, or their share of all, would make a
    job fail.
    """
    if stops := [
        reason for reason in tally.dropped if config.on.get(reason) == "error"
    ]:
        text = (
            f"the job stops at the first {stops[0]}; --on {stops[0]}=drop leaves it out"
        )
        return Finding("records", "problem", text)
    rate = count_unrequested_drops(tally) / max(tally.read, 1)
    text = (
        f"{100 * rate:.3g}% are dropped; max_drop_rate allows "
        f"{100 * config.max_drop_rate:g}%"
    )
    return Finding("records", "ok" if rate <= config.max_drop_rate else "problem", text)
