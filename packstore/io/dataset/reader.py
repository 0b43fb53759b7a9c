"""Reads row groups of shards, each with one ranged read, and verifies checksums.

A reader keeps no file open: it reads the footer once, and each row group with a single
read of its byte range. So it is safe to use from many threads and after a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self, TypeAlias

import numpy as np
import pyarrow as pa

from packstore.errors import (
    FormatError,
    IntegrityError,
    PackstoreError,
    StorageError,
    add_place,
)
from packstore.format.arrays import Int32, Packs
from packstore.format.rules import check_structure
from packstore.format.schema import ANY_LIST, from_arrow, schema_difference
from packstore.format.typed_json import TOP
from packstore.io.dataset.cache import Cache
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import DECODER_ERRORS, decoding
from packstore.io.shards.arrow_file import ArrowFile, batch_crc32
from packstore.io.shards.parquet import ParquetShard
from packstore.io.shards.shard import (
    NonconformingFile,
    ShardInfo,
    crc32_of,
    declared_footer_bytes,
)
from packstore.io.store import local
from packstore.io.store.location import Location

GroupBytes: TypeAlias = bytes | memoryview
"""The bytes of a row group, not yet verified; of a mapped file, a view."""

HASHED_BYTES = 1 << 20
"""Bytes that are hashed at once outside row groups."""

COPY_AGAIN = "The file was damaged or replaced: copy the dataset again"
"""Remedy for a damaged shard in the report of ``packstore verify``."""

_REMEDY = f"{COPY_AGAIN}; `packstore verify` lists all damage"


class ShardReader:
    """Reads the row groups of a shard. Thread-safe.

    Args:
        location: folder of the dataset.
        manifest: its manifest.
        shard: the shard's entry in it.
        stream: reads the bytes, if the row groups are read in order.
        cache: keeps the bytes on the local disk.
        remedy: of the errors of a damaged shard.

    All methods raise :class:`StorageError` if the store refuses, and
    :class:`IntegrityError` if the shard is damaged.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        shard: ShardInfo,
        stream: ShardStream | None = None,
        cache: Cache | None = None,
        remedy: str = _REMEDY,
    ) -> None:
        self.shard = shard
        self.where = location.join(shard.path).display
        self._location = location
        self._manifest = manifest
        self._stream = stream
        self._cache = cache
        self._remedy = remedy
        self._lock = threading.Lock()
        self._file: ParquetShard | ArrowFile | None = None

    def read_packs(self, group: int) -> Packs:
        """Return row group `group` as packs, verified."""
        return self.decode(group, self.fetch(group))

    def read_columns(self, group: int, names: Sequence[str]) -> pa.RecordBatch:
        """Return columns as stored, verified page by page; all columns of an Arrow
        shard.
        """
        with self.error_context(f"row group {group}"):
            file = self.footer()
            if isinstance(file, ParquetShard):
                return file.columns(group, names, self._read)
            return self._verified_batch(group, self._fetch(group))

    def fetch(self, group: int) -> GroupBytes:
        """Return the bytes of row group `group`, not yet verified."""
        with self.error_context(f"row group {group}"):
            return self._fetch(group)

    def prefetch(self, group: int) -> None:
        """Let the system read row group `group` of a mapped file ahead; never raise."""
        with contextlib.suppress(PackstoreError, *DECODER_ERRORS):
            start, end = self.footer().range(group)
            local.advise_will_read(self._local_path, start, end)

    def decode(self, group: int, data: GroupBytes) -> Packs:
        """Verify and decode the bytes of row group `group`."""
        with self.error_context(f"row group {group}"):
            manifest = self._manifest
            packs = from_arrow(
                self._verified_batch(group, data),
                manifest.kind,
                vocab_size=manifest.vocab_size,
                where=self.where,
                allocate=pooled_array,
            )
            self._check_counts(group, packs)
            segment_lengths = check_structure(
                packs,
                manifest.layout,
                manifest.pack_size,
                manifest.statistics.most_keys,
                self.where,
            )
            self._check_lengths(group, packs, int(segment_lengths.max()))
            self._check_ids(packs)
            packs.example_ids += self.shard.example_id_base
            return packs

    def footer(self) -> ParquetShard | ArrowFile:
        """Return the parsed footer, checked against the manifest; it is read once."""
        with self._lock:
            if self._file is None:
                self._file = self._parse_footer(self._read_footer())
            return self._file

    @contextlib.contextmanager
    def error_context(self, part: str) -> Iterator[None]:
        """Add the shard and a part of it to errors; turn errors of decoders into
        :class:`IntegrityError`.
        """
        where = f"{self.where}, {part}"
        with decoding(where, self._remedy):
            try:
                yield
            except StorageError as error:
                add_place(error, where)
                raise

    # Footer

    def _read_footer(self) -> bytes:
        size = self.shard.bytes
        start = size - self.shard.footer_bytes
        footer = self._read_cached(start, size, self._is_intact_footer)
        # Its hash is verified first: a damaged footer can crash the parser.
        if not self._is_intact_footer(footer):
            raise IntegrityError(
                "its footer must have the sha256 that the manifest records"
            )
        declared_bytes = declared_footer_bytes(footer)
        if declared_bytes != len(footer):
            raise NonconformingFile(
                f"its footer must have {len(footer)} bytes, as the manifest says; it "
                f"declares {declared_bytes}"
            )
        return footer

    def _is_intact_footer(self, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.shard.footer_sha256

    def _parse_footer(self, footer: bytes) -> ParquetShard | ArrowFile:
        expected_schema = self._manifest.stored_schema
        names = [field.name for field in expected_schema if field.type != ANY_LIST]
        file: ParquetShard | ArrowFile
        if self._manifest.file_format == "arrow":
            file = ArrowFile(footer, self.shard, names)
        else:
            file = ParquetShard(footer, self.shard, names)

        difference = schema_difference(file.schema, expected_schema)
        if difference:
            raise NonconformingFile(
                f"its schema must be that of the manifest; found {difference}"
            )
        num_groups = len(self.shard.row_groups)
        if file.num_groups != num_groups:
            raise IntegrityError(
                f"must have {num_groups} row groups; found {file.num_groups}"
            )
        return file

    # Bytes

    @property
    def _local_path(self) -> str:
        """Path of the shard on the local disk; empty for other stores."""
        root = self._location.local_path
        return "" if root is None else os.path.join(root, self.shard.path)

    def _fetch(self, group: int) -> GroupBytes:
        file = self.footer()
        start, end = file.range(group)
        path = self._local_path
        is_mapped = isinstance(file, ArrowFile) and path != ""
        if is_mapped and self._stream is None and self._cache is None:
            with self._location.guard("read", self.shard.path):
                return local.map_part(path, start, end)
        return self._read_cached(start, end, partial(self._is_intact_group, group))

    def _is_intact_group(self, group: int, data: bytes) -> bool:
        if isinstance(self.footer(), ParquetShard):
            return crc32_of(data) == int(self.shard.row_groups.crc32[group])
        # The crc32 of an Arrow batch is computed from its decoded buffers.
        with contextlib.suppress(FormatError, *DECODER_ERRORS):
            self._verified_batch(group, data)
            return True
        return False

    def _read_cached(
        self, start: int, end: int, is_intact: Callable[[bytes], bool]
    ) -> bytes:
        """Return bytes from the cache, if there is one and they are intact."""
        read = partial(self._read, start, end)
        if self._cache is None:
            return read()
        # The name has the dataset's place: a forged copy of the dataset elsewhere could
        # fit the checksums, too.
        name = f"{self._location.digest}-{self.shard.sha256}-{start}-{end}"
        return self._cache.read(name, is_intact, read)

    def _read(self, start: int, end: int) -> bytes:
        if self._stream is not None:
            data = self._stream.read(start, end)
        else:
            data = self._location.read_bytes(self.shard.path, start, end)
        if len(data) != end - start:
            raise IntegrityError(
                f"must have {self.shard.bytes} bytes; found only {start + len(data)} "
                "bytes"
            )
        return data

    # Checks

    def _verified_batch(self, group: int, data: GroupBytes) -> pa.RecordBatch:
        """Decode the columns to read of a row group; raise if its crc32 is wrong."""
        file = self.footer()
        expected_crc32 = self.shard.row_groups.crc32[group]
        if isinstance(file, ArrowFile):
            batch = file.batch(data)
            batch.validate()
            crc32 = batch_crc32(batch)
        else:
            crc32 = crc32_of(data)
        if crc32 != expected_crc32:
            raise IntegrityError("must have the crc32 that the manifest records")
        if isinstance(file, ParquetShard):
            batch = file.batch(group, bytes(data))
        return batch.select(file.names)

    def _check_counts(self, group: int, packs: Packs) -> None:
        groups = self.shard.row_groups
        counts = (len(packs), len(packs.example_ids), len(packs.signed_ids))
        expected = (
            int(groups.rows[group]),
            int(groups.examples[group]),
            int(groups.tokens[group]),
        )
        if counts != expected:
            raise IntegrityError(
                f"must have (rows, examples, tokens) {expected}; found {counts}"
            )

    def _check_lengths(self, group: int, packs: Packs, longest_segment: int) -> None:
        """Raise if the manifest has wrong lengths: training checks models with them."""
        expected_segment = int(self.shard.row_groups.longest[group])
        max_sequence = self._manifest.statistics.longest_sequence
        longest_sequence = int(packs.lengths.max())
        if longest_segment != expected_segment or longest_sequence > max_sequence:
            rule = (
                f"a longest segment of {expected_segment} tokens, and no sequence "
                f"over {max_sequence}"
            )
            raise IntegrityError(
                f"must have {rule}, as the manifest says; found "
                f"{(longest_segment, longest_sequence)}"
            )

    def _check_ids(self, packs: Packs) -> None:
        """Raise if example ids are negative, or overflow with the shard's base."""
        base = self.shard.example_id_base
        lowest = packs.example_ids.min()
        highest = packs.example_ids.max()
        if lowest < 0 or highest > TOP - base:
            raise IntegrityError(
                "must have example ids of at least 0, and below 2^63 with the base "
                f"{base}; found {lowest} to {highest}"
            )


class ShardStream:
    """The bytes of a shard, for a reader of its row groups in order; hashes the full
    file.

    It does not map the file: if this were truncated meanwhile, the process would crash.
    """

    def __init__(self, location: Location, shard: ShardInfo) -> None:
        self._location = location
        self._shard = shard
        self._file = location.open_read(shard.path)
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> bytes:
        """Return the footer, or bytes behind all that were read before.

        Raises:
            IntegrityError: the bytes are before those that were read.
        """
        size = self._shard.bytes
        footer_start = size - self._shard.footer_bytes
        if start == footer_start and stop == size:
            return self._location.read_bytes(self._shard.path, start, stop)

        if start < self._file.tell():
            raise IntegrityError("its row groups must lie one after another")
        self._skip(start)
        return self._take(stop - start)

    def sha256(self) -> str:
        """Read the file to its end, and return the sha256 of all of it."""
        self._skip(self._shard.bytes)
        return self._digest.hexdigest()

    def _skip(self, offset: int) -> None:
        """Hash the bytes up to an offset."""
        while True:
            remaining_bytes = offset - self._file.tell()
            data = self._take(min(remaining_bytes, HASHED_BYTES))
            is_at_end = not data  # of these bytes, or of a file that is too short
            if is_at_end:
                return

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        self._digest.update(data)
        return data


# Memory of decoded row groups. They are freed in another order than they were decoded.
# An allocator would keep the gaps, so that the process grows; memory from the system is
# zeroed, a fifth of the time of decoding.

POOL_BYTES = 32 << 20
"""Maximum bytes of free memory that waits for reuse."""

_UNIT_BYTES = 64 << 10
"""Buffers have a multiple of this size."""

_free_buffers: list[mmap.mmap] = []


def pooled_array(n: int) -> Int32:
    """Return an uninitialized int32 array `[n]`; its memory is reused after its last
    view.
    """
    num_bytes = 4 * n
    num_units = max(-(-num_bytes // _UNIT_BYTES), 1)  # rounded up
    memory = _take_buffer(num_units * _UNIT_BYTES)
    array = np.frombuffer(memory, np.int32, n)
    # The base of all views is `array`, not the mmap, so it is finalized after the last
    # view.
    weakref.finalize(array, _recycle, memory).atexit = False
    return array


def _take_buffer(num_bytes: int) -> mmap.mmap:
    with contextlib.suppress(IndexError):  # another thread may take the last one
        memory = _free_buffers.pop()
        if len(memory) >= num_bytes:
            return memory
    if hasattr(mmap, "MAP_PRIVATE"):
        # A fork would share memory with its parent by default, and overwrite it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return mmap.mmap(-1, num_bytes, flags=flags)
    return mmap.mmap(-1, num_bytes)


def _recycle(memory: mmap.mmap) -> None:
    if (len(_free_buffers) + 1) * len(memory) <= POOL_BYTES:
        _free_buffers.append(memory)
