"""The ends of optimizer steps that hold a requested mean of examples: a function of
packs' sizes.

A pack is never split, so a step rarely holds the requested examples exactly. Each step
ends at the boundary of packs that is nearest to its target: the requested examples, and
those that the steps before it are short. So errors do not add up. As long as the packs
that a step must have (one for each rank) hold no more than the requested examples, the
steps of an epoch, up to any of them, are off by half a pack in total.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from packstore.format.arrays import Int64, to_offsets


def limit_shortfall(shortfall: int, requested: int) -> int:
    """Return a shortfall that a step of `requested` examples can make up for.

    Where packs hold too many examples for every step, the excess is not saved up: steps
    of smaller packs that follow would be tiny.
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
    packs = len(examples)
    offsets = to_offsets(examples).tolist()
    start = 0
    while start < packs:
        target = offsets[start] + requested + shortfall
        end = bisect_left(offsets, target, lo=start + 1)
        if max(end, start + min_packs) > packs and not is_end:
            return

        if end <= packs and end > start + 1:
            excess = offsets[end] - target
            shortfall_before = target - offsets[end - 1]
            if shortfall_before <= excess:
                end -= 1
        end = min(max(end, start + min_packs), packs)
        shortfall = limit_shortfall(target - offsets[end], requested)
        yield end, shortfall
        start = end
