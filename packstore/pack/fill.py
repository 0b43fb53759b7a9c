"""Copies tokens into packs as planned, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.errors import (
    ConfigError,
    FormatError,
    UnsupportedFormatError,
    sentence,
)
from packstore.format.arrays import (
    Bool,
    Examples,
    Int32,
    Int64,
    Packs,
    ids_of,
    to_offsets,
)
from packstore.format.rules import RULES, check_parents
from packstore.pack.layout import omitted_tokens

MOST_TOKENS = 1 << 28
"""Maximum tokens of the sequences that :func:`unpack` rebuilds at once, 5 bytes each:
with shared prefixes, a few kilobytes of tokens may be gigabytes of sequences.
"""


def fill(
    examples: Examples,
    pack_offsets: Int64,
    layout: str,
    order: Int32 | Int64 | None = None,
    *,
    share: str = "example",
) -> Packs:
    """Fill packs with examples, in the order of the plan.

    Args:
        examples: the examples.
        pack_offsets: int64 `[P + 1]`; pack i holds the examples at
            ``order[pack_offsets[i] : pack_offsets[i + 1]]``.
        layout: ``concat`` or ``shared_prefix``.
        order: int `[n]`, positions in `examples`; None: all of them in their order.
        share: in layout ``shared_prefix`` a sequence shares a prefix with earlier ones
            of its ``example``, or of its ``pack``.

    Raises:
        ConfigError: `pack_offsets` do not cover the order.
        FormatError: a token id is negative.
    """
    num_examples = examples.num_examples if order is None else len(order)
    _check_pack_offsets(pack_offsets, num_examples)

    if order is not None and layout != "concat":
        # Shared prefixes are compared in the planned order.
        examples = gather(examples, order)
        order = None
    if order is None:
        planned_examples = examples
        sequence_starts = examples.sequence_offsets[:-1]
    else:
        planned_examples, sequence_starts = examples.without_tokens(order)

    sequence_offsets = planned_examples.example_offsets[pack_offsets]
    group_offsets = planned_examples.example_offsets
    if share == "pack":
        group_offsets = sequence_offsets
    omitted, distances = omitted_tokens(planned_examples, layout, group_offsets)
    segment_starts = sequence_starts + omitted
    segment_lengths = planned_examples.lengths - omitted
    input_ids = _copy_ranges(examples.input_ids, segment_starts, segment_lengths)
    supervised = _copy_ranges(examples.supervised, segment_starts, segment_lengths)

    token_edges = to_offsets(segment_lengths)
    packs = Packs(
        signed_ids=_sign(input_ids, supervised),
        reward=planned_examples.reward,
        lengths=planned_examples.lengths,
        seq_boundaries=_boundaries_in_packs(token_edges, sequence_offsets),
        parent_distances=distances,
        example_ids=planned_examples.example_ids,
        num_responses=planned_examples.num_responses,
        token_offsets=token_edges[sequence_offsets],
        sequence_offsets=sequence_offsets,
        example_offsets=pack_offsets,
        columns=planned_examples.columns,
    )
    if omitted.any():
        _require_same_tokens(packs, planned_examples)
    return packs


def _require_same_tokens(packs: Packs, planned_examples: Examples) -> None:
    """Raise unless packs hold the ids and labels of the examples.

    No reader can see that a segment has left out a token with a label.
    """
    rebuilt = unpack(packs)
    has_ids = np.array_equal(rebuilt.input_ids, planned_examples.input_ids)
    has_labels = np.array_equal(rebuilt.supervised, planned_examples.supervised)
    if not (has_ids and has_labels):
        raise FormatError(
            "packs must hold the ids and labels of their examples; found others."
        )


def gather(examples: Examples, order: Int32 | Int64) -> Examples:
    """Return ``examples.take(order)``, several times as fast for sequences of usual
    lengths.
    """
    gathered, starts = examples.without_tokens(order)
    lengths = gathered.lengths
    return replace(
        gathered,
        input_ids=_copy_ranges(examples.input_ids, starts, lengths),
        supervised=_copy_ranges(examples.supervised, starts, lengths),
    )


def unpack(packs: Packs) -> Examples:
    """Return the examples of packs, in order: the exact inverse of :func:`fill`.

    Raises:
        FormatError: the arrays of the packs contradict each other.
        UnsupportedFormatError: their sequences have more tokens than
            :data:`MOST_TOKENS`.
    """
    example_offsets = to_offsets(packs.num_responses)
    segment_lengths = packs.segment_lengths
    segment_edges = to_offsets(segment_lengths)
    _check_packs(packs, segment_edges, example_offsets)

    sequence_edges = to_offsets(packs.lengths)
    _check_size(int(sequence_edges[-1]))
    signed_ids = _join_sequences(packs, segment_edges, sequence_edges)
    # A turn that is learned in one sequence is context in the next.
    parts = np.stack([packs.segment_offsets, segment_lengths], axis=1)
    is_own = np.tile(np.array([False, True]), len(parts))
    supervised = (signed_ids >= 0) & np.repeat(is_own, parts.ravel())
    return Examples(
        input_ids=ids_of(signed_ids),
        supervised=supervised,
        sequence_offsets=sequence_edges,
        example_offsets=example_offsets,
        reward=packs.reward,
        example_ids=packs.example_ids,
        columns=packs.columns,
    )


def convert(packs: Packs, layout: str) -> Packs:
    """Convert packs to another layout; lossless in both directions."""
    return fill(unpack(packs), packs.example_offsets, layout)


def _check_pack_offsets(pack_offsets: Int64, num_examples: int) -> None:
    starts_at_zero = len(pack_offsets) > 0 and pack_offsets[0] == 0
    ends_at_last = len(pack_offsets) > 0 and pack_offsets[-1] == num_examples
    is_increasing = bool(np.all(np.diff(pack_offsets) > 0))
    if starts_at_zero and ends_at_last and is_increasing:
        return
    raise ConfigError(
        sentence(
            where="pack_offsets",
            rule=f"they must increase strictly from 0 to {num_examples}, the examples",
            found=np.array2string(pack_offsets, threshold=6),
        )
    )


def _check_packs(packs: Packs, segment_edges: Int64, example_offsets: Int64) -> None:
    """Raise unless the ranges that :func:`unpack` copies lie inside the tokens."""
    if _counts_agree(packs, segment_edges, example_offsets):
        check_parents(packs, packs.segment_lengths, "packs")
        return
    raise FormatError(
        sentence(
            where="packs",
            rule="seq_boundaries, lengths and num_responses must agree with the tokens",
            remedy="Run `packstore verify` on the dataset",
        )
    )


def _check_size(num_tokens: int) -> None:
    """Raise UnsupportedFormatError before memory is taken for so many tokens."""
    if num_tokens <= MOST_TOKENS:
        return
    raise UnsupportedFormatError(
        sentence(
            where="packs",
            rule=f"their sequences may have at most {MOST_TOKENS} tokens together",
            found=str(num_tokens),
            remedy="Pack the records again with a lower max_keys or row_group_tokens",
        )
    )


def _counts_agree(packs: Packs, segment_edges: Int64, example_offsets: Int64) -> bool:
    if example_offsets[-1] != len(packs.lengths):
        return False
    if segment_edges[-1] != len(packs.signed_ids):
        return False
    if np.any(packs.num_responses < 1) or np.any(packs.segment_lengths < 1):
        return False
    token_offsets = segment_edges[packs.sequence_offsets]
    sequence_offsets = example_offsets[packs.example_offsets]
    return np.array_equal(token_offsets, packs.token_offsets) and np.array_equal(
        sequence_offsets, packs.sequence_offsets
    )


def _sign(input_ids: Int32, supervised: Bool) -> Int32:
    """Return signed ids: the complement of the id where it is not supervised."""
    if input_ids.min(initial=0) < 0:
        raise FormatError(f"{RULES['ids-range']}; found a negative id [ids-range].")
    all_ones_if_unsupervised = supervised.view(np.int8) - np.int8(1)
    signed_ids: Int32 = input_ids ^ all_ones_if_unsupervised
    return signed_ids


def _boundaries_in_packs(token_edges: Int64, sequence_offsets: Int64) -> Int32:
    """Return the edges of the segments, counted from the start of their pack.

    Args:
        token_edges: int64 `[S + 1]`, where segments start, and the end of the last one.
        sequence_offsets: int64 `[P + 1]`, offsets of the packs in the sequences.

    Returns:
        int32 `[S + P]`: each pack has one edge more than segments.
    """
    edges_per_pack = np.diff(sequence_offsets) + 1
    pack = np.repeat(np.arange(len(edges_per_pack)), edges_per_pack)
    # The last edge of a pack is the first of the next, and stands twice: so the edges
    # of pack i are numbered i too high.
    sequence = np.arange(len(pack)) - pack
    boundaries: Int64 = token_edges[sequence] - token_edges[sequence_offsets[pack]]
    return boundaries.astype(np.int32)


def _join_sequences(packs: Packs, segment_edges: Int64, sequence_edges: Int64) -> Int32:
    """Return the signed ids of all sequences, each copied from its parent and from its
    own segment.

    Args:
        packs: the packs.
        segment_edges: int64 `[S + 1]`, where segments start, and the end of the last.
        sequence_edges: int64 `[S + 1]`, the same of the sequences, laid end to end.
    """
    signed_ids = np.empty(int(sequence_edges[-1]), np.int32)
    starts = sequence_edges[:-1]
    own_starts = starts + packs.segment_offsets
    for start, own_start, end, parent_start, segment_start, segment_end in zip(
        starts.tolist(),
        own_starts.tolist(),
        sequence_edges[1:].tolist(),
        starts[packs.parents].tolist(),
        segment_edges[:-1].tolist(),
        segment_edges[1:].tolist(),
        strict=True,
    ):
        if own_start > start:
            parent_end = parent_start + own_start - start
            signed_ids[start:own_start] = signed_ids[parent_start:parent_end]
        signed_ids[own_start:end] = packs.signed_ids[segment_start:segment_end]
    return signed_ids


def _copy_ranges(
    values: npt.NDArray[Any], starts: Int64, lengths: Int32 | Int64
) -> npt.NDArray[Any]:
    """Concatenate the ranges ``values[start : start + length]``.

    By slices: to index each token takes several times as long.
    """
    if not len(starts):
        return values[:0].copy()
    ends = starts + lengths
    ranges = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.concatenate([values[start:end] for start, end in ranges])
