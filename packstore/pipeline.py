"""From records to a committed dataset, in a straight line:

    read -> tokenize -> spill -> plan -> fill -> write -> commit

Tokenizing runs in workers, the rest in this process. Nothing is visible to a reader before the last
step, and nothing stays behind of a job that fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packstore.config import PackConfig, fingerprint
from packstore.engines import ENGINES
from packstore.intake import Intake, open_intake
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.job import WriteJob, writing
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.overlap import ahead
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.partitions import filled, write_partitions
from packstore.records import Tally
from packstore.runs import (
    Progress,
    begun_with,
    check_drops,
    commit,
    shape_of,
    with_lineage,
    without_paths,
)
from packstore.spill import Spill

__all__ = ["Progress", "pack", "pack_into"]

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
        The committed dataset. ``manifest.records`` says what became of every record.

    Raises:
        PackstoreError: see :mod:`packstore.errors`; `out` is then as it was before.
    """
    config = PackConfig.of(config, **settings)
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    location = Location(out, storage_options or {})
    with writing(location, config.overwrite, config.fresh) as job:
        pack_into(job, source, tokenizer, config, progress)
    dataset = open_dataset(out, storage_options=storage_options)
    _log_result(dataset)
    return dataset


def pack_into(
    job: WriteJob, source: Any, tokenizer: Any, config: PackConfig, progress: Progress | None = None
) -> None:
    """What :func:`pack` does at a place that is its own for now; see :mod:`packstore.io.job`."""
    report = progress or _no_progress
    job.compare(begun_with(config, job))
    intake = open_intake(source, tokenizer, config, dict(job.location.storage_options))
    job.check_fits(intake.kind, intake.carry, intake.provenance)
    if config.partitions > 1:
        write_partitions(intake, job, config, report)
        return
    with Spill(config.spill_dir) as spill:
        tally = _read(intake, spill, config, report)
        check_drops(tally, config)
        packing = plan(spill.lengths(), config=config)
        _write(intake, spill, packing, tally, job, config, report)


def _no_progress(stage: str, done: int, total: int | None, unit: str) -> None:
    """Nobody is listening."""


def _read(intake: Intake, spill: Spill, config: PackConfig, report: Progress) -> Tally:
    """All examples to the spill; returns what became of the records."""
    tally = Tally()
    report("read", 0, None, "records")
    with contextlib.closing(ahead(intake)) as parts:
        for examples, part in parts:
            tally.add(part)
            spill.append(examples, sizes(examples, config.layout, config.pad_to_multiple))
            report("read", tally.read, None, "records")
    report("read", tally.read, tally.read, "records")
    return tally


def _write(
    intake: Intake,
    spill: Spill,
    packing: Plan,
    tally: Tally,
    job: WriteJob,
    config: PackConfig,
    report: Progress,
) -> None:
    """Fills the packs that no interrupted run had finished, writes the shards, and commits."""
    provenance = with_lineage(intake.provenance(), intake.kind, config)
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
    for reason, count in m.records.dropped.items():
        log.warning("dropped %s records: %s", f"{count:,}", reason)
    for event, count in m.records.noted.items():
        log.info("noted in %s records: %s", f"{count:,}", event)
