"""The pack index: the sizes of all packs, without opening shards.

A small Parquet file beside the manifest, which names it. It has a row for each pack, in
dataset order, and a row group for each shard, and is optional: without it sizes are
read from the shards.

*Sizes* of a pack are its tokens, its examples and its squares (the cost of attention,
see :class:`packstore.format.arrays.PackSizes`). The index also has *counts*, by which
losses divide (:data:`packstore.format.arrays.COUNTS`); an index of an earlier release
lacks these columns, and they are null for shards that were not counted. Nothing in it
is trusted: figures that no pack can have are refused, and loaders compare each with its
pack.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

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
from packstore.io.shards.shard import (
    ShardInfo,
    sizes_of,
)
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging

_SIZE_FIELDS = [
    pa.field("tokens", pa.int32(), nullable=False),
    pa.field("examples", pa.int32(), nullable=False),
    pa.field("squares", pa.int64(), nullable=False),
]
_COUNT_FIELDS = [pa.field(name, pa.int64()) for name in COUNTS]
SCHEMA = pa.schema(_SIZE_FIELDS + _COUNT_FIELDS)

THREADS = 4
"""Shards read in parallel without an index."""

CACHED_SHARDS = 128
"""Maximum of shards with cached sizes. An order reads from `LANES` (64) row groups at a
time, each in one shard: these stay in the cache.
"""

_COLUMNS_WITH_SIZES = ("lengths", "seq_boundaries", "example_ids")
"""Columns of a shard that are enough to count sizes."""

_REMEDY = "The index or the shard was damaged or replaced: copy the dataset again"


def put_index(
    location: Location,
    sizes: Iterable[PackSizes],
    version: int,
    extends: Manifest | None = None,
) -> StoredFile | None:
    """Store the index of a version.

    Args:
        location: folder of the dataset.
        sizes: sizes of the packs of each shard.
        version: number of the version. It is part of the name: packs of equal sizes
            have equal indexes, and `clean` may be removing one of an old version.
        extends: an older version, whose shards come before these.

    Returns:
        The manifest's entry; None without shards.
    """
    row_groups = b""
    metadata = None
    if extends is not None and extends.pack_index is not None:
        row_groups, metadata = _stored_row_groups(location, extends)
    if extends is not None and metadata is None:
        # Without an index of all columns, sizes are counted anew.
        table = SizeTable(location, extends)
        old_sizes = (table.shard(number) for number in range(len(extends.shards)))
        sizes = itertools.chain(old_sizes, sizes)

    shards = iter(sizes)
    first_shard = next(shards, None)
    if first_shard is not None:
        shards = itertools.chain([first_shard], shards)
    elif metadata is None:
        return None

    with Staging(location, (FOLDER,)) as staging:
        with staging.file() as file:
            _write_index(file, shards, row_groups, metadata)
        info = StoredFile.of(file.name, f"{FOLDER}/packs-{version:06d}", ".index")
        staging.store(file.name, info.path)
        return info


def _stored_row_groups(
    location: Location, manifest: Manifest
) -> tuple[bytes, pq.FileMetaData | None]:
    """Return the bytes of a stored index before its footer, and its metadata.

    The metadata are None if the index has other columns than those that are written.
    """
    assert manifest.pack_index is not None
    index = PackIndex(location, manifest, manifest.pack_index)
    if index.metadata.schema.to_arrow_schema() != SCHEMA:
        return b"", None
    return index.data[: -_footer_bytes(index.metadata)], index.metadata


def _write_index(
    file: IO[bytes],
    shards: Iterable[PackSizes],
    row_groups: bytes,
    metadata: pq.FileMetaData | None,
) -> None:
    """Write an index, which may begin with the row groups of another one.

    These are copied: to decode and encode them again would take most of the time of a
    small append. The file is the same as one that is written at once.

    Args:
        file: an empty file.
        shards: sizes of the packs of each shard.
        row_groups: bytes of another index before its footer.
        metadata: its footer.
    """
    encodings = dict.fromkeys(SCHEMA.names, "DELTA_BINARY_PACKED")
    options = {"column_encoding": encodings, "store_schema": False, **OPTIONS}
    path = os.fsencode(file.name)  # Arrow would encode it as UTF-8
    sink = pa.OSFile(path, "wb")
    with sink, pq.ParquetWriter(sink, SCHEMA, **options) as writer:
        # The writer has written the first word, and asks the sink for its position.
        sink.write(memoryview(row_groups)[len(b"PAR1") :])
        for shard in shards:
            # A shard of other writers may have no packs: an empty row group.
            rows = max(len(shard), 1)
            writer.write_table(_to_table(shard), row_group_size=rows)
    if metadata is None:
        return

    with pa.OSFile(path) as source:
        added_metadata = pq.read_metadata(source)
    metadata.append_row_groups(added_metadata)
    footer = io.BytesIO()
    metadata.write_metadata_file(footer)
    file.seek(-_footer_bytes(added_metadata), os.SEEK_END)
    file.write(footer.getvalue()[len(b"PAR1") :])
    file.truncate()


def _footer_bytes(metadata: pq.FileMetaData) -> int:
    """Return the size of a footer, with its length and the last word of the file."""
    return int(metadata.serialized_size) + 4 + len(b"PAR1")


def _to_table(sizes: PackSizes) -> pa.Table:
    columns = [sizes.tokens, sizes.examples, sizes.squares]
    if sizes.counts is not None:
        columns += list(sizes.counts.T)
    arrays = [
        as_arrow(column, field.type)
        for column, field in zip(columns, SCHEMA, strict=False)
    ]
    uncounted_fields = list(SCHEMA)[len(arrays) :]
    arrays += [pa.nulls(len(sizes), field.type) for field in uncounted_fields]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


class PackIndex:
    """The index of a dataset, in memory as stored, a few bytes for each pack.

    Args:
        location: folder of the dataset.
        manifest: its manifest.
        info: the index's entry in it.
        first_shard: above 0 for a view, whose manifest lacks the shards before it.

    Attributes:
        data: the bytes of the file.
        metadata: its footer.

    Raises:
        StorageError: the store refuses.
        IntegrityError: the file is damaged, or has other columns or row groups.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        info: StoredFile,
        first_shard: int = 0,
    ) -> None:
        self.where = location.join(info.path).display
        self._manifest = manifest
        self._first_group = first_shard
        self.data = read_stored(location, info)
        with decoding(self.where):
            self.metadata = pq.read_metadata(pa.BufferReader(self.data))
            schema = self.metadata.schema.to_arrow_schema()
            groups = range(first_shard, self.metadata.num_row_groups)
            rows = [self.metadata.row_group(group).num_rows for group in groups]

        self._columns = _columns_to_read(schema)
        expected_rows = [shard.rows for shard in manifest.shards]
        if not self._columns or rows != expected_rows:
            raise IntegrityError(
                sentence(
                    self.where,
                    rule=f"it must have columns {', '.join(SCHEMA.names)}, and a row "
                    "group for each shard",
                    found=f"{quote(schema.names)}, rows {rows}",
                )
            )

    def shard(self, number: int) -> PackSizes:
        """Return the sizes of the packs of a shard, checked. Thread-safe.

        Raises:
            IntegrityError: no packs of the shard can have these sizes.
        """
        if not self._manifest.shards[number].rows:
            return PackSizes.concat([])

        group = self._first_group + number
        where = f"{self.where}, row group {group}"
        with decoding(self.where):
            sizes = self._decode(group, self._manifest.shards[number].rows)
        _check_sums(sizes, self._manifest.shards[number], where)
        _check_bounds(sizes, self._manifest, where)
        return sizes

    def _decode(self, number: int, rows: int) -> PackSizes:
        group = self.metadata.row_group(number)
        check_group(group, rows, max_values=rows, names=self._columns)
        source = pa.BufferReader(self.data)
        file = open_parquet(source, self.metadata, page_checksums=True)
        batch = read_group(file, number, self._columns)

        count_columns = batch.columns[len(_SIZE_FIELDS) :]
        null_counts = {column.null_count for column in count_columns}
        if not null_counts <= {0, rows}:
            raise IntegrityError(
                "its counts must be of all packs of a row group, or of none"
            )
        counts = None
        if null_counts == {0}:
            counts = np.stack([as_numpy(column) for column in count_columns], axis=1)
        return PackSizes(
            tokens=as_numpy(batch.column("tokens")).astype(np.int64),
            examples=as_numpy(batch.column("examples")).astype(np.int64),
            squares=as_numpy(batch.column("squares")).astype(np.int64),
            counts=counts,
        )


def _columns_to_read(schema: pa.Schema) -> list[str]:
    """Return the columns of an index to read; none if it is not an index.

    Further columns, of later releases, may follow.
    """
    fields = list(schema)
    if fields[: len(SCHEMA)] == list(SCHEMA):
        return list(SCHEMA.names)

    has_a_count = any(name in COUNTS for name in schema.names)
    if fields[: len(_SIZE_FIELDS)] == _SIZE_FIELDS and not has_a_count:
        return [field.name for field in _SIZE_FIELDS]
    return []


class SizeTable:
    """Sizes of the packs of a dataset, from its index or its shards.

    The most recently used shards are cached. Thread-safe. All methods raise
    :class:`StorageError` if the store refuses, and :class:`IntegrityError` if sizes or
    shards are damaged.
    """

    def __init__(
        self, location: Location, manifest: Manifest, first_shard: int = 0
    ) -> None:
        self._location = location
        self._manifest = manifest
        self._first_shard = first_shard
        rows = [shard.rows for shard in manifest.shards]
        self._first_packs = to_offsets(np.array(rows, np.int64))  # of the shards
        self.shard = functools.lru_cache(CACHED_SHARDS)(self._load)
        # First packs of row groups that were compared. Checksums guard against changes.
        self._compared_groups: set[int] = set()

    def take(self, packs: Int64) -> PackSizes:
        """Return the sizes of packs.

        Args:
            packs: int64 `[n]`, their numbers in file order.
        """
        shards = self._shards_of(packs)
        by_shard = np.argsort(shards, kind="stable")
        distinct_shards, starts = np.unique(shards[by_shard], return_index=True)
        packs_of_shards = np.split(packs[by_shard], starts[1:])
        parts = []
        # Without packs, split returns one empty array for no shard: not strict.
        for shard, shard_packs in zip(
            distinct_shards.tolist(), packs_of_shards, strict=False
        ):
            rows = shard_packs - self._first_packs[shard]
            parts.append(self.shard(shard).take(rows))
        original_order = np.argsort(by_shard, kind="stable")
        return PackSizes.concat(parts).take(original_order)

    def require_same(self, first: int, packs: Packs, where: str) -> None:
        """Raise if sizes in the index are not the actual ones; do nothing without an
        index.

        Args:
            first: number of the first pack in file order.
            packs: the packs of a row group.
            where: the row group.
        """
        if self._index is None or first in self._compared_groups:
            return
        shard = int(self._shards_of(np.array([first]))[0])
        start = first - int(self._first_packs[shard])
        recorded = self.shard(shard).take(slice(start, start + len(packs)))
        actual = sizes_of(packs, self._manifest.kind)
        require_same(recorded, actual, self._index.where, where)
        self._compared_groups.add(first)

    def all(self) -> PackSizes:
        """Return the sizes of all packs in file order, 56 bytes each."""
        shards = range(len(self._manifest.shards))
        if self._index is not None:
            return PackSizes.concat([self._load(shard) for shard in shards])
        with ThreadPoolExecutor(THREADS) as pool:
            return PackSizes.concat(list(pool.map(self._load, shards)))

    def _shards_of(self, packs: Int64) -> Int64:
        return np.searchsorted(self._first_packs, packs, side="right") - 1

    @functools.cached_property
    def _index(self) -> PackIndex | None:
        info = self._manifest.pack_index
        if info is None:
            return None
        return PackIndex(self._location, self._manifest, info, self._first_shard)

    def _load(self, number: int) -> PackSizes:
        """Return the sizes of the packs of a shard, checked."""
        if self._index is not None:
            return self._index.shard(number)

        shard = self._manifest.shards[number]
        reader = ShardReader(self._location, self._manifest, shard)
        groups = range(len(shard.row_groups))
        sizes = PackSizes.concat([_count_sizes(reader, group) for group in groups])
        _check_sums(sizes, shard, reader.where)
        _check_bounds(sizes, self._manifest, reader.where)
        return sizes


def _count_sizes(reader: ShardReader, group: int) -> PackSizes:
    """Count the sizes of the packs of a row group from some of its columns."""
    batch = reader.read_columns(group, _COLUMNS_WITH_SIZES)
    with decoding(f"{reader.where}, row group {group}"):
        columns = {name: flat_column(batch, name, None) for name in _COLUMNS_WITH_SIZES}
        check_counts(columns, int(reader.shard.row_groups.rows[group]))
        boundaries, boundary_offsets = columns["seq_boundaries"]
        _, example_offsets = columns["example_ids"]
        lengths, sequence_offsets = columns["lengths"]
        # A pack of S segments has S + 1 boundaries.
        if not np.array_equal(np.diff(sequence_offsets), np.diff(boundary_offsets) - 1):
            raise IntegrityError(
                "column seq_boundaries must have one value more than lengths"
            )
        is_segment = np.ones(len(boundaries) - 1, np.bool_)
        is_segment[boundary_offsets[1:-1] - 1] = False  # from one pack to the next
        stored_lengths = np.diff(boundaries.astype(np.int64))[is_segment]
        whole_lengths = lengths.astype(np.int64)
        squares = stored_lengths * (2 * whole_lengths - stored_lengths)
        first_segments = sequence_offsets[:-1]
        return PackSizes(
            tokens=np.add.reduceat(stored_lengths, first_segments),
            examples=np.diff(example_offsets),
            squares=np.add.reduceat(squares, first_segments),
        )


# Checks


def require_same(
    recorded: PackSizes, actual: PackSizes, index: str, where: str
) -> None:
    """Raise IntegrityError if an index has recorded other sizes than the actual ones.

    Args:
        recorded: sizes in the index.
        actual: sizes counted from the packs.
        index: the index, as shown in errors.
        where: the packs, as shown in errors.
    """
    for name in ("tokens", "examples", "squares", "counts"):
        recorded_values = getattr(recorded, name)
        if recorded_values is None:
            continue
        actual_values = getattr(actual, name)
        if np.array_equal(recorded_values, actual_values):
            continue

        differences = recorded_values != actual_values
        pack = int(np.argmax(differences.reshape(len(differences), -1).any(axis=1)))
        raise IntegrityError(
            sentence(
                index,
                rule=f"must have the {name} of each pack of {where}",
                found=f"{recorded_values[pack].tolist()} for pack {pack}, which has "
                f"{actual_values[pack].tolist()}",
                remedy=_REMEDY,
            )
        )


def check_counts(columns: Mapping[str, tuple[Any, Int64]], rows: int) -> None:
    """Raise IntegrityError if offsets or counts in columns are out of range.

    Callers compare the sums with the manifest.

    Args:
        columns: name of a stored column -> its flat values, and offsets of the rows.
        rows: number of rows that each must have.
    """
    for name, (values, offsets) in columns.items():
        if len(offsets) != rows + 1:
            raise IntegrityError(
                f"column {name} must have {rows} rows; found {len(offsets) - 1}"
            )
        is_count = name in ("lengths", "num_responses")
        if is_count and len(values) and values.min() < 1:
            raise IntegrityError(
                f"column {name} must hold positive numbers; found {values.min()}"
            )

    if "seq_boundaries" in columns:
        boundaries, offsets = columns["seq_boundaries"]
        if not _rise_from_zero(boundaries, offsets):
            raise IntegrityError("column seq_boundaries must rise from 0 in each pack")


def _rise_from_zero(boundaries: Any, offsets: Int64) -> bool:
    """Return True if the boundaries of each pack are a 0 and one or more larger
    numbers, in order.
    """
    if np.any(np.diff(offsets) < 2):
        return False
    if np.any(boundaries[offsets[:-1]] != 0):
        return False
    differences = np.diff(boundaries.astype(np.int64))
    differences[offsets[1:-1] - 1] = 1  # from one pack to the next
    return bool(np.all(differences >= 1))


def _check_sums(sizes: PackSizes, shard: ShardInfo, where: str) -> None:
    """Raise if sizes do not add up to the shard's in the manifest."""
    sums = (len(sizes), int(sizes.examples.sum()), int(sizes.tokens.sum()))
    expected = (shard.rows, shard.examples, shard.tokens)
    if sums != expected:
        raise IntegrityError(
            sentence(
                where,
                rule=f"its packs must have (rows, examples, tokens) {expected}, as the "
                "manifest says",
                found=str(sums),
            )
        )


def _check_bounds(sizes: PackSizes, manifest: Manifest, where: str) -> None:
    """Raise if no pack can have these sizes."""
    for bound in _bounds(sizes, manifest):
        if not bound.holds.all():
            pack = int(np.argmin(bound.holds))
            raise IntegrityError(
                sentence(
                    where,
                    rule=bound.rule,
                    found=f"{bound.values[pack].tolist()} for pack {pack}",
                    remedy=_REMEDY,
                )
            )


class _Bound(NamedTuple):
    """A rule for sizes: the values, and whether it holds, for each pack."""

    rule: str
    values: Int64
    holds: Bool


def _bounds(sizes: PackSizes, manifest: Manifest) -> Iterator[_Bound]:
    tokens = sizes.tokens
    examples = sizes.examples
    squares = sizes.squares
    responses = manifest.num_responses or 1
    yield _Bound(
        rule=f"tokens must be 1 to {manifest.pack_size}, the pack size",
        values=tokens,
        holds=(tokens > 0) & (tokens <= manifest.pack_size),
    )
    yield _Bound(
        rule="examples must be at least 1, and each of its sequences have a token",
        values=examples,
        holds=(examples > 0) & (examples * responses <= tokens),
    )
    yield _Bound(
        rule="squares must be those of segments",
        values=squares,
        # A sequence has at most as many tokens as its pack stores.
        holds=(squares >= tokens) & (squares < 2 * tokens**2),
    )
    if sizes.counts is None:
        return

    best_tokens = sizes.counts[:, COUNTS.index("best_tokens")]
    # The first token of a segment is never supervised, and each example has one.
    max_best_tokens = tokens - examples
    yield _Bound(
        rule="best_tokens must be 1 to all but one of each example",
        values=best_tokens,
        holds=(best_tokens >= examples) & (best_tokens <= max_best_tokens),
    )
    yield _Bound(
        rule="pairs must be those of its examples",
        values=sizes.counts[:, 1:],
        holds=_are_possible_pairs(sizes, manifest.kind),
    )


def _are_possible_pairs(sizes: PackSizes, kind: str) -> Bool:
    """Return whether packs of a kind can have the counts of pairs, bool `[P]`."""
    assert sizes.counts is not None
    _, best_vs_rest, all_pairs, adjacent = sizes.counts.T
    is_possible: Bool
    if kind == "scored":
        # A response has a token at least, so that tokens bound the numbers of pairs.
        is_possible = (adjacent >= 0) & (adjacent <= best_vs_rest)
        is_possible &= best_vs_rest <= all_pairs
        is_possible &= best_vs_rest <= sizes.tokens - sizes.examples
        is_possible &= all_pairs <= sizes.tokens**2
        return is_possible

    num_pairs = sizes.examples if kind == "preference" else 0
    is_possible = best_vs_rest == num_pairs
    is_possible &= all_pairs == num_pairs
    is_possible &= adjacent == num_pairs
    return is_possible
