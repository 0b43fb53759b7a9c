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
from packstore.errors import DatasetNotFoundError, PackstoreError
from packstore.format.arrays import Int64, Packs, PackSizes, to_offsets
from packstore.format.html import card
from packstore.format.schema import to_arrow
from packstore.io.dataset.cache import Cache
from packstore.io.dataset.pack_index import SizeTable
from packstore.io.dataset.reader import Fetched, ShardReader
from packstore.io.dataset.verify import VerifyReport, verify
from packstore.io.manifest.commit import require_files
from packstore.io.manifest.manifest import Manifest, read_manifest
from packstore.io.store.location import Location, PerProcess
from packstore.progress import Progress

OPEN_SHARDS = 64
"""Shards whose parsed footers are kept, some kB for each row group."""


@dataclass(frozen=True, eq=False)
class RowGroupTable:
    """All row groups of a dataset, in file order: int64 `[G]` each."""

    shard: Int64  # position of the shard in the manifest
    index: Int64  # position of the row group in its shard
    rows: Int64  # rows, examples, tokens: of the row group
    examples: Int64
    tokens: Int64
    longest: Int64  # its longest segment, in tokens

    def __len__(self) -> int:
        return len(self.shard)


class Dataset:
    """A committed version of a dataset, which never changes. Picklable; opens files
    when it reads.

    `location` is its folder, `version` the number of its `manifest`; `cache` keeps row
    groups.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        version: int,
        cache: Cache | None = None,
    ) -> None:
        self.location, self.manifest, self.version, self.cache = (
            location,
            manifest,
            version,
            cache,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.location, self.manifest, self.version, self.cache)

    def __len__(self) -> int:
        return self.manifest.num_packs

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"Dataset({self.url!r}, version={self.version}, kind={m.kind!r}, "
            f"packs={len(self)}, "
            f"examples={m.totals.examples}, tokens={m.totals.tokens}, "
            f"fill_rate={m.fill_rate:.4f})"
        )

    def _repr_html_(self) -> str:
        parts: list[int] = []
        if len(self):
            with contextlib.suppress(
                PackstoreError
            ):  # a notebook shows the facts without a store
                parts = self.read_packs(0).row(0).example_tokens.tolist()
        title = f"Dataset {self.url}, version {self.version}"
        return card(title, self.manifest.facts, parts, self.manifest.pack_size)

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
        """Returns this dataset with the local cache of the settings, if they
        name one.
        """
        if reading.cache_dir is None:
            return self
        cache = Cache(os.path.abspath(reading.cache_dir))
        cache.home()
        return Dataset(self.location, self.manifest, self.version, cache)

    @cached_property
    def row_groups(self) -> RowGroupTable:
        """All row groups, in file order."""
        parts = [[np.empty(0, np.int64)] * 6]
        for n, g in enumerate(shard.row_groups for shard in self.manifest.shards):
            places = np.full(len(g), n), np.arange(len(g))
            parts.append([*places, g.rows, g.examples, g.tokens, g.longest])
        return RowGroupTable(*map(np.concatenate, zip(*parts, strict=True)))

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
        """Returns the sizes of packs, by their numbers in file order, int64 `[n]`.

        Memory does not grow with the dataset; raises like :attr:`pack_index`.
        """
        return self._sizes.take(packs)

    def shard_sizes(self, shard: int) -> PackSizes:
        """Returns the sizes of the packs of a shard; raises like :attr:`pack_index`."""
        return self._sizes.shard(shard)

    def read_packs(self, group: int) -> Packs:
        """Returns row group `group` of the dataset, verified by checksum. Thread-safe.

        Raises:
            StorageError: a shard is missing, or the store refuses.
            IntegrityError: a checksum does not match.
        """
        reader, index = self._reader(group)
        return reader.read_packs(index)

    def read_columns(
        self, group: int, names: Sequence[str]
    ) -> tuple[pa.RecordBatch, str, int]:
        """Returns columns as stored (all of an Arrow shard), their place, and their id
        base.
        """
        reader, index = self._reader(group)
        batch = reader.read_columns(index, names)
        return batch, self.group_name(group), reader.shard.example_id_base

    def fetch(self, group: int) -> Fetched:
        """Returns the bytes of a row group, not verified yet; raises like
        :meth:`read_packs`.
        """
        reader, index = self._reader(group)
        return reader.fetch(index)

    def decode(self, group: int, fetched: Fetched) -> Packs:
        """Verifies and decodes the bytes of a row group; raises like
        :meth:`read_packs`.

        What the pack index tells of it, by which loaders plan and losses divide, must
        be so.
        """
        reader, index = self._reader(group)
        packs = reader.decode(index, fetched)
        self._sizes.require_same(
            int(self.group_offsets[group]), packs, self.group_name(group)
        )
        return packs

    @property
    def is_mapped(self) -> bool:
        """True if row groups are memory-mapped local files, which are cheap to
        decode.
        """
        return (
            self.manifest.file_format == "arrow"
            and self.location.local_path is not None
        )

    def prefetch(self, group: int) -> None:
        """Makes the system prefetch a row group of a mapped file from disk; never
        raises.
        """
        reader, index = self._reader(group)
        reader.prefetch(index)

    def group_name(self, group: int) -> str:
        """Returns shard and row group for error texts."""
        reader, index = self._reader(group)
        return f"{reader.where}, row group {index}"

    def iter_packs(self) -> Iterator[Packs]:
        """Yields all packs in file order, by row group; raises like
        :meth:`read_packs`.
        """
        return map(self.read_packs, range(len(self.row_groups)))

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all packs as Arrow batches of :attr:`schema`, one for each row
        group.
        """
        return (to_arrow(packs, self.schema) for packs in self.iter_packs())

    def verify(
        self, progress: Progress | None = None, jobs: int | None = None
    ) -> VerifyReport:
        """Reads the whole dataset, checks every hash, invariant and count; returns all
        problems.

        `progress` is called after each shard; `jobs` are read in parallel, by default
        one for each processor, at most 4.
        """
        return verify(self.location, self.manifest, progress, jobs)

    def require_files(self) -> None:
        """Raises :class:`MissingFilesError` if the dataset lacks a file of this
        version.
        """
        rule = f"must have all files that version {self.version} names"
        remedy = (
            "Open another version, or pack it again with overwrite=True (--overwrite)"
        )
        require_files(self.location, self.manifest.files, rule, remedy)

    def _reader(self, group: int) -> tuple[ShardReader, int]:
        shard, index = self.row_groups.shard[group], self.row_groups.index[group]
        return self._readers.get()(int(shard)), int(index)

    @cached_property
    def _sizes(self) -> SizeTable:
        return SizeTable(self.location, self.manifest)

    @cached_property
    def _readers(self) -> PerProcess[Callable[[int], ShardReader]]:
        location, manifest, cache = (
            self.location,
            self.manifest,
            self.cache,
        )  # no circle of self

        def reader(shard: int) -> ShardReader:
            return ShardReader(location, manifest, manifest.shards[shard], cache=cache)

        return PerProcess(lambda: functools.lru_cache(OPEN_SHARDS)(reader))


def open(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
    reading: ReadConfig | None = None,
) -> Dataset:
    """Opens the dataset at `url`, by default its current version.

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
    return Dataset(location, *read_manifest(location, version)).cached(
        reading or ReadConfig()
    )


def find_dataset(
    source: object, storage_options: Mapping[str, Any] | None = None
) -> Dataset | None:
    """Opens the dataset at `source`; returns None for any other source (file, glob,
    table).
    """
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        return None
    url = os.fspath(source)
    if (
        any(c in url for c in "*?[")
        and not Location(url, storage_options or {}).is_dir()
    ):
        return None
    try:
        return open(url, storage_options)
    except DatasetNotFoundError:
        return None
