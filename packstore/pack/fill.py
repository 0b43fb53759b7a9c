"""Copies tokens into packs as planned, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packstore.errors import ConfigError, FormatError, sentence
from packstore.format.arrays import Bool, Examples, Int32, Int64, Packs, to_offsets
from packstore.format.rules import RULES
from packstore.pack.kernels import jit
from packstore.pack.layout import segment_offsets


def fill(
    examples: Examples, pack_offsets: Int64, layout: str, order: Int32 | Int64 | None = None
) -> Packs:
    """Fills packs with `examples`, in the order of the plan.

    Pack i holds those at ``order[pack_offsets[i] : pack_offsets[i + 1]]``; `order` None: all.
    """
    number = examples.num_examples if order is None else len(order)
    ends = [*pack_offsets[:1], *pack_offsets[-1:]]
    if ends != [0, number] or np.any(np.diff(pack_offsets) < 1):
        must = f"they must increase strictly from 0 to {number}, the examples"
        text = np.array2string(pack_offsets, threshold=6)
        raise ConfigError(sentence("pack_offsets", must, text))
    if order is not None and layout != "concat":
        examples, order = gather(examples, order), None
    skipped = segment_offsets(examples, layout)
    about, source = examples, examples.sequence_offsets[:-1] + skipped
    if order is not None:
        about, source = examples.without_tokens(order)
        skipped = np.zeros(len(source), np.int32)
    starts = to_offsets(about.lengths - skipped)
    sequences = about.example_offsets[pack_offsets]
    signed_ids = np.empty(starts[-1], np.int32)
    if _copy_in(examples.input_ids, examples.supervised, source, starts, signed_ids) < 0:
        raise FormatError(f"{RULES['ids-range']}; found a negative id [ids-range].")
    # The offsets of the segments inside each pack, including the end of the last one.
    counts = np.diff(sequences) + 1
    pack = np.repeat(np.arange(len(counts)), counts)
    boundaries = starts[np.arange(len(pack)) - pack] - starts[sequences[pack]]
    return Packs(
        signed_ids=signed_ids,
        reward=about.reward,
        lengths=about.lengths,
        seq_boundaries=boundaries.astype(np.int32),
        example_ids=about.example_ids,
        num_responses=about.num_responses,
        token_offsets=starts[sequences],
        sequence_offsets=sequences,
        example_offsets=pack_offsets,
        columns=about.columns,
    )


def gather(examples: Examples, order: Int32 | Int64) -> Examples:
    """Computes ``examples.take(order)`` for tokenized records, several times as fast."""
    about, source = examples.without_tokens(order)
    total = about.sequence_offsets[-1]
    input_ids, supervised = np.empty(total, np.int32), np.empty(total, np.bool_)
    _gather(
        examples.input_ids,
        examples.supervised,
        source,
        about.sequence_offsets,
        input_ids,
        supervised,
    )
    return replace(about, input_ids=input_ids, supervised=supervised)


def unpack(packs: Packs) -> Examples:
    """Returns the examples of the packs, in order: the exact inverse of :func:`fill`."""
    examples = to_offsets(packs.num_responses)
    starts = to_offsets(packs.segment_lengths)
    _check(packs, starts, examples)
    first = np.repeat(starts[examples[:-1]], packs.num_responses)
    sequences = to_offsets(packs.lengths)
    input_ids, supervised = np.empty(sequences[-1], np.int32), np.empty(sequences[-1], np.bool_)
    _copy_out(packs.signed_ids, starts, first, sequences, input_ids, supervised)
    return Examples(
        input_ids=input_ids,
        supervised=supervised,
        sequence_offsets=sequences,
        example_offsets=examples,
        reward=packs.reward,
        example_ids=packs.example_ids,
        columns=packs.columns,
    )


def convert(packs: Packs, layout: str) -> Packs:
    """Converts packs to another layout; lossless in both directions."""
    return fill(unpack(packs), packs.example_offsets, layout)


def _check(packs: Packs, starts: Int64, examples: Int64) -> None:
    """Checks the preconditions of the copying loop, which runs without bounds checks."""
    skipped, lengths = packs.segment_offsets, packs.segment_lengths
    good = (
        examples[-1] == len(packs.lengths)
        and starts[-1] == len(packs.signed_ids)
        and np.all(packs.num_responses > 0)
        and np.all(lengths > 0)
        and np.array_equal(starts[packs.sequence_offsets], packs.token_offsets)
        and np.array_equal(examples[packs.example_offsets], packs.sequence_offsets)
        and np.all(skipped >= 0)
        and np.all(skipped <= np.repeat(lengths[examples[:-1]], packs.num_responses))
        and not skipped[examples[:-1]].any()
    )
    if not good:
        must = "seq_boundaries, lengths and num_responses must agree with the tokens"
        raise FormatError(sentence("packs", must, do="Run `packstore verify` on the dataset"))


@jit
def _copy_in(
    input_ids: Int32, supervised: Bool, source: Int64, starts: Int64, signed_ids: Int32
) -> np.int32:
    """Copies segment i from ``source[i]`` on to ``starts[i]:starts[i + 1]``, as signed ids.

    Returns a negative number if an id is negative.
    """
    every = np.int32(0)
    # Slices, as the compiler vectorises them: their indices cannot be negative.
    for i in range(len(source)):
        first, last = starts[i], starts[i + 1]
        ids = input_ids[source[i] : source[i] + last - first]
        learned = supervised[source[i] : source[i] + last - first]
        to = signed_ids[first:last]
        for j in range(len(ids)):
            every |= ids[j]
            to[j] = ids[j] if learned[j] else ~ids[j]
    return every


@jit
def _gather(
    input_ids: Int32, supervised: Bool, source: Int64, starts: Int64, out_ids: Int32, out: Bool
) -> None:
    """Copies sequence i from ``source[i]`` on to ``starts[i]:starts[i + 1]``."""
    for i in range(len(source)):
        first, last = starts[i], starts[i + 1]
        out_ids[first:last] = input_ids[source[i] : source[i] + last - first]
        out[first:last] = supervised[source[i] : source[i] + last - first]


@jit
def _copy_out(
    signed_ids: Int32,
    starts: Int64,
    first: Int64,
    sequences: Int64,
    out_ids: Int32,
    supervised: Bool,
) -> None:
    """Copies segment i to the end of sequence i, and its omitted prefix before it.

    `starts`: offsets of the segments; `first`: start of the first segment of each one's example;
    `sequences`: offsets of the sequences in `out_ids` and `supervised`, which are written.
    """
    for i in range(len(first)):
        start, last = sequences[i], sequences[i + 1]
        own = last - (starts[i + 1] - starts[i])
        prefix, to_prefix = signed_ids[first[i] : first[i] + own - start], out_ids[start:own]
        for j in range(len(prefix)):
            to_prefix[j] = prefix[j] ^ (prefix[j] >> 31)
        supervised[start:own] = False
        tokens, to, on = (
            signed_ids[starts[i] : starts[i + 1]],
            out_ids[own:last],
            supervised[own:last],
        )
        for j in range(len(tokens)):
            to[j] = tokens[j] ^ (tokens[j] >> 31)
            on[j] = tokens[j] >= 0
