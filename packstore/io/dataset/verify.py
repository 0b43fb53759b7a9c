"""Verifies a dataset: every hash, invariant and count."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.format.arrays import Int64
from packstore.format.rules import check_packs
from packstore.io.dataset.pack_index import PackIndex
from packstore.io.dataset.reader import ShardReader
from packstore.io.manifest.manifest import Manifest
from packstore.io.shards.shard import FileHashes, ShardInfo, describe_shard
from packstore.io.shards.shard_bytes import ShardBytes
from packstore.io.shards.statistics import (
    PackCounter,
    Totals,
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
class _Findings:
    """Problems and totals of one shard."""

    problems: list[str] = field(default_factory=list)
    counter: PackCounter = field(default_factory=PackCounter)
    example_ids: list[Int64] = field(default_factory=list)
    bytes: int = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Turns errors in this context into problems."""
        try:
            yield
        except PackstoreError as error:
            self.problems.append(str(error))


def verify(
    location: Location, manifest: Manifest, progress: Progress | None, jobs: int | None = None
) -> VerifyReport:
    """Verifies a dataset; see :meth:`Dataset.verify`.

    Memory: 16 bytes per example, and for each job two windows and a row group.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1; found {jobs}.")
    where = location.display
    whole, ids = _Findings(), list[Int64]()
    counter, problems, index = whole.counter, whole.problems, None
    if manifest.pack_index is not None:
        with whole.noted():
            index = PackIndex(location, manifest, manifest.pack_index)
    for done, found in enumerate(_each_shard(location, manifest, index, jobs), 1):
        problems += found.problems
        ids += found.example_ids
        whole.bytes += found.bytes
        counter.merge(found.counter)
        if progress is not None:
            progress("verify", done, len(manifest.shards), "shards")
    totals = counter.totals(whole.bytes)
    if not problems:
        real = counter.statistics(manifest.pack_size, manifest.statistics.planning)
        problems += _differences(where, manifest.totals, totals, _names(totals))
        problems += _differences(where, manifest.statistics, real, _names(real))
    every = np.concatenate([np.empty(0, np.int64), *ids])
    every.sort()
    problems += _repeated_ids(where, every)
    return VerifyReport(where, tuple(problems), totals, len(manifest.shards))


def _names(value: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(value))


def _each_shard(
    location: Location, manifest: Manifest, index: PackIndex | None, jobs: int | None
) -> Iterator[_Findings]:
    """Yields findings in the order of the shards; buffers only a few."""
    threads = jobs or min(JOBS, os.cpu_count() or 1)
    numbers = iter(range(len(manifest.shards)))
    waiting: deque[Future[_Findings]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        while True:
            for number in itertools.islice(numbers, 2 * threads - len(waiting)):
                waiting.append(pool.submit(_verify_shard, location, manifest, number, index))
            if not waiting:
                return
            yield waiting.popleft().result()


def _verify_shard(
    location: Location, manifest: Manifest, number: int, index: PackIndex | None
) -> _Findings:
    shard, found = manifest.shards[number], _Findings()
    where = location.join(shard.path).display
    with found.noted():
        found.bytes = location.size(shard.path)
        file = ShardBytes(location, shard)
    if found.problems:
        return found
    if found.bytes != shard.bytes:
        found.problems += [_differs(where, "bytes", shard.bytes, found.bytes)]
    reader = ShardReader(location, manifest, shard, file)
    first_row, figures = 0, list[Int64]()
    for group, rows in enumerate(shard.row_groups.rows.tolist()):
        with found.noted():
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
            found.counter.add(figures[-1], packs.lengths)
            found.example_ids.append(packs.example_ids)
        first_row += rows
    with found.noted():
        found.problems += _check_hashes(where, shard, file)
    if not found.problems:
        hashes = FileHashes(**{name: getattr(shard, name) for name in _names(FileHashes)})
        info = describe_shard(shard.path, figures, hashes, shard.row_groups.crc32)
        found.problems += _differences(where, shard, info, ("sequences", "supervised_tokens"))
        found.problems += _differences(where, shard.row_groups, info.row_groups, ("longest",))
        if index is not None:
            with found.noted():
                found.problems += _index_differences(index, number, np.concatenate(figures))
    return found


def _check_hashes(where: str, shard: ShardInfo, file: ShardBytes) -> list[str]:
    """Reads the rest of a shard; returns a sentence for each hash that does not match."""
    return [
        _differs(where, name, getattr(shard, name), value)
        for name, value in file.hashes().items()
        if value != getattr(shard, name)
    ]


def _index_differences(index: PackIndex, number: int, figures: Int64) -> list[str]:
    """Returns a sentence for each column of the pack index that differs from the packs."""
    told = index.shard(number)
    where, real = f"{index.where}, row group {number}", pack_sizes(figures)
    return [
        sentence(where, f"must have the {name} of each pack of its shard", "others")
        for name in _names(real)
        if getattr(told, name) is not None
        and not np.array_equal(getattr(told, name), getattr(real, name))
    ]


def _differences(where: str, told: object, real: object, names: tuple[str, ...]) -> list[str]:
    """Returns a sentence for each named attribute that is wrong in the manifest."""
    return [
        _differs(where, name, a, b)
        for name in names
        if not np.array_equal(a := getattr(told, name), b := getattr(real, name))
    ]


def _differs(where: str, name: str, told: object, real: object) -> str:
    must = f"must have {name} {quote(told, 80)}, as the manifest says"
    return sentence(where, must, quote(real, 80))


def _repeated_ids(where: str, every: Int64) -> list[str]:
    """Returns a sentence if two of the sorted ids are equal."""
    repeated = every[1:][every[1:] == every[:-1]]
    if not len(repeated):
        return []
    first = f"{len(repeated)} that repeat, the first of them {repeated[0]}"
    return [sentence(where, "example ids must be distinct", first)]
