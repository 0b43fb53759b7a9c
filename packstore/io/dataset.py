"""A committed dataset: its manifest, and its packs in file order."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from packstore.config import ReadConfig
from packstore.errors import ConfigError, DatasetNotFoundError
from packstore.io.cache import Cache
from packstore.io.compact import CompactPacks
from packstore.io.manifest import Manifest, read_manifest
from packstore.io.object_version import object_version
from packstore.io.pack_index import SizeTable
from packstore.io.presence import explaining
from packstore.io.reader import Fetched
from packstore.io.readers import ShardReaders
from packstore.io.storage import Location
from packstore.io.verify import Progress, VerifyReport, verify
from packstore.records import Int64, Packs, PackSizes, to_offsets
from packstore.schema import to_arrow


@dataclass(frozen=True, eq=False)
class RowGroupTable:
    """All row groups of a dataset, in file order: int64 `[G]` each.

    Attributes:
        shard: position of the shard in the manifest.
        index: position of the row group in its shard.
        rows, examples, tokens: of the row group.
        longest: its longest segment, in tokens.
    """

    shard: Int64
    index: Int64
    rows: Int64
    examples: Int64
    tokens: Int64
    longest: Int64

    def __len__(self) -> int:
        return len(self.shard)


class Dataset:
    """A committed version of a dataset, which never changes. Picklable; opens files when it reads.

    Args:
        location: where it is.
        manifest: what it is.
        version: number of the manifest.
        cache: keeps what is read of shards.
    """

    def __init__(
        self, location: Location, manifest: Manifest, version: int, cache: Cache | None = None
    ) -> None:
        self.location, self.manifest, self.version = location, manifest, version
        self.cache = cache

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.location, self.manifest, self.version, self.cache)

    def __len__(self) -> int:
        return self.manifest.num_packs

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"Dataset({self.url!r}, version={self.version}, kind={m.kind!r}, packs={len(self)}, "
            f"examples={m.totals.examples}, tokens={m.totals.tokens}, fill_rate={m.fill_rate:.4f})"
        )

    @property
    def url(self) -> str:
        """Where the dataset is, without secrets."""
        return self.location.display

    @property
    def shard_urls(self) -> list[str]:
        """Where the shards of this version are, for readers that know no manifest.

        After an overwrite the folder holds the shards of older versions too, so give Polars,
        DuckDB or ``datasets`` this list rather than the folder.
        """
        return [self.location.join(shard.path).url for shard in self.manifest.shards]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of :meth:`iter_batches`."""
        return self.manifest.schema

    def cached(self, reading: ReadConfig) -> Dataset:
        """This dataset, read through the local cache that the settings name, if they name one.

        Raises:
            ConfigError: the cache is smaller than a shard.
            StorageError: its folder cannot be made, or is not the user's own.
        """
        if reading.cache_dir is None:
            return self
        largest = max((shard.bytes for shard in self.manifest.shards), default=0)
        if reading.cache_bytes < largest:
            must = f"setting cache_bytes must be at least the largest shard of {self.url}"
            raise ConfigError(f"{must}, {largest}; found {reading.cache_bytes}.")
        (cache := Cache(os.path.abspath(reading.cache_dir), reading.cache_bytes)).home()
        return Dataset(self.location, self.manifest, self.version, cache)

    @cached_property
    def row_groups(self) -> RowGroupTable:
        """All row groups, in file order."""
        shards = self.manifest.shards
        counts = [len(s.row_groups) for s in shards]

        def column(name: str) -> Int64:
            parts = [getattr(s.row_groups, name) for s in shards]
            return np.concatenate(parts) if parts else np.empty(0, np.int64)

        indices = [np.arange(n, dtype=np.int64) for n in counts]
        return RowGroupTable(
            shard=np.repeat(np.arange(len(shards), dtype=np.int64), counts),
            index=np.concatenate(indices) if indices else np.empty(0, np.int64),
            **{name: column(name) for name in ("rows", "examples", "tokens", "longest")},
        )

    @cached_property
    def group_rows(self) -> Int64:
        """int64 `[G]`, packs of each row group: what :class:`PackOrder` takes."""
        parts = [shard.row_groups.rows for shard in self.manifest.shards]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def group_tokens(self, group: int) -> int:
        """Tokens of a row group."""
        shard, index = self._place(group)
        return int(self.manifest.shards[shard].row_groups.tokens[index])

    @cached_property
    def group_offsets(self) -> Int64:
        """int64 `[G + 1]`, number of the first pack of each row group, in file order."""
        return to_offsets(self.group_rows)

    @cached_property
    def pack_index(self) -> PackSizes:
        """Sizes of all packs, in file order: 56 bytes for each, read when first asked for.

        Raises:
            StorageError: a file is missing, or the store refuses.
            IntegrityError: its bytes are not those that were written.
        """
        with self._whole():
            return self._sizes.all()

    def sizes(self, packs: Int64) -> PackSizes:
        """Sizes of the packs with these numbers in file order, int64 `[n]`.

        Looks them up shard by shard, so that memory does not grow with the dataset; raises as
        :attr:`pack_index`.
        """
        with self._whole():
            return self._sizes.take(packs)

    def shard_sizes(self, shard: int) -> PackSizes:
        """Sizes of the packs of a shard; raises as :attr:`pack_index`."""
        with self._whole():
            return self._sizes.shard(shard)

    def read_packs(self, group: int) -> Packs:
        """Row group `group` of the dataset, checksums verified; safe to call from many threads.

        Raises:
            MissingFilesError: this version lacks files; names one that is whole.
            StorageError: the store refuses.
            IntegrityError: its bytes are not those that were written.
        """
        shard, index = self._place(group)
        with self._whole():
            return self._readers[shard].read_packs(index)

    def fetch(self, group: int) -> Fetched:
        """The bytes of a row group, not looked at yet; raises as :meth:`read_packs`."""
        shard, index = self._place(group)
        with self._whole():
            return self._readers[shard].fetch(index)

    def decode(self, group: int, fetched: Fetched) -> CompactPacks:
        """A row group out of its bytes; raises as :meth:`read_packs`."""
        shard, index = self._place(group)
        return self._readers[shard].decode(index, fetched)

    @property
    def is_mapped(self) -> bool:
        """Whether row groups are views of local files, which costs little to decode."""
        return self.manifest.file_format == "arrow" and self.location.local_path is not None

    def expect(self, group: int) -> None:
        """Has the system read a row group of a mapped file from its disk; never raises."""
        shard, index = self._place(group)
        self._readers[shard].expect(index)

    def group_name(self, group: int) -> str:
        """Shard and row group, as error texts name them."""
        shard, index = self._place(group)
        place = self.location.join(self.manifest.shards[shard].path)
        return f"{place.display}, row group {index}"

    def object_version(self, group: int) -> str:
        """Version id or ETag of the shard of a row group, where the store tells it; else empty."""
        return object_version(self.location, self.manifest.shards[self._place(group)[0]].path)

    def iter_packs(self) -> Iterator[Packs]:
        """All packs, one row group at a time, in file order; raises as :meth:`read_packs`."""
        return map(self.read_packs, range(len(self.row_groups)))

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """All packs as Arrow batches of :attr:`schema`, one row group at a time."""
        return (to_arrow(packs, self.schema) for packs in self.iter_packs())

    def verify(self, progress: Progress | None = None, jobs: int | None = None) -> VerifyReport:
        """Reads everything and checks every hash, rule and count; collects all problems.

        Args:
            progress: called with the shards done and the shards in all, after each.
            jobs: shards that are read at a time; default: as many as processors, 4 at most.
        """
        return verify(self.location, self.manifest, progress, jobs)

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        return explaining(self.location, self.manifest, self.version)

    def _place(self, group: int) -> tuple[int, int]:
        """The shard of a row group, and its number there."""
        shard = bisect.bisect_right(self._first_groups, group) - 1
        return shard, group - self._first_groups[shard]

    @cached_property
    def _first_groups(self) -> list[int]:
        """Number of the first row group of each shard."""
        return [0, *itertools.accumulate(len(s.row_groups) for s in self.manifest.shards)][:-1]

    @cached_property
    def _sizes(self) -> SizeTable:
        return SizeTable(self.location, self.manifest)

    @cached_property
    def _readers(self) -> ShardReaders:
        return ShardReaders(self.location, self.manifest, self.cache)


def open(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
    reading: ReadConfig | None = None,
) -> Dataset:
    """The dataset at `url`, its current version by default.

    Args:
        url: a local folder or an fsspec URL.
        storage_options: what fsspec's filesystem takes.
        version: number of an older version.
        reading: of it, the local cache.

    Raises:
        DatasetNotFoundError: no dataset, or no such version, was committed there.
        FormatError: its manifest is not valid.
        StorageError: the store refuses.
        ConfigError: the cache is smaller than a shard.
    """
    location = Location(url, storage_options or {})
    return Dataset(location, *read_manifest(location, version)).cached(reading or ReadConfig())


def find_dataset(
    source: object, storage_options: Mapping[str, Any] | None = None
) -> Dataset | None:
    """The dataset at `source`, or None if `source` is anything else (a file, a glob, a table).

    Raises:
        FormatError: a dataset is there, but its manifest is not valid.
        StorageError: the store refuses.
    """
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        return None
    url = os.fspath(source)
    if any(c in url for c in "*?[") and not Location(url, storage_options or {}).is_dir():
        return None
    try:
        return open(url, storage_options)
    except DatasetNotFoundError:
        return None
