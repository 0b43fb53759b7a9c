"""Draws a sample of the input: blocks spread over all of it, chosen by a seed.

The whole input is read, which also counts its records; only the sampled blocks are kept and
tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from packstore.format.arrays import Int64
from packstore.format.seeds import derive

SAMPLE_BLOCK_BYTES = 1 << 16
"""Approximate bytes of a block of a sample: small, so that a sample has many places."""


class _Counted(Protocol):
    @property
    def records(self) -> int: ...


B = TypeVar("B", bound=_Counted)


class RowGroup(NamedTuple):
    """Number of a row group in its dataset, and its examples."""

    number: int
    records: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Figures of a sample.

    Attributes:
        records, total: number in the sample, and in the whole input; None: only its start was read.
        places: number of blocks or row groups; the records in each are neighbours.
        run, last_run: neighbouring blocks from which each place was drawn, and the last one.
        seed: of the draw.
    """

    records: int
    total: int | None
    places: int
    run: int
    last_run: int
    seed: int

    @property
    def whole(self) -> bool:
        """True if the sample is the whole input."""
        return self.records == self.total


def sample_blocks(
    blocks: Iterable[B], records: int, seed: int, report: Callable[[int], None] | None = None
) -> tuple[list[B], Sampling]:
    """Draws one block of every run of neighbours, in input order; keeps only these in memory.

    Runs are as short as `records` allows; their lengths are powers of two, except the last. At most
    `records` are drawn, or one block. `report` gets the records read.
    """
    kept: list[tuple[int, B]] = []  # the block of each run with the least random number
    run, held, total, number = 1, 0, 0, 0
    for number, block in enumerate(blocks):
        total += block.records
        if report:
            report(total)
        drawn = [(derive(seed, "sample", number), block)]
        if number % run:
            drawn.append(kept.pop())
            held -= drawn[1][1].records
        kept.append(_least(drawn))
        held += kept[-1][1].records
        while held > records and len(kept) > 1:
            run *= 2
            kept = [_least(kept[i : i + 2]) for i in range(0, len(kept), 2)]
            held = sum(block.records for _, block in kept)
    return [block for _, block in kept], Sampling(
        records=held, total=total, places=len(kept), run=run, last_run=number % run + 1, seed=seed
    )


def _least(drawn: list[tuple[int, B]]) -> tuple[int, B]:
    return min(drawn, key=lambda pair: pair[0])


def head_blocks(blocks: Iterable[B], records: int, seed: int) -> tuple[list[B], Sampling]:
    """Takes the first blocks of an input that may be endless; its total is known if it ended."""
    kept: list[B] = []
    held = 0
    stream = iter(blocks)
    while held < records and (block := next(stream, None)):
        kept.append(block)
        held += block.records
    total = held if held < records or next(stream, None) is None else None
    return kept, Sampling(records=held, total=total, places=len(kept), run=1, last_run=1, seed=seed)


def sample_groups(examples: Int64, records: int, seed: int) -> tuple[list[int], Sampling]:
    """Draws row groups like blocks, by number; `examples`: int64 `[G]`, of each."""
    groups = (RowGroup(number, n) for number, n in enumerate(examples.tolist()))
    chosen, sampling = sample_blocks(groups, records, seed)
    return [group.number for group in chosen], sampling
