"""First fit, as NeMo-Aligner and Megatron-Bridge define it: each example goes into the
first pack that it fits, in random order or the longest first.
"""

from __future__ import annotations

import math

import numpy as np

from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack.kernels import Bits, jit


def first_fit_decreasing(
    lengths: Int32, capacity: int, seed: int
) -> tuple[Int32, Int64]:
    """Packs the longest example first; equal ones in a seeded order, spread over the
    input.

    Makes as many packs as the strategy of this name in NeMo-Aligner and Megatron-Bridge
    (``create_packing_strategy``). Packs hold examples of similar length.
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    grouped = lengths.argsort(kind="stable").astype(np.int32)
    keys = seeds.keys(int(np.count_nonzero(counts)), seed, "equal lengths")
    _spread(grouped, counts[counts > 0], keys)
    return _first_fit(lengths, capacity, np.ascontiguousarray(grouped[::-1]))


def first_fit_shuffle(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs the examples in random order."""
    queue = seeds.permutation(len(lengths), seed, "first_fit_shuffle").astype(np.int32)
    return _first_fit(lengths, capacity, queue)


@jit
def _spread(grouped: Int32, counts: Int64, keys: Bits) -> None:
    """Puts each run of m equal examples in the order ``a * i + b mod m``, `a` prime to
    `m`.

    So neighbours of a sorted input do not share a pack. `grouped`, the examples sorted
    by length, is written; `a` and `b` are the upper and lower half of the run's random
    `keys`.
    """
    copy = np.empty(counts.max() if len(counts) else 0, np.int32)
    start = np.int64(0)
    for run in range(len(counts)):
        number = np.uint32(counts[run])
        place = np.uint32(keys[run] & np.uint64(0xFFFFFFFF)) % number
        step = np.uint32(keys[run] >> np.uint64(32)) % number
        while math.gcd(step, number) != 1:
            step = np.uint32(step + 1)
        copy[:number] = grouped[start : start + number]
        for i in range(number):
            grouped[start + i] = copy[place]
            place = np.uint32((np.uint64(place) + np.uint64(step)) % np.uint64(number))
        start += number


def _first_fit(lengths: Int32, capacity: int, queue: Int32) -> tuple[Int32, Int64]:
    """Packs the examples in the order of `queue`, a permutation `[n]`; O(n log P).

    Returns the order and offsets of a strategy; packs stand in the order in which they
    were opened.
    """
    # Any two packs together exceed one pack, else the later would not have been opened.
    # So P > 1 packs hold more than P / 2 full packs.
    most = min(len(lengths), 2 * int(lengths.sum(dtype=np.int64)) // capacity)
    pack_of = _assign(lengths, capacity, queue, most)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(pack_of))])
    return queue[pack_of.argsort(kind="stable")], offsets


@jit
def _assign(lengths: Int32, capacity: int, queue: Int32, most: int) -> Int32:
    """Returns the pack of each example of the queue: int32 `[n]`.

    Node i of the tree holds the largest free space of the packs below it; its children
    are 2i and 2i + 1, and the leaves are all packs, including unopened ones (which are
    empty).
    """
    leaves = 1
    while leaves < most:
        leaves *= 2
    room = np.full(2 * leaves, capacity, np.int32)
    pack_of = np.empty(len(queue), np.int32)
    for i in range(len(queue)):
        length = lengths[queue[i]]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        pack_of[i] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            most_room = max(room[2 * node], room[2 * node + 1])
            if room[node] == most_room:
                break
            room[node] = most_room
    return pack_of
