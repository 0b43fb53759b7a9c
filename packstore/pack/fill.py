"""Copies tokens into packs as planned, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.errors import ConfigError, FormatError, sentence
from packstore.format.arrays import (
    Bool,
    Examples,
    Int32,
    Int64,
    Packs,
    ids_of,
    to_offsets,
)
from packstore.format.rules import RULES
from packstore.pack.kernels import jit
from packstore.pack.layout import segment_offsets


def fill(
    examples: Examples,
    pack_offsets: Int64,
    layout: str,
    order: Int32 | Int64 | None = None,
) -> Packs:
    """Fills packs with `examples`, in the order of the plan.

    Pack i holds those at ``order[pack_offsets[i] : pack_offsets[i + 1]]``; `order`
    None: all.
    """
    number = examples.num_examples if order is None else len(order)
    ends = [*pack_offsets[:1], *pack_offsets[-1:]]
    if ends != [0, number] or np.any(np.diff(pack_offsets) < 1):
        rule = f"they must increase strictly from 0 to {number}, the examples"
        found = np.array2string(pack_offsets, threshold=6)
        raise ConfigError(sentence("pack_offsets", rule, found))
    if order is not None and layout != "concat":
        examples, order = gather(examples, order), None
    skipped = segment_offsets(examples, layout)
    about, source = examples, examples.sequence_offsets[:-1] + skipped
    if order is not None:
        about, source = examples.without_tokens(order)
        skipped = np.zeros(len(source), np.int32)
    starts = to_offsets(about.lengths - skipped)
    sequences = about.example_offsets[pack_offsets]
    signed_ids, supervised = _tokens(examples, source, starts)
    if signed_ids.min(initial=0) < 0:
        raise FormatError(f"{RULES['ids-range']}; found a negative id [ids-range].")
    signed_ids ^= supervised.view(np.int8) - np.int8(1)
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
    """Computes ``examples.take(order)`` for tokenized records, several times as
    fast.
    """
    about, source = examples.without_tokens(order)
    input_ids, supervised = _tokens(examples, source, about.sequence_offsets)
    return replace(about, input_ids=input_ids, supervised=supervised)


def _tokens(examples: Examples, source: Int64, starts: Int64) -> tuple[Int32, Bool]:
    """Copies token ids, and which are supervised, see :func:`_copy`."""
    input_ids, supervised = (
        np.empty(starts[-1], np.int32),
        np.empty(starts[-1], np.bool_),
    )
    _copy(source, starts, examples.input_ids, input_ids)
    _copy(source, starts, examples.supervised, supervised)
    return input_ids, supervised


def unpack(packs: Packs) -> Examples:
    """Returns the examples of the packs, in order: the exact inverse of
    :func:`fill`.
    """
    examples = to_offsets(packs.num_responses)
    starts = to_offsets(packs.segment_lengths)
    _check(packs, starts, examples)
    first = np.repeat(starts[examples[:-1]], packs.num_responses)
    # Of each sequence: the prefix that its segment leaves out, which is prompt, and the
    # segment.
    source = np.stack([first, starts[:-1]], 1).ravel()
    lengths = np.stack([packs.segment_offsets, packs.segment_lengths], 1).ravel()
    signed_ids = np.empty(packs.lengths.sum(dtype=np.int64), np.int32)
    _copy(source, to_offsets(lengths), packs.signed_ids, signed_ids)
    return Examples(
        input_ids=ids_of(signed_ids),
        supervised=signed_ids >= 0,
        sequence_offsets=to_offsets(packs.lengths),
        example_offsets=examples,
        reward=packs.reward,
        example_ids=packs.example_ids,
        columns=packs.columns,
    )


def convert(packs: Packs, layout: str) -> Packs:
    """Converts packs to another layout; lossless in both directions."""
    return fill(unpack(packs), packs.example_offsets, layout)


def _check(packs: Packs, starts: Int64, examples: Int64) -> None:
    """Checks the preconditions of the copying loop, which runs without bounds
    checks.
    """
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
        rule = "seq_boundaries, lengths and num_responses must agree with the tokens"
        raise FormatError(
            sentence("packs", rule, remedy="Run `packstore verify` on the dataset")
        )


@jit
def _copy(
    source: Int64, starts: Int64, values: npt.NDArray[Any], copies: npt.NDArray[Any]
) -> None:
    """Copies part i of `values`, from ``source[i]`` on, to ``starts[i]:starts[i
    + 1]``.
    """
    for i in range(len(source)):
        first, last = starts[i], starts[i + 1]
        copies[first:last] = values[source[i] : source[i] + last - first]
