"""Opens and reads committed datasets."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from packstore.config import ReadConfig
from packstore.errors import (
    ConfigError,
    PackstoreError,
    sentence,
)
from packstore.format.arrays import Int64, Packs, PackSizes, to_offsets
from packstore.format.html import card
from packstore.format.schema import to_arrow
from packstore.io.dataset.cache import Cache
from packstore.io.dataset.pack_index import SizeTable
from packstore.io.dataset.reader import GroupBytes, ShardReader
from packstore.io.dataset.verify import VerifyReport, verify
from packstore.io.manifest.commit import list_versions, require_files
from packstore.io.manifest.manifest import Manifest, read_manifest
from packstore.io.manifest.merge import last_parts
from packstore.io.store.location import Location, PerProcess
from packstore.progress import Progress

OPEN_SHARDS = 64
"""Maximum of parsed footers in memory, some kB for each row group."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowGroupTable:
    """All row groups of a dataset, in file order: int64 `[G]` each."""

    shard: Int64  # position of the shard in the manifest
    index: Int64  # position of the row group in its shard
    rows: Int64  # packs of the row group
    examples: Int64
    tokens: Int64
    longest: Int64  # tokens of its longest segment

    def __len__(self) -> int:
        return len(self.shard)

    @classmethod
    def of(cls, manifest: Manifest) -> RowGroupTable:
        """Return the row groups of a manifest."""
        groups = [shard.row_groups for shard in manifest.shards]
        num_groups = [len(group) for group in groups]
        return cls(
            shard=np.repeat(np.arange(len(groups)), num_groups),
            index=_join([np.arange(count) for count in num_groups]),
            rows=_join([group.rows for group in groups]),
            examples=_join([group.examples for group in groups]),
            tokens=_join([group.tokens for group in groups]),
            longest=_join([group.longest for group in groups]),
        )


def _join(columns: Sequence[Int64]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *columns])


class Dataset:
    """A committed version of a dataset, which never changes. Picklable; opens files
    when it reads.

    Attributes:
        location: its folder.
        manifest: its manifest.
        version: number of its manifest.
        cache: keeps row groups on the local disk; None: no cache.
        first_shard: number of its first shard in the version; above 0 in a view of the
            :meth:`last_versions`, whose manifest lacks the shards before it.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        version: int,
        cache: Cache | None = None,
        first_shard: int = 0,
    ) -> None:
        self.location = location
        self.manifest = manifest
        self.version = version
        self.cache = cache
        self.first_shard = first_shard

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.location,
            self.manifest,
            self.version,
            self.cache,
            self.first_shard,
        )
        return Dataset, fields

    def __len__(self) -> int:
        return self.manifest.num_packs

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"Dataset({self.url!r}, version={self.version}, kind={manifest.kind!r}, "
            f"packs={len(self)}, examples={manifest.totals.examples}, "
            f"tokens={manifest.totals.tokens}, fill_rate={manifest.fill_rate:.4f})"
        )

    def _repr_html_(self) -> str:
        example_tokens: list[int] = []
        if len(self):
            # If the store cannot be read, a notebook shows the facts without a chart.
            with contextlib.suppress(PackstoreError):
                example_tokens = self.read_packs(0).row(0).example_tokens.tolist()
        title = f"Dataset {self.url}, version {self.version}"
        return card(title, self.manifest.facts, example_tokens, self.manifest.pack_size)

    @property
    def url(self) -> str:
        """URL of the dataset, without secrets."""
        return self.location.display

    @property
    def shard_urls(self) -> list[str]:
        """URLs of the shards of this version, for readers that do not read manifests.

        After an overwrite the folder also contains shards of older versions, so pass
        this list, not the folder, to Polars, DuckDB or ``datasets``.
        """
        return [self.location.join(shard.path).url for shard in self.manifest.shards]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of :meth:`iter_batches`."""
        return self.manifest.schema

    def cached(self, reading: ReadConfig) -> Dataset:
        """Return this dataset with the local cache of the settings, if they name one.

        Raises:
            StorageError: others can write to the cache's folder, or it cannot be
                created.
        """
        if reading.cache_dir is None:
            return self
        cache = Cache(os.path.abspath(reading.cache_dir))
        cache.home()
        return Dataset(
            self.location, self.manifest, self.version, cache, self.first_shard
        )

    def last_versions(self, count: int) -> Dataset:
        """Return a view of the packs that the newest versions added.

        A version adds a part: the packs of one `append`; the first, those of `pack`.
        `concat` adds the parts of its datasets. Parts that were packed again together
        are one; one without examples is not counted.

        Examples keep their ids, and the view has a fingerprint of its own: a loader's
        position in one window is refused in another. Side data need to cover the view
        only. Sums in its manifest are those of its shards; most statistics are limits
        that hold for the whole dataset, so that fixed shapes are equal in each window.

        Args:
            count: number of versions; more than there are: all.

        Raises:
            ConfigError: `count` is less than 1.
        """
        if count < 1:
            raise ConfigError(f"last_versions must be at least 1; found {count}.")
        manifest = last_parts(self.manifest, count)
        if manifest is self.manifest:
            return self
        num_absent_shards = len(self.manifest.shards) - len(manifest.shards)
        return Dataset(
            self.location,
            manifest,
            self.version,
            self.cache,
            self.first_shard + num_absent_shards,
        )

    def require_whole(self, rule: str) -> None:
        """Raise ConfigError, with this rule, for a view of the last versions."""
        if self.first_shard:
            raise ConfigError(
                sentence(
                    where=self.url,
                    rule=rule,
                    found="a view of its last versions",
                    remedy="Open it again",
                )
            )

    @cached_property
    def row_groups(self) -> RowGroupTable:
        """All row groups, in file order."""
        return RowGroupTable.of(self.manifest)

    @property
    def group_rows(self) -> Int64:
        """int64 `[G]`, packs of each row group, for :class:`PackOrder`."""
        return self.row_groups.rows

    @cached_property
    def group_offsets(self) -> Int64:
        """int64 `[G + 1]`, number of the first pack of each row group, in file
        order.
        """
        return to_offsets(self.group_rows)

    @cached_property
    def pack_index(self) -> PackSizes:
        """Sizes of all packs, in file order; 56 bytes per pack, read at first use.

        Raises like :meth:`read_packs`.
        """
        return self._sizes.all()

    def sizes(self, packs: Int64) -> PackSizes:
        """Return the sizes of packs, in memory that does not grow with the dataset.

        Args:
            packs: int64 `[n]`, their numbers in file order.

        Raises:
            StorageError: the index or a shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        return self._sizes.take(packs)

    def shard_sizes(self, shard: int) -> PackSizes:
        """Return the sizes of the packs of a shard; raise like :meth:`sizes`."""
        return self._sizes.shard(shard)

    def read_packs(self, group: int) -> Packs:
        """Return row group `group` of the dataset, verified by checksum. Thread-safe.

        Raises:
            StorageError: a shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        reader, index = self._reader(group)
        return reader.read_packs(index)

    def read_columns(
        self, group: int, names: Sequence[str]
    ) -> tuple[pa.RecordBatch, str, int]:
        """Return columns of a row group as they are stored.

        Args:
            group: number of the row group.
            names: columns; of an Arrow shard all are returned.

        Returns:
            The columns, the name of the row group, and the number to add to its example
            ids.

        Raises:
            StorageError: a shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        reader, index = self._reader(group)
        batch = reader.read_columns(index, names)
        return batch, self.group_name(group), reader.shard.example_id_base

    def fetch(self, group: int) -> GroupBytes:
        """Return the bytes of a row group, not verified yet; raise like
        :meth:`read_packs`.
        """
        reader, index = self._reader(group)
        return reader.fetch(index)

    def decode(self, group: int, data: GroupBytes) -> Packs:
        """Verify and decode the bytes of a row group.

        The pack index must agree: loaders plan with it, and losses divide by it.

        Raises:
            StorageError: the index cannot be read.
            IntegrityError: a checksum does not match, or the index has other sizes.
        """
        reader, index = self._reader(group)
        packs = reader.decode(index, data)
        first_pack = int(self.group_offsets[group])
        self._sizes.require_same(first_pack, packs, self.group_name(group))
        return packs

    @property
    def is_mapped(self) -> bool:
        """True if row groups are memory-mapped local files, which are cheap to
        decode.
        """
        is_local = self.location.local_path is not None
        return is_local and self.manifest.file_format == "arrow"

    def prefetch(self, group: int) -> None:
        """Let the system read a row group of a mapped file ahead; never raise."""
        reader, index = self._reader(group)
        reader.prefetch(index)

    def group_name(self, group: int) -> str:
        """Return shard and row group for error texts."""
        reader, index = self._reader(group)
        return f"{reader.where}, row group {index}"

    def iter_packs(self) -> Iterator[Packs]:
        """Yield all packs in file order, by row group.

        Raises like :meth:`read_packs`.
        """
        for group in range(len(self.row_groups)):
            yield self.read_packs(group)

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all packs as Arrow batches of :attr:`schema`, one for each row
        group.
        """
        for packs in self.iter_packs():
            yield to_arrow(packs, self.schema)

    def verify(
        self, progress: Progress | None = None, jobs: int | None = None
    ) -> VerifyReport:
        """Read the whole dataset, and check every hash, invariant and count.

        Args:
            progress: called after each shard.
            jobs: shards read in parallel; None: one for each processor, at most 4.

        Returns:
            All problems, in one report.

        Raises:
            ConfigError: `jobs` is less than 1.
        """
        return verify(self.location, self.manifest, progress, jobs, self.first_shard)

    def require_files(self) -> None:
        """Raise :class:`MissingFilesError` if the dataset lacks a file of this
        version.
        """
        rule = f"must have all files that version {self.version} names"
        remedy = (
            "Open another version, or pack it again with overwrite=True (--overwrite)"
        )
        require_files(self.location, self.manifest.files, rule, remedy)

    def _reader(self, group: int) -> tuple[ShardReader, int]:
        """Return the reader of a row group's shard, and its position in the shard."""
        shard = int(self.row_groups.shard[group])
        index = int(self.row_groups.index[group])
        open_shard = self._shard_readers.get()
        return open_shard(shard), index

    @cached_property
    def _sizes(self) -> SizeTable:
        return SizeTable(self.location, self.manifest, self.first_shard)

    @cached_property
    def _shard_readers(self) -> PerProcess[Callable[[int], ShardReader]]:
        # The functions do not refer to self: a cycle would keep the dataset in memory
        # until the next garbage collection.
        location = self.location
        manifest = self.manifest
        cache = self.cache

        def open_shard(shard: int) -> ShardReader:
            return ShardReader(location, manifest, manifest.shards[shard], cache=cache)

        def remember_shards() -> Callable[[int], ShardReader]:
            return functools.lru_cache(OPEN_SHARDS)(open_shard)

        return PerProcess(remember_shards)


def open(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
    reading: ReadConfig | None = None,
) -> Dataset:
    """Open the dataset at `url`, by default its current version.

    Args:
        url: a local folder or an fsspec URL.
        storage_options: options of the fsspec filesystem.
        version: number of an older version.
        reading: only its settings of the local cache are used.

    Raises:
        DatasetNotFoundError: no dataset, or no such version, was committed there.
        FormatError: its manifest is not valid.
        StorageError: the store refuses.
    """
    location = Location(url, storage_options or {})
    manifest, number = read_manifest(location, version)
    return Dataset(location, manifest, number).cached(reading or ReadConfig())


def find_dataset(
    source: object,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> Dataset | None:
    """Open the dataset at `source`; return None if it is another source (file, glob,
    table).

    Raises:
        DatasetNotFoundError: the dataset does not have this version.
        FormatError: the manifest is not valid.
        StorageError: the store refuses.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    url = os.fspath(source)
    location = Location(url, storage_options or {})
    has_wildcard = any(character in url for character in "*?[")
    if has_wildcard and not location.is_dir():
        return None
    sizes = list_versions(location)
    if not sizes:
        return None
    manifest, number = read_manifest(location, version, sizes)
    return Dataset(location, manifest, number).cached(ReadConfig())
