"""First fit, as NeMo-Aligner and Megatron-Bridge define it: each example goes into the
first pack that it fits, in random order or the longest first.
"""

from __future__ import annotations

import math

import numpy as np

from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack.jit import jit


def first_fit_decreasing(
    lengths: Int32, capacity: int, seed: int
) -> tuple[Int32, Int64]:
    """Pack the longest example first; equal ones in a seeded order, spread over the
    input.

    Makes as many packs as the strategy of this name in NeMo-Aligner and Megatron-Bridge
    (``create_packing_strategy``). Packs hold examples of similar length.
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    counts = counts[counts > 0]
    by_length = lengths.argsort(kind="stable").astype(np.int32)
    keys = seeds.keys(len(counts), seed, "equal lengths")
    _spread_equal_lengths(by_length, counts, keys)
    longest_first = np.ascontiguousarray(by_length[::-1])
    return _first_fit(lengths, capacity, longest_first)


def first_fit_shuffle(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Pack the examples in random order."""
    queue = seeds.permutation(len(lengths), seed, "first_fit_shuffle").astype(np.int32)
    return _first_fit(lengths, capacity, queue)


@jit
def _spread_equal_lengths(by_length: Int32, counts: Int64, keys: seeds.U64) -> None:
    """Put each run of m equal examples into the order ``(start + i * step) mod m``.

    So neighbours of a sorted input do not share a pack. `step` is prime to `m`.

    Args:
        by_length: int32 `[n]`, the examples sorted by length; is overwritten.
        counts: int64 `[R]`, the number of examples of each run.
        keys: uint64 `[R]`, random: the lower half gives `start`, the upper half `step`.
    """
    copy = np.empty(counts.max() if len(counts) else 0, np.int32)
    first = np.int64(0)
    for run in range(len(counts)):
        count = np.uint32(counts[run])
        place = np.uint32(keys[run] & np.uint64(0xFFFFFFFF)) % count
        step = np.uint32(keys[run] >> np.uint64(32)) % count
        while math.gcd(step, count) != 1:
            step = np.uint32(step + 1)
        copy[:count] = by_length[first : first + count]
        for i in range(count):
            by_length[first + i] = copy[place]
            place = np.uint32((np.uint64(place) + np.uint64(step)) % np.uint64(count))
        first += count


def _first_fit(lengths: Int32, capacity: int, queue: Int32) -> tuple[Int32, Int64]:
    """Pack the examples in the order of `queue`, a permutation `[n]`; O(n log P).

    Returns the order and offsets of a strategy; packs stand in the order in which they
    were opened.
    """
    # Any two packs together exceed one pack, else the later would not have been opened.
    # So P > 1 packs hold more than P / 2 full packs.
    num_tokens = int(lengths.sum(dtype=np.int64))
    max_packs = min(len(lengths), 2 * num_tokens // capacity)
    pack_of = _assign(lengths, capacity, queue, max_packs)

    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(pack_of))])
    return queue[pack_of.argsort(kind="stable")], offsets


@jit
def _assign(lengths: Int32, capacity: int, queue: Int32, max_packs: int) -> Int32:
    """Return the pack of each example of the queue: int32 `[n]`.

    Node i of the tree holds the largest room of the packs below it; its children are 2i
    and 2i + 1, and the leaves are all packs, including unopened ones (which are empty).
    """
    num_leaves = 1
    while num_leaves < max_packs:
        num_leaves *= 2
    room = np.full(2 * num_leaves, capacity, np.int32)
    pack_of = np.empty(len(queue), np.int32)
    for i in range(len(queue)):
        length = lengths[queue[i]]

        # Go down to the first pack with room.
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        pack_of[i] = node - num_leaves
        room[node] -= length

        # Go up to the first node that does not change.
        while node > 1:
            node //= 2
            largest_room = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest_room:
                break
            room[node] = largest_room
    return pack_of
