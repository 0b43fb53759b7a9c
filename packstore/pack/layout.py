"""The layouts of an example's sequences in a pack, and their sizes.

``concat``: each sequence is stored in full. ``shared_prefix``: a sequence omits the
prompt tokens that it shares with the first sequence of its example, except the last
shared one, which predicts its first token after the prefix.
"""

from __future__ import annotations

import itertools

import numpy as np

from packstore.errors import UnknownNameError
from packstore.format.arrays import Examples, Int32, to_offsets


def segment_offsets(examples: Examples, layout: str) -> Int32:
    """Return the number of leading tokens that each sequence omits in a layout: int32
    `[S]`.
    """
    if layout == "concat":
        return np.zeros(examples.num_sequences, np.int32)
    if layout == "shared_prefix":
        return _shared_prefix_offsets(examples)
    raise UnknownNameError(
        f"unknown layout {layout!r}; choose one of: concat, shared_prefix."
    )


def sizes(examples: Examples, layout: str, multiple: int = 1) -> Int32:
    """Return the tokens that each example occupies in a pack: int32 `[E]`.

    Args:
        examples: the examples.
        layout: ``concat`` or ``shared_prefix``.
        multiple: the stored part of each sequence is rounded up to a multiple of this.
    """
    stored_lengths = examples.lengths - segment_offsets(examples, layout)
    edges = to_offsets(round_up(stored_lengths, multiple))
    return np.diff(edges[examples.example_offsets]).astype(np.int32)


def round_up(lengths: Int32, multiple: int) -> Int32:
    """Round lengths up to a multiple."""
    if multiple == 1:
        return lengths
    return -(-lengths // multiple) * multiple


def _shared_prefix_offsets(examples: Examples) -> Int32:
    """Return the leading tokens that each sequence omits: int32 `[S]`, 0 for the first
    sequence of an example.
    """
    input_ids = examples.input_ids
    # Bytes compare several times as fast as slices of arrays, and prompts are mostly
    # equal. Python reads lists several times as fast as arrays.
    id_bytes = input_ids.tobytes()
    width = input_ids.itemsize
    starts = examples.sequence_offsets.tolist()
    prompt_lengths = _prompt_lengths(examples)

    offsets = [0] * examples.num_sequences
    for first, end in itertools.pairwise(examples.example_offsets.tolist()):
        a = starts[first]
        for sequence in range(first + 1, end):
            b = starts[sequence]
            shared = min(prompt_lengths[first], prompt_lengths[sequence])
            prompt_a = id_bytes[a * width : (a + shared) * width]
            prompt_b = id_bytes[b * width : (b + shared) * width]
            if prompt_a != prompt_b:
                differs = input_ids[a : a + shared] != input_ids[b : b + shared]
                shared = int(differs.argmax())  # tokens before the first difference
            if shared > 1:
                offsets[sequence] = shared - 1
    return np.array(offsets, np.int32)


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
