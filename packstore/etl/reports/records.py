"""Reads records, or a sample of them, once, and reports how a job would pack them.

No dataset is written. ``doctor`` checks records for errors, ``estimate`` compares pack
sizes and layouts on a sample, and ``dry_run`` does both for one setting, and tests the
destination. All findings, and the lengths from which packs are projected, come from
the same pass.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from packstore.config import CHECK_RETRIES, REASONS, BatchConfig, PackConfig
from packstore.config.reading import DEFAULT_EXAMPLES_PER_STEP
from packstore.errors import (
    ConfigError,
    InputError,
    PackstoreError,
    message_with_notes,
    sentence,
)
from packstore.etl.append import plan_append
from packstore.etl.pipeline import locate_splits, resolve_settings, with_adapter
from packstore.etl.provenance import find_committed
from packstore.etl.repeated_files import find_repeated_files
from packstore.etl.reports.lint import find_in_tally, lint_blocks
from packstore.etl.reports.place import Finding, try_place
from packstore.etl.reports.projection import Choice, Projection, Report
from packstore.etl.sources import (
    ExampleReader,
    RecordExampleReader,
    open_examples,
)
from packstore.etl.tokenize import TokenizedBlock
from packstore.etl.totals import count_unrequested_drops, describe_drops
from packstore.format.schema import LAYOUTS
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.files import BLOCK_BYTES
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.io.manifest.commit import newest_version
from packstore.io.store.location import Location
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.plan import MAX_PACK_SIZE
from packstore.progress import Progress
from packstore.tokenizer.records.adapters import Adapter
from packstore.tokenizer.tally import Sample, Tally

TRAIN_BATCHING = BatchConfig(examples_per_step=DEFAULT_EXAMPLES_PER_STEP)
"""Steps of a training with the default settings."""

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
"""Pack sizes of an estimate, unless others are requested."""

SHARES: tuple[Literal["example", "pack"], ...] = ("example", "pack")
"""Values of `share_prefixes` of an estimate, unless one is requested."""

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
    """Tokenize records as ``packstore.pack`` would, and count their errors.

    Where the setting `on` has the answer ``error``, records are counted instead of
    stopping. Duplicates are the examples that `dedup` would drop. Memory: 16 bytes for
    each record.

    Args:
        source, tokenizer, config, adapter, storage_options, progress, settings: see
            :func:`packstore.pack`.
        sample: maximum number of records, drawn from all of the input; None: all.

    Returns:
        A report with `findings`, problems first.

    Raises:
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    config, loaded_adapter = with_adapter(PackConfig.of(config, **settings), adapter)
    config = _with_duplicate_keys(_without_stops(config))
    reader = open_examples(
        source,
        tokenizer,
        config,
        storage_options or {},
        block_bytes=BLOCK_BYTES if sample is None else SAMPLE_BLOCK_BYTES,
        adapter=loaded_adapter,
    )
    if sample is not None:
        _draw_sample(reader, sample, config.seed, progress)
    return _read(reader, config, progress, should_lint=True)


def estimate(
    source: Any,
    tokenizer: Any = None,
    *,
    pack_sizes: Sequence[int] | None = None,
    layouts: Sequence[Literal["auto", "concat", "shared_prefix"]] | None = None,
    sample: int = SAMPLE,
    records: int | None = None,
    packs_per_batch: int | None = None,
    gradient_accumulation_steps: int = 1,
    examples_per_step: int | None = None,
    config: PackConfig | None = None,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Estimate tokens, fill, packs and steps for several pack sizes and layouts.

    The examples of layout ``shared_prefix`` share prefixes inside each, and in packs.

    Tokenizes a sample of the records, and plans each combination. Reads all of the
    input, but only the first records of an iterable of unknown length.

    Args:
        source, tokenizer, adapter, storage_options, progress: see
            :func:`packstore.pack`.
        pack_sizes, layouts: values to combine. None: the setting `pack_size` or
            `layout` if it is in `settings`, else 2048 to 32768 and both layouts. A
            layout of ``auto`` stands for both, too.
        sample: maximum number of sampled records.
        records: total number of records to scale counts to, if larger than the input.
        packs_per_batch, gradient_accumulation_steps, examples_per_step: how one rank
            makes steps of packs, see :class:`packstore.config.BatchConfig`. Without any
            of them, a step has 64 examples, as in :func:`packstore.torch.train`.
        config: other settings of :func:`packstore.pack`. Its `pack_size`, `layout` and
            `share_prefixes` are not used; `seed` also decides the sample.
        settings: fields of :class:`packstore.PackConfig`, which override `config`.

    Returns:
        A report with `choices`, by pack size, layout and `share_prefixes`.

    Raises:
        ConfigError: a setting is not supported here, is out of range, or is given
            twice.
        InputError: no record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    if packs_per_batch is None and gradient_accumulation_steps == 1:
        examples_per_step = examples_per_step or DEFAULT_EXAMPLES_PER_STEP
    batching = BatchConfig(
        packs_per_batch=packs_per_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
        examples_per_step=examples_per_step,
    )
    pack_sizes = _values_of("pack_size", pack_sizes, settings, PACK_SIZES)
    requested_layouts = _values_of("layout", layouts, settings, LAYOUTS)
    shares = _values_of("share_prefixes", None, settings, SHARES)
    base, loaded_adapter = with_adapter(PackConfig.of(config, **settings), adapter)
    STRATEGIES.check(base.strategy)
    if base.selects:
        rule = "must not be set, as an estimate counts all records"
        raise ConfigError(sentence("settings dedup and validation_fraction", rule))
    configs = [
        config
        for pack_size in sorted(set(pack_sizes))
        for config in _layouts_of(base, pack_size, requested_layouts, shares)
    ]

    truncates = base.on["overlong"].startswith("truncate")
    reader = open_examples(
        source,
        tokenizer,
        base if truncates else _without_limits(base),
        storage_options or {},
        block_bytes=SAMPLE_BLOCK_BYTES,
        adapter=loaded_adapter,
    )
    sampling = _draw_sample(reader, sample, base.seed, progress)
    total = max(sampling.total or sampling.records, records or 0)
    with contextlib.closing(Projection(sampling, total, configs)) as projection:
        report = _read(reader, base, progress, projection)
        # Records beyond the limit of this pass: each combination has one of its own.
        report.tally.dropped.pop("overlong", None)
        if not report.tally.kept:
            rule = "at least one record of the sample must be usable"
            remedy = "Correct the records, or the settings that read them"
            raise InputError(
                sentence(
                    where="input",
                    rule=rule,
                    found=describe_drops(report.tally),
                    remedy=remedy,
                )
            )
        if truncates:
            choices = []
            for config in configs:
                choices += _read_again(reader, [config], batching, sampling, total)
        else:
            choices = [projection.choice(config, batching) for config in configs]
        scale = projection.scale
    return replace(report, sample=sampling, scale=scale, choices=choices)


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
    """Lint and plan a sample of the records in one pass, and try the destination.

    At most `sample` records are tokenized. The report names every line among them that
    is no JSON, and a few records for each other finding. All other arguments: see
    :func:`packstore.pack`.

    Returns:
        A report, and the findings at the destination. If these are all ok, the job can
        be expected to commit. The first choice of the report has the settings of the
        job, and the others have other values of `layout` and `share_prefixes`.
    """
    source_options = source_storage_options
    if source_options is None:
        source_options = storage_options
    source, config = resolve_settings(source, source_options or {}, config, settings)
    config, loaded_adapter = with_adapter(config, adapter)
    report, sampled_config = _report_on_sample(
        source,
        tokenizer,
        config,
        loaded_adapter,
        source_options or {},
        sample=sample,
        progress=progress,
    )
    destination = Location(out, storage_options or {})
    findings = _try_destination(destination)
    # If a check has failed, looking for a dataset may raise its error.
    if all(finding.ok for finding in findings):
        open_source = partial(
            open_examples,
            source,
            tokenizer,
            config,
            source_options or {},
            adapter=loaded_adapter,
        )
        locations = locate_splits(destination, config)
        findings.extend(_find_versions(locations, source, open_source, config))
    findings.append(_find_drops(report.tally, sampled_config))
    return report, findings


def dry_run_of_append(
    dataset: str | Dataset,
    more: Any,
    tokenizer: Any = None,
    *,
    allow_empty: bool = False,
    sample: int = SAMPLE,
    progress: Progress | None = None,
    **arguments: Any,
) -> tuple[Report, list[Finding]]:
    """Lint and plan a sample of the records that would be appended, and try the places
    of the dataset.

    Arguments: see :func:`packstore.append`. The first choice of the report has the
    settings of the dataset, which no append can change.

    Returns:
        A report, and the findings at the places. If these are all ok, the append can be
        expected to commit.

    Raises:
        NoRecordsError: there is no record, also with `allow_empty`.
        PackstoreError: as :func:`packstore.append`.
    """
    plan = plan_append(dataset, more, tokenizer, **arguments)
    report, config = _report_on_sample(
        plan.source,
        plan.tokenizer,
        plan.config,
        plan.adapter,
        plan.source_options,
        sample=sample,
        skip_empty=allow_empty,
        progress=progress,
    )
    findings = []
    for split, base in plan.bases.items():
        findings += _try_destination(base.location)
        text = f"append would write version {base.version + 1} of {base.url}"
        if split is not None and split == plan.ahead:
            text = f"an interrupted append wrote version {base.version} of {base.url}; "
            text += "the same records complete it"
        findings.append(Finding("version", "ok", text))
    findings.append(_find_drops(report.tally, config))
    return replace(report, choices=report.choices[:1]), findings


def _report_on_sample(
    source: Any,
    tokenizer: Any,
    config: PackConfig,
    adapter: Adapter | None,
    source_options: Mapping[str, Any],
    *,
    sample: int,
    skip_empty: bool = False,
    progress: Progress | None,
) -> tuple[Report, PackConfig]:
    """Lint and plan a sample of the records; return also the settings with a layout.

    Arguments: see :func:`dry_run`.
    """
    if isinstance(source, Dataset):
        # It is packed anew: only its length can be wrong with an example.
        read_config = _without_stops(config, ("overlong",))
    else:
        read_config = _without_stops(config)
    # Token ids and datasets come without a tokenizer, and are not linted.
    should_lint = tokenizer is not None
    if should_lint:
        read_config = _with_duplicate_keys(read_config)
    # Tallies list every dropped record only if `rejects` is set. A report writes none.
    read_config = replace(read_config, rejects=os.devnull)

    reader = open_examples(
        source,
        tokenizer,
        read_config,
        source_options,
        block_bytes=SAMPLE_BLOCK_BYTES,
        adapter=adapter,
        skip_empty=skip_empty,
    )
    config = replace(config, layout=reader.layout)
    sampling = _draw_sample(reader, sample, config.seed, progress)
    total = sampling.total or sampling.records
    layouts = _layouts_of(config, config.pack_size, LAYOUTS, SHARES)
    alternatives = [choice for choice in layouts if choice != config]
    of_another_layout = [
        choice for choice in alternatives if choice.layout != config.layout
    ]
    of_same_layout = [
        choice for choice in alternatives if choice.layout == config.layout
    ]
    configs = [config, *alternatives]
    with contextlib.closing(Projection(sampling, total, configs)) as projection:
        report = _read(
            reader,
            read_config,
            progress,
            projection=projection,
            should_lint=should_lint,
        )
        choices = _choices(projection, [config])
        if _is_cut_for_layout(report.tally, config):
            choices += _read_again(
                reader, of_another_layout, TRAIN_BATCHING, sampling, total
            )
        else:
            choices += _choices(projection, of_another_layout)
        choices += _choices(projection, of_same_layout)
        scale = projection.scale
    report = replace(report, sample=sampling, scale=scale, choices=choices)
    return report, config


def _choices(projection: Projection, configs: Iterable[PackConfig]) -> list[Choice]:
    return [projection.choice(config, TRAIN_BATCHING) for config in configs]


def _try_destination(location: Location) -> list[Finding]:
    """Return the findings at a destination; requests that fail are soon given up."""
    options = {**CHECK_RETRIES, **location.storage_options}
    return list(try_place(Location(location.url, options)))


def _without_stops(
    config: PackConfig, reasons: Collection[str] = tuple(REASONS)
) -> PackConfig:
    """Return settings that count records at which a job would stop for `reasons`."""
    on = dict(config.on)
    for reason in reasons:
        if on[reason] == "error":
            on[reason] = "drop"
    return replace(config, on=on)


def _with_duplicate_keys(config: PackConfig) -> PackConfig:
    """Return settings by which examples have keys of prompts; nothing is dropped."""
    return replace(config, dedup="pair")


def _without_limits(config: PackConfig) -> PackConfig:
    """Return settings that keep records of any length that a pack can have."""
    on = {**config.on, "overlong": "drop"}
    return replace(config, pack_size=MAX_PACK_SIZE, max_length=None, on=on)


def _layouts_of(
    config: PackConfig,
    pack_size: int,
    layouts: Iterable[str],
    shares: Iterable[Literal["example", "pack"]],
) -> list[PackConfig]:
    """Return the settings with each layout, and each extent of sharing that it has."""
    if "auto" in layouts:
        layouts = LAYOUTS
    concat = replace(
        config, pack_size=pack_size, layout="concat", share_prefixes="example"
    )
    configs = []
    if "concat" in layouts:
        configs.append(concat)
    if "shared_prefix" in layouts:
        shared = replace(concat, layout="shared_prefix")
        configs.extend(replace(shared, share_prefixes=share) for share in shares)
    return configs


def _values_of(
    name: str,
    requested: Sequence[Any] | None,
    settings: Mapping[str, Any],
    defaults: Sequence[Any],
) -> Sequence[Any]:
    """Return the values of a setting to combine."""
    if requested is not None and not requested:
        raise ConfigError(
            sentence(
                where=f"values of {name}", rule="must be at least one", found="none"
            )
        )
    if name in settings and requested is not None:
        conflict = f"{settings[name]!r}, and {list(requested)} to try"
        raise ConfigError(
            sentence(where=f"setting {name}", rule="must be given once", found=conflict)
        )
    if name in settings:
        return (settings[name],)
    return defaults if requested is None else requested


def _draw_sample(
    reader: ExampleReader, sample: int, seed: int, progress: Progress | None
) -> Sampling:
    """Reduce the source of a reader to a sample."""
    if sample < 1:
        raise ConfigError(
            sentence(
                where="setting sample", rule="must be at least 1", found=str(sample)
            )
        )
    if progress is None:
        return reader.sample(sample, seed)

    num_records = 0

    def report(records: int) -> None:
        nonlocal num_records
        num_records = records
        progress("sample", records, None, "records")

    sampling = reader.sample(sample, seed, report)
    if num_records:
        progress("sample", num_records, num_records, "records")
    return sampling


def _read(
    reader: ExampleReader,
    config: PackConfig,
    progress: Progress | None,
    projection: Projection | None = None,
    should_lint: bool = False,
) -> Report:
    """Read all blocks once; add their lengths to the projection, if there is one."""
    if isinstance(reader, RecordExampleReader):
        reader.announce()
    tally = Tally()
    broken_lines: list[Sample] = []
    blocks: Iterable[TokenizedBlock] = lint_blocks(reader) if should_lint else reader
    for examples, block_tally in blocks:
        tally.add(block_tally)
        for sample in block_tally.rejected or ():
            if sample.reason == "not_json":
                broken_lines.append(sample)
        if projection is not None:
            projection.add(examples, block_tally)
        if progress is not None:
            progress("read", tally.read, None, "records")
    if progress is not None:
        progress("read", tally.read, tally.read, "records")  # the end of the stage

    if broken_lines:
        # All of them in place of the first few, so that a user can correct all at once.
        other_samples = [
            sample for sample in tally.samples if sample.reason != "not_json"
        ]
        tally.samples = [*other_samples, *broken_lines]
    findings = list(find_in_tally(tally, config))
    if isinstance(reader, RecordExampleReader):
        repeated = find_repeated_files(reader.sources)
        if repeated is not None:
            findings.append(
                Finding(
                    "repeated_files",
                    "remark",
                    text=repeated.text,
                    examples=repeated.examples,
                )
            )
    return Report(kind=reader.kind, tally=tally, findings=findings)


def _read_again(
    reader: ExampleReader,
    configs: Sequence[PackConfig],
    batching: BatchConfig,
    sampling: Sampling,
    total: int,
) -> list[Choice]:
    """Read the sample again, as size and layout decide which records are dropped or
    cut, and where.

    Args:
        configs: settings of one size and layout; none: nothing is read.
    """
    if not configs:
        return []
    with contextlib.closing(Projection(sampling, total, configs)) as projection:
        for examples, tally in reader.resized(configs[0]):
            projection.add(examples, tally)
        return [projection.choice(config, batching) for config in configs]


def _is_cut_for_layout(tally: Tally, config: PackConfig) -> bool:
    """Return True if records that were read for the layout of `config` may differ from
    those that the other layout would keep.
    """
    if config.on["overlong"].startswith("truncate"):
        return True
    # Layout concat drops every record that `shared_prefix` drops, and maybe more.
    return config.layout == "concat" and tally.dropped["overlong"] > 0


def _find_versions(
    locations: Mapping[str | None, Location],
    source: Any,
    open_source: Callable[[], ExampleReader],
    config: PackConfig,
) -> Iterator[Finding]:
    """Yield findings if the destination holds datasets already.

    Without `overwrite` they are compared with the job, as ``packstore.pack`` does.

    Args:
        locations: split -> location of its dataset.
        source: the records or the dataset.
        open_source: opens `source`.
        config: settings of the job.
    """
    is_read_already = isinstance(source, Iterator)
    if config.overwrite or is_read_already:
        for location in locations.values():
            version = newest_version(location)
            if not version:
                continue
            text = f"version {version} of {location.display} is there; "
            if config.overwrite:
                yield Finding("version", "ok", text + "the job replaces it")
            else:
                text += "input that can be read only once is not compared with it"
                yield Finding("version", "remark", text)
        return

    try:
        existing = find_committed(locations, open_source, config)
    except PackstoreError as error:
        yield Finding("version", "problem", message_with_notes(error))
        return
    for dataset in existing.values():
        text = f"version {dataset.version} of {dataset.url} is of this job; "
        yield Finding("version", "ok", text + "it stays as it is")


def _find_drops(tally: Tally, config: PackConfig) -> Finding:
    """Return a finding: a problem if dropped records would make a job fail."""
    for reason in tally.dropped:
        if config.on.get(reason) == "error":
            text = f"the job stops at the first {reason}; "
            text += f"--on {reason}=drop leaves it out"
            return Finding("records", "problem", text)
    rate = count_unrequested_drops(tally) / max(tally.read, 1)
    text = (
        f"{100 * rate:.3g}% are dropped; max_drop_rate allows "
        f"{100 * config.max_drop_rate:g}%"
    )
    return Finding("records", "ok" if rate <= config.max_drop_rate else "problem", text)
