"""The default strategy: packs of neighbours, and well chosen examples to fill them.

A look-ahead of a few thousand examples (the pool) is refilled from the input. A pack
takes the oldest examples of the pool until one or two more can fill it; they are
chosen to fill it exactly, again the oldest that do. So packs are as random as the
input, no example moves far, and memory does not grow with the input.

The functions of this file run in Python for few examples, and compiled for many (see
:mod:`packstore.pack.jit`): they use arrays and numbers only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int32, Int64
from packstore.pack.jit import highest_bit, jit, jit_helper, lowest_bit

Words = npt.NDArray[np.uint64]

WINDOW = 8192
"""Maximum number of examples in the pool."""

SPAN = 4 * WINDOW
"""Maximum distance in the input between the oldest and newest example of the pool."""

PROBES = 64
"""Number of examples tried as the second to last of a pack."""

CLOSE = 2
"""A pack is completed once it has room for at most this many examples of mean length.
"""

SPARE = 0.5
"""Until then, a pack keeps room for this many more examples of mean length.

Shorter examples are scarce, and needed for packs that begin with a long example.
"""

ENDGAME = 1024
"""At most this many examples remain, and the input has ended: the longest go first, as
they are hard to place.
"""

FIRST, LAST = range(2)
"""Columns of ``Pool.queues``."""

OLDEST, NEXT, COUNT, TOKENS = range(4)
"""Places in ``Pool.counters``."""


class BitSet(NamedTuple):
    """A set of the integers from 0 to a limit that finds the members beside a number.

    Attributes:
        words: uint64, a bit for each integer, set for members.
        summary: uint64, a bit for each word, set for words that hold members.
    """

    words: Words
    summary: Words


class Pool(NamedTuple):
    """The examples that the strategy chooses from; an example is its input position.

    Attributes:
        slots: the slots of the examples in the pool; the slot is the example modulo
            `SPAN`.
        lengths: the lengths of the examples in the pool.
        queues: int64 `[capacity + 1, 2]`, the oldest and the newest example of each
            length, or -1.
        successors: int64 `[SPAN]`, per slot the next example of the same length, or -1.
        counters: int64 `[4]`, the oldest example in the pool, the next one of the
            input, and the number and the tokens of the examples in the pool.
    """

    slots: BitSet
    lengths: BitSet
    queues: Int64
    successors: Int64
    counters: Int64


def pool(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Make nearly full packs in nearly input order; draw no random numbers."""
    order = np.empty(len(lengths), np.int32)
    offsets = np.empty(len(lengths) + 1, np.int64)
    empty_pool = Pool(
        slots=new_bit_set(SPAN - 1),
        lengths=new_bit_set(capacity),
        queues=np.full((capacity + 1, 2), -1, np.int64),
        successors=np.empty(SPAN, np.int64),
        counters=np.zeros(4, np.int64),
    )
    num_packs = _fill_packs(lengths, capacity, empty_pool, order, offsets)
    return order, offsets[: num_packs + 1].copy()


@jit
def _fill_packs(
    lengths: Int32, capacity: int, pool: Pool, order: Int32, offsets: Int64
) -> int:
    """Write the plan into `order` `[n]` and `offsets` `[n + 1]`; return the number of
    packs.
    """
    counters = pool.counters
    num_packs = 0
    num_placed = 0
    while num_placed < len(lengths):
        _refill(pool, lengths)
        offsets[num_packs] = num_placed
        num_packs += 1

        # The first example: the oldest, or in the endgame one of the longest.
        room = capacity
        example = counters[OLDEST]
        length = lengths[example]
        if counters[NEXT] == len(lengths) and counters[COUNT] <= ENDGAME:
            length = at_most(pool.lengths, room)

        # Then the oldest that fit, as long as there is much room; `example` is the last
        # of these, and -1 from the first time on that none is left. Then the best ones
        # to close the pack.
        while length > 0:
            order[num_placed] = _take_oldest(pool, length)
            num_placed += 1
            room -= length

            mean_length = counters[TOKENS] / max(counters[COUNT], 1)
            if example >= 0 and room > CLOSE * mean_length:
                longest = room - np.int64(SPARE * mean_length)
                example = _oldest_that_fits(pool, lengths, example, longest)
            else:
                example = -1

            if example >= 0:
                length = lengths[example]
            else:
                length = _best_closing_length(pool, lengths, room)

    offsets[num_packs] = num_placed
    return num_packs


@jit_helper
def _refill(pool: Pool, lengths: Int32) -> None:
    """Add examples of the input to the pool until it is full."""
    counters = pool.counters
    queues = pool.queues
    if counters[COUNT] == 0:
        counters[OLDEST] = counters[NEXT]
    end = min(len(lengths), counters[OLDEST] + SPAN)
    while counters[COUNT] < WINDOW and counters[NEXT] < end:
        example = counters[NEXT]
        length = lengths[example]
        slot = example % SPAN
        add(pool.slots, slot)
        pool.successors[slot] = -1
        if queues[length, FIRST] < 0:
            queues[length, FIRST] = example
            add(pool.lengths, length)
        else:
            pool.successors[queues[length, LAST] % SPAN] = example
        queues[length, LAST] = example
        counters[NEXT] += 1
        counters[COUNT] += 1
        counters[TOKENS] += length


@jit_helper
def _take_oldest(pool: Pool, length: int) -> int:
    """Remove the oldest example of a length from the pool, and return it."""
    counters = pool.counters
    example = int(pool.queues[length, FIRST])
    slot = example % SPAN
    successor = pool.successors[slot]
    pool.queues[length, FIRST] = successor
    if successor < 0:
        remove(pool.lengths, length)
    remove(pool.slots, slot)
    counters[COUNT] -= 1
    counters[TOKENS] -= length
    if example == counters[OLDEST] and counters[COUNT] > 0:
        counters[OLDEST] = _oldest(pool, example)
    return example


@jit_helper
def _oldest(pool: Pool, first: int) -> int:
    """Return the oldest example in the pool that is not older than `first`, or -1."""
    first_slot = first % SPAN
    slot = at_least(pool.slots, first_slot)
    if slot < 0:
        # Slots are used in turn: slot 0 follows the last one.
        slot = at_least(pool.slots, 0)
        if slot < 0:
            return -1
        slot += SPAN
    example = first + slot - first_slot
    return example if first <= example < pool.counters[NEXT] else -1


@jit_helper
def _oldest_that_fits(pool: Pool, lengths: Int32, first: int, room: int) -> int:
    """Return the oldest example, not older than `first`, of at most `room` tokens, or
    -1.
    """
    example = _oldest(pool, first)
    while example >= 0 and lengths[example] > room:
        example = _oldest(pool, example + 1)
    return example


@jit_helper
def _best_closing_length(pool: Pool, lengths: Int32, room: int) -> int:
    """Return the length that fills `room` best, alone or with one more; -1: none fits.

    Of two lengths, the first belongs to one of the oldest examples.
    """
    best = at_most(pool.lengths, room)
    if room < 2 * at_least(pool.lengths, 1):
        return best  # no two examples fit

    least_waste = room - best
    example = pool.counters[OLDEST] - 1
    for _ in range(PROBES):
        example = _oldest(pool, example + 1)
        if least_waste == 0 or example < 0:
            break
        length = lengths[example]
        if length >= room:
            continue
        partner = at_most(pool.lengths, room - length)
        if partner > 0 and room - length - partner < least_waste:
            best = length
            least_waste = room - length - partner
    return best


# Sets of integers. Words are uint64, and so must be all that is combined with them:
# numpy and numba turn a uint64 and an int64 into a float.

ZERO = np.uint64(0)
ONE = np.uint64(1)
WORD_SHIFT = np.uint64(6)
BIT_MASK = np.uint64(63)


def new_bit_set(limit: int) -> BitSet:
    """Return an empty set of integers in 0..limit."""
    num_words = limit // 64 + 1
    return BitSet(
        words=np.zeros(num_words, np.uint64),
        summary=np.zeros(num_words // 64 + 1, np.uint64),
    )


@jit_helper
def add(members: BitSet, number: int) -> None:
    """Add a number to the set."""
    place = np.uint64(number)
    word = place >> WORD_SHIFT
    members.words[word] |= ONE << (place & BIT_MASK)
    members.summary[word >> WORD_SHIFT] |= ONE << (word & BIT_MASK)


@jit_helper
def remove(members: BitSet, number: int) -> None:
    """Remove a number from the set."""
    place = np.uint64(number)
    word = place >> WORD_SHIFT
    bits = members.words[word] & ~(ONE << (place & BIT_MASK))
    members.words[word] = bits
    if bits == ZERO:
        members.summary[word >> WORD_SHIFT] &= ~(ONE << (word & BIT_MASK))


@jit_helper
def at_least(members: BitSet, number: int) -> int:
    """Return the smallest member that is at least `number` (0..limit), or -1."""
    words = members.words
    summary = members.summary
    word = np.uint64(number) >> WORD_SHIFT
    bits = words[word] >> (np.uint64(number) & BIT_MASK)
    if bits != ZERO:
        return number + lowest_bit(bits)

    # The next word that holds members is the next bit of the summary.
    word += ONE
    place = word >> WORD_SHIFT
    end = np.uint64(len(summary))
    if place == end:
        return -1
    bits = summary[place] & (~ZERO << (word & BIT_MASK))
    while bits == ZERO:
        place += ONE
        if place == end:
            return -1
        bits = summary[place]
    word = (place << WORD_SHIFT) + np.uint64(lowest_bit(bits))
    return int(np.int64(word << WORD_SHIFT)) + lowest_bit(words[word])


@jit_helper
def at_most(members: BitSet, number: int) -> int:
    """Return the largest member that is at most `number` (0..limit), or -1."""
    words = members.words
    summary = members.summary
    word = np.uint64(number) >> WORD_SHIFT
    bits = words[word] << (BIT_MASK - (np.uint64(number) & BIT_MASK))
    if bits != ZERO:
        return number - 63 + highest_bit(bits)

    # The word before it that holds members is the bit before in the summary.
    place = word >> WORD_SHIFT
    bits = summary[place] & ((ONE << (word & BIT_MASK)) - ONE)
    while bits == ZERO:
        if place == ZERO:
            return -1
        place -= ONE
        bits = summary[place]
    word = (place << WORD_SHIFT) + np.uint64(highest_bit(bits))
    return int(np.int64(word << WORD_SHIFT)) + highest_bit(words[word])
