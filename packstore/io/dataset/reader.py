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
from typing import Self, TypeAlias

import numpy as np
import pyarrow as pa

from packstore.errors import (
    FormatError,
    IntegrityError,
    PackstoreError,
    StorageError,
    add_place,
    sentence,
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
from packstore.io.shards.shard import ShardInfo, crc32_of
from packstore.io.store import local
from packstore.io.store.location import Location


class ShardStream:
    """The bytes of a shard, for a reader of its row groups in order; hashes the whole
    file.

    Does not map the file: if it were truncated meanwhile, the process would crash.
    """

    def __init__(self, location: Location, shard: ShardInfo) -> None:
        self._location, self._shard = location, shard
        self._file, self._digest = location.open_read(shard.path), hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> bytes:
        """Reads the footer, or bytes `start` to `stop` behind all that were read
        before.
        """
        size = self._shard.bytes
        if (start, stop) == (size - self._shard.footer_bytes, size):
            return self._location.read_bytes(self._shard.path, start, stop)
        if start < self._file.tell():
            raise IntegrityError("its row groups must lie one after another")
        self._skip(start)
        return self._take(stop - start)

    def sha256(self) -> str:
        """Reads the rest of the file; returns the sha256 of all of it."""
        self._skip(self._shard.bytes)
        return self._digest.hexdigest()

    def _skip(self, to: int) -> None:
        while self._take(min(to - self._file.tell(), HASHED_BYTES)):
            pass

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        self._digest.update(data)
        return data


HASHED_BYTES = 1 << 20
"""Bytes that are hashed at once outside row groups."""

Fetched: TypeAlias = bytes | memoryview
"""The bytes of a fetched row group, not yet verified; of a mapped file, a view."""

_REMEDY = (
    "The file was damaged or replaced: copy the dataset again, or run "
    "`packstore "
    "verify`"
)
_REWRITTEN = (
    "Files that other programs wrote are no version 1: pack them anew by packstore"
)


class _ForeignFooter(IntegrityError):
    """The footer is the one that the manifest names, but another program wrote it."""


class ShardReader:
    """Reads the row groups of a shard, from `stream` if given; damage is an
    IntegrityError.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        shard: ShardInfo,
        stream: ShardStream | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.shard = shard
        self.where = location.join(shard.path).display
        self._location, self._manifest = location, manifest
        self._stream, self._cache = stream, cache
        self._lock = threading.Lock()
        self._opened: ParquetShard | ArrowFile | None = None

    def read_packs(self, group: int) -> Packs:
        """Returns row group `group` as packs, verified."""
        return self.decode(group, self.fetch(group))

    def read_columns(self, group: int, names: Sequence[str]) -> pa.RecordBatch:
        """Returns columns as stored, verified page by page; of an Arrow shard all of
        them.
        """
        with self.error_context(f"row group {group}"):
            file = self.footer()
            if isinstance(file, ParquetShard):
                return file.columns(group, names, self._read)
            return self._batch(group, self._fetch(group))

    def fetch(self, group: int) -> Fetched:
        """Returns the bytes of row group `group`, not yet verified."""
        with self.error_context(f"row group {group}"):
            return self._fetch(group)

    def _fetch(self, group: int) -> Fetched:
        file = self.footer()
        start, end = file.range(group)
        if (
            isinstance(file, ArrowFile)
            and self._path
            and not (self._stream or self._cache)
        ):
            with self._location.guard("read", self.shard.path):
                return local.map_part(self._path, start, end)

        def good(data: bytes) -> bool:
            if isinstance(file, ParquetShard):
                return crc32_of(data) == int(self.shard.row_groups.crc32[group])
            with contextlib.suppress(FormatError, *DECODER_ERRORS):
                self._batch(group, data)
                return True
            return False

        return self._cached(start, end, good)

    def prefetch(self, group: int) -> None:
        """Makes the system prefetch row group `group` of a mapped file from disk; never
        raises.
        """
        with contextlib.suppress(PackstoreError, *DECODER_ERRORS):
            local.advise_will_read(self._path, *self.footer().range(group))

    def decode(self, group: int, fetched: Fetched) -> Packs:
        """Verifies and decodes the bytes of row group `group`."""
        with self.error_context(f"row group {group}"):
            manifest, groups = self._manifest, self.shard.row_groups
            packs = from_arrow(
                self._batch(group, fetched),
                manifest.kind,
                vocab_size=manifest.vocab_size,
                where=self.where,
                allocate=pooled_array,
            )
            sizes = (len(packs), len(packs.example_ids), len(packs.signed_ids))
            expected = tuple(
                int(c[group]) for c in (groups.rows, groups.examples, groups.tokens)
            )
            if sizes != expected:
                rule = f"must have (rows, examples, tokens) {expected}"
                raise IntegrityError(f"{rule}; found {sizes}")
            segments = check_structure(
                packs, manifest.layout, manifest.pack_size, self.where
            )
            longest, most = (
                int(groups.longest[group]),
                manifest.statistics.longest_sequence,
            )
            found = int(segments.max()), int(packs.lengths.max())
            if found[0] != longest or found[1] > most:
                rule = (
                    f"a longest segment of {longest} tokens, and no sequence over "
                    f"{most}"
                )
                raise IntegrityError(
                    f"must have {rule}, as the manifest says; found {found}"
                )
            first, last = packs.example_ids.min(), packs.example_ids.max()
            base = self.shard.example_id_base
            if first < 0 or last > TOP - base:
                rule = (
                    "must have example ids of at least 0, and below 2^63 with the "
                    f"base {base}"
                )
                raise IntegrityError(f"{rule}; found {first} to {last}")
            packs.example_ids += base
            return packs

    def _batch(self, group: int, data: Fetched) -> pa.RecordBatch:
        file = self.footer()
        if isinstance(file, ArrowFile):
            batch = file.batch(data)
            batch.validate()
            crc32 = batch_crc32(batch)
        else:
            batch, crc32 = None, crc32_of(data)
        if crc32 != self.shard.row_groups.crc32[group]:
            raise IntegrityError("must have the crc32 that the manifest records")
        if isinstance(file, ParquetShard):
            batch = file.batch(group, bytes(data))
        return batch.select(file.names)

    def footer(self) -> ParquetShard | ArrowFile:
        """Returns the footer, checked against the manifest; reads it once."""
        with self._lock:
            if self._opened is None:
                # Its hash is verified first: a damaged footer can crash the parser.
                size, sha256 = self.shard.bytes, self.shard.footer_sha256

                def good(data: bytes) -> bool:
                    return hashlib.sha256(data).hexdigest() == sha256

                footer = self._cached(size - self.shard.footer_bytes, size, good)
                if not good(footer):
                    raise IntegrityError(
                        "its footer must have the sha256 that the manifest tells"
                    )
                expected, groups = (
                    self._manifest.stored_schema,
                    len(self.shard.row_groups),
                )
                names = [f.name for f in expected if f.type != ANY_LIST]
                kind = (
                    ArrowFile if self._manifest.file_format == "arrow" else ParquetShard
                )
                file = kind(footer, self.shard, names)
                if other := schema_difference(file.schema, expected):
                    raise _ForeignFooter(
                        f"its schema must be that of the manifest; found {other}"
                    )
                if file.num_groups != groups:
                    raise IntegrityError(
                        f"must have {groups} row groups; found {file.num_groups}"
                    )
                self._opened = file
            return self._opened

    @property
    def _path(self) -> str:
        root = self._location.local_path
        return "" if root is None else os.path.join(root, self.shard.path)

    def _cached(self, start: int, end: int, good: Callable[[bytes], bool]) -> bytes:
        if self._cache is None:
            return self._read(start, end)
        # Of this dataset's place: a forged copy of it elsewhere fits the checksums,
        # too.
        name = f"{self._location.digest}-{self.shard.sha256}-{start}-{end}"
        return self._cache.read(name, good, lambda: self._read(start, end))

    def _read(self, start: int, end: int) -> bytes:
        if self._stream is not None:
            data = self._stream.read(start, end)
        else:
            data = self._location.read_bytes(self.shard.path, start, end)
        if len(data) != end - start:
            size = self.shard.bytes
            raise IntegrityError(
                f"must have {size} bytes; found only {start + len(data)} bytes"
            )
        return data

    @contextlib.contextmanager
    def error_context(self, part: str) -> Iterator[None]:
        """Adds shard and row group to errors; turns decoder errors into
        :class:`IntegrityError`.
        """
        where = f"{self.where}, {part}"
        with decoding(where, _REMEDY):
            try:
                yield
            except _ForeignFooter as error:
                raise IntegrityError(
                    sentence(where, str(error), remedy=_REWRITTEN)
                ) from error
            except StorageError as error:
                add_place(error, where)
                raise


# Row groups are freed in another order than they were decoded. An allocator would keep
# the gaps, so that the process grows; memory from the system is zeroed, a fifth of the
# time of decoding.
KEPT_BYTES = 32 << 20
"""Maximum bytes of decoded row groups kept for reuse."""
_UNIT = 64 << 10

_free_buffers: list[mmap.mmap] = []


def pooled_array(n: int) -> Int32:
    """Returns an uninitialized int32 array `[n]`; its memory is reused after its last
    view.
    """
    size = max(-(-4 * n // _UNIT), 1) * _UNIT
    memory = None
    with contextlib.suppress(IndexError):  # another thread may take the last one
        memory = _free_buffers.pop()
    if memory is None or len(memory) < size:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    array = np.frombuffer(memory, np.int32, n)
    # The base of all views is `array`, not the mmap, so it is finalized after the last
    # view.
    weakref.finalize(array, _recycle, memory).atexit = False
    return array


def _recycle(memory: mmap.mmap) -> None:
    if (len(_free_buffers) + 1) * len(memory) <= KEPT_BYTES:
        _free_buffers.append(memory)


_PRIVATE = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    if hasattr(mmap, "MAP_PRIVATE")
    else {}
)
