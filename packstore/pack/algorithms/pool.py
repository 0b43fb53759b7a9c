"""The default: packs neighbours in input order, and chooses the last examples to fill
each pack.

A look-ahead of a few thousand examples (the pool) is refilled from the input. A pack
takes the oldest examples of the pool until one or two more can fill it; those are
chosen to fill it exactly, again the oldest that do. So packs are as random as the
input, no example moves far, and memory does not grow with the input.
"""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.kernels import (
    Bits,
    add,
    at_least,
    at_most,
    inlined,
    jit,
    new_set,
    remove,
)

WINDOW = 8192
"""Examples in the pool."""

SPAN = 4 * WINDOW
"""Upper bound of the distance in the input between the oldest and newest example of the
pool.
"""

PROBES = 64
"""Number of examples tried as the second to last of a pack."""

CLOSE = 2
"""A pack is completed once it has space for at most this many examples of mean length.
"""

SPARE = 0.5
"""Until then, it keeps space for this many more: shorter examples are scarce, and
needed for packs that begin with a long example.
"""

ENDGAME = 1024
"""When the input has ended and this few are left, the longest go first: they are hard
to place.
"""


def pool(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Makes nearly full packs in nearly input order; draws no random numbers."""
    order, offsets = (
        np.empty(len(lengths), np.int32),
        np.empty(len(lengths) + 1, np.int64),
    )
    packs = _fill(
        lengths, capacity, new_set(SPAN - 1), new_set(capacity), order, offsets
    )
    return order, offsets[: packs + 1].copy()


OLDEST, NEWEST, COUNT, TOKENS = range(4)
"""State of the pool: index of its oldest example, one past its newest, its example and
token counts.
"""

FRONT, BACK = range(2)
"""The examples of one length form a queue: index of the first and the last, or -1.

Below, `alive` is the set of slots in use (an example's slot is its index modulo
`SPAN`), `sizes` the set of lengths in the pool, `ends` the queues (int64 `[capacity +
1, 2]`), and `behind` the next example in the queue of each slot's example (int64
`[SPAN]`).
"""


@inlined
def _enter(
    lengths: Int32, alive: Bits, sizes: Bits, ends: Int64, behind: Int64, state: Int64
) -> None:
    """Adds examples from the input to the pool until it is full."""
    if state[COUNT] == 0:
        state[OLDEST] = state[NEWEST]
    limit = min(len(lengths), state[OLDEST] + SPAN)
    while state[COUNT] < WINDOW and state[NEWEST] < limit:
        i = state[NEWEST]
        length = lengths[i]
        add(alive, i % SPAN)
        behind[i % SPAN] = -1
        if ends[length, FRONT] < 0:
            ends[length, FRONT] = i
            add(sizes, length)
        else:
            behind[ends[length, BACK] % SPAN] = i
        ends[length, BACK] = i
        state[NEWEST] += 1
        state[COUNT] += 1
        state[TOKENS] += length


@inlined
def _oldest(alive: Bits, state: Int64, i: int) -> int:
    """Returns the oldest example of the pool that is not older than `i`, or -1."""
    slot = i % SPAN
    found = at_least(alive, slot)
    if found < 0:  # wrap around
        found = at_least(alive, 0)
        if found < 0:
            return -1
        found += SPAN
    found += i - slot
    return found if i <= found < state[NEWEST] else -1


@inlined
def _oldest_fit(lengths: Int32, alive: Bits, state: Int64, i: int, room: int) -> int:
    """Returns the oldest example, not older than `i`, of at most `room` tokens,
    or -1.
    """
    i = _oldest(alive, state, i)
    while i >= 0 and lengths[i] > room:
        i = _oldest(alive, state, i + 1)
    return i


@inlined
def _leave(
    length: int, alive: Bits, sizes: Bits, ends: Int64, behind: Int64, state: Int64
) -> int:
    """Removes the oldest example of this length from the pool, and returns it."""
    i = int(ends[length, FRONT])
    ends[length, FRONT] = behind[i % SPAN]
    if behind[i % SPAN] < 0:
        remove(sizes, length)
    remove(alive, i % SPAN)
    state[COUNT] -= 1
    state[TOKENS] -= length
    if i == state[OLDEST] and state[COUNT] > 0:
        state[OLDEST] = _oldest(alive, state, i)
    return i


@inlined
def _closing(lengths: Int32, alive: Bits, sizes: Bits, state: Int64, room: int) -> int:
    """Returns the length that, alone or with one more, fills `room` best; -1: none
    fits.
    """
    best = at_most(sizes, room)
    if room < 2 * at_least(sizes, 1):  # no two fit
        return best
    least = room - best
    i = state[OLDEST] - 1
    for _ in range(PROBES):
        i = _oldest(alive, state, i + 1)
        if least == 0 or i < 0:
            break
        one = lengths[i]
        if one >= room:
            continue
        two = at_most(sizes, room - one)
        if two > 0 and room - one - two < least:
            best, least = one, room - one - two
    return best


@jit
def _fill(
    lengths: Int32,
    capacity: int,
    alive: Bits,
    sizes: Bits,
    order: Int32,
    offsets: Int64,
) -> int:
    """Writes the plan into `order` `[n]` and `offsets` `[n + 1]`; returns the number of
    packs.
    """
    ends, behind = np.full((capacity + 1, 2), -1, np.int64), np.empty(SPAN, np.int64)
    state, packs, written = np.zeros(4, np.int64), 0, 0
    while written < len(lengths):
        _enter(lengths, alive, sizes, ends, behind, state)
        offsets[packs] = written
        packs += 1
        room = capacity
        i = state[OLDEST]
        length = lengths[i]
        if state[NEWEST] == len(lengths) and state[COUNT] <= ENDGAME:
            length = at_most(sizes, room)
        while length > 0:
            order[written] = _leave(length, alive, sizes, ends, behind, state)
            written += 1
            room -= length
            mean = state[TOKENS] / max(state[COUNT], 1)
            if i >= 0 and room > CLOSE * mean:
                i = _oldest_fit(lengths, alive, state, i, room - np.int64(SPARE * mean))
            else:
                i = -1
            if i >= 0:
                length = lengths[i]
            else:
                length = _closing(lengths, alive, sizes, state, room)
    offsets[packs] = written
    return packs
