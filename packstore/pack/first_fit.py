"""First fit with a tree: each example goes into the first pack that it fits."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.kernels import jit


def first_fit(lengths: Int32, capacity: int, queue: Int32) -> tuple[Int32, Int64]:
    """Packs the examples first-fit in the order of `queue`; O(n log P).

    Args:
        lengths: int32 `[n]`, tokens of each example.
        capacity: most tokens of a pack.
        queue: int32 `[n]`, a permutation of the examples.

    Returns:
        The order and offsets of a strategy; packs in the order in which they were opened.
    """
    # Any two packs together exceed one pack, else the later would not have been opened. So P > 1
    # packs hold more than P / 2 full packs.
    most = min(len(lengths), 2 * int(lengths.sum(dtype=np.int64)) // capacity)
    pack_of = _assign(lengths, capacity, queue, most)
    return _by_pack(pack_of, queue)


@jit
def _assign(lengths: Int32, capacity: int, queue: Int32, most: int) -> Int32:
    """Returns the pack of each example of the queue: int32 `[n]`.

    Node i of the tree holds the largest free space of the packs below it; its children are 2i and
    2i + 1, and the leaves are all packs, including unopened ones (which are empty).
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


@jit
def _by_pack(pack_of: Int32, queue: Int32) -> tuple[Int32, Int64]:
    packs = pack_of.max() + 1 if len(pack_of) else 0
    order, ends = np.empty(len(queue), np.int32), np.zeros(packs + 2, np.int64)
    # ends[i + 2] first counts pack i; then ends[i + 1] is its start, and finally its end.
    for pack in pack_of:
        ends[pack + 2] += 1
    ends = np.cumsum(ends)
    for i in range(len(queue)):
        order[ends[pack_of[i] + 1]] = queue[i]
        ends[pack_of[i] + 1] += 1
    return order, ends[:-1]
