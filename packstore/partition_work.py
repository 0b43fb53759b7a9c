"""What one task does with one partition: read, tokenize, select, plan, fill, write, note.

A partition that an interrupted run had finished is taken over instead, if its inputs and its shards
still are what they were.
"""

from __future__ import annotations

import hashlib
import itertools
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from packstore import seeds
from packstore.config import PackConfig
from packstore.intake import Part
from packstore.io.inputs import Block, Input, InputReader
from packstore.io.journal import Finished, Journal
from packstore.io.object_version import object_version
from packstore.io.rejects import CompressedRejects
from packstore.io.shard import PackShape
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.pack.fill import fill, gather
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.records import Examples, Int64, Packs, Sample, Tally
from packstore.seeds import U64
from packstore.selection import Selection, dedup_keys
from packstore.spill import Spill

_COUNTS = [f.name for f in fields(Tally) if f.name not in ("samples", "rejected")]


@dataclass(frozen=True)
class Slice:
    """Blocks of a file at equal distances.

    Attributes:
        input: the file.
        first: number of the first block, from 0.
        step: from one block to the next; 1: the whole file.
        block_bytes: bytes of a block, about.
    """

    input: Input
    first: int
    step: int
    block_bytes: int

    def holds(self, block: int) -> bool:
        """Whether the file's block of this number belongs to the slice."""
        return block % self.step == self.first


@dataclass(frozen=True, eq=False)
class Written:
    """What a partition put into one dataset.

    Attributes:
        parts: its shards, in order.
        examples: in them.
        planning: statistics of its plan; None if there was nothing to pack.
        counts: int64 `[pack_size + 1]`, examples of each padded length; empty likewise.
    """

    parts: list[Finished]
    examples: int = 0
    planning: dict[str, Any] | None = None
    counts: Int64 = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class Partition:
    """What was made of one.

    Attributes:
        written: what went to each dataset, in the order of :attr:`Selection.parts`.
        tally: what became of its records.
        sources: ordinal of an input -> its path, bytes, hash and records.
        resumed: an interrupted run had finished it.
        rejects: its dropped records, compressed; empty where nobody wants them.
    """

    written: list[Written]
    tally: Tally
    sources: dict[int, dict[str, Any]]
    resumed: bool = False
    rejects: bytes = b""


Tokenizing = Callable[[Block], Part]
Item = tuple[int, list[Slice], Int64]
"""Number of a partition, its slices, and its duplicates: ids, int64, sorted."""


class ReadKeys:
    """Finds what `dedup` compares: keys and ids of the examples of a partition."""

    def __init__(self, tokenize: Tokenizing, config: PackConfig) -> None:
        self._tokenize, self._config = tokenize, config

    def __call__(self, slices: list[Slice]) -> tuple[U64, Int64]:
        """uint64 `[n]` and int64 `[n]`, in input order."""
        keys, ids = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for examples, _ in _parts(self._config, slices, self._tokenize, {}):
            keys.append(dedup_keys(examples, self._config))
            ids.append(examples.example_ids)
        return np.concatenate(keys), np.concatenate(ids)


class PackPartition:
    """Packs and writes a partition.

    Args:
        tokenize: turns a block into examples.
        places: each dataset, and what begins the names of its shards.
        shape: what all packs have in common.
        config: all settings.
    """

    def __init__(
        self,
        tokenize: Tokenizing,
        places: Sequence[tuple[Location, str]],
        shape: PackShape,
        config: PackConfig,
    ) -> None:
        self._tokenize, self._places = tokenize, places
        self._shape, self._config = shape, config

    def __call__(self, item: Item) -> Partition:
        """What the partition has become, now or in the run before."""
        number, slices, repeated = item
        what = _identity(slices, repeated)
        if (made := self._taken_over(number, slices, what)) is not None:
            return made
        # As they are before they are read: what changes meanwhile is then seen to be another.
        versions = {str(s.input.ordinal): object_version(s.input.location, "") for s in slices}
        paths = {s.input.ordinal: s.input.path for s in slices}
        select = Selection(self._config, self._config.seed, repeated, paths)
        tally, sources = Tally(), dict[int, dict[str, Any]]()
        rejects = CompressedRejects()
        spills = [Spill(self._config.spill_dir) for _ in select.parts]
        try:
            for examples, part in _parts(self._config, slices, self._tokenize, sources):
                for spill, own in zip(spills, select(examples, part).values(), strict=True):
                    lengths = sizes(own, self._config.layout, self._config.pad_to_multiple)
                    spill.append(own, lengths)
                rejects.add(part.rejected)
                tally.add(part)
            written = [self._write(number, *p) for p in zip(spills, self._places, strict=True)]
        finally:
            for spill in spills:
                spill.close()
        dropped = b"" if self._config.rejects is None else rejects.finish()
        shared = {
            "what": what,
            "versions": versions,
            "tally": {name: getattr(tally, name) for name in _COUNTS},
            "samples": [asdict(sample) for sample in tally.samples],
            "rejects": b64encode(dropped).decode(),
            "sources": {str(ordinal): source for ordinal, source in sources.items()},
        }
        for journal, one in zip(self._journals(), written, strict=True):
            planned = {"planning": one.planning, "counts": one.counts.tolist()}
            journal.finished_partition(number, one.parts, {**shared, **planned})
        return Partition(written, tally, sources, rejects=dropped)

    def _write(self, number: int, spill: Spill, place: tuple[Location, str]) -> Written:
        if not spill.num_examples:
            return Written([])
        seed = seeds.derive(self._config.seed, "partition", number) >> 1
        config = replace(self._config, seed=seed)
        packing = plan(spill.lengths(), config=config)
        run = f"{place[1]}-p{number:05d}"
        with ShardWriter(place[0], self._shape, config, run, config.spill_dir) as writer:
            for packs in filled(spill, packing, config):
                writer.write(packs)
            parts = writer.finish()
        planning = replace(packing, tokens=writer.counter.tokens).statistics()
        planning["seed"] = self._config.seed
        counts = np.bincount(packing.lengths, minlength=config.pack_size + 1)
        return Written(parts, spill.num_examples, planning, counts)

    def _journals(self) -> Iterator[Journal]:
        for location, run in self._places:
            journal = Journal(location)
            journal.run = run
            yield journal

    def _taken_over(self, number: int, slices: list[Slice], what: str) -> Partition | None:
        """The partition as the run before noted it; None if it did not, or anything has changed."""
        written: list[Written] = []
        for journal in self._journals():
            noted = journal.partition(number)
            if noted is None or noted[1].get("what") != what:
                return None
            parts, about = noted
            counts = np.array(about["counts"], np.int64)
            examples = sum(part.shard.examples for part in parts)
            written.append(Written(parts, examples, about["planning"], counts))
        rejects = b64decode(about["rejects"])
        if self._config.rejects is not None and not rejects:  # nobody wanted them then
            return None
        sources = {int(ordinal): source for ordinal, source in about["sources"].items()}
        for one in slices:
            ordinal = one.input.ordinal
            if not _is_same(one.input, sources[ordinal], about["versions"][str(ordinal)]):
                return None
        if self._config.rejects is None:
            rejects = b""
        return Partition(written, _tally(about), sources, resumed=True, rejects=rejects)


def warm_up(config: PackConfig) -> None:
    """Loads the compiled loops of planning and filling, so that no later step waits for them."""
    ones = np.ones(2, np.int32)
    packing = plan(ones, config=config)
    packing.statistics()
    sample = Examples(
        input_ids=ones,
        supervised=ones.astype(np.bool_),
        sequence_offsets=np.arange(3),
        example_offsets=np.arange(3),
        reward=ones.astype(np.float32),
        example_ids=np.arange(2),
    )
    sizes(sample, config.layout)
    for array in (sample.input_ids, sample.supervised, sample.sequence_offsets):
        array.flags.writeable = False  # as those of a spill are
    gather(sample, packing.order)
    fill(sample, packing.offsets, config.layout, packing.order)


def filled(spill: Spill, packing: Plan, config: PackConfig, start: int = 0) -> Iterator[Packs]:
    """The packs in plan order from `start` on, about a row group at a time."""
    step = max(1, config.row_group_tokens // config.pack_size)
    for examples, order, offsets in spill.parts(packing.order, packing.offsets, start):
        for first in range(0, len(offsets) - 1, step):
            cut = offsets[first : first + step + 1]
            yield fill(examples, cut - cut[0], config.layout, order[cut[0] : cut[-1]])


def _parts(
    config: PackConfig,
    slices: Sequence[Slice],
    tokenize: Tokenizing,
    sources: dict[int, dict[str, Any]],
) -> Iterator[tuple[Examples, Tally]]:
    """What becomes of the blocks of the slices; their files are noted in `sources`."""
    for one in slices:
        reader = InputReader([], config=config, block_bytes=one.block_bytes)
        blocks = reader.read_file(one.input)
        for block in itertools.compress(blocks, map(one.holds, itertools.count())):
            yield tokenize(block)
        sources[one.input.ordinal] = reader.sources()[-1]


def _identity(slices: Sequence[Slice], repeated: Int64) -> str:
    """Hash of what a partition is made of, but for the contents of its files."""
    cut = [[s.input.ordinal, s.input.path, s.first, s.step, s.block_bytes] for s in slices]
    digest = hashlib.sha256(repr(cut).encode(errors="surrogatepass"))
    digest.update(repeated.tobytes())
    return digest.hexdigest()


def _is_same(item: Input, source: Mapping[str, Any], version: str) -> bool:
    """Whether a file holds what it held: by its version in the store, else by its hash."""
    if version and object_version(item.location, "") == version:
        return True
    if item.location.size() != source["bytes"]:
        return False
    with item.location.open_read() as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return bool(digest == source["sha256"])


def _tally(value: Mapping[str, Any]) -> Tally:
    samples = [Sample(**sample) for sample in value["samples"]]
    counts = value["tally"]
    told: dict[str, Any] = {n: Counter(v) if isinstance(v, dict) else v for n, v in counts.items()}
    return Tally(**told, samples=samples)
