"""Cuts packs into optimizer steps with a requested mean number of examples.

A pack is never split, so a step rarely holds the requested examples exactly. Each step
ends at the boundary of packs that is nearest to its target: the requested examples,
plus the *shortfall*, the examples that all steps before it are short. For example, with
8 requested and packs of 3 examples, the steps have 9, 6 and 9 examples.

So errors do not add up: after any step, the examples so far are off by half a pack at
most. (Unless the packs that a step must have, one for each rank, already hold more than
the requested examples.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from packstore.format.arrays import Int64, to_offsets


def limit_shortfall(shortfall: int, requested: int) -> int:
    """Return a shortfall that a step of `requested` examples can make up for.

    If the packs of every step hold too many examples, the excess (a negative shortfall)
    must not add up: later steps, of smaller packs, would be tiny.
    """
    return min(max(shortfall, -(requested // 2)), requested)


def cut_by_examples(
    examples: Int64,
    requested: int,
    min_packs: int,
    shortfall: int = 0,
    *,
    is_end: bool = True,
) -> Iterator[tuple[int, int]]:
    """Yield, for each step, the pack at which it ends, and the shortfall after it.

    Args:
        examples: int64 `[n]`, examples of each pack, in order.
        requested: examples that a step should hold, at least 1.
        min_packs: packs that a step must have, at least 1.
        shortfall: examples that the steps before the first are short; below 0: in
            excess.
        is_end: False if more packs follow; then only steps that do not depend on them
            are yielded.
    """
    num_packs = len(examples)
    offsets = to_offsets(examples).tolist()  # examples before each boundary of packs
    start = 0
    while start < num_packs:
        target = offsets[start] + requested + shortfall
        # The first boundary, after one pack or more, that reaches the target.
        end = bisect_left(offsets, target, lo=start + 1)
        needs_more_packs = max(end, start + min_packs) > num_packs
        if needs_more_packs and not is_end:
            return

        # The boundary before it may be nearer to the target.
        if start + 1 < end <= num_packs:
            excess = offsets[end] - target
            shortfall_before = target - offsets[end - 1]
            if shortfall_before <= excess:
                end -= 1
        end = min(max(end, start + min_packs), num_packs)
        shortfall = limit_shortfall(target - offsets[end], requested)
        yield end, shortfall
        start = end
