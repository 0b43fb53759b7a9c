"""Patterns of lengths that fill a pack exactly, over the histogram: as tight as a plan gets.

Best-fit decreasing loses a percent where about three examples go into a pack, because it takes the
longest that fits and not the one after which another still does.
"""

from __future__ import annotations

import numpy as np

from packstore.pack.histogram import (
    add_step,
    best_fit,
    count_lengths,
    group_by_length,
    new_steps,
    place,
)
from packstore.pack.kernels import Bits, add, at_most, inlined, jit, new_set, remove
from packstore.records import Int32, Int64

PROBES = 64
"""Lengths that are tried as the last but one of a pattern."""


def exact_fill(lengths: Int32, capacity: int, seed: int) -> tuple[Int64, Int64]:
    """The longest example first, with those that fill its pack exactly; the rest by best fit.

    Examples of like lengths meet in a pack: use pack order ``stratified`` or ``shuffled``.
    """
    counts = count_lengths(lengths, capacity)
    steps, packs = _plan(counts.copy(), capacity)
    return place(steps, packs, group_by_length(lengths, counts, seed), counts)


@jit
def _plan(counts: Int64, capacity: int) -> tuple[Int64, int]:
    """Steps and number of packs; uses up `counts`."""
    steps, used, packs = new_steps(), 0, 0
    sizes, rest = new_set(capacity), np.zeros_like(counts)
    parts = np.empty(capacity, np.int64)
    tokens = 0
    for size in range(1, capacity + 1):
        if counts[size] > 0:
            add(sizes, size)
            tokens += size * counts[size]
    mean = tokens / max(counts.sum(), 1)
    size = at_most(sizes, capacity)
    while size > 0:
        found = _find_pattern(counts, sizes, parts, size, capacity, mean)
        if found == 0:
            rest[size] += counts[size]
            counts[size] = 0
            remove(sizes, size)
        else:
            parts[:found] = np.sort(parts[:found])
            more = counts[size]
            part = 0
            while part < found:
                each = _run(parts, found, part)
                more = min(more, counts[parts[part]] // each)
                part += each
            part = 0
            while part < found:
                each = _run(parts, found, part)
                counts[parts[part]] -= more * each
                if counts[parts[part]] == 0:
                    remove(sizes, parts[part])
                steps = add_step(steps, used, packs, 1 + more, parts[part], each)
                used += 1
                part += each
            packs += 1 + more
        size = at_most(sizes, size)
    steps, used, packs = best_fit(rest, capacity, steps, used, packs)
    return steps[:used], packs


@inlined
def _run(parts: Int64, found: int, part: int) -> int:
    each = 1
    while part + each < found and parts[part + each] == parts[part]:
        each += 1
    return each


@inlined
def _find_pattern(
    counts: Int64, sizes: Bits, parts: Int64, size: int, capacity: int, mean: float
) -> int:
    """Takes examples, `size` first, that fill a pack exactly; returns how many, 0 if none do."""
    room = capacity
    found = 0
    while size > 0:
        parts[found] = size
        found += 1
        counts[size] -= 1
        room -= size
        if room == 0:
            return found
        size = _next_part(counts, sizes, size, room, mean)
    for i in range(found):
        counts[parts[i]] += 1
    return 0


@inlined
def _next_part(counts: Int64, sizes: Bits, last: int, room: int, mean: float) -> int:
    if room <= last and counts[room] > 0:
        return room
    one = min(last, room - 1)
    for _ in range(PROBES):
        one = at_most(sizes, one)
        if one < 0 or 2 * one < room:
            break
        two = room - one
        if counts[one] > 0 and counts[two] > (1 if one == two else 0):
            return one
        one -= 1
    if room > 2 * mean:
        one = at_most(sizes, min(last, room - np.int64(mean / 2)))
        while one > 0 and counts[one] == 0:
            one = at_most(sizes, one - 1)
        return one
    return -1
