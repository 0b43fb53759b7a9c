"""Patterns of lengths that fill a pack exactly, over the histogram: as tight as a plan gets.

Best-fit decreasing loses a percent where about three examples go into a pack: it takes the longest
example that fits, and not one after which the next fits exactly.
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
from packstore.pack.kernels import Bits, add, at_least, at_most, inlined, jit, new_set, remove
from packstore.records import Int32, Int64

PROBES = 64
"""Lengths that are tried as the last but one of a pattern."""


def exact_fill(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """The longest example first, with others that fill its pack exactly; the rest by best fit.

    Never more packs than best-fit decreasing makes, whose plan is made as well and taken if it is
    better. Examples of like lengths meet in a pack: use pack order ``stratified`` or ``shuffled``.
    """
    counts = count_lengths(lengths, capacity)
    steps, used, packs = plan_exactly(counts, capacity, new_steps(), 0, 0)
    return place(steps[:used], packs, group_by_length(lengths, counts, seed), counts)


@jit
def plan_exactly(
    counts: Int64, capacity: int, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """The better of exact patterns and best-fit decreasing, into packs from `packs` on.

    Returns:
        The steps, how many are used, and the number of packs.
    """
    exact, exact_used, exact_packs = _plan(counts.copy(), capacity, steps.copy(), used, packs)
    fit, fit_used, fit_packs = best_fit(counts, capacity, steps, used, packs)
    if fit_packs < exact_packs:
        return fit, fit_used, fit_packs
    return exact, exact_used, exact_packs


@jit
def _plan(
    counts: Int64, capacity: int, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """Exact patterns, and best fit for the rest; uses up `counts`."""
    sizes, rest, parts = new_set(capacity), np.zeros_like(counts), np.empty(capacity, np.int64)
    for size in range(1, capacity + 1):
        if counts[size] > 0:
            add(sizes, size)
    size = at_most(sizes, capacity)
    while size > 0:
        number = _find(counts, sizes, parts, size, capacity)
        if number > 0:
            _sort(parts, number)
            steps, used, packs = _repeat(parts[:number], counts, sizes, steps, used, packs)
        else:
            rest[size] = counts[size]
            counts[size] = 0
            remove(sizes, size)
        size = at_most(sizes, size)
    return best_fit(rest, capacity, steps, used, packs)


@inlined
def _find(counts: Int64, sizes: Bits, parts: Int64, size: int, capacity: int) -> int:
    """Writes to `parts` lengths, `size` first, that fill a pack exactly; returns how many, or 0."""
    room = capacity
    number = 0
    while size > 0:
        parts[number] = size
        number += 1
        counts[size] -= 1
        if counts[size] == 0:
            remove(sizes, size)
        room -= size
        size = _next_part(counts, sizes, room)
    for part in parts[:number]:
        counts[part] += 1
        add(sizes, part)
    return number if room == 0 else 0


@inlined
def _next_part(counts: Int64, sizes: Bits, room: int) -> int:
    """The length that closes `room`, or one of two that do, else a third of it; -1: none fits.

    Two as equal as possible, and a third rather than more: that saves up the short ones, without
    which the packs of long ones stay open.
    """
    if at_most(sizes, room) == room:
        return room
    one = (room - 1) // 2
    for _ in range(PROBES):
        one = at_least(sizes, one + 1)
        if one < 0 or one >= room:
            break
        if counts[room - one] > (1 if 2 * one == room else 0):
            return one
    third = at_most(sizes, room // 3)
    return third if third > 0 else at_most(sizes, room)


@inlined
def _sort(parts: Int64, number: int) -> None:
    """Sorts the first `number` parts, which are few: np.sort takes longer than the whole search."""
    for i in range(1, number):
        part = parts[i]
        to = i
        while to > 0 and parts[to - 1] > part:
            parts[to] = parts[to - 1]
            to -= 1
        parts[to] = part


@jit
def _repeat(
    pattern: Int64, counts: Int64, sizes: Bits, steps: Int64, used: int, packs: int
) -> tuple[Int64, int, int]:
    """Fills as many packs as there are examples for with the (sorted) pattern."""
    number = counts[pattern[0]]
    each = 0
    for i in range(len(pattern)):
        each = each + 1 if i > 0 and pattern[i] == pattern[i - 1] else 1
        number = min(number, counts[pattern[i]] // each)
    for i in range(len(pattern)):
        each = each + 1 if i > 0 and pattern[i] == pattern[i - 1] else 1
        size = pattern[i]
        if i + 1 < len(pattern) and pattern[i + 1] == size:
            continue
        steps = add_step(steps, used, packs, number, size, each)
        used += 1
        counts[size] -= number * each
        if counts[size] == 0:
            remove(sizes, size)
    return steps, used, packs + number
