"""Verifies a dataset: every hash, invariant and count."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import numpy as np

from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.format.arrays import Int64, PackSizes
from packstore.format.rules import check_packs
from packstore.io.dataset.pack_index import PackIndex
from packstore.io.dataset.reader import ShardBytes, ShardReader
from packstore.io.manifest.manifest import Manifest
from packstore.io.shards.shard import (
    FileHashes,
    PackCounter,
    Totals,
    describe_shard,
    pack_figures,
    pack_sizes,
)
from packstore.io.store.location import Location
from packstore.progress import Progress

JOBS = 4
"""Default maximum of shards verified in parallel."""


@dataclass(frozen=True)
class VerifyReport:
    """The result of :meth:`Dataset.verify`.

    Attributes:
        problems: one sentence each; empty if the dataset is intact.
        totals: counted from the shards, not from the manifest.
        shards: number of shards checked.
    """

    url: str
    problems: tuple[str, ...]
    totals: Totals
    shards: int

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


@dataclass
class _Checked:
    """Problems and totals of one shard, or of all."""

    problems: list[str] = field(default_factory=list)
    counter: PackCounter = field(default_factory=PackCounter)
    example_ids: list[Int64] = field(default_factory=list)
    bytes: int = 0

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Turns errors in this context into problems."""
        try:
            yield
        except PackstoreError as error:
            self.problems.append(str(error))

    def compare(self, where: str, recorded: object, real: object, names: Iterable[str]) -> None:
        """Adds a problem for each named attribute that is wrong in the manifest."""
        for name in names:
            a, b = getattr(recorded, name), getattr(real, name)
            if not np.array_equal(a, b):
                must = f"must have {name} {quote(a, 80)}, as the manifest says"
                self.problems.append(sentence(where, must, quote(b, 80)))


def verify(
    location: Location, manifest: Manifest, progress: Progress | None, jobs: int | None = None
) -> VerifyReport:
    """Verifies a dataset in 16 bytes per example, and for each job two windows and a row group."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1; found {jobs}.")
    where, whole, index = location.display, _Checked(), None
    if manifest.pack_index is not None:
        with whole.noting():
            index = PackIndex(location, manifest, manifest.pack_index)
    for done, checked in enumerate(_each_shard(location, manifest, index, jobs), 1):
        whole.problems += checked.problems
        whole.example_ids += checked.example_ids
        whole.bytes += checked.bytes
        whole.counter.merge(checked.counter)
        if progress is not None:
            progress("verify", done, len(manifest.shards), "shards")
    totals = whole.counter.totals(whole.bytes)
    if not whole.problems:
        real = whole.counter.statistics(manifest.pack_size, manifest.statistics.planning)
        whole.compare(where, manifest.totals, totals, vars(totals))
        whole.compare(where, manifest.statistics, real, vars(real))
    ids = np.concatenate([np.empty(0, np.int64), *whole.example_ids])
    ids.sort()
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        first = f"{len(repeated)} that repeat, the first of them {repeated[0]}"
        whole.problems.append(sentence(where, "example ids must be distinct", first))
    return VerifyReport(where, tuple(whole.problems), totals, len(manifest.shards))


def _each_shard(
    location: Location, manifest: Manifest, index: PackIndex | None, jobs: int | None
) -> Iterator[_Checked]:
    """Yields what was found in each shard, in order; buffers only a few."""
    threads = jobs or min(JOBS, os.cpu_count() or 1)
    numbers = iter(range(len(manifest.shards)))
    waiting: deque[Future[_Checked]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        while True:
            for number in itertools.islice(numbers, 2 * threads - len(waiting)):
                waiting.append(pool.submit(_check_shard, location, manifest, number, index))
            if not waiting:
                return
            yield waiting.popleft().result()


def _check_shard(
    location: Location, manifest: Manifest, number: int, index: PackIndex | None
) -> _Checked:
    shard, checked = manifest.shards[number], _Checked()
    where = location.join(shard.path).display
    with checked.noting():
        checked.bytes = location.size(shard.path)
    if checked.problems:
        return checked
    checked.compare(where, shard, checked, ("bytes",))
    file, figures, first_row = ShardBytes(location, shard), list[Int64](), 0
    reader = ShardReader(location, manifest, shard, file)
    for group, rows in enumerate(shard.row_groups.rows.tolist()):
        with checked.noting():
            packs = reader.read_packs(group)
            check_packs(
                packs,
                layout=manifest.layout,
                pack_size=manifest.pack_size,
                vocab_size=manifest.vocab_size,
                where=where,
                first_row=first_row,
            )
            figures.append(pack_figures(packs, manifest.kind))
            checked.counter.add(figures[-1], packs.lengths)
            checked.example_ids.append(packs.example_ids)
        first_row += rows
    with checked.noting():
        hashes = file.hashes()  # reads the rest
        checked.compare(where, shard, SimpleNamespace(**hashes), hashes)
    if not checked.problems:
        stored = FileHashes(**{f.name: getattr(shard, f.name) for f in fields(FileHashes)})
        real = describe_shard(shard.path, figures, stored, shard.row_groups.crc32)
        checked.compare(where, shard, real, ("sequences", "supervised_tokens"))
        checked.compare(where, shard.row_groups, real.row_groups, ("longest",))
    if index is not None and not checked.problems:
        with checked.noting():
            _compare_index(index, number, pack_sizes(np.concatenate(figures)), checked)
    return checked


def _compare_index(index: PackIndex, number: int, real: PackSizes, checked: _Checked) -> None:
    """Adds a problem for each column of the pack index that differs from the packs."""
    recorded = index.shard(number)
    for name in (column.name for column in fields(PackSizes)):
        values = getattr(recorded, name)
        if values is not None and not np.array_equal(values, getattr(real, name)):
            must = f"must have the {name} of each pack of its shard"
            place = f"{index.where}, row group {number}"
            checked.problems.append(sentence(place, must, "others"))
