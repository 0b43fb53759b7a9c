"""Plans over the histogram of lengths: equal packs are placed together, however many examples.

A plan is a list of steps, each of which puts the same examples into a run of neighbouring packs.
Deciding it costs the same for any number of examples; after that there is one counting sort
(:func:`group_by_length`) and one scatter (:func:`place`).
"""

from __future__ import annotations

from math import gcd

import numpy as np

from packstore import seeds
from packstore.pack.kernels import Bits, add, at_least, jit, new_set, remove
from packstore.records import Int32, Int64

FIRST, PACKS, SIZE, EACH, OPEN, NEXT = range(6)
"""Columns of a step: `EACH` examples of length `SIZE` go into every one of `PACKS` packs from
`FIRST` on. `OPEN` of these packs (the first ones) still have the room that this step left, and
`NEXT` is the step before it that left the same room, or -1."""


@jit
def count_lengths(lengths: Int32, capacity: int) -> Int64:
    """int64 `[capacity + 1]`: how many examples have each length."""
    counts = np.zeros(capacity + 1, np.int64)
    for length in lengths:
        counts[length] += 1
    return counts


def group_by_length(lengths: Int32, counts: Int64, seed: int) -> Int32:
    """int32 `[n]`: the examples by increasing length, those of one length in a seeded order.

    The order of m equal examples is ``a * i + b mod m`` with `a` prime to `m`: spread over the
    input, so that neighbours in a sorted input do not become neighbours in a pack, yet as cheap as
    no shuffle at all.
    """
    keys = seeds.keys(int(np.count_nonzero(counts)), seed, "equal lengths")
    # Large arrays are made by numpy, not by compiled code: numpy asks for huge pages.
    grouped = np.empty(len(lengths), np.int32)
    _sort(lengths, counts, grouped)
    _mix(grouped, counts, keys)
    return grouped


@jit
def _sort(lengths: Int32, counts: Int64, grouped: Int32) -> None:
    ends = np.cumsum(counts) - counts
    for i in range(len(lengths)):
        grouped[ends[lengths[i]]] = i
        ends[lengths[i]] += 1


@jit
def _mix(grouped: Int32, counts: Int64, keys: Bits) -> None:
    copy = np.empty(counts.max(), np.int32)
    start = key = 0
    for count in counts:
        if count == 0:
            continue
        at = np.int64((keys[key] & np.uint64(0xFFFFFFFF)) % np.uint64(count))
        step = np.int64((keys[key] >> np.uint64(32)) % np.uint64(count))
        while gcd(step, count) != 1:
            step += 1
        copy[:count] = grouped[start : start + count]
        for i in range(start, start + count):
            grouped[i] = copy[at]
            at += step
            if at >= count:
                at -= count
        key += 1
        start += count


@jit
def new_steps() -> Int64:
    """Room for some steps."""
    return np.empty((1024, 6), np.int64)


@jit
def add_step(steps: Int64, used: int, first: int, packs: int, size: int, each: int) -> Int64:
    """Writes step number `used`; returns `steps`, which may have been moved to grow."""
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
    """Best-fit decreasing of all examples in `counts` into new packs, numbered from `packs` on.

    Returns:
        The steps, how many are used, and the number of packs.
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


def place(steps: Int64, packs: int, grouped: Int32, counts: Int64) -> tuple[Int64, Int64]:
    """The order and offsets that the steps mean.

    Args:
        steps: int64 `[steps, 6]`, all of them in use.
        packs: the number of packs.
        grouped: int32 `[n]` of :func:`group_by_length`.
        counts: int64 `[capacity + 1]`, examples of each length.
    """
    order, ends = np.empty(len(grouped), np.int64), np.zeros(packs + 2, np.int64)
    _scatter(steps, grouped, counts, order, ends)
    return order, ends[:-1]


@jit
def _scatter(steps: Int64, grouped: Int32, counts: Int64, order: Int64, ends: Int64) -> None:
    """Writes `order`, and the offsets into all but the last of the zeros in `ends` `[P + 2]`.

    First ``ends[i + 2]`` counts pack i, then ``ends[i + 1]`` is where it starts, and when all its
    examples are written there, where it ends.
    """
    for s in range(len(steps)):
        first = steps[s, FIRST] + 2
        for pack in range(first, first + steps[s, PACKS]):
            ends[pack] += steps[s, EACH]
    for pack in range(2, len(ends)):
        ends[pack] += ends[pack - 1]
    taken = np.cumsum(counts) - counts
    for s in range(len(steps)):
        first, each = steps[s, FIRST] + 1, steps[s, EACH]
        source = taken[steps[s, SIZE]]
        for pack in range(first, first + steps[s, PACKS]):
            to = ends[pack]
            for i in range(each):
                order[to + i] = grouped[source + i]
            source += each
            ends[pack] = to + each
        taken[steps[s, SIZE]] = source
