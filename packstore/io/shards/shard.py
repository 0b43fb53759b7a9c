"""Facts about shards and packs, which a manifest records: shapes, sizes, checksums,
totals and statistics.
"""

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

from packstore.errors import IntegrityError
from packstore.format.arrays import Int64, Packs, PackSizes, count_packs
from packstore.format.typed_json import Checksums, Count, Positive, Real, Sha256, Share

_crc32 = zlib.crc32
with contextlib.suppress(ImportError):
    from isal.isal_zlib import crc32 as _isal_crc32

    # Every read depends on the checksum, so the faster function is used only if it
    # passes the standard test of CRC-32.
    _test_value = _isal_crc32(b"56789", _isal_crc32(b"1234"))
    if _test_value == _isal_crc32(b"123456789") == 0xCBF43926:
        _crc32 = _isal_crc32


def crc32_of(data: Any, crc_before: int = 0) -> int:
    """Return the crc32 of a buffer.

    Args:
        data: bytes or another buffer.
        crc_before: crc32 of the bytes before it.
    """
    return int(_crc32(data, crc_before))


# Shards


class NonconformingFile(IntegrityError):
    """A file has the recorded hashes, but its writer broke a rule of the format."""


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

    rows: Int64  # packs of the row group
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
    footer_sha256: Sha256  # of these bytes; page checksums do not cover them
    example_id_base: Count  # added to the example ids in the file
    row_groups: RowGroups
    # members of a later release, name -> JSON value
    further: Any = field(default_factory=dict)


def declared_footer_bytes(end: bytes) -> int:
    """Return the size of the footer that a shard declares in its last bytes.

    Parquet and Arrow files end with the footer, its length in four bytes, and a magic
    word. The size includes all of them.
    """
    magic_bytes = len(b"ARROW1") if end.endswith(b"ARROW1") else len(b"PAR1")
    length = int.from_bytes(end[-magic_bytes - 4 : -magic_bytes], "little")
    return length + 4 + magic_bytes


def file_hashes(file: io.BufferedIOBase) -> dict[str, Any]:
    """Return sizes and hashes of a finished shard, named as in :class:`ShardInfo`."""
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 10, 0))
    footer_bytes = declared_footer_bytes(file.read())
    file.seek(size - footer_bytes)
    return {
        "bytes": size,
        "footer_bytes": footer_bytes,
        "sha256": sha256,
        "footer_sha256": hashlib.sha256(file.read()).hexdigest(),
    }


def describe_shard(
    path: str,
    figures: Sequence[PackFigures],
    hashes: Mapping[str, Any],
    crc32: Int64,
) -> ShardInfo:
    """Return the manifest's entry for a shard.

    Args:
        path: path of the shard, relative to the dataset.
        figures: figures of the packs of each row group.
        hashes: result of :func:`file_hashes`.
        crc32: int64 `[G]`, crc32 of each row group.
    """
    packs_of_groups = [len(group) for group in figures]
    examples = [group.sizes.examples.sum() for group in figures]
    sequences = [group.sequences.sum() for group in figures]
    tokens = [group.sizes.tokens.sum() for group in figures]
    supervised_tokens = [group.supervised_tokens.sum() for group in figures]
    longest = [group.longest_segments.max() for group in figures]
    return ShardInfo(
        path=path,
        rows=sum(packs_of_groups),
        examples=int(sum(examples)),
        sequences=int(sum(sequences)),
        tokens=int(sum(tokens)),
        supervised_tokens=int(sum(supervised_tokens)),
        **hashes,
        example_id_base=0,
        row_groups=RowGroups(
            rows=np.array(packs_of_groups, np.int64),
            examples=np.array(examples, np.int64),
            tokens=np.array(tokens, np.int64),
            longest=np.array(longest, np.int64),
            crc32=crc32.astype(np.uint32),
        ),
    )


# Packs


def sizes_of(packs: Packs, kind: str) -> PackSizes:
    """Count the sizes of packs, the input of the loaders' plans."""
    segment_starts = packs.sequence_offsets[:-1]
    stored_lengths = packs.segment_lengths.astype(np.int64)
    whole_lengths = packs.lengths.astype(np.int64)
    squares = stored_lengths * (2 * whole_lengths - stored_lengths)
    return PackSizes(
        tokens=np.diff(packs.token_offsets),
        examples=np.diff(packs.example_offsets),
        squares=np.add.reduceat(squares, segment_starts),
        counts=count_packs(packs, kind),
    )


@dataclass(frozen=True, eq=False)
class PackFigures:
    """Figures of packs: int64 `[P]` each, but for `sizes`."""

    sizes: PackSizes
    sequences: Int64
    supervised_tokens: Int64
    keys: Int64  # logical tokens
    longest_segments: Int64  # tokens of the longest segment of a pack

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, packs: slice) -> PackFigures:
        return PackFigures(
            sizes=self.sizes.take(packs),
            sequences=self.sequences[packs],
            supervised_tokens=self.supervised_tokens[packs],
            keys=self.keys[packs],
            longest_segments=self.longest_segments[packs],
        )

    @classmethod
    def of(cls, packs: Packs, kind: str) -> PackFigures:
        """Count packs of a kind of dataset."""
        token_starts = packs.token_offsets[:-1]
        segment_starts = packs.sequence_offsets[:-1]
        # Sums of int32 take a third of the time.
        supervised = np.add.reduceat(packs.supervised, token_starts, dtype=np.int32)
        longest = np.maximum.reduceat(packs.segment_lengths, segment_starts)
        return cls(
            sizes=sizes_of(packs, kind),
            sequences=np.diff(packs.sequence_offsets),
            supervised_tokens=supervised.astype(np.int64),
            keys=packs.keys,
            longest_segments=longest.astype(np.int64),
        )

    @classmethod
    def concat(cls, parts: Sequence[PackFigures]) -> PackFigures:
        """Return the figures of all packs in order."""
        return cls(
            sizes=PackSizes.concat([part.sizes for part in parts]),
            sequences=_join([part.sequences for part in parts]),
            supervised_tokens=_join([part.supervised_tokens for part in parts]),
            keys=_join([part.keys for part in parts]),
            longest_segments=_join([part.longest_segments for part in parts]),
        )


def _join(columns: Sequence[Int64]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *columns])


# Totals and statistics of a dataset


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
    most_keys: Count  # maximum of a pack: logical tokens, the keys of its attention
    most_targets: Count  # maximum of a pack: labels that are not -100
    shortest_pack: Count  # tokens
    # number of sequences by logical length; keys are lower bounds of buckets, powers of
    # two
    length_histogram: Mapping[str, Count]
    planning: Mapping[str, Any]  # figures of the planner


_SUMS = (
    "packs",
    "examples",
    "sequences",
    "tokens",
    "supervised_tokens",
    "logical_tokens",
)
"""Fields of :class:`Totals` in the order of :attr:`PackCounter.sums`."""

_LENGTH_BITS = 32
"""Buckets of the length histogram."""


def _no_sums() -> Int64:
    return np.zeros(len(_SUMS), np.int64)


def _empty_histogram() -> Int64:
    return np.zeros(_LENGTH_BITS, np.int64)


def _no_maxima() -> Int64:
    return np.zeros(5, np.int64)


def _no_minima() -> Int64:
    return np.full(2, 2**63 - 1)


@dataclass(eq=False)
class PackCounter:
    """Accumulates totals of valid packs; the result does not depend on how they are
    batched.

    Attributes:
        sums: int64 `[6]`, in the order of `_SUMS`.
        histogram: int64 `[32]`, sequences by the bits of their length.
        most: int64 `[5]`, maxima: examples, segments, keys and targets of a pack,
            tokens of a sequence.
        least: int64 `[2]`, minima: examples and tokens of a pack.
    """

    sums: Int64 = field(default_factory=_no_sums)
    histogram: Int64 = field(default_factory=_empty_histogram)
    most: Int64 = field(default_factory=_no_maxima)
    least: Int64 = field(default_factory=_no_minima)

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return int(self.sums[_SUMS.index("tokens")])

    def add(self, figures: PackFigures, lengths: npt.NDArray[np.integer]) -> None:
        """Add packs.

        Args:
            figures: their figures.
            lengths: `[S]`, logical tokens of their sequences.
        """
        examples = figures.sizes.examples
        tokens = figures.sizes.tokens
        sums = [
            len(figures),
            examples.sum(),
            figures.sequences.sum(),
            tokens.sum(),
            figures.supervised_tokens.sum(),
            figures.keys.sum(),
        ]
        # frexp has the exponent of the next power of two: the number's bits.
        _, bits = np.frexp(lengths)
        most = [
            examples.max(),
            figures.sequences.max(),
            figures.keys.max(),
            figures.supervised_tokens.max(),
            lengths.max(),
        ]
        self.merge(
            PackCounter(
                sums=np.array(sums, np.int64),
                histogram=np.bincount(bits - 1, minlength=_LENGTH_BITS),
                most=np.array(most, np.int64),
                least=np.array([examples.min(), tokens.min()]),
            )
        )

    def merge(self, counter: PackCounter) -> None:
        """Add the totals of another counter."""
        self.sums = self.sums + counter.sums
        self.histogram = self.histogram + counter.histogram
        self.most = np.maximum(self.most, counter.most)
        self.least = np.minimum(self.least, counter.least)

    @classmethod
    def of_dataset(cls, totals: Totals, statistics: Statistics) -> PackCounter:
        """Return the counter of the packs of a dataset."""
        if not totals.packs:
            return cls()

        sums = [getattr(totals, name) for name in _SUMS]
        histogram = _empty_histogram()
        for lower_bound, count in statistics.length_histogram.items():
            bits = min(int(lower_bound).bit_length(), _LENGTH_BITS)
            histogram[bits - 1] = count
        examples = statistics.examples_per_pack
        most = [
            examples.max,
            statistics.most_segments,
            statistics.most_keys,
            statistics.most_targets,
            statistics.longest_sequence,
        ]
        least = [examples.min, statistics.shortest_pack]
        return cls(
            sums=np.array(sums),
            histogram=histogram,
            most=np.array(most),
            least=np.array(least),
        )

    def totals(self, stored_bytes: int) -> Totals:
        """Return the sums, with the bytes of the shards."""
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        return Totals(bytes=stored_bytes, **sums)

    def statistics(self, pack_size: int, planning: Mapping[str, Any]) -> Statistics:
        """Return the statistics; all are zero if there are no packs.

        Args:
            pack_size: maximum tokens of a pack.
            planning: figures of the planner.
        """
        totals = self.totals(stored_bytes=0)
        most = self.most.tolist()
        most_examples, most_segments, most_keys, most_targets, longest_sequence = most
        least_examples, shortest_pack = self.least.tolist()
        if not totals.packs:
            least_examples = 0
            shortest_pack = 0
        num_packs = max(totals.packs, 1)
        histogram = enumerate(self.histogram.tolist())
        return Statistics(
            fill_rate=totals.tokens / (num_packs * pack_size),
            examples_per_pack=Spread(
                min=least_examples,
                mean=totals.examples / num_packs,
                max=most_examples,
            ),
            longest_sequence=longest_sequence,
            most_segments=most_segments,
            most_keys=most_keys,
            most_targets=most_targets,
            shortest_pack=shortest_pack,
            length_histogram={
                str(1 << bit): count for bit, count in histogram if count
            },
            planning=planning,
        )
