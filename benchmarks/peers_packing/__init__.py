"""The packers of others, for ``packing.py``: installed ones, and NeMo's, re-done plainly."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from rich.console import Console

from packstore.records import to_offsets

Packer = Callable[[Any, int], Any]
PEERS = ("lightbinpack", "binpacking", "trl")
QUADRATIC = {"binpacking": 10_000}
"""Peers that are not run on more examples than this."""


def nemo_first_fit(lengths: list[int], capacity: int, queue: Iterable[int]) -> list[list[int]]:
    """First fit as NeMo describes it: packs are lists of lengths, each added up at every look.

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


def nemo_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    queue = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return nemo_first_fit(lengths, capacity, queue)


def nemo_shuffle(lengths: list[int], capacity: int) -> list[list[int]]:
    queue = np.random.default_rng(0).permutation(len(lengths)).tolist()
    return nemo_first_fit(lengths, capacity, queue)


def trl_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """TRL packs tokens, so each example is its number over and over; making that is not its work.

    All examples are one batch; its default is batches of 1000, which are packed on their own.
    """
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    rows = pa.ListArray.from_arrays(to_offsets(np.array(lengths)).astype(np.int32), pa.array(ids))
    table = datasets.Dataset(pa.table({"input_ids": rows}))
    packed = pack_dataset(table, capacity, "bfd", map_kwargs={"batch_size": len(lengths)})
    column = packed.data.column("input_ids").combine_chunks()
    tokens, ends = column.flatten().to_numpy(), column.offsets.to_numpy()
    return [list(dict.fromkeys(tokens[a:b].tolist())) for a, b in itertools.pairwise(ends)]


def peers(console: Console) -> dict[str, Packer]:
    """Name -> packer, from a list of lengths to lists of examples."""
    found: dict[str, Packer] = {"NeMo ffd, re-done": nemo_decreasing}
    found["NeMo ffshuffle, re-done"] = nemo_shuffle
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
            found["TRL bfd, one batch"] = trl_best_fit
        else:
            found["binpacking"] = lambda lengths, capacity, module=module: [
                list(pack) for pack in module.to_constant_volume(dict(enumerate(lengths)), capacity)
            ]
    return found
