"""Value types passed between layers: named numpy arrays.

Shapes, used throughout packstore: `N` tokens, `S` sequences, `E` examples, `P` packs.
Ragged data is kept flat beside int64 offsets (CSR): row `i` is
``values[offsets[i]:offsets[i + 1]]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Column = npt.NDArray[np.generic]

IGNORE_INDEX = -100
"""Label of an unsupervised token (torch's default)."""

TOKEN_BYTES = 4
"""Bytes per buffered token."""

SOURCE_SHIFT = 40
"""``example_id = (ordinal of the source file << SOURCE_SHIFT) + ordinal of the record
in it``.
"""


def example_id(source: int, ordinal: int) -> int:
    """Returns the id of record `ordinal` (0-based; line number - 1 for JSONL) of file
    `source`.
    """
    return (source << SOURCE_SHIFT) + ordinal


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive parsed records of one input, with their places."""

    source: int  # ordinal of the input file
    path: str  # name of the input in error texts
    unit: str  # unit of the ordinals: `line`, `row` or `item`
    ordinals: Sequence[int]  # 0-based ordinal of each record in its file
    # the records: dicts, or any other values (the tokenizer's policies handle them)
    values: Sequence[object]

    def where(self, i: int) -> str:
        """Returns the place of record `i` for error texts, counted from 1."""
        return f"{self.path}, {self.unit} {self.ordinals[i] + 1}"

    def first(self, number: int) -> Rows:
        """Return the first records."""
        return replace(
            self, ordinals=self.ordinals[:number], values=self.values[:number]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Tokenized records: each example is its K sequences (DPO: chosen, then rejected),
    in order.

    Attributes:
        input_ids: int32 `[N]`, the token ids of all sequences, one after another.
        supervised: bool `[N]`, the tokens whose label is their id; all others get -100.
        sequence_offsets: int64 `[S + 1]`, offsets of the sequences in `input_ids`.
        example_offsets: int64 `[E + 1]`, offsets of the examples in the sequences.
        reward: float32 `[S]`, the ground-truth reward of each sequence.
        example_ids: int64 `[E]`, ids that encode file and ordinal, see
            :func:`example_id`.
        columns: carried scalar columns of the input, each `[E]`.
        keys: uint64 `[E]`, hashes of the prompts, if records are to be selected.
    """

    input_ids: Int32
    supervised: Bool
    sequence_offsets: Int64
    example_offsets: Int64
    reward: Float32
    example_ids: Int64
    columns: Mapping[str, Column] = field(default_factory=dict)
    keys: npt.NDArray[np.uint64] | None = None

    @property
    def num_examples(self) -> int:
        """E."""
        return len(self.example_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.reward)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.input_ids)

    @property
    def lengths(self) -> Int32:
        """Tokens of each sequence, int32 `[S]`."""
        return np.diff(self.sequence_offsets).astype(np.int32)

    @property
    def num_responses(self) -> Int32:
        """K of each example, int32 `[E]`."""
        return np.diff(self.example_offsets).astype(np.int32)

    @classmethod
    def empty(cls, columns: Mapping[str, Column] | None = None) -> Examples:
        """Makes an instance without examples; `columns` sets names and types of carried
        columns.
        """
        zero = np.zeros(1, np.int64)
        return cls(
            input_ids=np.empty(0, np.int32),
            supervised=np.empty(0, np.bool_),
            sequence_offsets=zero,
            example_offsets=zero.copy(),
            reward=np.empty(0, np.float32),
            example_ids=np.empty(0, np.int64),
            columns={name: column[:0] for name, column in (columns or {}).items()},
        )

    @classmethod
    def concat(cls, parts: Sequence[Examples]) -> Examples:
        """Concatenates the examples of `parts`, which carry the same columns."""
        if not parts:
            return cls.empty()
        keys = [p.keys for p in parts if p.keys is not None]
        lengths = [p.lengths for p in parts], [p.num_responses for p in parts]
        sequence_offsets, example_offsets = (
            to_offsets(np.concatenate(x)) for x in lengths
        )
        return cls(
            input_ids=np.concatenate([p.input_ids for p in parts]),
            supervised=np.concatenate([p.supervised for p in parts]),
            sequence_offsets=sequence_offsets,
            example_offsets=example_offsets,
            reward=np.concatenate([p.reward for p in parts]),
            example_ids=np.concatenate([p.example_ids for p in parts]),
            columns={
                n: np.concatenate([p.columns[n] for p in parts])
                for n in parts[0].columns
            },
            keys=np.concatenate(keys) if len(keys) == len(parts) else None,
        )

    def take(self, order: Int32 | Int64) -> Examples:
        """Returns the examples at positions `order` (repeats allowed), in that
        order.
        """
        taken, starts = self.without_tokens(order)
        tokens = range_indices(starts, taken.lengths)
        ids, supervised = self.input_ids[tokens], self.supervised[tokens]
        return replace(taken, input_ids=ids, supervised=supervised)

    def without_tokens(self, order: Int32 | Int64) -> tuple[Examples, Int64]:
        """Returns :meth:`take` without tokens, and where those of each sequence begin,
        `[S]`.
        """
        sequences = ragged_indices(self.example_offsets, order)
        taken = Examples(
            input_ids=self.input_ids[:0],
            supervised=self.supervised[:0],
            sequence_offsets=to_offsets(_row_lengths(self.sequence_offsets, sequences)),
            example_offsets=to_offsets(_row_lengths(self.example_offsets, order)),
            reward=self.reward[sequences],
            example_ids=self.example_ids[order],
            columns={name: column[order] for name, column in self.columns.items()},
            keys=None if self.keys is None else self.keys[order],
        )
        return taken, self.sequence_offsets[sequences]


@dataclass(slots=True, eq=False)
class Packs:
    """Packs (rows of a shard): the columns of the format as flat arrays, 4 bytes a
    token.

    Attributes:
        signed_ids: int32 `[N]`, the token id where supervised, its bitwise complement
            elsewhere.
        reward: float32 `[S]`.
        lengths: int32 `[S]`, logical length of each sequence.
        seq_boundaries: int32 `[S + P]`, each pack's segment offsets, from 0 to its
            token count.
        example_ids: int64 `[E]`.
        num_responses: int32 `[E]`, K of each example (stored only for kind ``scored``).
        token_offsets: int64 `[P + 1]`, offsets of the packs in `signed_ids`.
        sequence_offsets: int64 `[P + 1]`, offsets of the packs in `lengths`.
        example_offsets: int64 `[P + 1]`, offsets of the packs in `example_ids`.
        columns: carried scalar columns and joined side data, each `[E]`.
        sequence_columns: joined side data with a value for each sequence, float32 `[S]`
            each.
        ref_logps: float32 `[S]`, log-prob of each sequence under a reference model in
            nats, if joined.
        stand_in: True if they replace packs that could not be read; their weight is 0.
    """

    signed_ids: Int32
    reward: Float32
    lengths: Int32
    seq_boundaries: Int32
    example_ids: Int64
    num_responses: Int32
    token_offsets: Int64
    sequence_offsets: Int64
    example_offsets: Int64
    columns: Mapping[str, Column] = field(default_factory=dict)
    ref_logps: Float32 | None = None
    stand_in: bool = False
    sequence_columns: Mapping[str, Float32] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    @property
    def input_ids(self) -> Int32:
        """The token ids, int32 `[N]`, a copy."""
        ids: Int32 = ids_of(self.signed_ids)
        return ids

    @property
    def labels(self) -> Int32:
        """The token id where supervised, -100 elsewhere; unshifted; int32 `[N]`, a
        copy.
        """
        labels: Int32 = labels_of(self.signed_ids)
        return labels

    @property
    def supervised(self) -> Bool:
        """True for supervised tokens, bool `[N]`."""
        return self.signed_ids >= 0

    @property
    def example_tokens(self) -> Int64:
        """Stored tokens of each example, int64 `[E]`."""
        starts = to_offsets(self.num_responses)[:-1]
        return np.add.reduceat(self.segment_lengths.astype(np.int64), starts)

    def row(self, i: int) -> Packs:
        """Returns pack `i`, as views."""
        token, tokens_end = self.token_offsets[i : i + 2].tolist()
        sequence, sequences_end = self.sequence_offsets[i : i + 2].tolist()
        example, examples_end = self.example_offsets[i : i + 2].tolist()
        sequences, examples = (
            slice(sequence, sequences_end),
            slice(example, examples_end),
        )
        ref_logps, columns = self.ref_logps, self.columns
        return Packs(
            self.signed_ids[token:tokens_end],
            self.reward[sequences],
            self.lengths[sequences],
            self.seq_boundaries[sequence + i : sequences_end + i + 1],
            self.example_ids[examples],
            self.num_responses[examples],
            np.array((0, tokens_end - token)),
            np.array((0, sequences_end - sequence)),
            np.array((0, examples_end - example)),
            {name: column[examples] for name, column in columns.items()}
            if columns
            else {},
            None if ref_logps is None else ref_logps[sequences],
            self.stand_in,
            {name: column[sequences] for name, column in self.sequence_columns.items()},
        )

    @property
    def boundary_offsets(self) -> Int64:
        """Offsets of the packs in `seq_boundaries`, int64 `[P + 1]`."""
        return self.sequence_offsets + np.arange(len(self) + 1)

    @property
    def segment_lengths(self) -> Int32:
        """Physical tokens of each segment, int32 `[S]`."""
        steps = self.seq_boundaries[1:] - self.seq_boundaries[:-1]
        inside = np.ones(len(steps), np.bool_)
        inside[self.boundary_offsets[1:-1] - 1] = False
        return steps[inside]

    @property
    def segment_offsets(self) -> Int32:
        """Leading tokens that each segment omits (``offset_i``), int32 `[S]`."""
        return self.lengths - self.segment_lengths


@dataclass(frozen=True, slots=True, eq=False)
class PackSizes:
    """Sizes and loss counts of packs, known without reading them.

    All are int64 `[P]` except the last.
    """

    tokens: Int64  # physical tokens
    examples: Int64  # examples (for kind `preference`: pairs)
    squares: Int64  # sum of the squared lengths of the segments, the attention cost
    # int64 `[P, 4]`, the columns of :data:`COUNTS`; None: unknown
    counts: Int64 | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def concat(cls, parts: Sequence[PackSizes]) -> PackSizes:
        """Concatenates sizes; if the counts of a part are unknown, all are."""
        none, names = np.empty(0, np.int64), ("tokens", "examples", "squares")
        counts = [part.counts for part in parts if part.counts is not None]
        return cls(
            *(
                np.concatenate([none, *(getattr(part, name) for part in parts)])
                for name in names
            ),
            counts=np.concatenate(counts) if len(counts) == len(parts) > 0 else None,
        )

    def take(self, indices: Int64 | slice) -> PackSizes:
        """Returns the sizes of the packs at `indices`."""
        columns = self.tokens, self.examples, self.squares
        counts = None if self.counts is None else self.counts[indices]
        return PackSizes(*(column[indices] for column in columns), counts=counts)


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line of the input that is no JSON, in place of its record."""

    detail: str
    remedy: str


def ids_of(signed_ids: Any) -> Any:
    """Returns the token ids of signed ids, an array or a tensor."""
    ids = signed_ids >> 31
    ids ^= signed_ids
    return ids


def labels_of(signed_ids: Any) -> Any:
    """Returns the labels of signed ids, an array or a tensor."""
    labels = signed_ids >> 31
    labels &= signed_ids ^ IGNORE_INDEX  # the bits that turn negative ids into -100
    labels ^= signed_ids
    return labels


def to_offsets(lengths: npt.NDArray[np.integer]) -> Int64:
    """Returns the offsets of rows with these lengths, int64 `[n + 1]`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def flatten(rows: Sequence[Sequence[int]]) -> tuple[Int32, Int64]:
    """Return lists of numbers as flat int32 `[N]`, and their offsets, int64 `[rows +
    1]`.
    """
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    offsets = to_offsets(lengths)
    numbers = itertools.chain.from_iterable(rows)
    return np.fromiter(numbers, np.int32, int(offsets[-1])), offsets


def ragged_indices(offsets: Int64, rows: Int32 | Int64) -> Int64:
    """Returns the positions of all elements of `rows` of a ragged array, row by row:
    int64.
    """
    return range_indices(offsets[rows], _row_lengths(offsets, rows))


def _row_lengths(offsets: Int64, rows: Int32 | Int64) -> Int64:
    return offsets[rows + 1] - offsets[rows]


def range_indices(starts: Int64, lengths: npt.NDArray[np.integer]) -> Int64:
    """Concatenates the ranges ``starts[i] .. starts[i] + lengths[i]``, int64."""
    out = to_offsets(lengths)
    return np.arange(out[-1], dtype=np.int64) + np.repeat(starts - out[:-1], lengths)


COUNTS = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
"""Divisors of losses, stored so that a loader has those of a step before it reads the
packs.

Supervised tokens of each example's best sequence (the first one; for kind ``scored``
the first of highest reward), and numbers of pairs. Pairs are counted for the three
choices of kind ``scored``, where sequences of equal reward are never compared; 1 per
example for kind ``preference``; 0 for kind ``sft``.
"""


def count_packs(packs: Packs, kind: str) -> Int64:
    """Counts the columns of :data:`COUNTS` for each pack: int64 `[P, 4]`."""
    starts, firsts = to_offsets(packs.num_responses)[:-1], packs.example_offsets
    edges = to_offsets(packs.segment_lengths)
    # As bytes to int32: it takes a third of the time.
    on = packs.supervised.view(np.int8)
    supervised = np.add.reduceat(on, edges[:-1], dtype=np.int32).astype(np.int64)
    if kind == "scored":
        counted = _count_pairs(supervised, packs.reward, starts)
        return np.add.reduceat(counted, firsts[:-1], axis=0)
    counts = np.empty((len(packs), len(COUNTS)), np.int64)
    counts[:, 0] = np.add.reduceat(supervised[starts], firsts[:-1])
    counts[:, 1:] = (firsts[1:] - firsts[:-1])[:, None] if kind == "preference" else 0
    return counts


def _count_pairs(supervised: Int64, rewards: Float32, starts: Int64) -> Int64:
    sequences = np.arange(len(rewards))
    example = np.searchsorted(starts, sequences, side="right") - 1
    order = np.lexsort((-rewards, example))
    falling, first = rewards[order], starts[example]
    falls = (sequences > first) & (falling < np.roll(falling, 1))
    # Start of each rank's run of equal rewards: all before it are better.
    runs = np.maximum.accumulate(np.where(falls | (sequences == first), sequences, 0))
    of_places = np.stack(
        [falling < falling[first], runs - first, falls], axis=1
    ).astype(np.int64)
    best = supervised[order[starts]]
    return np.column_stack([best, np.add.reduceat(of_places, starts, axis=0)])
