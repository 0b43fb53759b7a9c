"""Verifies a dataset: every hash, invariant and count."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.format.arrays import SOURCE_SHIFT, Int64
from packstore.format.rules import check_prefix
from packstore.io.dataset.pack_index import PackIndex, require_same
from packstore.io.dataset.reader import ShardReader, ShardStream
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import check_stored
from packstore.io.shards.shard import PackCounter, Totals, pack_figures, pack_sizes
from packstore.io.store.location import Location
from packstore.progress import Progress

JOBS = 4
"""Default maximum of shards verified in parallel."""


TOLERANCE = 1e-6
"""Largest error of a fraction in the statistics: writers may round, and divide
otherwise.
"""


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
    """Problems and totals of one shard, or of all; named like the fields of a shard."""

    problems: list[str] = field(default_factory=list)
    counter: PackCounter = field(default_factory=PackCounter)
    example_ids: list[Int64] = field(default_factory=list)
    bytes: int = 0
    sha256: str = ""
    sequences: int = 0
    supervised_tokens: int = 0
    longest: Int64 | None = None

    @contextlib.contextmanager
    def collecting_errors(self) -> Iterator[None]:
        """Turns errors in this context into problems."""
        try:
            yield
        except PackstoreError as error:
            self.problems.append(str(error))

    def compare(
        self, where: str, recorded: object, real: object, names: Iterable[str]
    ) -> None:
        """Adds a problem for each named attribute that is wrong in the manifest."""
        for name in names:
            a, b = getattr(recorded, name), getattr(real, name)
            near = isinstance(a, float) and abs(a - b) <= TOLERANCE
            if not near and not np.array_equal(a, b):
                rule = f"must have {name} {quote(a, 80)}, as the manifest says"
                self.problems.append(sentence(where, rule, quote(b, 80)))


def verify(
    location: Location,
    manifest: Manifest,
    progress: Progress | None,
    jobs: int | None = None,
) -> VerifyReport:
    """Verifies a dataset in 16 bytes per example, and two row groups for each job."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1; found {jobs}.")
    where, whole, index = location.display, _Checked(), None
    if manifest.pack_index is not None:
        with whole.collecting_errors():
            index = PackIndex(location, manifest, manifest.pack_index)
    for file in manifest.further_files:
        with whole.collecting_errors():
            check_stored(location, file)
    numbers, check = (
        range(len(manifest.shards)),
        partial(_check_shard, location, manifest, index),
    )
    with ThreadPoolExecutor(jobs or min(JOBS, os.cpu_count() or 1)) as pool:
        for done, checked in enumerate(pool.map(check, numbers), 1):
            whole.problems += checked.problems
            whole.example_ids += checked.example_ids
            whole.bytes += checked.bytes
            whole.counter.merge(checked.counter)
            if progress is not None:
                progress("verify", done, len(numbers), "shards")
    totals = whole.counter.totals(whole.bytes)
    if not whole.problems:
        recorded = manifest.statistics
        real = whole.counter.statistics(manifest.pack_size, recorded.planning)
        whole.compare(where, manifest.totals, totals, vars(totals))
        whole.compare(
            where, recorded, real, [n for n in vars(real) if n != "examples_per_pack"]
        )
        whole.compare(
            where,
            recorded.examples_per_pack,
            real.examples_per_pack,
            ("min", "mean", "max"),
        )
    ids = np.concatenate([np.empty(0, np.int64), *whole.example_ids])
    ids.sort()
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        found = f"{len(repeated)} that repeat, the first of them {repeated[0]}"
        whole.problems.append(sentence(where, "example ids must be distinct", found))
    return VerifyReport(where, tuple(whole.problems), totals, len(manifest.shards))


def _check_shard(
    location: Location, manifest: Manifest, index: PackIndex | None, number: int
) -> _Checked:
    shard, checked = manifest.shards[number], _Checked()
    where = location.join(shard.path).display
    with checked.collecting_errors(), ShardStream(location, shard) as stream:
        checked.bytes = location.size(shard.path)
        checked.compare(where, shard, checked, ("bytes",))
        reader = ShardReader(location, manifest, shard, stream)
        figures, first_row = list[Int64](), 0
        with checked.collecting_errors(), reader.error_context("footer"):
            reader.footer()  # also of a shard without row groups
        if checked.problems:  # each row group would say the same
            return checked
        for group, rows in enumerate(shard.row_groups.rows.tolist()):
            with checked.collecting_errors():
                packs = reader.read_packs(group)
                if manifest.layout == "shared_prefix":  # a read checks all else
                    check_prefix(packs, where, first_row)
                figures.append(pack_figures(packs, manifest.kind))
                checked.counter.add(figures[-1], packs.lengths)
                checked.example_ids.append(packs.example_ids)
            first_row += rows
        sources = len(manifest.provenance["sources"])
        # With a base, a combined dataset alone tells them apart.
        if shard.example_id_base == 0 or "combined_from" in manifest.provenance:
            for ids in checked.example_ids if sources else ():
                if (last := int(ids.max(initial=0))) >> SOURCE_SHIFT >= sources:
                    rule = (
                        f"example ids must be of the {sources} sources of the manifest"
                    )
                    found = f"{last}, of source {last >> SOURCE_SHIFT}"
                    checked.problems.append(sentence(where, rule, found))
        with checked.collecting_errors():
            checked.sha256 = stream.sha256()  # reads the rest
            checked.compare(where, shard, checked, ("sha256",))
        if checked.problems:
            return checked
        every = np.concatenate([np.empty((0, 10), np.int64), *figures])
        checked.sequences, checked.supervised_tokens = (
            every[:, [1, 3]].sum(axis=0).tolist()
        )
        checked.longest = np.array([packs[:, 4].max() for packs in figures])
        checked.compare(where, shard, checked, ("sequences", "supervised_tokens"))
        checked.compare(where, shard.row_groups, checked, ("longest",))
        if index is not None and not checked.problems:
            with checked.collecting_errors():
                require_same(index.shard(number), pack_sizes(every), index.where, where)
    return checked
