"""A sample of the input: blocks from all over it, chosen by a seed.

The input is read to its end, which tells how many records there are; only the blocks of the sample
are kept, and only they are tokenized.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from packstore.io.inputs import Block
from packstore.records import Int64
from packstore.seeds import derive

SAMPLE_BLOCK_BYTES = 1 << 16
"""Bytes of a block of a sample, about: small, so that a sample has many places."""

_WHOLE = 1 << 32
_STEP = 0x9E3779B9
"""2^32 over the golden ratio: its multiples modulo 2^32 are spread evenly over any range, so the
blocks whose multiple is below some bound are spread evenly over the input."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sample was taken.

    Attributes:
        records: in the sample.
        total: in the whole input; None: not known, as only its beginning was read.
        places: blocks or row groups of the sample; its records are neighbours inside of each.
        seed: what decided the places.
    """

    records: int
    total: int | None
    places: int
    seed: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the input."""
        return self.records == self.total


def sample_blocks(
    blocks: Iterable[Block],
    records: int,
    seed: int,
    report: Callable[[int], None] | None = None,
) -> tuple[list[Block], Sampling]:
    """The fewest blocks that hold `records`, spread evenly over the input, in input order.

    Every block has the same chance. Memory holds the sample alone.

    Args:
        blocks: all blocks of the input.
        records: how many are wanted; there may be fewer, and a few more.
        seed: decides where the sample begins.
        report: told how many records were read so far.
    """
    start = derive(seed, "sample") % _WHOLE
    kept: list[tuple[int, int, Block]] = []  # a heap: the largest place comes first
    held = total = 0
    for number, block in enumerate(blocks):
        total += block.records
        if report:
            report(total)
        place = -((start + number * _STEP) % _WHOLE)
        if held >= records and place < kept[0][0]:
            continue
        heapq.heappush(kept, (place, number, block))
        held += block.records
        while held - kept[0][2].records >= records:
            held -= heapq.heappop(kept)[2].records
    chosen = [block for _, _, block in sorted(kept, key=lambda entry: entry[1])]
    return chosen, Sampling(records=held, total=total, places=len(chosen), seed=seed)


def head_blocks(blocks: Iterable[Block], records: int, seed: int) -> tuple[list[Block], Sampling]:
    """The first blocks, of an input that may have no end; its total is known if it ended."""
    kept: list[Block] = []
    held = 0
    stream = iter(blocks)
    while held < records and (block := next(stream, None)):
        kept.append(block)
        held += block.records
    total = held if held < records or next(stream, None) is None else None
    return kept, Sampling(records=held, total=total, places=len(kept), seed=seed)


def sample_groups(examples: Int64, records: int, seed: int) -> tuple[Sequence[int], Sampling]:
    """The fewest row groups that hold `records`, chosen as blocks are; in order.

    Args:
        examples: of each row group.
        records: how many are wanted.
        seed: decides where the sample begins.
    """
    start = derive(seed, "sample") % _WHOLE
    order = np.argsort((start + np.arange(len(examples), dtype=np.uint64) * _STEP) % _WHOLE)
    enough = int(np.searchsorted(np.cumsum(examples[order]), records)) + 1
    chosen = np.sort(order[:enough])
    held, total = int(examples[chosen].sum()), int(examples.sum())
    return chosen.tolist(), Sampling(records=held, total=total, places=len(chosen), seed=seed)
