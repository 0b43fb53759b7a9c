"""Makes one partition, from its blocks to its note.

    read -> tokenize -> select -> spill -> plan -> fill -> write -> note

One machine reads a few partitions at once, in one pass over their files, and writes
them one after another while it reads the next ones. On a cluster, or many cores, each
task makes one. Partitions with a valid note of an earlier run are reused.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from packstore.config import PackConfig
from packstore.etl.dedup_and_split import Selection, split_names
from packstore.etl.engines import Run
from packstore.etl.partitions.resume import Partition, Written, reuse_finished_partition
from packstore.etl.partitions.slices import Item, parts_with_owners, read_blocks
from packstore.etl.rejects import compressed
from packstore.etl.spill import Spill
from packstore.etl.tokenize import Part, Tokenize
from packstore.etl.totals import Contents, ProgressCounter
from packstore.format import seeds
from packstore.format.seeds import U64
from packstore.io.manifest.partition_notes import PartitionNotes
from packstore.io.shards.shard import PackShape
from packstore.io.versions.shard_writer import ShardWriter
from packstore.pack.layout import sizes
from packstore.pack.plan import plan
from packstore.tokenizer.dialogue import template
from packstore.tokenizer.tally import Tally

T = TypeVar("T")

PASSES = 2
"""Maximum passes of one machine over a file; each reads some of the partitions. With
more passes, a killed job loses less, but each takes 3 % of the time of tokenizing, or
10 % for gzip.
"""


class Spilled:
    """A partition while it is read; its examples are on the local disk."""

    def __init__(
        self,
        item: Item,
        config: PackConfig,
        paths: Mapping[int, str],
        known: U64 | None,
    ) -> None:
        self.number, self.slices, repeated = self.item = item
        self._config = config
        self._select = Selection(config, repeated, paths, known)
        self.spills = [Spill() for _ in split_names(config)]
        self._tally = Tally()
        # Not empty, so that a rerun sees that they were collected.
        self._rejects: list[bytes] = [] if config.rejects is None else [compressed([])]
        self._sources = dict[int, dict[str, Any]]()
        self.versions = dict[int, str]()

    def add(self, part: Part) -> None:
        """Adds the examples of the next block."""
        examples, tally = part
        for spill, kept in zip(self.spills, self._select(examples, tally), strict=True):
            spill.append(
                kept, sizes(kept, self._config.layout, self._config.pad_to_multiple)
            )
        if tally.rejected:
            self._rejects.append(compressed(tally.rejected))
        self._tally.add(tally)

    def record_file(self, ordinal: int, source: dict[str, Any], version: str) -> None:
        """Records a file that was read to its end."""
        self._sources[ordinal] = source
        self.versions[ordinal] = version

    def contents(self) -> Contents:
        """Returns the counts of its records, after the last block."""
        kept = [spill.num_examples for spill in self.spills]
        return Contents(kept, self._tally, self._sources, b"".join(self._rejects))

    def close(self) -> None:
        """Removes its files."""
        for spill in self.spills:
            spill.close()


Group = tuple[list[Spilled | Partition], Iterable[tuple[Spilled, Part, int]]]
"""Partitions that are read together, and the parts of those that are not there yet,
with the bytes of the input that each part took.
"""


@dataclass(frozen=True, eq=False)
class PackPartitions:
    """Packs and writes partitions. Picklable, for the tasks of a cluster.

    `known` has the keys of duplicates of a dataset that grows, where a partition finds
    its own.
    """

    notes: Sequence[PartitionNotes]
    shape: PackShape
    config: PackConfig
    paths: Mapping[int, str]
    known: U64 | None
    _hashes: dict[int, str] = field(default_factory=dict)
    _started: list[Spilled] = field(default_factory=list)

    def pack_files(
        self,
        tokenize: Tokenize,
        items: Iterable[Item],
        run: Run,
        counter: ProgressCounter | None = None,
    ) -> Iterator[Partition]:
        """Yields the partitions in order; `counter` may refuse one before its
        writing.
        """
        at_once = -(-(self.config.partitions or 1) // PASSES)
        remaining, collects = iter(items), self.config.rejects is not None

        def groups() -> Iterator[Group]:
            while batch := list(itertools.islice(remaining, at_once)):
                group = [
                    reuse_finished_partition(self.notes, item, self._hashes, collects)
                    or self._start_partition(item)
                    for item in batch
                ]
                reading = [(p, p.slices) for p in group if isinstance(p, Spilled)]
                blocks = read_blocks(reading, self.config, Spilled.record_file)
                yield group, parts_with_owners(tokenize, blocks, run)

        return self._write_groups(groups(), counter or ProgressCounter())

    def pack_examples(
        self, parts: Iterable[Part], counter: ProgressCounter
    ) -> Iterator[Partition]:
        """Yields the only partition, of examples that come from no files: it cannot be
        resumed.
        """
        tokenized = iter(parts)  # refuses settings before there is a folder to remove
        only = self._start_partition((0, (), None))
        return self._write_groups(
            [([only], ((only, part, part[1].read) for part in tokenized))], counter
        )

    def _write_groups(
        self, groups: Iterable[Group], counter: ProgressCounter
    ) -> Iterator[Partition]:
        """Writes the partitions of each group while those of the next one are read."""
        stop = threading.Event()

        def read() -> Iterator[list[Spilled | Partition]]:
            for group, parts in groups:
                with contextlib.closing(prefetch(parts)) as tokenized:
                    for partition, part, size in tokenized:
                        if stop.is_set():
                            return
                        partition.add(part)
                        counter.add_records(part[1].read, size)
                yield group

        try:
            with contextlib.closing(prefetch(read(), stop=stop)) as ready:
                for partition in itertools.chain.from_iterable(ready):
                    if isinstance(partition, Spilled):
                        contents = partition.contents()
                        counter.add(contents)
                        yield self._write(partition, contents, counter)
                    else:
                        counter.add_finished(partition.contents, partition.packs)
                        yield partition
        finally:
            while self._started:
                self._started.pop().close()

    def _start_partition(self, item: Item) -> Spilled:
        self._started.append(Spilled(item, self.config, self.paths, self.known))
        return self._started[-1]

    def _write(
        self, spilled: Spilled, contents: Contents, counter: ProgressCounter
    ) -> Partition:
        """Plans, fills and writes a partition, and puts its note."""
        written = [
            self._write_packs(spilled.number, spill, notes, counter)
            for spill, notes in zip(spilled.spills, self.notes, strict=True)
        ]
        spilled.close()
        partition = Partition(contents, written)
        if spilled.slices:
            partition.note(self.notes, spilled.item, spilled.versions)
        return partition

    def _write_packs(
        self, number: int, spill: Spill, notes: PartitionNotes, counter: ProgressCounter
    ) -> Written:
        if not spill.num_examples:
            return Written([])
        config = self.config
        if (
            number
        ):  # the first one keeps the seed: its plan equals packstore.plan(lengths)
            config = replace(
                config, seed=seeds.derive(config.seed, "partition", number) >> 1
            )
        packing = plan(spill.lengths(), config=config)
        last = number + 1 == config.partitions and notes is self.notes[-1]
        run = f"{notes.run}-p{number:05d}"
        with (
            ShardWriter(notes.location, self.shape, config, run) as writer,
            contextlib.closing(prefetch(spill.packs(packing, config), 2)) as filled,
        ):
            left = packing.num_packs
            for packs in filled:
                writer.write(packs)
                left -= len(packs)
                counter.add_packs(len(packs), left if last else None)
            shards = writer.finish()
        # The plan counts padded lengths; only the writer counts the tokens.
        planning = replace(
            packing, tokens=sum(part.shard.tokens for part in shards)
        ).statistics()
        planning["seed"] = self.config.seed
        return Written(shards, planning)


def run_as_task(work: Callable[[Any, Run], Iterator[Any]], item: Any) -> Any:
    """Returns the result of `work` on one item, in this process, which can be ended
    meanwhile.
    """
    template.require_worker()
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, 0)  # it may take longer than a block
    with contextlib.closing(iter(work([item], map))) as results:  # type: ignore[type-var]
        return next(results)


def prefetch(
    items: Iterable[T], depth: int = 1, stop: threading.Event | None = None
) -> Generator[T, None, None]:
    """Yields the items, which another thread computes at most `depth` ahead; raises its
    errors.

    Closing the generator sets `stop`, so that a slow item can end early, and ends the
    thread before the next item.
    """
    stop = stop or threading.Event()
    stream, end = iter(items), object()
    thread = ThreadPoolExecutor(1, "packstore-ahead")
    try:
        pending = deque(thread.submit(next, stream, end) for _ in range(depth + 1))
        while (item := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, stream, end))
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.shutdown(cancel_futures=True)
