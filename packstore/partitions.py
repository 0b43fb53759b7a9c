"""Parts of the input that are packed and written on their own, in any order and on any machine.

    inputs -> split -> each on its own: read -> tokenize -> plan -> fill -> write

A partition is a slice of the input, fixed by the input and the number of partitions. Whatever makes
it (a worker process, a Ray task, one that is run again) writes the same shards under the same
names, and no reader sees them before the one commit that names them all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packstore import seeds
from packstore.config import PackConfig, fingerprint
from packstore.engines import ENGINES
from packstore.errors import ConfigError, PackstoreError, sentence
from packstore.intake import Intake, Part, RecordIntake
from packstore.io.inputs import Block, Input, InputReader
from packstore.io.job import WriteJob
from packstore.io.journal import Finished
from packstore.io.named import named_paths
from packstore.io.shard import PackShape
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.pack.fill import fill
from packstore.pack.layout import sizes
from packstore.pack.merged import merged_statistics
from packstore.pack.plan import Plan, plan
from packstore.records import Int64, Packs, Tally
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

WHOLE = 1 << 32
"""Blocks of a file have places in 0..WHOLE, spread evenly."""

_STEP = 0x9E3779B9
"""2^32 over the golden ratio: the places of any run of blocks are spread evenly."""


@dataclass(frozen=True)
class Slice:
    """Blocks of a file: those whose place lies in ``low..high``. The whole file is 0..WHOLE."""

    input: Input
    low: int
    high: int

    def holds(self, block: int) -> bool:
        """Whether the file's block of this number belongs to the slice."""
        return self.low <= block * _STEP % WHOLE < self.high


@dataclass(frozen=True, eq=False)
class Partition:
    """What was made of one.

    Attributes:
        parts: its shards, in order.
        tally: what became of its records.
        sources: ordinal of an input -> its path, bytes, hash and records.
        planning: statistics of its plan; None if there was nothing to pack.
        counts: int64 `[pack_size + 1]`, examples of each padded length; empty likewise.
    """

    parts: list[Finished]
    tally: Tally
    sources: dict[int, dict[str, Any]]
    planning: dict[str, Any] | None
    counts: Int64


def split(inputs: Sequence[tuple[Input, int]], partitions: int) -> list[list[Slice]]:
    """The slices of each partition: neighbouring files, about the same number of bytes.

    A file that lies in several partitions is read by each of them, which takes its share of the
    blocks and leaves the rest: so any file will do, also a compressed one, and one is enough.

    Args:
        inputs: each input and its bytes.
        partitions: how many are wanted.
    """
    found: list[list[Slice]] = [[] for _ in range(partitions)]
    total = sum(max(size, 1) for _, size in inputs)
    start = 0
    for item, size in inputs:
        # In units of bytes / partitions, to stay with whole numbers.
        size = max(size, 1) * partitions
        for p in range(start // total, -(-(start + size) // total)):
            low, high = max(p * total - start, 0), min((p + 1) * total - start, size)
            share = Slice(item, low * WHOLE // size, high * WHOLE // size)
            if share.low < share.high:
                found[p].append(share)
        start += size
    return found


def pack_partitions(
    intake: RecordIntake, location: Location, shape: PackShape, run: str, config: PackConfig
) -> Iterator[Partition]:
    """The partitions in order, each packed and written; nothing is committed.

    Args:
        intake: knows the inputs and how they are tokenized.
        location: the dataset.
        shape: what all packs have in common.
        run: begins the names of the shards.
        config: all settings.

    Raises:
        PackstoreError: see :mod:`packstore.errors`; shards that were written stay.
    """
    inputs = [replace(i, location=_absolute(i.location)) for i in intake.inputs]
    slices = split([(i, i.location.size()) for i in inputs], config.partitions)
    work = _Work(intake.tokenize(), _absolute(location), shape, run, config)
    workers = config.num_workers
    if workers is None and config.engine == "local":
        workers = min(os.cpu_count() or 1, config.partitions)
    return ENGINES.load(config.engine)(work, enumerate(slices), workers)


def write_partitions(intake: Intake, job: WriteJob, config: PackConfig, report: Progress) -> None:
    """Has all partitions packed and written, and commits them at once.

    Raises:
        ConfigError: the input is not files of records.
        PackstoreError: see :mod:`packstore.errors`; nothing was committed, and nothing stays.
    """
    if not isinstance(intake, RecordIntake) or not intake.inputs:
        must = "the input must be files of records"
        raise ConfigError(sentence(f"partitions={config.partitions}", must, "another input"))
    shape = shape_of(intake, config)
    # What the files hold is known when they have been read, and their names tell nothing.
    size = [i.location.size() for i in intake.inputs]
    about = without_paths({**intake.provenance([]), "bytes": size})
    run = fingerprint(about)[:12]
    job.begin(run, {**about, **begun_with(config, job)})
    made: list[Partition] = []
    try:
        for partition in pack_partitions(intake, job.location, shape, run, config):
            made.append(partition)
            report("write", len(made), config.partitions, "partitions")
        tally, sources = Tally(), {}
        for partition in made:
            tally.add(partition.tally)
            sources.update(partition.sources)
        check_drops(tally, config)
        known = [sources[i.ordinal] for i in intake.inputs]
        provenance = with_lineage(intake.provenance(known), intake.kind, config)
        planned = [p.planning for p in made if p.planning]
        counts = np.sum([p.counts for p in made if p.planning], axis=0)
        planning = {**merged_statistics(planned, counts), "partitions": config.partitions}
        with ShardWriter(job.location, shape, config, run, config.spill_dir, job) as writer:
            for part in itertools.chain.from_iterable(p.parts for p in made):
                writer.take(part)
            commit(job, shape, config, writer, (tally, planning, provenance))
    except BaseException:
        with contextlib.suppress(PackstoreError):
            job.discard(run, named_paths(job.location))
        raise


def _absolute(location: Location) -> Location:
    """The same place for a process in another folder."""
    path = location.local_path
    return location if path is None else Location(path)


class _Work:
    """What a worker does with the number and the slices of a partition."""

    def __init__(
        self,
        tokenize: Callable[[Block], Part],
        location: Location,
        shape: PackShape,
        run: str,
        config: PackConfig,
    ) -> None:
        self._tokenize, self._location, self._shape = tokenize, location, shape
        self._run, self._config = run, config

    def __call__(self, item: tuple[int, list[Slice]]) -> Partition:
        number, slices = item
        config = replace(
            self._config, seed=seeds.derive(self._config.seed, "partition", number) >> 1
        )
        tally, sources, reader = Tally(), {}, InputReader([], config=config)
        with Spill(config.spill_dir) as spill:
            for one in slices:
                for block in itertools.compress(
                    reader.read_file(one.input), map(one.holds, itertools.count())
                ):
                    examples, part = self._tokenize(block)
                    tally.add(part)
                    lengths = sizes(examples, config.layout, config.pad_to_multiple)
                    spill.append(examples, lengths)
                sources[one.input.ordinal] = reader.sources()[-1]
            if not spill.num_examples:
                return Partition([], tally, sources, None, np.zeros(0, np.int64))
            packing = plan(spill.lengths(), config=config)
            run = f"{self._run}-p{number:05d}"
            with ShardWriter(self._location, self._shape, config, run, config.spill_dir) as writer:
                for packs in filled(spill, packing, config):
                    writer.write(packs)
                parts = writer.finish()
            planning = replace(packing, tokens=writer.counter.tokens).statistics()
        planning["seed"] = self._config.seed
        counts = np.bincount(packing.lengths, minlength=config.pack_size + 1)
        return Partition(parts, tally, sources, planning, counts)


def filled(spill: Spill, packing: Plan, config: PackConfig, start: int = 0) -> Iterator[Packs]:
    """The packs in plan order from `start` on, about a row group at a time."""
    step = max(1, config.row_group_tokens // config.pack_size)
    for examples, order, offsets in spill.parts(packing.order, packing.offsets, start):
        for first in range(0, len(offsets) - 1, step):
            cut = offsets[first : first + step + 1]
            part = examples.take(order[cut[0] : cut[-1]])
            yield fill(part, cut - cut[0], config.layout)
