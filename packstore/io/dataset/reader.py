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
from typing import Any, TypeAlias

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

Fetched: TypeAlias = Any
"""A fetched, unverified row group: its bytes, or a batch whose buffers are views."""

_REMEDY = "The file was damaged or replaced: copy the dataset again, or run `packstore verify`"


class ShardReader:
    """Reads the row groups of one shard.

    Args:
        location: the dataset.
        manifest: of the dataset.
        shard: one of the manifest's shards.
        data: the bytes of the file, if the caller provides them.
        cache: caches row groups and footers.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        shard: ShardInfo,
        data: bytes | ShardBytes | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.shard = shard
        self._location, self._manifest, self._data = location, manifest, data
        self._cache = cache
        self.where = location.join(shard.path).display
        self._lock = threading.Lock()
        self._parquet: ParquetShard | None = None
        self._arrow: ArrowFile | None = None

    def read_packs(self, group: int) -> Packs:
        """Returns row group `group` as packs, verified.

        Raises:
            StorageError: the shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        return self.decode(group, self.fetch(group))

    def read_columns(self, group: int, names: Sequence[str]) -> pa.RecordBatch:
        """Returns columns `names` of row group `group` as stored; all columns of an Arrow shard.

        For Parquet, fetches the bytes from the first to the last of them, and verifies the
        checksums of their pages.

        Raises:
            StorageError: the shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        with self._naming(f"row group {group}"):
            if self._manifest.file_format == "arrow":
                return self._batch(group, self._arrow_batch(group))
            return self._parquet_shard().columns(group, names, self._read)

    def fetch(self, group: int) -> Fetched:
        """Returns the unverified bytes of row group `group`; raises like :meth:`read_packs`."""
        with self._naming(f"row group {group}"):
            if self._manifest.file_format == "arrow":
                return self._arrow_batch(group)
            start, end = self._parquet_shard().range(group)
            crc32 = int(self.shard.row_groups.crc32[group])
            return self._cached(start, end, lambda data: crc32_of(data) == crc32)

    def expect(self, group: int) -> None:
        """Makes the system prefetch row group `group` of a mapped file from disk; never raises."""
        with contextlib.suppress(PackstoreError, *DECODER_ERRORS):
            start, end = self._arrow_file().ranges[group]
            local.will_read(self._path, start, end)

    def decode(self, group: int, fetched: Fetched) -> Packs:
        """Verifies and decodes the bytes of row group `group`.

        Raises:
            IntegrityError: a checksum does not match.
        """
        with self._naming(f"row group {group}"):
            manifest = self._manifest
            packs = from_arrow(
                self._batch(group, fetched),
                manifest.kind,
                vocab_size=manifest.vocab_size,
                where=self.where,
                allocate=pooled_array,
            )
            self._check_packs(packs, group)
            packs.example_ids += self.shard.example_id_base
            return packs

    def _batch(self, group: int, fetched: Fetched) -> pa.RecordBatch:
        if isinstance(fetched, bytes):
            self._check_crc32(group, crc32_of(fetched))
            batch = self._parquet_shard().batch(group, fetched)
        else:
            batch = fetched
            batch.validate()
            self._check_crc32(group, batch_crc32(batch))
        expected = int(self.shard.row_groups.rows[group])
        if batch.num_rows != expected:
            raise IntegrityError(f"must have {expected} rows; found {batch.num_rows}")
        return batch

    def _check_packs(self, packs: Packs, group: int) -> None:
        groups = self.shard.row_groups
        found = (len(packs), len(packs.example_ids), len(packs.signed_ids))
        figures = (groups.rows, groups.examples, groups.tokens)
        expected = tuple(int(figure[group]) for figure in figures)
        if found != expected:
            raise IntegrityError(f"must have (rows, examples, tokens) {expected}; found {found}")
        check_structure(packs, self._manifest.layout, self._manifest.pack_size, self.where)

    def _parquet_shard(self) -> ParquetShard:
        """Footer of a Parquet file, checked against the manifest; read once."""
        with self._lock:
            if self._parquet is None:
                parquet = ParquetShard(self._read_footer(), self.shard)
                self._check(parquet.schema, parquet.num_groups)
                self._parquet = parquet
            return self._parquet

    def _read_footer(self) -> bytes:
        """Reads the footer and verifies its hash: a damaged footer can crash the parser."""
        size, length = self.shard.bytes, self.shard.footer_bytes

        def good(data: bytes) -> bool:
            return hashlib.sha256(data).hexdigest() == self.shard.footer_sha256

        footer = self._cached(size - length, size, good)
        if not good(footer):
            raise IntegrityError("its footer must have the sha256 that the manifest tells")
        return footer

    def _arrow_file(self) -> ArrowFile:
        """Footer of an Arrow file; read once."""
        with self._lock:
            if self._arrow is None:
                arrow = ArrowFile(self._read_footer(), self.shard.bytes)
                self._check(arrow.schema, len(arrow.ranges))
                self._arrow = arrow
            return self._arrow

    @property
    def _path(self) -> str:
        """Path of a shard on the local disk."""
        return os.path.join(self._location.local_path or "", self.shard.path)

    def _arrow_batch(self, group: int) -> pa.RecordBatch:
        """Returns a batch of the Arrow file; a local file is mapped, without copies."""
        arrow = self._arrow_file()
        start, end = arrow.ranges[group]
        if self._data is None and self._cache is None and self._location.local_path is not None:
            return arrow.batch(local.map_part(self._path, start, end))

        def good(data: bytes) -> bool:
            with contextlib.suppress(FormatError, *DECODER_ERRORS):
                batch = arrow.batch(data)
                batch.validate()
                return batch_crc32(batch) == int(self.shard.row_groups.crc32[group])
            return False

        return arrow.batch(self._cached(start, end, good))

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
            found = f"only {start + len(data)} bytes"
            raise IntegrityError(f"must have {self.shard.bytes} bytes; found {found}")
        return data

    def _check_crc32(self, group: int, found: int) -> None:
        if found != self.shard.row_groups.crc32[group]:
            raise IntegrityError("must have the crc32 that the manifest tells")

    def _check(self, schema: pa.Schema, groups: int) -> None:
        expected = self._manifest.stored_schema
        if not schema.equals(expected) or schema.metadata != expected.metadata:
            raise IntegrityError("its schema must be the one that the manifest declares")
        if groups != len(self.shard.row_groups):
            must = f"must have {len(self.shard.row_groups)} row groups"
            raise IntegrityError(f"{must}; found {groups}")

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
