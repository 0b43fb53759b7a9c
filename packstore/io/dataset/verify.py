"""Verifies a dataset: every hash, invariant and count."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.format.arrays import SOURCE_SHIFT, Int64
from packstore.io.dataset.pack_index import PackIndex, require_same
from packstore.io.dataset.reader import COPY_AGAIN, ShardReader, ShardStream
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import check_stored
from packstore.io.shards.shard import (
    PackCounter,
    PackFigures,
    ShardInfo,
    Statistics,
    Totals,
)
from packstore.io.store.location import Location
from packstore.progress import Progress

JOBS = 4
"""Default maximum of shards verified in parallel."""

TOLERANCE = 1e-6
"""Largest error of a fraction in the statistics: other writers may round it, or compute
it in another order.
"""


@dataclass(frozen=True)
class VerifyReport:
    """The result of :meth:`Dataset.verify`.

    Attributes:
        url: the dataset, without secrets.
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


def verify(
    location: Location,
    manifest: Manifest,
    progress: Progress | None,
    jobs: int | None = None,
    first_shard: int = 0,
) -> VerifyReport:
    """Verify a dataset.

    It takes 16 bytes of memory per example, and two row groups per job.

    Args:
        location: folder of the dataset.
        manifest: the version to verify.
        progress: called after each shard.
        jobs: shards read in parallel; None: one for each processor, at most `JOBS`.
        first_shard: above 0 for a view, see :class:`Dataset`. Its totals are limits,
            and not compared.

    Raises:
        ConfigError: `jobs` is less than 1.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1; found {jobs}.")

    problems = _Problems()
    index = None
    if manifest.pack_index is not None:
        with problems.collect():
            index = PackIndex(location, manifest, manifest.pack_index, first_shard)
    for file in manifest.further_files:  # of later releases: opaque
        with problems.collect():
            check_stored(location, file)

    counter = PackCounter()
    example_ids: list[Int64] = []  # one array for each row group
    num_bytes = 0
    num_shards = len(manifest.shards)
    check_shard = partial(_check_shard, location, manifest, index)
    with ThreadPoolExecutor(jobs or min(JOBS, os.cpu_count() or 1)) as pool:
        results = pool.map(check_shard, range(num_shards))
        for num_checked, result in enumerate(results, start=1):
            problems += result.problems
            counter.merge(result.counter)
            example_ids += result.example_ids
            num_bytes += result.num_bytes
            if progress is not None:
                progress("verify", num_checked, num_shards, "shards")

    where = location.display
    totals = counter.totals(num_bytes)
    is_view = first_shard > 0
    if not problems and not is_view:  # otherwise the counts lack damaged row groups
        # Not compared: the figures of the planner cannot be counted from packs.
        planning = manifest.statistics.planning
        statistics = counter.statistics(manifest.pack_size, planning)
        _compare_totals(problems, where, manifest.totals, totals)
        _compare_statistics(problems, where, manifest.statistics, statistics)
    _check_distinct_ids(problems, where, example_ids)
    return VerifyReport(
        url=where, problems=tuple(problems), totals=totals, shards=num_shards
    )


class _Problems(list[str]):
    """Sentences about a damaged dataset."""

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Add errors of this context to the problems."""
        try:
            yield
        except PackstoreError as error:
            self.append(str(error))

    def compare(self, where: str, name: str, recorded: object, actual: object) -> None:
        """Add a problem if the manifest records another value than the actual one."""
        if isinstance(recorded, float) and isinstance(actual, float):
            is_equal = abs(recorded - actual) <= TOLERANCE
        else:
            is_equal = np.array_equal(recorded, actual)  # type: ignore[arg-type]
        if not is_equal:
            self.append(
                sentence(
                    where,
                    rule=f"must have {name} {quote(recorded, 80)}, as the manifest "
                    "says",
                    found=quote(actual, 80),
                )
            )


def _compare_totals(
    problems: _Problems, where: str, recorded: Totals, actual: Totals
) -> None:
    for name, value in vars(actual).items():
        problems.compare(where, name, getattr(recorded, name), value)


def _compare_statistics(
    problems: _Problems, where: str, recorded: Statistics, actual: Statistics
) -> None:
    for name, value in vars(actual).items():
        if name != "examples_per_pack":
            problems.compare(where, name, getattr(recorded, name), value)
    for name, value in vars(actual.examples_per_pack).items():
        problems.compare(where, name, getattr(recorded.examples_per_pack, name), value)


def _check_distinct_ids(
    problems: _Problems, where: str, example_ids: Sequence[Int64]
) -> None:
    ids = np.concatenate([np.empty(0, np.int64), *example_ids])
    ids.sort()
    is_repeated = ids[1:] == ids[:-1]
    repeated_ids = ids[1:][is_repeated]
    if len(repeated_ids):
        problems.append(
            sentence(
                where,
                rule="example ids must be distinct",
                found=f"{len(repeated_ids)} that repeat, the first of them "
                f"{repeated_ids[0]}",
            )
        )


# One shard


@dataclass
class _ShardResult:
    """Problems, counts and example ids of one shard."""

    problems: _Problems = field(default_factory=_Problems)
    counter: PackCounter = field(default_factory=PackCounter)
    example_ids: list[Int64] = field(default_factory=list)  # see `verify`
    num_bytes: int = 0


def _check_shard(
    location: Location, manifest: Manifest, index: PackIndex | None, number: int
) -> _ShardResult:
    shard = manifest.shards[number]
    where = location.join(shard.path).display
    result = _ShardResult()
    problems = result.problems
    with problems.collect(), ShardStream(location, shard) as stream:
        result.num_bytes = location.size(shard.path)
        problems.compare(where, "bytes", shard.bytes, result.num_bytes)
        reader = ShardReader(location, manifest, shard, stream, remedy=COPY_AGAIN)
        with problems.collect(), reader.error_context("footer"):
            reader.footer()  # raises if it is damaged
        if problems:  # each row group would repeat them
            return result

        figures = _read_row_groups(reader, manifest, result)
        _check_sources(manifest, shard, where, result)
        with problems.collect():
            problems.compare(where, "sha256", shard.sha256, stream.sha256())
        if problems:
            return result

        shard_figures = PackFigures.concat(figures)
        _compare_figures(problems, where, shard, figures, shard_figures)
        if index is not None and not problems:
            with problems.collect():
                recorded_sizes = index.shard(number)
                require_same(recorded_sizes, shard_figures.sizes, index.where, where)
    return result


def _read_row_groups(
    reader: ShardReader, manifest: Manifest, result: _ShardResult
) -> list[PackFigures]:
    """Check the packs of a shard, and return their figures for each row group."""
    figures: list[PackFigures] = []
    for group in range(len(reader.shard.row_groups)):
        with result.problems.collect():
            packs = reader.read_packs(group)  # checks all rules
            figures.append(PackFigures.of(packs, manifest.kind))
            result.counter.add(figures[-1], packs.lengths)
            result.example_ids.append(packs.example_ids)
    return figures


def _check_sources(
    manifest: Manifest, shard: ShardInfo, where: str, result: _ShardResult
) -> None:
    """Add a problem if example ids are of sources that the manifest lacks."""
    num_sources = len(manifest.provenance["sources"])
    if not num_sources:
        return
    # `example_id_base` also shifts the numbers of sources in the ids. Only a combined
    # dataset lists sources by shifted numbers; otherwise they cannot be checked.
    is_combined = "combined_from" in manifest.provenance
    if shard.example_id_base != 0 and not is_combined:
        return
    for ids in result.example_ids:
        last = int(ids.max(initial=0))
        source = last >> SOURCE_SHIFT
        if source >= num_sources:
            result.problems.append(
                sentence(
                    where,
                    rule=f"example ids must be of the {num_sources} sources of the "
                    "manifest",
                    found=f"{last}, of source {source}",
                )
            )


def _compare_figures(
    problems: _Problems,
    where: str,
    shard: ShardInfo,
    figures: Sequence[PackFigures],
    shard_figures: PackFigures,
) -> None:
    """Compare counts that :meth:`ShardReader.read_packs` does not check.

    Args:
        problems: where differences are added.
        where: the shard.
        shard: its entry in the manifest.
        figures: actual figures of each row group.
        shard_figures: actual figures of all row groups.
    """
    sequences = int(shard_figures.sequences.sum())
    problems.compare(where, "sequences", shard.sequences, sequences)
    supervised_tokens = int(shard_figures.supervised_tokens.sum())
    problems.compare(
        where, "supervised_tokens", shard.supervised_tokens, supervised_tokens
    )
    longest = np.array([group.longest_segments.max() for group in figures])
    problems.compare(where, "longest", shard.row_groups.longest, longest)
