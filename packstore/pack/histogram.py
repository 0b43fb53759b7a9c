"""Plans over the histogram of lengths, which place equal packs together.

A plan is a list of steps, each of which puts the same lengths into a run of consecutive packs.
Planning costs the same for any number of examples; after it there is one counting sort
(:func:`group_by_length`) and one scatter (:func:`place`).
"""

from __future__ import annotations

import numpy as np

from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack.kernels import Bits, add, at_least, inlined, jit, new_set, remove

FIRST, PACKS, SIZE, EACH, OPEN, NEXT = range(6)
"""Columns of a step: `EACH` examples of length `SIZE` go into each of `PACKS` packs from `FIRST`
on. The first `OPEN` of these packs still have the space that this step left; `NEXT` is the previous
step that left the same space, or -1."""


@jit
def count_lengths(lengths: Int32, capacity: int) -> Int64:
    """Counts the examples of each length: int64 `[capacity + 1]`."""
    counts = np.zeros(capacity + 1, np.int64)
    for length in lengths:
        counts[np.uint32(length)] += 1
    return counts


def group_by_length(lengths: Int32, counts: Int64, seed: int) -> Int32:
    """Sorts examples by increasing length, equal ones in a seeded order: int32 `[n]`.

    The order of m equal examples is ``a * i + b mod m`` with `a` prime to `m`. It spreads them over
    the input, so that neighbours of a sorted input do not share a pack, at no cost.
    """
    keys = seeds.keys(int(np.count_nonzero(counts)), seed, "equal lengths")
    # Large arrays are made by numpy, not by compiled code: numpy requests huge pages.
    grouped = np.empty(len(lengths), np.int32)
    _sort(lengths, counts, grouped)
    _mix(grouped, counts, keys)
    return grouped


# Indices of the loops over all examples are unsigned: numba checks signed ones for negative values,
# which takes as long as the work (measured: 1.8 against 0.8 ns).


@jit
def _sort(lengths: Int32, counts: Int64, grouped: Int32) -> None:
    # 32 bits, so that the table fits the L1 cache.
    ends = (np.cumsum(counts) - counts).astype(np.uint32)
    # Touched in order first, so that random writes hit a cache (measured: 1.6, not 3.0 ns).
    for line in range(0, len(grouped), 16):
        grouped[np.uint32(line)] = 0
    for i in range(len(lengths)):
        size = np.uint32(lengths[i])
        end = ends[size]
        grouped[end] = i
        ends[size] = end + np.uint32(1)


@jit
def _mix(grouped: Int32, counts: Int64, keys: Bits) -> None:
    copy = np.empty(counts.max(), np.int32)
    start, key = np.uint64(0), 0
    for count in counts:
        if count == 0:
            continue
        # 32 bits: division takes half as long.
        number = np.uint32(count)
        at = np.uint32(keys[key] & np.uint64(0xFFFFFFFF)) % number
        step = np.uint32(keys[key] >> np.uint64(32)) % number
        while _common(step, number) != 1:
            step = np.uint32(step + 1)
        for i in range(number):
            copy[i] = grouped[start + i]
        for i in range(number):
            grouped[start + i] = copy[at]
            at = np.uint32(at + step)
            if at >= number:
                at = np.uint32(at - number)
        key += 1
        start += np.uint64(number)


@inlined
def _common(a: np.uint32, b: np.uint32) -> np.uint32:
    """Returns the greatest common divisor."""
    while b != 0:
        a, b = b, np.uint32(a % b)
    return a


def new_steps() -> Int64:
    """Allocates an array of steps."""
    return np.empty((1024, 6), np.int64)


@jit
def add_step(steps: Int64, used: int, first: int, packs: int, size: int, each: int) -> Int64:
    """Writes step number `used`; returns `steps`, reallocated if it had to grow."""
    if used == len(steps):
        larger = np.empty((2 * used, 6), np.int64)
        larger[:used] = steps
        steps = larger
    steps[used, FIRST] = first
    steps[used, PACKS] = packs
    steps[used, SIZE] = size
    steps[used, EACH] = each
    steps[used, OPEN] = 0
    return steps


@jit
def best_fit(
    counts: Int64, capacity: int, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """Packs all examples in `counts` by best-fit decreasing into new packs from `packs` on.

    Returns:
        The steps, the number of steps used, and the number of packs.
    """
    last = np.full(capacity + 1, -1, np.int64)
    bits = new_set(capacity)
    for size in range(capacity, 0, -1):
        left = counts[size]
        while left > 0:
            room = at_least(bits, size)
            if room < 0:
                room = capacity
                each = min(room // size, left)
                take = left // each
                first = packs
                packs += take
            else:
                group = last[room]
                each = min(room // size, left)
                take = min(left // each, steps[group, OPEN])
                steps[group, OPEN] -= take
                first = steps[group, FIRST] + steps[group, OPEN]
                if steps[group, OPEN] == 0:
                    last[room] = steps[group, NEXT]
                    if last[room] < 0:
                        remove(bits, room)
            left -= take * each
            room -= each * size
            steps = add_step(steps, used, first, take, size, each)
            if room > 0:
                steps[used, OPEN] = take
                steps[used, NEXT] = last[room]
                last[room] = used
                add(bits, room)
            used += 1
    return steps, used, packs


def place(steps: Int64, packs: int, grouped: Int32, counts: Int64) -> tuple[Int32, Int64]:
    """Returns the order and offsets that the steps describe.

    Args:
        steps: int64 `[steps, 6]`, all in use; the last two columns are overwritten.
        packs: the number of packs.
        grouped: int32 `[n]`, from :func:`group_by_length`.
        counts: int64 `[capacity + 1]`, examples of each length.
    """
    order, offsets = np.empty(len(grouped), np.int32), np.empty(packs + 1, np.int64)
    _source(steps, counts, offsets)
    _scatter(steps, len(counts), grouped, order, offsets)
    return order, offsets


@jit
def _source(steps: Int64, counts: Int64, offsets: Int64) -> None:
    """Writes each step's start in `grouped` to `OPEN`, and links the steps that begin at a pack.

    Afterwards ``offsets[i]`` is the first step of pack i, or -1, and `NEXT` of a step is the next
    one that begins at the same pack.
    """
    taken = np.cumsum(counts) - counts
    for s in range(len(steps)):
        size = steps[s, SIZE]
        steps[s, OPEN] = taken[size]
        taken[size] += steps[s, PACKS] * steps[s, EACH]
    offsets[:] = -1
    for s in range(len(steps) - 1, -1, -1):
        first = steps[s, FIRST]
        steps[s, NEXT] = offsets[first]
        offsets[first] = s


@jit
def _scatter(steps: Int64, depth: int, grouped: Int32, order: Int32, offsets: Int64) -> None:
    """Writes `order` and `offsets` in one pass, by runs of packs filled by the same steps.

    The packs of a step lie within those of the step whose space it uses, or are disjoint from them.
    So the steps that fill a pack form a stack of at most `depth`.
    """
    stack, ends = np.empty(depth, np.int64), np.empty(depth, np.int64)
    depth = pack = 0
    to = each_pack = np.uint64(0)
    while pack < len(offsets) - 1:
        while depth > 0 and ends[depth - 1] <= pack:
            depth -= 1
            each_pack -= np.uint64(steps[stack[depth], EACH])
        s = offsets[pack]
        while s >= 0:
            stack[depth], ends[depth] = s, pack + steps[s, PACKS]
            depth += 1
            each_pack += np.uint64(steps[s, EACH])
            s = steps[s, NEXT]
        stop = pack + 1
        while stop < ends[depth - 1] and offsets[stop] < 0:
            stop += 1
        column = to
        for s in stack[:depth]:
            each, source = np.uint64(steps[s, EACH]), np.uint64(steps[s, OPEN])
            steps[s, OPEN] += steps[s, EACH] * (stop - pack)
            for i in range(each):
                row, taken = column + i, source + i
                for _ in range(stop - pack):
                    order[row] = grouped[taken]
                    row += each_pack
                    taken += each
            column += each
        for i in range(pack, stop):
            offsets[i] = np.int64(to)
            to += each_pack
        pack = stop
    offsets[-1] = np.int64(to)
