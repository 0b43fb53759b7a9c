"""Makes one partition, from its blocks to its note.

    read -> tokenize -> select -> spill -> plan -> fill -> write -> note

One machine reads a group of partitions at once, in one pass over their files, and
writes them one after another while it reads the next group. On a cluster, or many
cores, each *task* makes one partition in a worker process, from reading to writing.
Partitions with a valid note of an earlier run are reused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from packstore.config import PackConfig
from packstore.etl.dedup_and_split import Selection, split_names
from packstore.etl.engines import Run
from packstore.etl.partitions.resume import (
    Partition,
    WrittenPacks,
    reuse_finished_partition,
)
from packstore.etl.partitions.slices import Assignment, read_blocks, tokenize_blocks
from packstore.etl.rejects import compress_rejects
from packstore.etl.spill import Spill
from packstore.etl.tokenize import BlockTokenizer, TokenizedBlock
from packstore.etl.totals import Contents, ProgressCounter
from packstore.format import seeds
from packstore.format.arrays import Int32, Packs, to_offsets
from packstore.format.seeds import U64
from packstore.io.manifest.partition_notes import PartitionNotes
from packstore.io.shards.shard import PackShape
from packstore.io.versions.shard_writer import ShardWriter
from packstore.pack.layout import round_up
from packstore.tokenizer.dialogue import template
from packstore.tokenizer.tally import Tally

T = TypeVar("T")

PASSES = 2
"""Maximum passes of one machine over a file; each reads some of the partitions. With
more passes, a killed job loses less, but each takes 3 % of the time of tokenizing, or
10 % for gzip.
"""


class SpilledPartition:
    """A partition while it is read; its examples are on the local disk.

    Args:
        assignment: its input.
        config: settings.
        paths, stored_keys: see :class:`PartitionPacker`.

    Attributes:
        assignment: its input.
        spills: its examples, for each dataset.
        versions: ordinal of an input -> its version in the store.
    """

    def __init__(
        self,
        assignment: Assignment,
        config: PackConfig,
        paths: Mapping[int, str],
        stored_keys: U64 | None,
    ) -> None:
        self.assignment = assignment
        self.spills = [Spill(config) for _ in split_names(config)]
        self.versions: dict[int, str] = {}
        self._config = config
        self._select = Selection(
            config,
            duplicate_ids=assignment.duplicate_ids,
            paths=paths,
            stored_keys=stored_keys,
        )
        self._tally = Tally()
        self._sources: dict[int, dict[str, Any]] = {}
        self._rejects: list[bytes] = []
        if config.rejects is not None:
            # A rerun reuses the partition only if its rejects are not empty: an empty
            # file of gzip shows that they were collected.
            self._rejects.append(compress_rejects([]))

    def add(self, block: TokenizedBlock) -> None:
        """Add the examples of the next block."""
        examples, tally = block
        selected = self._select(examples, tally)
        for spill, examples_of_split in zip(self.spills, selected, strict=True):
            spill.append(examples_of_split)
        if tally.rejected:
            self._rejects.append(compress_rejects(tally.rejected))
        self._tally.add(tally)

    def record_file(self, ordinal: int, source: dict[str, Any], version: str) -> None:
        """Record a file that was read to its end."""
        self._sources[ordinal] = source
        self.versions[ordinal] = version

    def contents(self) -> Contents:
        """Return the counts of its records, after the last block."""
        return Contents(
            examples=[spill.num_examples for spill in self.spills],
            tally=self._tally,
            sources=self._sources,
            rejects=b"".join(self._rejects),
        )

    def close(self) -> None:
        """Remove its files."""
        for spill in self.spills:
            spill.close()


@dataclass(frozen=True, eq=False)
class _Group:
    """Partitions that are read in one pass.

    Attributes:
        partitions: in order; ones of an earlier run are finished already.
        blocks: the blocks of all others: the partition, its tokenized block, and the
            size of the block in bytes (or in records, if the input is not files).
    """

    partitions: list[SpilledPartition | Partition]
    blocks: Iterable[tuple[SpilledPartition, TokenizedBlock, int]]


@dataclass(frozen=True, eq=False)
class PartitionPacker:
    """Packs and writes partitions. Picklable, for the tasks of a cluster.

    Attributes:
        notes: the folder of notes of each dataset.
        shape: the shape of the packs.
        config: settings.
        paths: ordinal of an input -> its path.
        stored_keys: uint64 `[n]`, keys of the examples of the dataset that is appended
            to. A partition looks among them for duplicates.
    """

    notes: Sequence[PartitionNotes]
    shape: PackShape
    config: PackConfig
    paths: Mapping[int, str]
    stored_keys: U64 | None
    _hashes: dict[int, str] = field(default_factory=dict)
    _open_partitions: list[SpilledPartition] = field(default_factory=list)

    def pack_files(
        self,
        block_tokenizer: BlockTokenizer,
        assignments: Iterable[Assignment],
        run: Run,
        counter: ProgressCounter | None = None,
    ) -> Iterator[Partition]:
        """Yield the partitions in order.

        Args:
            block_tokenizer: tokenizes blocks.
            assignments: the input of each partition.
            run: runs the workers.
            counter: adds up the records; it may refuse a partition before it is
                written.
        """
        groups = self._read_in_groups(block_tokenizer, assignments, run)
        return self._write_groups(groups, counter or ProgressCounter())

    def pack_examples(
        self, blocks: Iterable[TokenizedBlock], counter: ProgressCounter
    ) -> Iterator[Partition]:
        """Yield the only partition of examples that come from no files.

        It has no note, and is not reused.
        """
        blocks = iter(blocks)  # refuses settings before there is a folder to remove
        assignment = Assignment(number=0, slices=(), duplicate_ids=None)
        partition = self._open_partition(assignment)
        owned_blocks = (
            (partition, (examples, tally), tally.read) for examples, tally in blocks
        )
        return self._write_groups([_Group([partition], owned_blocks)], counter)

    def _read_in_groups(
        self,
        block_tokenizer: BlockTokenizer,
        assignments: Iterable[Assignment],
        run: Run,
    ) -> Iterator[_Group]:
        """Yield the partitions of each pass, and the blocks of those to make."""
        partitions_at_once = math.ceil((self.config.partitions or 1) / PASSES)
        remaining_assignments = iter(assignments)
        while True:
            batch = list(itertools.islice(remaining_assignments, partitions_at_once))
            if not batch:
                return
            partitions = [self._reuse_or_open(assignment) for assignment in batch]
            owned_slices = [
                (partition, partition.assignment.slices)
                for partition in partitions
                if isinstance(partition, SpilledPartition)
            ]
            blocks = read_blocks(
                owned_slices, self.config, on_file=SpilledPartition.record_file
            )
            yield _Group(partitions, tokenize_blocks(block_tokenizer, blocks, run))

    def _reuse_or_open(self, assignment: Assignment) -> SpilledPartition | Partition:
        finished = reuse_finished_partition(
            self.notes,
            assignment,
            self._hashes,
            needs_rejects=self.config.rejects is not None,
        )
        if finished is not None:
            return finished
        return self._open_partition(assignment)

    def _open_partition(self, assignment: Assignment) -> SpilledPartition:
        partition = SpilledPartition(
            assignment, self.config, self.paths, self.stored_keys
        )
        self._open_partitions.append(partition)
        return partition

    def _write_groups(
        self, groups: Iterable[_Group], counter: ProgressCounter
    ) -> Iterator[Partition]:
        """Write the partitions of each group while those of the next one are read."""
        stop = threading.Event()
        reading = _read_groups(groups, counter, stop)
        try:
            with contextlib.closing(prefetch(reading, stop=stop)) as groups_read:
                for partition in itertools.chain.from_iterable(groups_read):
                    if isinstance(partition, Partition):
                        counter.add_finished(partition.contents, partition.num_packs)
                        yield partition
                    else:
                        contents = partition.contents()
                        counter.add(contents)  # may raise, before anything is written
                        yield self._write(partition, contents, counter)
        finally:
            while self._open_partitions:
                self._open_partitions.pop().close()

    def _write(
        self,
        spilled: SpilledPartition,
        contents: Contents,
        counter: ProgressCounter,
    ) -> Partition:
        """Plan, fill and write a partition, and put its note."""
        number = spilled.assignment.number
        packs = [
            self._write_packs(number, spill, notes, counter)
            for spill, notes in zip(spilled.spills, self.notes, strict=True)
        ]
        spilled.close()
        partition = Partition(contents, packs)
        if spilled.assignment.slices:
            partition.put_notes(self.notes, spilled.assignment, spilled.versions)
        return partition

    def _write_packs(
        self, number: int, spill: Spill, notes: PartitionNotes, counter: ProgressCounter
    ) -> WrittenPacks:
        """Plan and fill the packs of a partition in one dataset, and write them."""
        if not spill.num_examples:
            return WrittenPacks(shards=[])
        config = self.config
        seed = config.seed
        if number > 0:
            # The first one keeps the seed: unless packs share prefixes or are split,
            # its plan equals packstore.plan(lengths).
            seed = seeds.derive(config.seed, "partition", number) >> 1
        packing = spill.plan(replace(config, seed=seed))

        # Only then the number of packs that remain in the job is known.
        is_last = number + 1 == config.partitions and notes is self.notes[-1]
        run = f"{notes.run}-p{number:05d}"
        with (
            ShardWriter(notes.location, self.shape, config, run) as writer,
            contextlib.closing(prefetch(spill.packs(packing), depth=2)) as filled_packs,
        ):
            remaining_packs = packing.num_packs
            lengths: list[Int32] = []
            for packs in filled_packs:
                writer.write(packs)
                lengths.append(_padded_lengths(packs, config.pad_to_multiple))
                remaining_packs -= len(packs)
                counter.add_packs(len(packs), remaining_packs if is_last else None)
            shards = writer.finish()

        # The plan counts padded lengths; the shards count tokens without padding. A
        # pack may share more than was planned.
        tokens = sum(finished.shard.tokens for finished in shards)
        filled = packing.with_lengths(np.concatenate(lengths), tokens)
        planning = filled.statistics()
        planning["seed"] = config.seed
        return WrittenPacks(shards, planning)


def _padded_lengths(packs: Packs, multiple: int) -> Int32:
    """Return the tokens of each example in its pack, with padding: int32 `[E]`."""
    segment_lengths = round_up(packs.segment_lengths, multiple)
    first_segments = to_offsets(packs.num_responses)[:-1]
    return np.add.reduceat(segment_lengths, first_segments)


def _read_groups(
    groups: Iterable[_Group], counter: ProgressCounter, stop: threading.Event
) -> Iterator[list[SpilledPartition | Partition]]:
    """Yield the partitions of each group once all of their blocks are read."""
    for group in groups:
        with contextlib.closing(prefetch(group.blocks)) as blocks:
            for partition, block, size in blocks:
                if stop.is_set():
                    return
                partition.add(block)
                _, tally = block
                counter.add_records(tally.read, size)
        yield group.partitions


def run_as_task(work: Callable[[Any, Run], Iterator[Any]], item: Any) -> Any:
    """Return the result of `work` on one item, in this process.

    It must be a worker process, which the job can end amid the work.
    """
    template.require_worker()
    if hasattr(signal, "setitimer"):
        # Its time limit is for a block; a partition may take longer.
        signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.closing(iter(work([item], map))) as results:  # type: ignore[type-var]
        return next(results)


def prefetch(
    items: Iterable[T], depth: int = 1, stop: threading.Event | None = None
) -> Generator[T, None, None]:
    """Yield the items, which another thread computes ahead; raise its errors.

    Closing the generator sets `stop`, so that a slow item can end early, and ends the
    thread before the next item.

    Args:
        items: the items.
        depth: number of items computed ahead, besides the next one.
        stop: set when the generator is closed.
    """
    stop = stop or threading.Event()
    stream = iter(items)
    end = object()
    thread = ThreadPoolExecutor(1, "packstore-ahead")
    try:
        pending = deque(thread.submit(next, stream, end) for _ in range(depth + 1))
        while True:
            item = pending.popleft().result()
            if item is end:
                return
            pending.append(thread.submit(next, stream, end))
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.shutdown(cancel_futures=True)
