"""The packers of others, for ``packing.py``: TRL's, and two re-done plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from packstore.format.arrays import Int32, to_offsets

Packer = Callable[[list[int], int], list[list[int]]]
MOST_EXAMPLES = {"TRL bfd, one batch": 100_000, "TRL bfd": 100_000}
MOST_EXAMPLES |= {
    "NeMo ffd, re-done": 10_000,
    "NeMo ffshuffle, re-done": 10_000,
}  # quadratic
"""Peers that are not run on more examples than this."""

MOST_TOKENS = 100_000_000
"""TRL packs tokens, and needs several copies of them."""


def nemo_first_fit(
    lengths: list[int], capacity: int, queue: Iterable[int]
) -> list[list[int]]:
    """First fit as NeMo-Aligner describes it: packs are lists of lengths, each added up
    at a look.

    The list of examples beside them is ours, to check the result; it costs one append
    per example.
    """
    packs: list[list[int]] = []
    examples: list[list[int]] = []
    for i in queue:
        length = lengths[i]
        for number, pack in enumerate(packs):
            if sum(pack) + length <= capacity:
                pack.append(length)
                examples[number].append(i)
                break
        else:
            packs.append([length])
            examples.append([i])
    return examples


def bridge_first_fit(
    lengths: list[int], capacity: int, queue: Iterable[int]
) -> list[list[int]]:
    """First fit as Megatron-Bridge describes it: the first pack with room, by a tree of
    maxima.

    Its tree is recursive; this one is a loop, which is not slower.
    """
    leaves = 1 << max(len(lengths) - 1, 1).bit_length()
    room = [capacity] * (2 * leaves)
    examples: list[list[int]] = []
    for i in queue:
        length = lengths[i]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(examples):
            examples.append([])
        examples[node - leaves].append(i)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return examples


def decreasing(first_fit: Callable[..., list[list[int]]]) -> Packer:
    """First fit of the longest first."""

    def pack(lengths: list[int], capacity: int) -> list[list[int]]:
        queue = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        return first_fit(lengths, capacity, queue)

    return pack


def shuffle(first_fit: Callable[..., list[list[int]]]) -> Packer:
    """First fit in random order."""

    def pack(lengths: list[int], capacity: int) -> list[list[int]]:
        queue = np.random.default_rng(0).permutation(len(lengths)).tolist()
        return first_fit(lengths, capacity, queue)

    return pack


RE_DONE = {
    "NeMo ffd, re-done": decreasing(nemo_first_fit),
    "NeMo ffshuffle, re-done": shuffle(nemo_first_fit),
    "Bridge ffd, re-done": decreasing(bridge_first_fit),
    "Bridge ffshuffle, re-done": shuffle(bridge_first_fit),
}


def trl(lengths: Int32, capacity: int, batch_size: int) -> Callable[[], Any]:
    """A call of TRL's packer, which packs tokens: each example is its number over and
    over.

    Args:
        lengths: of the examples.
        capacity: tokens of a pack.
        batch_size: examples that are packed together; 1000 is the default of
            ``Dataset.map``.

    Raises:
        ImportError: TRL or datasets is not installed.
    """
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    datasets.disable_caching()
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    rows = pa.ListArray.from_arrays(to_offsets(lengths).astype(np.int32), pa.array(ids))
    dataset = datasets.Dataset(pa.table({"input_ids": rows}))
    return partial(
        pack_dataset, dataset, capacity, "bfd", map_kwargs={"batch_size": batch_size}
    )
