"""The layouts of an example's sequences in a pack, and their sizes.

``concat``: each sequence is whole. ``shared_prefix``: a sequence omits the prompt
tokens that it shares with the first sequence of its example, except the last one, which
predicts its first own token.
"""

from __future__ import annotations

import numpy as np

from packstore.errors import UnknownNameError
from packstore.format.arrays import Bool, Examples, Int32, Int64, to_offsets
from packstore.pack.kernels import jit


def segment_offsets(examples: Examples, layout: str) -> Int32:
    """Returns the number of leading tokens that each sequence omits in a layout: int32
    `[S]`.
    """
    if layout == "concat":
        return np.zeros(examples.num_sequences, np.int32)
    if layout == "shared_prefix":
        return _shared_prefix_offsets(
            examples.example_offsets,
            examples.sequence_offsets,
            examples.input_ids,
            examples.supervised,
        )
    raise UnknownNameError(
        f"unknown layout {layout!r}; choose one of: concat, shared_prefix."
    )


def sizes(examples: Examples, layout: str, multiple: int = 1) -> Int32:
    """Returns the tokens that each example occupies in a pack: int32 `[E]`."""
    physical = round_up(examples.lengths - segment_offsets(examples, layout), multiple)
    return np.diff(to_offsets(physical)[examples.example_offsets]).astype(np.int32)


def round_up(lengths: Int32, multiple: int) -> Int32:
    """Rounds lengths up to `multiple`."""
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


@jit
def _shared_prefix_offsets(
    example_offsets: Int64, sequence_offsets: Int64, input_ids: Int32, supervised: Bool
) -> Int32:
    offsets = np.zeros(len(sequence_offsets) - 1, np.int32)
    for example in range(len(example_offsets) - 1):
        first = example_offsets[example]
        for s in range(first + 1, example_offsets[example + 1]):
            a, b = sequence_offsets[first], sequence_offsets[s]
            most = min(sequence_offsets[first + 1] - a, sequence_offsets[s + 1] - b)
            other = input_ids[a : a + most] != input_ids[b : b + most]
            ends = supervised[a : a + most] | supervised[b : b + most] | other
            shared = ends.argmax() if ends.any() else most
            offsets[s] = max(shared - 1, 0)
    return offsets
