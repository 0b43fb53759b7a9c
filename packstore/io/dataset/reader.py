"""Reads row groups of shards, each with one ranged read, and verifies checksums.

A reader keeps no file open: it reads the footer once, and each row group with a single read of its
byte range. So it is safe to use from many threads and after a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa

from packstore.errors import (
    FormatError,
    IntegrityError,
    PackstoreError,
    StorageError,
    add_place,
    sentence,
)
from packstore.format.arrays import Packs
from packstore.format.rules import check_structure
from packstore.format.schema import from_arrow
from packstore.io.dataset.cache import Cache
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import DECODER_ERRORS
from packstore.io.shards.arrow_file import ArrowFile
from packstore.io.shards.buffer_pool import pooled_array
from packstore.io.shards.checksums import batch_crc32, crc32_of
from packstore.io.shards.parquet import ParquetShard
from packstore.io.shards.shard import ShardInfo
from packstore.io.shards.shard_bytes import ShardBytes
from packstore.io.store import local
from packstore.io.store.location import Location

Fetched: TypeAlias = bytes | memoryview
"""The bytes of a fetched row group, not yet verified; of a mapped file, a view."""

_REMEDY = "The file was damaged or replaced: copy the dataset again, or run `packstore verify`"


class ShardReader:
    """Reads the row groups of one shard, from `data` if given; damage is an IntegrityError."""

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        shard: ShardInfo,
        data: bytes | ShardBytes | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.shard = shard
        self.where = location.join(shard.path).display
        self._location, self._manifest, self._data = location, manifest, data
        self._cache = cache
        self._lock = threading.Lock()
        self._opened: ParquetShard | ArrowFile | None = None

    def read_packs(self, group: int) -> Packs:
        """Returns row group `group` as packs, verified."""
        return self.decode(group, self.fetch(group))

    def read_columns(self, group: int, names: Sequence[str]) -> pa.RecordBatch:
        """Returns columns as stored, verified page by page; of an Arrow shard all of them."""
        with self._naming(f"row group {group}"):
            file = self._file()
            if isinstance(file, ParquetShard):
                return file.columns(group, names, self._read)
        data = self.fetch(group)
        with self._naming(f"row group {group}"):
            return self._batch(group, data)

    def fetch(self, group: int) -> Fetched:
        """Returns the bytes of row group `group`, not yet verified."""
        with self._naming(f"row group {group}"):
            file = self._file()
            start, end = file.range(group)
            mapped = self._data is None and self._cache is None and self._path is not None
            if mapped and isinstance(file, ArrowFile):
                return local.map_part(self._path or "", start, end)

            def good(data: bytes) -> bool:
                if isinstance(file, ParquetShard):
                    return crc32_of(data) == int(self.shard.row_groups.crc32[group])
                with contextlib.suppress(FormatError, *DECODER_ERRORS):
                    self._batch(group, data)
                    return True
                return False

            return self._cached(start, end, good)

    def expect(self, group: int) -> None:
        """Makes the system prefetch row group `group` of a mapped file from disk; never raises."""
        with contextlib.suppress(PackstoreError, *DECODER_ERRORS):
            local.will_read(self._path or "", *self._file().range(group))

    def decode(self, group: int, fetched: Fetched) -> Packs:
        """Verifies and decodes the bytes of row group `group`."""
        with self._naming(f"row group {group}"):
            manifest, groups = self._manifest, self.shard.row_groups
            packs = from_arrow(
                self._batch(group, fetched),
                manifest.kind,
                vocab_size=manifest.vocab_size,
                where=self.where,
                allocate=pooled_array,
            )
            sizes = (len(packs), len(packs.example_ids), len(packs.signed_ids))
            columns = (groups.rows, groups.examples, groups.tokens)
            expected = tuple(int(column[group]) for column in columns)
            if sizes != expected:
                must = f"must have (rows, examples, tokens) {expected}"
                raise IntegrityError(f"{must}; found {sizes}")
            check_structure(packs, manifest.layout, manifest.pack_size, self.where)
            packs.example_ids += self.shard.example_id_base
            return packs

    def _batch(self, group: int, data: Fetched) -> pa.RecordBatch:
        """Verifies the checksum of a row group, and decodes it to Arrow."""
        file, groups = self._file(), self.shard.row_groups
        if isinstance(file, ArrowFile):
            batch = file.batch(data)
            batch.validate()
            crc32 = batch_crc32(batch)
        else:
            batch, crc32 = None, crc32_of(data)
        if crc32 != groups.crc32[group]:
            raise IntegrityError("must have the crc32 that the manifest tells")
        if isinstance(file, ParquetShard):
            batch = file.batch(group, bytes(data))
        if batch.num_rows != groups.rows[group]:
            raise IntegrityError(f"must have {groups.rows[group]} rows; found {batch.num_rows}")
        return batch

    def _file(self) -> ParquetShard | ArrowFile:
        """Returns the footer, checked against the manifest; reads it once."""
        with self._lock:
            if self._opened is None:
                kind = ArrowFile if self._manifest.file_format == "arrow" else ParquetShard
                file = kind(self._footer(), self.shard)
                expected, groups = self._manifest.stored_schema, len(self.shard.row_groups)
                if not file.schema.equals(expected) or file.schema.metadata != expected.metadata:
                    raise IntegrityError("its schema must be the one that the manifest declares")
                if file.num_groups != groups:
                    raise IntegrityError(f"must have {groups} row groups; found {file.num_groups}")
                self._opened = file
            return self._opened

    def _footer(self) -> bytes:
        """Reads the footer and verifies its hash: a damaged footer can crash the parser."""
        size, sha256 = self.shard.bytes, self.shard.footer_sha256

        def good(data: bytes) -> bool:
            return hashlib.sha256(data).hexdigest() == sha256

        footer = self._cached(size - self.shard.footer_bytes, size, good)
        if not good(footer):
            raise IntegrityError("its footer must have the sha256 that the manifest tells")
        return footer

    @property
    def _path(self) -> str | None:
        """Path of a shard on the local disk."""
        root = self._location.local_path
        return None if root is None else os.path.join(root, self.shard.path)

    def _cached(self, start: int, end: int, good: Callable[[bytes], bool]) -> bytes:
        if self._cache is None:
            return self._read(start, end)
        name = f"{self.shard.sha256}-{start}-{end}"
        return self._cache.read(name, good, lambda: self._read(start, end))

    def _read(self, start: int, end: int) -> bytes:
        if self._data is not None:
            data = self._data[start:end]
        else:
            data = self._location.read_bytes(self.shard.path, start, end)
        if len(data) != end - start:
            must = f"must have {self.shard.bytes} bytes"
            raise IntegrityError(f"{must}; found only {start + len(data)} bytes")
        return data

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Adds shard and row group to errors; turns decoder errors into :class:`IntegrityError`."""
        place = f"{self.where}, {what}"
        try:
            yield
        except FormatError as error:
            raise IntegrityError(sentence(place, str(error).rstrip("."), "", _REMEDY)) from error
        except StorageError as error:
            add_place(error, place)
            raise
        except PackstoreError:
            raise
        except DECODER_ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                with self._location.guard("read", self.shard.path):
                    raise
            must = "its bytes must be those that were written"
            raise IntegrityError(sentence(place, must, str(error), _REMEDY)) from error
