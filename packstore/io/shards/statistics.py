"""Totals and statistics of packs, computed while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int64, Packs, PackSizes
from packstore.format.loss_counts import count_packs
from packstore.format.typed_json import Count, Real

_SUMS = ("packs", "examples", "sequences", "tokens", "supervised_tokens", "logical_tokens")


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
    """Statistics of the packs.

    Attributes:
        fill_rate: tokens / (packs * pack_size), 0 to 1.
        examples_per_pack: over all packs.
        longest_sequence: logical tokens.
        most_segments: maximum of a pack.
        shortest_pack: tokens.
        length_histogram: number of sequences by logical length; keys are lower bounds of buckets,
            powers of two.
        planning: figures of the planner.
    """

    fill_rate: Real
    examples_per_pack: Spread
    longest_sequence: Count
    most_segments: Count
    shortest_pack: Count
    length_histogram: Mapping[str, Count]
    planning: Mapping[str, Any]


NO_TOTALS = Totals(
    packs=0, examples=0, sequences=0, tokens=0, supervised_tokens=0, logical_tokens=0, bytes=0
)


def pack_figures(packs: Packs, kind: str) -> Int64:
    """Returns int64 `[P, 10]`: examples, sequences, tokens, supervised tokens, longest segment and
    sum of squared segment lengths of each pack, and the four of
    :mod:`packstore.format.loss_counts`.
    """
    segments = packs.segment_lengths.astype(np.int64)
    firsts = packs.sequence_offsets[:-1]
    columns = [
        np.diff(packs.example_offsets),
        np.diff(packs.sequence_offsets),
        np.diff(packs.token_offsets),
        np.add.reduceat(packs.supervised, packs.token_offsets[:-1], dtype=np.int32),
        np.maximum.reduceat(segments, firsts),
        np.add.reduceat(segments**2, firsts),
    ]
    return np.concatenate([np.stack(columns, axis=1), count_packs(packs, kind)], axis=1)


def pack_sizes(figures: Int64) -> PackSizes:
    """Returns the sizes that loaders plan with, from :func:`pack_figures`."""
    return PackSizes(
        tokens=figures[:, 2], examples=figures[:, 0], squares=figures[:, 5], counts=figures[:, 6:]
    )


@dataclass(eq=False)
class PackCounter:
    """Accumulates totals of valid packs; the result does not depend on how they are batched.

    Attributes:
        sums: int64 `[6]`: packs, examples, sequences, tokens, supervised and logical tokens.
        histogram: int64 `[32]`, sequences by the bits of their length.
        most: int64 `[3]`: examples and segments of a pack, and tokens of a sequence.
        least: int64 `[2]`: examples and tokens of a pack.
    """

    sums: Int64 = field(default_factory=lambda: np.zeros(len(_SUMS), np.int64))
    histogram: Int64 = field(default_factory=lambda: np.zeros(32, np.int64))
    most: Int64 = field(default_factory=lambda: np.zeros(3, np.int64))
    least: Int64 = field(default_factory=lambda: np.full(2, 2**63 - 1))

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(self.sums[1])

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return int(self.sums[3])

    def add(self, figures: Int64, lengths: npt.NDArray[np.integer]) -> None:
        """Adds packs: their :func:`pack_figures`, and logical lengths `[S]` of their sequences."""
        if not len(figures):
            return
        examples, segments, tokens, supervised = figures[:, :4].T
        logical = lengths.sum(dtype=np.int64)
        sums = len(figures), examples.sum(), len(lengths), tokens.sum(), supervised.sum(), logical
        added = PackCounter(
            sums=np.array(sums, np.int64),
            histogram=np.bincount(np.frexp(lengths)[1] - 1, minlength=32),
            most=np.array([examples.max(), segments.max(), lengths.max()]),
            least=np.array([examples.min(), tokens.min()]),
        )
        self.merge(added)

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
        examples = statistics.examples_per_pack
        most = examples.max, statistics.most_segments, statistics.longest_sequence
        return cls(
            sums=np.array([getattr(totals, name) for name in _SUMS]),
            histogram=histogram,
            most=np.array(most),
            least=np.array([examples.min, statistics.shortest_pack]),
        )

    def totals(self, stored_bytes: int) -> Totals:
        """Returns the sums, with the bytes of the shards."""
        return Totals(bytes=stored_bytes, **dict(zip(_SUMS, self.sums.tolist(), strict=True)))

    def statistics(self, pack_size: int, planning: Mapping[str, Any]) -> Statistics:
        """Returns the statistics; all zero if there are no packs."""
        packs = int(self.sums[0])
        most_examples, most_segments, longest = self.most.tolist()
        fewest, shortest = self.least.tolist() if packs else (0, 0)
        mean = self.examples / max(packs, 1)
        return Statistics(
            fill_rate=self.tokens / (max(packs, 1) * pack_size),
            examples_per_pack=Spread(min=fewest, mean=mean, max=most_examples),
            longest_sequence=longest,
            most_segments=most_segments,
            shortest_pack=shortest,
            length_histogram={str(1 << b): int(n) for b, n in enumerate(self.histogram) if n},
            planning=planning,
        )
