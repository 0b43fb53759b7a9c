"""The packers of others, for ``packing.py``: installed ones, and two re-done plainly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from rich.console import Console

from packstore.format.arrays import to_offsets

Packer = Callable[[Any, int], Any]
PEERS = ("lightbinpack", "binpacking", "trl")
MOST_EXAMPLES = {"binpacking": 10_000, "TRL bfd, one batch": 100_000, "TRL bfd": 100_000}
"""Peers that are not run on more examples than this."""

MOST_TOKENS = 100_000_000
"""TRL packs tokens, and needs several copies of them."""


def nemo_first_fit(lengths: list[int], capacity: int, queue: Iterable[int]) -> list[list[int]]:
    """First fit as NeMo-Aligner describes it: packs are lists of lengths, each added up at a look.

    The list of examples beside them is ours, to check the result; it costs one append per example.
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


def bridge_first_fit(lengths: list[int], capacity: int, queue: Iterable[int]) -> list[list[int]]:
    """First fit as Megatron-Bridge describes it: the first pack with room, by a tree of maxima.

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


class Trl:
    """TRL packs tokens, so each example is its number over and over; that is made beforehand.

    Args:
        batch_size: examples that are packed together; 1000 is the default of ``Dataset.map``.
    """

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size

    def prepare(self, lengths: list[int]) -> Any:
        import datasets
        import pyarrow as pa

        datasets.disable_progress_bars()
        datasets.disable_caching()
        ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        ends = to_offsets(np.array(lengths)).astype(np.int32)
        rows = pa.ListArray.from_arrays(ends, pa.array(ids))
        return datasets.Dataset(pa.table({"input_ids": rows}))

    def __call__(self, dataset: Any, capacity: int) -> Any:
        from trl.data_utils import pack_dataset

        return pack_dataset(
            dataset, capacity, "bfd", map_kwargs={"batch_size": self._batch_size or len(dataset)}
        )


def peers(console: Console) -> dict[str, Packer]:
    """Name -> packer, from a list of lengths to lists of examples."""
    found: dict[str, Packer] = {
        "NeMo ffd, re-done": decreasing(nemo_first_fit),
        "NeMo ffshuffle, re-done": shuffle(nemo_first_fit),
        "Bridge ffd, re-done": decreasing(bridge_first_fit),
        "Bridge ffshuffle, re-done": shuffle(bridge_first_fit),
    }
    for name in PEERS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            console.print(f"[yellow]{name} is not installed: left out")
            continue
        if name == "lightbinpack":
            found["lightbinpack obfd"] = module.obfd
            found["lightbinpack ffd"] = module.ffd
        elif name == "trl":
            found["TRL bfd, one batch"], found["TRL bfd"] = Trl(None), Trl(1000)
        else:
            found["binpacking"] = lambda lengths, capacity, module=module: [
                list(pack) for pack in module.to_constant_volume(dict(enumerate(lengths)), capacity)
            ]
    return found
