"""From records to a committed dataset, in a straight line:

    read -> tokenize -> spill -> plan -> fill -> write -> commit

Tokenizing runs in workers, the rest in this process. Nothing is visible to a reader before the last
step. Shards that a job put before it failed stay until ``packstore clean`` removes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from packstore.config import PackConfig, fingerprint
from packstore.engines import ENGINES
from packstore.errors import ConfigError, WrongEngineError
from packstore.finished import finished_before
from packstore.intake import Intake, RecordIntake, open_intake
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.job import WriteJob, writing
from packstore.io.rejects import RejectsFile
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.overlap import ahead, beside
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.partition_work import filled, warm_up
from packstore.partitions import write_partitions
from packstore.records import Tally
from packstore.runs import (
    Progress,
    begun_with,
    check_input,
    check_parts,
    commit,
    log_drops,
    shape_of,
    with_lineage,
    without_paths,
)
from packstore.selection import Selection, of_part
from packstore.spill import Spill
from packstore.tokenizer import misread

__all__ = ["Progress", "pack", "pack_into"]

WARNED = ("reward_reversed", "reward_default")
"""Events that mostly tell of a mistake in the data."""

log = logging.getLogger("packstore")


def pack(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Dataset:
    """Tokenizes records, packs them, and commits them as a dataset.

    Args:
        source: path, glob, URL, folder, or a list of them (``.jsonl .json .parquet .arrow .csv``,
            also ``.gz`` and ``.zst``); an Arrow table, a Polars frame, an iterable of dicts; or a
            packstore dataset, which is packed anew without tokenizing.
        out: folder or any fsspec URL that will hold the dataset.
        tokenizer: ``tokenizer.json``, a Hugging Face folder, a SentencePiece ``.model``, or a
            ``tokenizers.Tokenizer``. Not for a packstore dataset.
        config: all settings as one object.
        storage_options: passed to the fsspec filesystems of `source` and `out`.
        progress: told how far each stage is.
        settings: fields of :class:`packstore.PackConfig`, over `config`.

    Returns:
        The committed dataset. ``manifest.records`` says what became of every record. With
        `validation_fraction` it is that in ``OUT/train``; the other is in ``OUT/validation``.

    Raises:
        DatasetExistsError: a dataset of other input or settings is at `out`, and `overwrite` is
            False. One of the same input and settings is returned as it is, so that a call may be
            repeated after it has ended well.
        PackstoreError: see :mod:`packstore.errors`; `out` then has the versions that it had.
    """
    config = PackConfig.of(config, **settings)
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    options = dict(storage_options or {})
    places: dict[str | None, Location] = {None: Location(out, options)}
    if len(parts := Selection(config, config.seed).parts) > 1:
        places = {part: places[None].join(part) for part in parts}
    there: dict[str | None, Dataset] = {}
    if not config.overwrite:
        opening = partial(open_intake, source, tokenizer, config, options)
        there = finished_before(places, opening, config)
    if there and len(there) == len(places):
        log.info("%s: already there, same input and settings", Location(out, options).display)
        return next(iter(there.values()))
    with contextlib.ExitStack() as stack:
        opened = partial(writing, fresh=config.fresh, single_writer=config.single_writer)
        jobs = [
            stack.enter_context(opened(place, config.overwrite or part in there))
            for part, place in places.items()
        ]
        work = partial(_pack_parts, jobs, source, tokenizer, config, progress or _no_progress)
        _falling_back(work, source, config)
    datasets = [open_dataset(p.url, storage_options=storage_options) for p in places.values()]
    for dataset in datasets:
        _log_result(dataset)
    return datasets[0]


def pack_into(
    job: WriteJob, source: Any, tokenizer: Any, config: PackConfig, progress: Progress | None = None
) -> None:
    """What :func:`pack` does at a place that is its own for now; see :mod:`packstore.io.job`."""
    if config.validation_fraction:
        raise ConfigError("validation_fraction makes two datasets of its own: set it for pack().")
    work = partial(_pack_parts, [job], source, tokenizer, config, progress or _no_progress)
    _falling_back(work, source, config)


def _falling_back(work: Callable[[], None], source: Any, config: PackConfig) -> None:
    """Runs `work`; once more with the reference, where the engine that `auto` chose is wrong."""
    try:
        work()
    except WrongEngineError as error:
        if config.tokenizer_engine != "auto" or isinstance(source, Iterator):  # read only once
            raise
        log.warning("%s All records are tokenized again, with the reference.", error)
        misread(error.tokenizer)
        work()


def _pack_parts(
    jobs: Sequence[WriteJob], source: Any, tokenizer: Any, config: PackConfig, report: Progress
) -> None:
    """One dataset for each part that the settings ask for."""
    for job in jobs:
        job.compare(begun_with(config, job))
    beside(partial(warm_up, config))
    intake = open_intake(source, tokenizer, config, dict(jobs[0].location.storage_options))
    for job in jobs:
        job.check_fits(intake.kind, intake.carry, intake.provenance)
    inputs = [i.location for i in intake.inputs] if isinstance(intake, RecordIntake) else []
    options = jobs[0].location.storage_options
    with RejectsFile(config.rejects, options, config.spill_dir, inputs) as rejects:
        _pack_all(jobs, intake, config, rejects, report)


def _pack_all(
    jobs: Sequence[WriteJob],
    intake: Intake,
    config: PackConfig,
    rejects: RejectsFile,
    report: Progress,
) -> None:
    if config.partitions > 1:
        write_partitions(intake, jobs, config, rejects, report)
        return
    paths = intake.paths if isinstance(intake, RecordIntake) else None
    select = Selection(config, config.seed, paths=paths)
    with contextlib.ExitStack() as stack:
        spills = {part: stack.enter_context(Spill(config.spill_dir)) for part in select.parts}
        tally = _read(intake, select, spills, config, rejects, report)
        rejects.publish()
        log_drops(tally)
        check_input(tally, config, jobs[0])
        kept = {part: spill.num_examples for part, spill in spills.items()}
        check_parts(kept, config)
        for (part, spill), job in zip(spills.items(), jobs, strict=True):
            packing = plan(spill.lengths(), config=config)
            name = part if len(spills) > 1 else None
            _write(intake, name, spill, packing, of_part(tally, part, kept), job, config, report)


def _no_progress(stage: str, done: int, total: int | None, unit: str) -> None:
    """Nobody is listening."""


def _read(
    intake: Intake,
    select: Selection,
    spills: Mapping[str, Spill],
    config: PackConfig,
    rejects: RejectsFile,
    report: Progress,
) -> Tally:
    """All examples to the spills; returns what became of the records."""
    tally = Tally()
    report("read", 0, None, "records")
    with contextlib.closing(ahead(intake)) as parts:
        for examples, part in parts:
            for name, own in select(examples, part).items():
                spills[name].append(own, sizes(own, config.layout, config.pad_to_multiple))
            rejects.add(part.rejected)
            tally.add(part)
            report("read", tally.read, None, "records")
    report("read", tally.read, tally.read, "records")
    return tally


def _write(
    intake: Intake,
    part: str | None,
    spill: Spill,
    packing: Plan,
    tally: Tally,
    job: WriteJob,
    config: PackConfig,
    report: Progress,
) -> None:
    """Fills the packs that no interrupted run had finished, writes the shards, and commits."""
    provenance = with_lineage(intake.provenance(), intake.kind, config)
    if part is not None:
        provenance["part"] = part
    shape = shape_of(intake, config)
    about = without_paths(provenance)
    run = fingerprint(about)[:12]
    job.begin(run, {**about, **begun_with(config, job), "plan": packing.sha256})
    with ShardWriter(job.location, shape, config, run, config.spill_dir, job) as writer:
        done = writer.resumed
        with contextlib.closing(ahead(filled(spill, packing, config, done), 2)) as made:
            for packs in made:
                writer.write(packs)
                done += len(packs)
                report("write", done, packing.num_packs, "packs")
        # The plan knows lengths as they will be padded; the writer has seen the tokens.
        planning = replace(packing, tokens=writer.counter.tokens).statistics()
        commit(job, shape, config, writer, (tally, planning, provenance))


def _log_result(dataset: Dataset) -> None:
    m = dataset.manifest
    log.info(
        "packed %s of %s records into %s packs: %s tokens, fill rate %.2f %%",
        *(f"{n:,}" for n in (m.records.packed, m.records.read, m.num_packs, m.totals.tokens)),
        100 * m.fill_rate,
    )
    if not m.statistics.planning.get("shuffle", True):
        log.info(
            "kept the order of the input, by shuffle=False: packs hold neighbours of the input"
        )
    for event, count in m.records.noted.items():
        level = logging.WARNING if event in WARNED else logging.INFO
        log.log(level, "noted in %s records: %s", f"{count:,}", event)
