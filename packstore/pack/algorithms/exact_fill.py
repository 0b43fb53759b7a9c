"""Packs by patterns of lengths that fill a pack exactly, over the histogram of lengths.

Best-fit decreasing wastes a percent where packs hold about three examples: it takes the longest
example that fits, not one after which the next fits exactly.
"""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.histogram import (
    add_step,
    best_fit,
    count_lengths,
    group_by_length,
    new_steps,
    place,
)
from packstore.pack.kernels import (
    Bits,
    add,
    at_least,
    at_most,
    inlined,
    jit,
    lowest_bit,
    new_set,
    remove,
    window,
)


def exact_fill(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs the longest example first, with others that fill its pack; the rest by best fit.

    Never makes more packs than best-fit decreasing, whose plan is also made, and taken if better.
    Packs hold examples of similar length: use pack order ``stratified`` or ``shuffled``.
    """
    counts = count_lengths(lengths, capacity)
    steps, used, packs = plan_exactly(counts, capacity, new_steps(), 0, 0)
    return place(steps[:used], packs, group_by_length(lengths, counts, seed), counts)


@jit
def plan_exactly(
    counts: Int64, capacity: int, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """Writes the better plan of exact patterns and best-fit decreasing, for packs from `packs` on.

    Returns:
        The steps, the number of steps used, and the number of packs.
    """
    tokens = 0
    for size in range(len(counts)):
        tokens += size * counts[size]
    exact, exact_used, exact_packs = _plan(counts.copy(), capacity, steps.copy(), used, packs)
    if (exact_packs - packs - 1) * capacity < tokens:  # one pack less would not hold the tokens
        return exact, exact_used, exact_packs
    fit, fit_used, fit_packs = best_fit(counts, capacity, steps, used, packs)
    if fit_packs < exact_packs:
        return fit, fit_used, fit_packs
    return exact, exact_used, exact_packs


PART, EACH = range(2)
"""A pattern is an int64 `[parts, 2]` of distinct lengths, the longest first, and their counts.
Below, `sizes` is the set of lengths with examples left, and `mirror` the set of their complements
to a full pack, so one word operation compares 64 lengths with their complements."""


@jit
def _plan(
    counts: Int64, capacity: int, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """Plans exact patterns, then best fit for the rest; reduces `counts` to 0."""
    sizes, mirror = new_set(capacity), new_set(capacity)
    rest, parts = np.zeros_like(counts), np.empty((capacity, 2), np.int64)
    for size in range(1, capacity + 1):
        if counts[size] > 0:
            _change(counts, sizes, mirror, size, 0)
    size = at_most(sizes, capacity)
    while size > 0:
        number = _find(counts, sizes, mirror, parts, size)
        if number > 0:
            times = counts[size]
            for i in range(number):
                times = min(times, counts[parts[i, PART]] // parts[i, EACH])
            for i in range(number - 1, -1, -1):
                part, each = parts[i, PART], parts[i, EACH]
                steps = add_step(steps, used, packs, times, part, each)
                used += 1
                _change(counts, sizes, mirror, part, -times * each)
            packs += times
        else:
            rest[size] = counts[size]
            _change(counts, sizes, mirror, size, -counts[size])
        size = at_most(sizes, size)
    return best_fit(rest, capacity, steps, used, packs)


@inlined
def _change(counts: Int64, sizes: Bits, mirror: Bits, size: int, by: int) -> None:
    """Changes the count of a length by `by`, and updates both sets."""
    counts[size] += by
    left = len(counts) - 1 - size
    if counts[size] == 0:
        remove(sizes, size)
        remove(mirror, left)
    elif counts[size] <= by or by == 0:
        add(sizes, size)
        add(mirror, left)


@inlined
def _find(counts: Int64, sizes: Bits, mirror: Bits, parts: Int64, size: int) -> int:
    """Writes a pattern with `size` that fills a pack to `parts`; returns its parts, or 0."""
    room = len(counts) - 1
    number, each = 0, 1
    while size > 0:
        number = _put(parts, number, size, each)
        _change(counts, sizes, mirror, size, -each)
        room -= size * each
        size = _next_part(counts, sizes, mirror, room)
        each = 1
        if size > 0 and 3 * size <= room and at_most(sizes, room) == size:
            # The longest length left: it remains the choice while a third of the space holds it.
            each = min(counts[size], room // size - 2)
    for i in range(number):
        _change(counts, sizes, mirror, parts[i, PART], parts[i, EACH])
    return number if room == 0 else 0


@inlined
def _put(parts: Int64, number: int, size: int, each: int) -> int:
    """Adds `each` examples of length `size` to a pattern; returns its number of parts."""
    at = number
    while at > 0 and parts[at - 1, PART] < size:
        at -= 1
    if at > 0 and parts[at - 1, PART] == size:
        parts[at - 1, EACH] += each
        return number
    for i in range(number, at, -1):
        parts[i, PART] = parts[i - 1, PART]
        parts[i, EACH] = parts[i - 1, EACH]
    parts[at, PART] = size
    parts[at, EACH] = each
    return number + 1


@inlined
def _next_part(counts: Int64, sizes: Bits, mirror: Bits, room: int) -> int:
    """Returns the length that fills `room`, one of two that do, or a third of it; -1: none fits.

    Prefers two equal lengths, and a third over more: that saves short examples, which are needed
    to complete packs with long ones.
    """
    if counts[room] > 0 or room == 0:
        return room
    one = _half(counts, sizes, mirror, room)
    if one > 0:
        return one
    third = at_most(sizes, room // 3)
    return third if third > 0 else at_most(sizes, room)


@inlined
def _half(counts: Int64, sizes: Bits, mirror: Bits, room: int) -> int:
    """Returns the longer of two lengths, as equal as possible, that fill `room`, or -1."""
    shift = len(counts) - 1 - room
    one = at_least(sizes, (room + 1) // 2)
    while 0 < one < room:
        both = window(sizes, one) & window(mirror, one + shift)
        if 2 * one == room and counts[one] < 2:
            both &= ~np.uint64(1)
        if both != 0:
            found = one + lowest_bit(both)
            return found if found < room else -1
        if one + 64 >= room:
            break
        one = at_least(sizes, one + 64)
    return -1
