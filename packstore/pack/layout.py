"""The layouts of sequences in a pack, and their sizes.

``concat``: each sequence is stored in full. ``shared_prefix``: a sequence omits the
leading prompt tokens that it shares with an earlier sequence, its *parent*, except the
last shared one, which predicts its first token after the prefix.
"""

from __future__ import annotations

import itertools

import numpy as np

from packstore.errors import UnknownNameError
from packstore.format.arrays import Examples, Int32, Int64, to_offsets
from packstore.format.schema import LAYOUTS
from packstore.pack.prefix_tree import PrefixTree


def omitted_tokens(
    examples: Examples, layout: str, group_offsets: Int64
) -> tuple[Int32, Int32]:
    """Return the tokens that each sequence leaves out in a layout, and its parent.

    Args:
        examples: the examples, S sequences.
        layout: ``concat`` or ``shared_prefix``.
        group_offsets: int64 `[G + 1]`, offsets of the groups in the sequences; a
            sequence shares tokens with earlier ones of its group.

    Returns:
        int32 `[S]`, the number of leading tokens that each sequence omits; int32 `[S]`,
        how many sequences before it its parent stands, 0 where it omits none.

    Raises:
        UnknownNameError: `layout` is none of these.
    """
    if layout == "concat":
        whole = np.zeros(examples.num_sequences, np.int32)
        return whole, whole.copy()
    if layout == "shared_prefix":
        return shared_prefixes(examples, group_offsets)
    raise UnknownNameError(
        f"unknown layout {layout!r}; choose one of: {', '.join(LAYOUTS)}."
    )


def sizes(examples: Examples, layout: str, multiple: int = 1) -> Int32:
    """Return the tokens that each example occupies in a pack: int32 `[E]`.

    Sequences share tokens inside their example.

    Args:
        examples: the examples.
        layout: ``concat`` or ``shared_prefix``.
        multiple: the stored part of each sequence is rounded up to a multiple of this.
    """
    omitted, _ = omitted_tokens(examples, layout, examples.example_offsets)
    edges = to_offsets(round_up(examples.lengths - omitted, multiple))
    return np.diff(edges[examples.example_offsets]).astype(np.int32)


def count_keys(examples: Examples) -> Int64:
    """Return the sum of the lengths of each example's sequences: int64 `[E]`.

    They are the keys of its attention: a layout leaves out tokens, but no keys.
    """
    return np.diff(examples.sequence_offsets[examples.example_offsets])


def round_up(lengths: Int32, multiple: int) -> Int32:
    """Round lengths up to a multiple."""
    if multiple == 1:
        return lengths
    return -(-lengths // multiple) * multiple


def shared_prefixes(examples: Examples, group_offsets: Int64) -> tuple[Int32, Int32]:
    """Return the tokens that each sequence leaves out, and its parent.

    The parent of a sequence is the earliest one of those that share the longest part of
    its prompt, which ends before its first supervised token. So the parent itself
    stores the last token that the sequence leaves out.

    Args:
        examples: the examples, S sequences.
        group_offsets: int64 `[G + 1]`, offsets of the groups in the sequences; a
            sequence shares tokens with earlier ones of its group.

    Returns:
        int32 `[S]`, the number of leading tokens that each sequence omits; int32 `[S]`,
        how many sequences before it its parent stands, 0 where it omits none.
    """
    tree = PrefixTree(examples.input_ids)
    starts = examples.sequence_offsets.tolist()
    prompt_lengths = _prompt_lengths(examples)
    omitted = [0] * examples.num_sequences
    distances = [0] * examples.num_sequences
    for first, end in itertools.pairwise(group_offsets.tolist()):
        if end - first == 2:  # a pair, without a tree
            limit = min(prompt_lengths[first + 1], starts[end - 1] - starts[first])
            shared = tree.common(starts[first], starts[first + 1], limit)
            if shared > 1:
                omitted[first + 1] = shared - 1
                distances[first + 1] = 1
            continue

        tree.clear()
        for sequence in range(first, end if end - first > 1 else first):
            start, stop = starts[sequence : sequence + 2]
            shared, parent = tree.add(start, stop, prompt_lengths[sequence], sequence)
            if shared > 1:
                omitted[sequence] = shared - 1
                distances[sequence] = sequence - parent
    return np.array(omitted, np.int32), np.array(distances, np.int32)


def _prompt_lengths(examples: Examples) -> list[int]:
    """Return the tokens of each sequence before its first supervised one.

    A sequence without supervised tokens is all prompt.
    """
    flags = examples.supervised.tobytes()
    prompt_lengths = []
    for start, end in itertools.pairwise(examples.sequence_offsets.tolist()):
        first_supervised = flags.find(b"\x01", start, end)
        if first_supervised < 0:
            first_supervised = end
        prompt_lengths.append(first_supervised - start)
    return prompt_lengths
