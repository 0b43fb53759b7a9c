"""Properties, totals and statistics of shards and packs, which a manifest records."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int64, Packs, PackSizes, count_packs
from packstore.format.typed_json import Checksums, Count, Positive, Real, Sha256, Share

_crc32 = zlib.crc32
with contextlib.suppress(ImportError):
    from isal.isal_zlib import crc32 as _faster

    # Every read depends on it, so a native crc32 is used only if it passes the standard
    # test.
    if _faster(b"56789", _faster(b"1234")) == _faster(b"123456789") == 0xCBF43926:
        _crc32 = _faster


def crc32_of(data: Any, before: int = 0) -> int:
    """Returns the crc32 of a buffer, continued from the crc32 `before` of earlier
    bytes.
    """
    return int(_crc32(data, before))


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Properties shared by all packs of a dataset."""

    kind: str  # `preference`, `sft` or `scored`
    layout: str  # `concat` or `shared_prefix`
    pack_size: int  # maximum tokens of a pack
    carry: Mapping[str, str]  # carried columns, name -> a name in `schema.CARRY_TYPES`
    vocab_size: int | None = None  # exclusive upper bound of token ids, if known


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """The row groups of a shard: int64 `[G]` each, checksums uint32."""

    rows: Int64  # rows, examples, tokens: counts of the row group
    examples: Int64
    tokens: Int64
    longest: Int64  # tokens of its longest segment
    crc32: Checksums  # of its column chunks (Parquet) or buffers (Arrow)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardInfo:
    """One shard file."""

    path: str  # relative to the dataset
    rows: Count
    examples: Count
    sequences: Count
    tokens: Count
    supervised_tokens: Count
    bytes: Count
    sha256: Sha256  # of the file, hexadecimal
    # bytes at the end of the file that a reader needs before any row group
    footer_bytes: Positive
    footer_sha256: Sha256  # of those bytes; page checksums do not cover them
    example_id_base: Count  # added to the example ids in the file
    row_groups: RowGroups
    further: Any = field(
        default_factory=dict
    )  # members of a later release, name to JSON value


def file_hashes(file: io.BufferedIOBase) -> dict[str, Any]:
    """Returns sizes and hashes of a file and its footer, named as in
    :class:`ShardInfo`.

    It ends with the footer, the footer's length in four bytes, and a magic word.
    """
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 10, 0))
    end = file.read()
    magic = 6 if end.endswith(b"ARROW1") else 4
    footer = int.from_bytes(end[-magic - 4 : -magic], "little") + 4 + magic
    file.seek(size - footer)
    of_footer = hashlib.sha256(file.read()).hexdigest()
    sizes = {"bytes": size, "footer_bytes": footer}
    return {**sizes, "sha256": digest, "footer_sha256": of_footer}


def describe_shard(
    path: str, figures: Sequence[Int64], hashes: Mapping[str, Any], crc32: Int64
) -> ShardInfo:
    """Builds the manifest's entry of a shard from `pack_figures` and crc32 of each row
    group.
    """
    groups = [[len(f), *f[:, :4].sum(axis=0), f[:, 4].max()] for f in figures]
    table = np.ascontiguousarray(np.array(groups, np.int64).reshape(-1, 6).T)
    columns = dict(zip((*_GROUP_SUMS, "longest"), table, strict=True))
    sums: dict[str, Any] = {name: int(columns[name].sum()) for name in _GROUP_SUMS}
    stored = {name: columns[name] for name in ("rows", "examples", "tokens", "longest")}
    row_groups = RowGroups(**stored, crc32=crc32.astype(np.uint32))
    return ShardInfo(
        path=path, **sums, **hashes, example_id_base=0, row_groups=row_groups
    )


_GROUP_SUMS = ("rows", "examples", "sequences", "tokens", "supervised_tokens")
_SUMS = ("packs", *_GROUP_SUMS[1:], "logical_tokens")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over a dataset; `logical_tokens` are the tokens of an unpacked run."""

    packs: Count
    examples: Count
    sequences: Count
    tokens: Count
    supervised_tokens: Count
    logical_tokens: Count
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Minimum, mean and maximum of some numbers."""

    min: Count
    mean: Real
    max: Count


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of the packs."""

    fill_rate: Share  # tokens / (packs * pack_size), 0 to 1
    examples_per_pack: Spread  # over all packs
    longest_sequence: Count  # logical tokens
    most_segments: Count  # maximum of a pack
    shortest_pack: Count  # tokens
    # number of sequences by logical length; keys are lower bounds of buckets, powers of
    # two
    length_histogram: Mapping[str, Count]
    planning: Mapping[str, Any]  # figures of the planner


def pack_figures(packs: Packs, kind: str) -> Int64:
    """Returns int64 `[P, 10]`: examples, sequences, tokens, supervised tokens, longest
    segment and sum of squared segment lengths of each pack, and the
    :data:`packstore.format.arrays.COUNTS`.
    """
    sizes = sizes_of(packs, kind)
    columns = [
        sizes.examples,
        np.diff(packs.sequence_offsets),
        sizes.tokens,
        np.add.reduceat(packs.supervised, packs.token_offsets[:-1], dtype=np.int32),
        np.maximum.reduceat(packs.segment_lengths, packs.sequence_offsets[:-1]),
        sizes.squares,
    ]
    return np.concatenate([np.stack(columns, axis=1), sizes.counts], axis=1)


def pack_sizes(figures: Int64) -> PackSizes:
    """Returns the sizes that loaders plan with, from :func:`pack_figures`."""
    return PackSizes(figures[:, 2], figures[:, 0], figures[:, 5], counts=figures[:, 6:])


def sizes_of(packs: Packs, kind: str) -> PackSizes:
    """Returns the sizes that loaders plan with, counted from the packs."""
    squares = packs.segment_lengths.astype(np.int64) ** 2
    return PackSizes(
        np.diff(packs.token_offsets),
        np.diff(packs.example_offsets),
        np.add.reduceat(squares, packs.sequence_offsets[:-1]),
        counts=count_packs(packs, kind),
    )


@dataclass(eq=False)
class PackCounter:
    """Accumulates totals of valid packs; the result does not depend on how they are
    batched.
    """

    # int64 `[6]`, as in `_SUMS`
    sums: Int64 = field(default_factory=lambda: np.zeros(len(_SUMS), np.int64))
    # int64 `[32]`, sequences by the bits of their length
    histogram: Int64 = field(default_factory=lambda: np.zeros(32, np.int64))
    # int64 `[3]`: examples and segments of a pack, and tokens of a sequence
    most: Int64 = field(default_factory=lambda: np.zeros(3, np.int64))
    # int64 `[2]`: examples and tokens of a pack
    least: Int64 = field(default_factory=lambda: np.full(2, 2**63 - 1))

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return int(self.sums[3])

    def add(self, figures: Int64, lengths: npt.NDArray[np.integer]) -> None:
        """Adds packs: their :func:`pack_figures`, and logical lengths `[S]` of their
        sequences.
        """
        examples, segments, tokens, _ = figures[:, :4].T
        sums = len(figures), *figures[:, :4].sum(axis=0), lengths.sum(dtype=np.int64)
        histogram = np.bincount(np.frexp(lengths)[1] - 1, minlength=32)
        most = np.array([examples.max(), segments.max(), lengths.max()])
        least = np.array([examples.min(), tokens.min()])
        self.merge(PackCounter(np.array(sums, np.int64), histogram, most, least))

    def merge(self, other: PackCounter) -> None:
        """Adds the totals of `other`."""
        self.sums = self.sums + other.sums
        self.histogram = self.histogram + other.histogram
        self.most = np.maximum(self.most, other.most)
        self.least = np.minimum(self.least, other.least)

    @classmethod
    def of_dataset(cls, totals: Totals, statistics: Statistics) -> PackCounter:
        """Returns the counter of the packs of a dataset."""
        if not totals.packs:
            return cls()
        histogram = np.zeros(32, np.int64)
        for bound, count in statistics.length_histogram.items():
            histogram[min(int(bound).bit_length(), 32) - 1] = count
        sums, examples = (
            [getattr(totals, name) for name in _SUMS],
            statistics.examples_per_pack,
        )
        most = examples.max, statistics.most_segments, statistics.longest_sequence
        least = examples.min, statistics.shortest_pack
        return cls(np.array(sums), histogram, np.array(most), np.array(least))

    def totals(self, stored_bytes: int) -> Totals:
        """Returns the sums, with the bytes of the shards."""
        return Totals(
            bytes=stored_bytes, **dict(zip(_SUMS, self.sums.tolist(), strict=True))
        )

    def statistics(self, pack_size: int, planning: Mapping[str, Any]) -> Statistics:
        """Returns the statistics; all zero if there are no packs."""
        packs, examples, _, tokens = self.sums[:4].tolist()
        most_examples, most_segments, longest = self.most.tolist()
        fewest, shortest = self.least.tolist() if packs else (0, 0)
        mean = examples / max(packs, 1)
        return Statistics(
            fill_rate=tokens / (max(packs, 1) * pack_size),
            examples_per_pack=Spread(min=fewest, mean=mean, max=most_examples),
            longest_sequence=longest,
            most_segments=most_segments,
            shortest_pack=shortest,
            length_histogram={
                str(1 << b): int(n) for b, n in enumerate(self.histogram) if n
            },
            planning=planning,
        )
