"""Value types passed between layers: named numpy arrays.

Shapes, used throughout packstore: `N` tokens, `S` sequences, `E` examples, `P` packs.
Ragged data is kept flat beside int64 offsets (CSR): row `i` is
``values[offsets[i]:offsets[i + 1]]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
    """Return the id of a record: `ordinal` counts from 0 in the file numbered `source`,
    and is the line number - 1 for JSONL.
    """
    return (source << SOURCE_SHIFT) + ordinal


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive parsed records of one input, with their places.

    Attributes:
        source: ordinal of the input file.
        path: name of the input in error texts.
        unit: unit of the ordinals: ``line``, ``row`` or ``item``.
        ordinals: ordinal of each record in its file, from 0.
        values: the records: dicts, or any other values (the tokenizer's policies handle
            them).
    """

    source: int
    path: str
    unit: str
    ordinals: Sequence[int]
    values: Sequence[object]

    def where(self, i: int) -> str:
        """Return the place of record `i` for error texts, counted from 1."""
        return f"{self.path}, {self.unit} {self.ordinals[i] + 1}"

    def first(self, number: int) -> Rows:
        """Return the first `number` records."""
        return replace(
            self, ordinals=self.ordinals[:number], values=self.values[:number]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Tokenized records: each example is its K sequences (DPO: chosen, then rejected),
    in order.

    Attributes:
        input_ids: int32 `[N]`, the token ids of all sequences, one after another.
        supervised: bool `[N]`, the tokens with their id as label; all others get -100.
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
        """Return an instance without examples; `columns` sets names and types of
        carried columns.
        """
        return cls(
            input_ids=np.empty(0, np.int32),
            supervised=np.empty(0, np.bool_),
            sequence_offsets=np.zeros(1, np.int64),
            example_offsets=np.zeros(1, np.int64),
            reward=np.empty(0, np.float32),
            example_ids=np.empty(0, np.int64),
            columns={name: column[:0] for name, column in (columns or {}).items()},
        )

    @classmethod
    def concat(cls, parts: Sequence[Examples]) -> Examples:
        """Concatenate the examples of `parts`, which carry the same columns."""
        if not parts:
            return cls.empty()
        lengths = np.concatenate([part.lengths for part in parts])
        num_responses = np.concatenate([part.num_responses for part in parts])
        columns = {
            name: np.concatenate([part.columns[name] for part in parts])
            for name in parts[0].columns
        }
        keys = [part.keys for part in parts if part.keys is not None]
        return cls(
            input_ids=np.concatenate([part.input_ids for part in parts]),
            supervised=np.concatenate([part.supervised for part in parts]),
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(num_responses),
            reward=np.concatenate([part.reward for part in parts]),
            example_ids=np.concatenate([part.example_ids for part in parts]),
            columns=columns,
            keys=np.concatenate(keys) if len(keys) == len(parts) else None,
        )

    def take(self, order: Int32 | Int64) -> Examples:
        """Return the examples at positions `order` (repeats allowed), in that order."""
        examples, starts = self.without_tokens(order)
        tokens = range_indices(starts, examples.lengths)
        return replace(
            examples,
            input_ids=self.input_ids[tokens],
            supervised=self.supervised[tokens],
        )

    def without_tokens(self, order: Int32 | Int64) -> tuple[Examples, Int64]:
        """Return :meth:`take` without tokens, and the positions in `input_ids` where
        the tokens of each sequence begin: int64 `[S]`.
        """
        sequences = ragged_indices(self.example_offsets, order)
        lengths = _row_lengths(self.sequence_offsets, sequences)
        num_responses = _row_lengths(self.example_offsets, order)
        examples = Examples(
            input_ids=self.input_ids[:0],
            supervised=self.supervised[:0],
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(num_responses),
            reward=self.reward[sequences],
            example_ids=self.example_ids[order],
            columns={name: column[order] for name, column in self.columns.items()},
            keys=None if self.keys is None else self.keys[order],
        )
        return examples, self.sequence_offsets[sequences]


class TopK(NamedTuple):
    """The k most probable token ids in place of each of n tokens, and their log-probs.

    Attributes:
        ids: int32 `[n, k]`, distinct in each row.
        logps: float16 or float32 `[n, k]`, in nats, from the highest to the lowest.
    """

    ids: Any
    logps: Any


TokenValues = npt.NDArray[np.floating] | TopK
"""Values of n supervised tokens: a number for each, `[n]`, or the top k."""


@dataclass(slots=True, eq=False)
class Packs:
    """Packs (rows of a shard): the columns of the format as flat arrays, 4 bytes per
    token.

    Attributes:
        signed_ids: int32 `[N]`, the token id where supervised, its bitwise complement
            elsewhere.
        reward: float32 `[S]`.
        lengths: int32 `[S]`, logical length of each sequence.
        seq_boundaries: int32 `[S + P]`, each pack's segment offsets, from 0 to its
            token count.
        parent_distances: int32 `[S]`, how many sequences before each one its parent
            stands, which has the tokens that it leaves out; 0 where it is whole (stored
            only in layout ``shared_prefix``).
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
        stand_in: whether they replace packs that could not be read; they have weight 0.
        token_columns: joined side data with a value for each supervised token, in the
            order of the tokens.
    """

    signed_ids: Int32
    reward: Float32
    lengths: Int32
    seq_boundaries: Int32
    parent_distances: Int32
    example_ids: Int64
    num_responses: Int32
    token_offsets: Int64
    sequence_offsets: Int64
    example_offsets: Int64
    columns: Mapping[str, Column] = field(default_factory=dict)
    ref_logps: Float32 | None = None
    stand_in: bool = False
    sequence_columns: Mapping[str, Float32] = field(default_factory=dict)
    token_columns: Mapping[str, TokenValues] = field(default_factory=dict)

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

    @property
    def num_targets(self) -> Int64:
        """Supervised tokens of each example, int64 `[E]`."""
        token_starts = to_offsets(self.example_tokens)[:-1]
        is_supervised = self.supervised.view(np.int8)
        return np.add.reduceat(is_supervised, token_starts, dtype=np.int64)

    def row(self, i: int) -> Packs:
        """Return pack `i`, as views."""
        first_token, end_token = self.token_offsets[i : i + 2].tolist()
        first_sequence, end_sequence = self.sequence_offsets[i : i + 2].tolist()
        first_example, end_example = self.example_offsets[i : i + 2].tolist()
        tokens = slice(first_token, end_token)
        sequences = slice(first_sequence, end_sequence)
        boundaries = slice(first_sequence + i, end_sequence + i + 1)
        examples = slice(first_example, end_example)

        columns = {name: column[examples] for name, column in self.columns.items()}
        sequence_columns = {
            name: column[sequences] for name, column in self.sequence_columns.items()
        }
        token_columns: dict[str, TokenValues] = {}
        if self.token_columns:
            first_target = np.count_nonzero(self.signed_ids[:first_token] >= 0)
            end_target = first_target + np.count_nonzero(self.signed_ids[tokens] >= 0)
            targets = slice(first_target, end_target)
            for name, values in self.token_columns.items():
                token_columns[name] = take_token_values(values, targets)
        ref_logps = None if self.ref_logps is None else self.ref_logps[sequences]
        return Packs(
            signed_ids=self.signed_ids[tokens],
            reward=self.reward[sequences],
            lengths=self.lengths[sequences],
            seq_boundaries=self.seq_boundaries[boundaries],
            parent_distances=self.parent_distances[sequences],
            example_ids=self.example_ids[examples],
            num_responses=self.num_responses[examples],
            token_offsets=np.array((0, end_token - first_token)),
            sequence_offsets=np.array((0, end_sequence - first_sequence)),
            example_offsets=np.array((0, end_example - first_example)),
            columns=columns,
            ref_logps=ref_logps,
            stand_in=self.stand_in,
            sequence_columns=sequence_columns,
            token_columns=token_columns,
        )

    @property
    def boundary_offsets(self) -> Int64:
        """Offsets of the packs in `seq_boundaries`, int64 `[P + 1]`."""
        return self.sequence_offsets + np.arange(len(self) + 1)

    @property
    def segment_lengths(self) -> Int32:
        """Physical tokens of each segment, int32 `[S]`."""
        steps = self.seq_boundaries[1:] - self.seq_boundaries[:-1]
        # The step from the end of a pack to the start of the next one is no segment.
        is_segment = np.ones(len(steps), np.bool_)
        is_segment[self.boundary_offsets[1:-1] - 1] = False
        return steps[is_segment]

    @property
    def segment_offsets(self) -> Int32:
        """Leading tokens that each segment omits (``offset_i``), int32 `[S]`."""
        return self.lengths - self.segment_lengths

    @property
    def parents(self) -> Int64:
        """The parent of each sequence, or itself if it has none, int64 `[S]`."""
        return np.arange(len(self.lengths)) - self.parent_distances

    @property
    def keys(self) -> Int64:
        """Logical tokens of each pack, which are the keys of its attention, int64
        `[P]`.
        """
        first_sequences = self.sequence_offsets[:-1]
        return np.add.reduceat(self.lengths.astype(np.int64), first_sequences)


@dataclass(frozen=True, slots=True, eq=False)
class PackSizes:
    """Sizes and loss counts of packs, which need no reading of the packs.

    Attributes:
        tokens: int64 `[P]`, physical tokens.
        examples: int64 `[P]`, examples (for kind ``preference``: pairs).
        squares: int64 `[P]`, sum of ``n * (2 * L - n)`` over the segments of n tokens
            of sequences of L: twice the pairs of a query and a key that attention
            computes.
        counts: int64 `[P, 4]`, the columns of :data:`COUNTS`; None: unknown.
    """

    tokens: Int64
    examples: Int64
    squares: Int64
    counts: Int64 | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def concat(cls, parts: Sequence[PackSizes]) -> PackSizes:
        """Concatenate sizes; the counts are unknown if those of a part are."""
        if not parts:
            empty = np.empty(0, np.int64)
            return cls(empty, empty, empty)
        counts = [part.counts for part in parts if part.counts is not None]
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            examples=np.concatenate([part.examples for part in parts]),
            squares=np.concatenate([part.squares for part in parts]),
            counts=np.concatenate(counts) if len(counts) == len(parts) else None,
        )

    def take(self, indices: Int64 | slice) -> PackSizes:
        """Return the sizes of the packs at `indices`."""
        return PackSizes(
            tokens=self.tokens[indices],
            examples=self.examples[indices],
            squares=self.squares[indices],
            counts=None if self.counts is None else self.counts[indices],
        )


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """Stands for the record of an input line that is not valid JSON."""

    detail: str
    remedy: str


def map_token_values(values: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to an array or tensor of numbers, or to both of a :class:`TopK`.

    `change` gets `[n]` or `[n, k]`.
    """
    if isinstance(values, TopK):
        return TopK(change(values.ids), change(values.logps))
    return change(values)


def take_token_values(values: TokenValues, tokens: Int64 | slice) -> TokenValues:
    """Return the values of some of the tokens; of a slice as a view."""
    if isinstance(values, TopK):
        return TopK(values.ids[tokens], values.logps[tokens])
    return values[tokens]


def concat_token_values(parts: Sequence[TokenValues]) -> TokenValues:
    """Concatenate values of tokens: all numbers, or all of the same k. One is not
    copied.
    """
    if len(parts) == 1:
        return parts[0]
    tops = [part for part in parts if isinstance(part, TopK)]
    if not tops:
        return np.concatenate(parts)
    ids = np.concatenate([top.ids for top in tops])
    logps = np.concatenate([top.logps for top in tops])
    return TopK(ids, logps)


def ids_of(signed_ids: Any) -> Any:
    """Return the token ids of signed ids, an array or a tensor."""
    ids = signed_ids >> 31  # all bits set where negative, which complements below
    ids ^= signed_ids
    return ids


def labels_of(signed_ids: Any) -> Any:
    """Return the labels of signed ids, an array or a tensor."""
    # Where an id is negative, x ^ (x ^ -100) gives -100; elsewhere x ^ 0 gives x.
    labels = signed_ids >> 31  # all bits set where negative
    labels &= signed_ids ^ IGNORE_INDEX
    labels ^= signed_ids
    return labels


def to_offsets(lengths: npt.NDArray[np.integer]) -> Int64:
    """Return the offsets of rows with these lengths, int64 `[n + 1]`."""
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
    """Return the positions of all elements of `rows` of a ragged array, row by row:
    int64.
    """
    return range_indices(offsets[rows], _row_lengths(offsets, rows))


def _row_lengths(offsets: Int64, rows: Int32 | Int64) -> Int64:
    return offsets[rows + 1] - offsets[rows]


def range_indices(starts: Int64, lengths: npt.NDArray[np.integer]) -> Int64:
    """Concatenate the ranges ``starts[i] .. starts[i] + lengths[i]``, int64."""
    offsets = to_offsets(lengths)
    shifts = np.repeat(starts - offsets[:-1], lengths)
    return np.arange(offsets[-1], dtype=np.int64) + shifts


def key_runs(
    parents: Int64, offsets: Int32 | Int64, own_lengths: Int32 | Int64
) -> tuple[Int64, Int64]:
    """Return the runs of stored tokens that make up each sequence.

    A sequence is a run from the start of the segment of each of its ancestors, the root
    first, and then its own segment. If sequence 1 leaves out 2 tokens, and sequence 2,
    its child, 5: sequence 2 is 2 tokens of segment 0, then 3 of segment 1, then
    segment 2.

    Args:
        parents: int64 `[S]`, the parent of each sequence, an earlier one; the sequence
            itself if it has none.
        offsets: `[S]`, the number of tokens that each leaves out, more than its parent
            does.
        own_lengths: `[S]`, the number of tokens in its own segment.

    Returns:
        int64 `[R]`, the segment where each run begins, at its start; int64 `[R]`, the
        tokens of each run. The runs of sequence 0 come first, and so on.
    """
    sequences = np.arange(len(parents))
    readers = [sequences]
    segments = [sequences]
    lengths = [own_lengths]
    # From each sequence to its parent, to the parent of that, and so on.
    reader = np.flatnonzero(offsets)
    segment = parents[reader]
    end = offsets[reader]
    while len(reader):
        start = offsets[segment]
        readers.append(reader)
        segments.append(segment)
        lengths.append(end - start)
        has_parent = start > 0
        reader = reader[has_parent]
        segment = parents[segment[has_parent]]
        end = start[has_parent]

    run_readers = np.concatenate(readers[::-1])
    order = np.argsort(run_readers, kind="stable")  # the root of each sequence first
    run_segments = np.concatenate(segments[::-1])[order]
    run_lengths = np.concatenate(lengths[::-1], dtype=np.int64)[order]
    return run_segments, run_lengths


COUNTS = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
"""Divisors of losses, stored so that a loader knows them before it reads the packs of a
step.

Supervised tokens of each example's best sequence (the first one; for kind ``scored``
the first of highest reward), and numbers of pairs. Pairs are counted for the three
choices of kind ``scored``, where sequences of equal reward are never compared; 1 per
example for kind ``preference``; 0 for kind ``sft``. With rewards 2, 1, 1, 0: the best
against 3 others; 5 pairs of different reward; 2 pairs of neighbours in the ranking.
"""


def count_packs(packs: Packs, kind: str) -> Int64:
    """Return the columns of :data:`COUNTS` for each pack: int64 `[P, 4]`."""
    first_sequences = to_offsets(packs.num_responses)[:-1]
    first_examples = packs.example_offsets[:-1]
    token_starts = to_offsets(packs.segment_lengths)[:-1]

    # Sums of bytes in int32 take a third of the time of sums in int64.
    is_supervised = packs.supervised.view(np.int8)
    supervised = np.add.reduceat(is_supervised, token_starts, dtype=np.int32)
    supervised_tokens = supervised.astype(np.int64)

    if kind == "scored":
        counts = _count_scored_examples(
            supervised_tokens, packs.reward, first_sequences
        )
        return np.add.reduceat(counts, first_examples, axis=0)

    counts = np.zeros((len(packs), len(COUNTS)), np.int64)
    counts[:, 0] = np.add.reduceat(supervised_tokens[first_sequences], first_examples)
    if kind == "preference":
        num_pairs = np.diff(packs.example_offsets)
        counts[:, 1:] = num_pairs[:, None]
    return counts


def _count_scored_examples(
    supervised_tokens: Int64, rewards: Float32, first_sequences: Int64
) -> Int64:
    """Return the columns of :data:`COUNTS` for each example of kind ``scored``.

    Args:
        supervised_tokens: int64 `[S]`.
        rewards: float32 `[S]`.
        first_sequences: int64 `[E]`, the first sequence of each example.
    """
    places = np.arange(len(rewards))
    example = np.searchsorted(first_sequences, places, side="right") - 1
    first_place = first_sequences[example]

    # Below, `[S]` each: sorted by example, and in it from the highest reward down.
    ranking = np.lexsort((-rewards, example))
    ranked_rewards = rewards[ranking]
    is_first = places == first_place
    is_below_previous = ~is_first & (ranked_rewards < np.roll(ranked_rewards, 1))
    # The place where the run of equal rewards starts; all before it are better.
    run_start = np.maximum.accumulate(np.where(is_first | is_below_previous, places, 0))

    # In how many pairs each sequence is the worse one, for each choice of pairs.
    pairs_best_vs_rest = ranked_rewards < ranked_rewards[first_place]
    pairs_all = run_start - first_place
    pairs_adjacent = is_below_previous
    pairs = np.stack([pairs_best_vs_rest, pairs_all, pairs_adjacent], axis=1)

    best_tokens = supervised_tokens[ranking[first_sequences]]
    pairs_of_examples = np.add.reduceat(pairs.astype(np.int64), first_sequences, axis=0)
    return np.column_stack([best_tokens, pairs_of_examples])
