"""Parts of the input that are packed and written on their own, in any order and on any machine.

    inputs -> split -> each on its own: read -> tokenize -> plan -> fill -> write

A partition takes blocks from all over the input, as real data lies sorted. Which ones is fixed by
the sizes of the inputs and the number of partitions. Whatever makes it (a worker process, a Ray
task, one that is run again) writes the same shards under the same names, and no reader sees them
before the one commit that names them all.

Duplicates may lie in different partitions. Where they are to be left out, all partitions are read
once before, for the keys of their examples alone.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from packstore.config import PackConfig, fingerprint
from packstore.engines import ENGINES
from packstore.errors import ConfigError, InputError, sentence
from packstore.intake import Intake, RecordIntake
from packstore.io.inputs import BLOCK_BYTES, Input
from packstore.io.job import WriteJob
from packstore.io.rejects import RejectsFile
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.pack.merged import merged_statistics
from packstore.partition_work import Item, PackPartition, Partition, ReadKeys, Slice, Written
from packstore.records import Int64, Tally
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
from packstore.selection import Selection, duplicates, of_part

log = logging.getLogger("packstore")

SHARES = 16
"""Shares of the input that a partition takes at least, about. With more, sources of a file each
would mix better, and each file would be read by more partitions."""

FILES, READERS = 64, 4
"""A partition takes blocks of so many files while that lets no file be read by more partitions than
so many: which takes a tenth of the time of tokenizing it."""

BLOCKS = 256
"""Blocks that a partition takes at least, about, down to the size below."""

MIN_BLOCK_BYTES = 4 << 10


def split(inputs: Sequence[tuple[Input, int]], partitions: int) -> list[list[Slice]]:
    """The slices of each partition: blocks from all over the input, about the same number of bytes.

    The input is cut into shares, and partition p takes the shares p, p + partitions, …. A file of m
    shares is not cut by place: share i of it is its blocks i, i + m, i + 2 m, …. So a file is read
    by as many partitions as it has shares, each of which leaves out the other blocks, and any file
    will do, also a compressed one.

    Args:
        inputs: each input and its bytes.
        partitions: how many are wanted.
    """
    found: list[list[Slice]] = [[] for _ in range(partitions)]
    total = max(sum(size for _, size in inputs), 1)
    block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, total // (partitions * BLOCKS)))
    readers = min(READERS, -(-FILES * partitions // max(len(inputs), 1)))
    share = 0
    for item, size in inputs:
        wanted = max(readers, -(-size * partitions * SHARES // total))
        shares = max(1, min(wanted, partitions, -(-size // block_bytes)))
        for first in range(shares):
            one = Slice(item, first, shares, block_bytes)
            found[(share + first) % partitions].append(one)
        share += shares
    return found


def write_partitions(
    intake: Intake,
    jobs: Sequence[WriteJob],
    config: PackConfig,
    rejects: RejectsFile,
    report: Progress,
) -> None:
    """Has all partitions packed and written, and commits them at once.

    Args:
        intake: knows the inputs and how they are tokenized.
        jobs: one for each part that the settings ask for.
        config: all settings.
        rejects: gets the dropped records, partition by partition.
        report: told how many partitions are finished.

    Raises:
        ConfigError: the input is not files of records.
        PackstoreError: see :mod:`packstore.errors`; nothing was committed. What is finished stays
            for a rerun, which may end better after a failure of the store; else for `clean`.
    """
    if not isinstance(intake, RecordIntake) or not intake.inputs:
        must = "the input must be files of records"
        raise ConfigError(sentence(f"partitions={config.partitions}", must, "another input"))
    runs = [_begin(intake, job, part, config) for part, job in _parts(jobs, config)]
    try:
        made = _make(intake, jobs, runs, config, rejects, report)
        rejects.publish()
        _commit(intake, jobs, runs, made, config)
    except BaseException as error:
        finished = any(map(WriteJob.has_finished, jobs))
        for job in jobs:
            job.leave(error, finished)
        raise


def _parts(jobs: Sequence[WriteJob], config: PackConfig) -> Iterator[tuple[str | None, WriteJob]]:
    """Name of each part, where there are several, and its job."""
    names = Selection(config, config.seed).parts
    yield from zip(names if len(names) > 1 else (None,), jobs, strict=True)


def _begin(intake: RecordIntake, job: WriteJob, part: str | None, config: PackConfig) -> str:
    """Begins the run of one part, or goes on with it; returns what begins its names."""
    # What the files hold is known when they have been read, and their names tell nothing.
    size = [i.location.size() for i in intake.inputs]
    about = without_paths({**intake.provenance([]), "bytes": size})
    if part is not None:
        about["part"] = part
    run = fingerprint(about)[:12]
    job.begin_partitions(run, {**about, **begun_with(config, job)})
    return run


def _make(
    intake: RecordIntake,
    jobs: Sequence[WriteJob],
    runs: Sequence[str],
    config: PackConfig,
    rejects: RejectsFile,
    report: Progress,
) -> list[Partition]:
    """All partitions in order, each packed and written, or taken over."""
    inputs = [replace(i, location=_absolute(i.location)) for i in intake.inputs]
    slices = split([(i, i.location.size()) for i in inputs], config.partitions)
    tokenize = intake.tokenize()
    repeated = [np.empty(0, np.int64)] * len(slices)
    if config.dedup != "none":
        repeated = _repeated(ReadKeys(tokenize, config), slices, config, report)
    places = [(_absolute(job.location), run) for job, run in zip(jobs, runs, strict=True)]
    work = PackPartition(tokenize, places, shape_of(intake, config), config)
    items: Iterable[Item] = zip(itertools.count(), slices, repeated, strict=False)
    made: list[Partition] = []
    for partition in _in_workers(work, items, config):
        rejects.add_compressed(partition.rejects)
        made.append(replace(partition, rejects=b""))
        report("write", len(made), config.partitions, "partitions")
    if resumed := sum(p.resumed for p in made):
        log.info("went on with an interrupted run: %d of %d partitions", resumed, len(made))
    return made


def _repeated(
    work: ReadKeys, slices: list[list[Slice]], config: PackConfig, report: Progress
) -> list[Int64]:
    """The duplicates in each partition."""
    keys, ids = [], []
    for own_keys, own_ids in _in_workers(work, slices, config):
        keys.append(own_keys)
        ids.append(own_ids)
        report("read", len(ids), config.partitions, "partitions")
    return duplicates(keys, ids)


def _in_workers(work: Callable[[Any], Any], items: Iterable[Any], config: PackConfig) -> Any:
    workers = config.num_workers
    if workers is None and config.engine == "local":
        workers = min(os.cpu_count() or 1, config.partitions)
    return ENGINES.load(config.engine)(work, items, workers)


def _commit(
    intake: RecordIntake,
    jobs: Sequence[WriteJob],
    runs: Sequence[str],
    made: Sequence[Partition],
    config: PackConfig,
) -> None:
    tally = Tally()
    for partition in made:
        tally.add(partition.tally)
    log_drops(tally)
    check_input(tally, config, jobs[0])
    names = Selection(config, config.seed).parts
    kept = {name: sum(p.written[i].examples for p in made) for i, name in enumerate(names)}
    check_parts(kept, config)
    provenance = with_lineage(intake.provenance(_sources(intake, made)), intake.kind, config)
    for number, (part, job) in enumerate(_parts(jobs, config)):
        own = {**provenance, "part": part} if part else provenance
        job.refuse_again(own)
        written = [p.written[number] for p in made]
        known = of_part(tally, names[number], kept), _planning(written, config), own
        shape = shape_of(intake, config)
        with ShardWriter(
            job.location, shape, config, runs[number], config.spill_dir, job
        ) as writer:
            parts = list(itertools.chain.from_iterable(w.parts for w in written))
            for finished in parts:
                writer.take(finished)
            commit(job, shape, config, writer, known)


def _sources(intake: RecordIntake, made: Sequence[Partition]) -> list[dict[str, Any]]:
    """What is known of each input.

    Raises:
        InputError: one changed while its partitions were read.
    """
    found: dict[int, dict[str, Any]] = {}
    for ordinal, source in itertools.chain.from_iterable(p.sources.items() for p in made):
        if found.setdefault(ordinal, source) != source:
            must = "must stay as it is while it is packed"
            raise InputError(sentence(source["path"], must, "that it changed", "Run it again"))
    return [found[i.ordinal] for i in intake.inputs]


def _planning(written: Sequence[Written], config: PackConfig) -> dict[str, Any]:
    """Statistics of all plans together."""
    planned = [w.planning for w in written if w.planning]
    counts = np.sum([w.counts for w in written if w.planning], axis=0)
    return {**merged_statistics(planned, counts), "partitions": config.partitions}


def _absolute(location: Location) -> Location:
    """The same place for a process in another folder."""
    path = location.local_path
    return location if path is None else Location(path)
