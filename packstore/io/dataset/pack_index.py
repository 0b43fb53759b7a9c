"""The pack index: the sizes of all packs, without opening shards.

A small Parquet file beside the manifest, which names it. It has a row for each pack, in
dataset order, and a row group for each shard, and is optional: without it sizes are
read from the shards. It also has the divisors of losses
(:data:`packstore.format.arrays.COUNTS`). An index of an earlier release lacks these
columns; they are null for shards that were not counted. Nothing in it is believed:
figures that no pack can have are refused, and loaders compare each with its pack.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import IntegrityError, quote, sentence
from packstore.format.arrays import COUNTS, Bool, Int64, Packs, PackSizes, to_offsets
from packstore.format.schema import as_arrow, as_numpy, flat_column
from packstore.io.dataset.reader import ShardReader
from packstore.io.manifest.commit import FOLDER
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import StoredFile, decoding, read_stored
from packstore.io.shards.parquet import OPTIONS, check_group, open_parquet, read_group
from packstore.io.shards.shard import sizes_of
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging

_SIZES = {"tokens": pa.int32(), "examples": pa.int32(), "squares": pa.int64()}
_WITHOUT_COUNTS = pa.schema([pa.field(n, t, nullable=False) for n, t in _SIZES.items()])
SCHEMA = pa.schema([*_WITHOUT_COUNTS, *(pa.field(name, pa.int64()) for name in COUNTS)])
THREADS = 4
"""Shards read in parallel without an index."""

KEPT_SHARDS = 128
"""Shards whose sizes a table caches: more than the lanes of an order, each in one
shard.
"""

_NEEDED = ("seq_boundaries", "example_ids")
_REMEDY = "The index or the shard was replaced: run `packstore verify`"


def put_index(
    location: Location, sizes: Iterable[PackSizes], version: int
) -> StoredFile | None:
    """Stores the index of a version from the sizes of each shard; returns None without
    any.

    The number is part of the name: packs of equal sizes have equal indexes, and `clean`
    may be removing that of an old version.
    """
    shards = iter(sizes)
    first = next(shards, None)
    if first is None:
        return None
    encodings = dict.fromkeys(SCHEMA.names, "DELTA_BINARY_PACKED")
    how = {"column_encoding": encodings, "store_schema": False, **OPTIONS}
    with Staging(location, (FOLDER,)) as staging:
        with staging.file() as file, pq.ParquetWriter(file, SCHEMA, **how) as writer:
            for shard in itertools.chain([first], shards):
                writer.write_table(_table(shard), len(shard))
        info = StoredFile.of(file.name, f"{FOLDER}/packs-{version:06d}", ".index")
        staging.store(file.name, info.path)
        return info


def _table(sizes: PackSizes) -> pa.Table:
    columns = [sizes.tokens, sizes.examples, sizes.squares]
    columns += [] if sizes.counts is None else list(sizes.counts.T)
    arrays = [as_arrow(c, f.type) for c, f in zip(columns, SCHEMA, strict=False)]
    arrays += [pa.nulls(len(sizes), f.type) for f in list(SCHEMA)[len(arrays) :]]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


class PackIndex:
    """The index of a dataset, in memory as stored, a few bytes for each pack;
    verified.
    """

    def __init__(
        self, location: Location, manifest: Manifest, info: StoredFile
    ) -> None:
        self.where = location.join(info.path).display
        self._shards, self._manifest = manifest.shards, manifest
        self._data = read_stored(location, info)
        with decoding(self.where):
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
            rows = [group.num_rows for group in groups]
            schema = self._metadata.schema.to_arrow_schema()
        begins = (
            s for s in (SCHEMA, _WITHOUT_COUNTS) if list(schema)[: len(s)] == list(s)
        )
        self._columns: list[str] = next(
            (s.names for s in begins), []
        )  # further ones may follow
        some = not {*COUNTS}.isdisjoint(schema.names) and len(self._columns) < len(
            SCHEMA
        )
        if not self._columns or some or rows != [s.rows for s in self._shards]:
            rule = (
                f"it must have columns {', '.join(SCHEMA.names)}, and a row group "
                "for each shard"
            )
            raise IntegrityError(
                sentence(self.where, rule, f"{quote(schema.names)}, rows {rows}")
            )

    def shard(self, number: int) -> PackSizes:
        """Returns the sizes of the packs of a shard, checked. Thread-safe."""
        with decoding(self.where):
            rows = self._shards[number].rows
            check_group(self._metadata.row_group(number), rows, rows, self._columns)
            source = pa.BufferReader(self._data)
            file = open_parquet(source, self._metadata, page_checksums=True)
            batch = read_group(file, number, self._columns)
            columns = (as_numpy(batch.column(name)).astype(np.int64) for name in _SIZES)
            known, counts = batch.columns[len(_SIZES) :], None
            if any(column.null_count not in (0, rows) for column in known):
                raise IntegrityError(
                    "its counts must be of all packs of a row group, or of none"
                )
            if known and not any(column.null_count for column in known):
                counts = np.stack([as_numpy(column) for column in known], axis=1)
            sizes = PackSizes(*columns, counts=counts)
        _check(sizes, number, self._manifest, f"{self.where}, row group {number}")
        return sizes


class SizeTable:
    """Sizes of the packs; caches the most recently used shards. Thread-safe."""

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self._location, self._manifest = location, manifest
        self._starts = to_offsets(
            np.array([shard.rows for shard in manifest.shards], np.int64)
        )
        self.shard = functools.lru_cache(KEPT_SHARDS)(self._load)
        self._compared = set[
            int
        ]()  # first packs of row groups: checksums keep them as they were

    def take(self, packs: Int64) -> PackSizes:
        """Returns the sizes of packs; `packs`: their numbers in file order, int64
        `[n]`.
        """
        shards = np.searchsorted(self._starts, packs, side="right") - 1
        order = np.argsort(shards, kind="stable")
        distinct, firsts = np.unique(shards[order], return_index=True)
        members = np.split(packs[order], firsts[1:])
        parts = [
            self.shard(shard).take(numbers - self._starts[shard])
            for shard, numbers in zip(distinct.tolist(), members, strict=False)
        ]
        return PackSizes.concat(parts).take(np.argsort(order, kind="stable"))

    def require_same(self, first: int, packs: Packs, where: str) -> None:
        """Refuses packs, number `first` and on, whose sizes are not those of
        the index.
        """
        if self._index is not None and first not in self._compared:
            shard = int(np.searchsorted(self._starts, first, side="right")) - 1
            start = first - int(self._starts[shard])
            recorded = self.shard(shard).take(slice(start, start + len(packs)))
            require_same(
                recorded, sizes_of(packs, self._manifest.kind), self._index.where, where
            )
            self._compared.add(first)

    def all(self) -> PackSizes:
        """Returns the sizes of all packs in file order, 56 bytes each."""
        numbers = range(len(self._manifest.shards))
        if self._index is not None:
            return PackSizes.concat(list(map(self._load, numbers)))
        with ThreadPoolExecutor(THREADS) as pool:
            return PackSizes.concat(list(pool.map(self._load, numbers)))

    @functools.cached_property
    def _index(self) -> PackIndex | None:
        info = self._manifest.pack_index
        return None if info is None else PackIndex(self._location, self._manifest, info)

    def _load(self, number: int) -> PackSizes:
        """Returns the sizes of the packs of a shard, from the index, or two columns,
        checked.
        """
        if self._index is not None:
            return self._index.shard(number)
        shard = self._manifest.shards[number]
        reader, parts = (
            ShardReader(self._location, self._manifest, shard),
            list[PackSizes](),
        )
        for group, rows in enumerate(shard.row_groups.rows.tolist()):
            batch = reader.read_columns(group, _NEEDED)
            with decoding(f"{reader.where}, row group {group}"):
                columns = {name: flat_column(batch, name, None) for name in _NEEDED}
                check_counts(columns, rows)
                (bounds, packs), (_, examples) = columns.values()
                steps, first = np.diff(bounds.astype(np.int64)), packs[:-1]
                steps[first[1:] - 1] = (
                    0  # from the end of one pack to the start of the next
                )
                tokens, squares = (np.add.reduceat(x, first) for x in (steps, steps**2))
            parts.append(PackSizes(tokens, np.diff(examples), squares))
        sizes = PackSizes.concat(parts)
        _check(sizes, number, self._manifest, reader.where)
        return sizes


def require_same(recorded: PackSizes, real: PackSizes, index: str, where: str) -> None:
    """Raises IntegrityError unless `index` has recorded the real sizes of the packs at
    `where`.
    """
    for name in (*_SIZES, "counts"):
        a, b = getattr(recorded, name), getattr(real, name)
        if a is not None and not np.array_equal(a, b):
            pack = int(np.argmax((a != b).reshape(len(a), -1).any(axis=1)))
            rule = f"must have the {name} of each pack of {where}"
            found = f"{a[pack].tolist()} for pack {pack}, which has {b[pack].tolist()}"
            raise IntegrityError(sentence(index, rule, found, _REMEDY))


def check_counts(columns: Mapping[str, tuple[Any, Int64]], rows: int) -> None:
    """Refuses out-of-range offsets and counts; callers compare the sums with the
    manifest.
    """
    for name, (values, offsets) in columns.items():
        if len(offsets) != rows + 1:
            raise IntegrityError(
                f"column {name} must have {rows} rows; found {len(offsets) - 1}"
            )
        if name in ("lengths", "num_responses") and len(values) and values.min() < 1:
            raise IntegrityError(
                f"column {name} must hold positive numbers; found {values.min()}"
            )
    if "seq_boundaries" in columns:
        bounds, offsets = columns["seq_boundaries"]
        steps = np.diff(bounds.astype(np.int64))
        steps[offsets[1:-1] - 1] = (
            1  # from the end of one pack to the start of the next
        )
        if (
            np.any(np.diff(offsets) < 2)
            or np.any(bounds[offsets[:-1]])
            or np.any(steps < 1)
        ):
            raise IntegrityError("column seq_boundaries must rise from 0 in each pack")


def _check(sizes: PackSizes, number: int, manifest: Manifest, where: str) -> None:
    """Refuses sizes that do not add up to those of the shard, or that no pack
    can have.
    """
    shard = manifest.shards[number]
    sums = (len(sizes), int(sizes.examples.sum()), int(sizes.tokens.sum()))
    expected = (shard.rows, shard.examples, shard.tokens)
    if sums != expected:
        rule = (
            f"its packs must have (rows, examples, tokens) {expected}, as the "
            "manifest says"
        )
        raise IntegrityError(sentence(where, rule, str(sums)))
    for rule, values, ok in _bounds(sizes, manifest):
        if not ok.all():
            pack = int(np.argmin(ok))
            found = f"{values[pack].tolist()} for pack {pack}"
            raise IntegrityError(sentence(where, rule, found, _REMEDY))


def _bounds(sizes: PackSizes, manifest: Manifest) -> Iterator[tuple[str, Int64, Bool]]:
    """Yields what must hold, the values, and whether it does, for each pack."""
    tokens, examples, squares = sizes.tokens, sizes.examples, sizes.squares
    size, responses = manifest.pack_size, manifest.num_responses or 1
    yield (
        f"tokens must be 1 to {size}, the pack size",
        tokens,
        (tokens > 0) & (tokens <= size),
    )
    ok = (examples > 0) & (examples * responses <= tokens)
    yield (
        "examples must be at least 1, and each of its sequences have a token",
        examples,
        ok,
    )
    ok = (squares >= tokens) & (squares <= tokens**2)
    yield "squares must be those of segments", squares, ok
    if sizes.counts is None:
        return
    best, rest, every, adjacent = sizes.counts.T
    most = tokens - examples  # no segment's first token is supervised
    ok = (best >= examples) & (best <= most)
    yield "best_tokens must be 1 to all but one of each example", best, ok
    if manifest.kind == "scored":
        ok = (adjacent >= 0) & (adjacent <= rest) & (rest <= every) & (rest <= most)
        ok &= every <= tokens**2
    else:
        pairs = examples * (manifest.kind == "preference")
        ok = (rest == pairs) & (every == pairs) & (adjacent == pairs)
    yield "pairs must be those of its examples", sizes.counts[:, 1:], ok
