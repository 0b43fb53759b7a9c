"""Draws samples of the input: blocks from all over it, chosen by a seed.

The input is cut into *runs* of neighbouring blocks, and one block of each run is drawn.
As the length of the input is not known before its end, runs begin with one block, and
two neighbouring runs are joined whenever the drawn blocks become too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from packstore.format.seeds import derive

SAMPLE_BLOCK_BYTES = 1 << 16
"""Approximate bytes of a block of a sample: small, so that a sample has many places."""

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Describes how a sample was drawn.

    Attributes:
        records: number of records in the sample.
        total: number of records in the full input; None if only its start was read.
        places: number of drawn blocks (or row groups of a dataset).
        run: number of neighbouring blocks; one of them was drawn.
        last_run: number of neighbouring blocks in the last run, which may be shorter.
        seed: seed of the draw.
    """

    records: int
    total: int | None
    places: int
    run: int
    last_run: int
    seed: int

    @property
    def is_complete(self) -> bool:
        """True if the sample is all of the input."""
        return self.records == self.total


@dataclass(frozen=True, slots=True)
class _Draw(Generic[B]):
    """A block, and its random number: of a run, the block of the lowest is drawn."""

    number: int
    num_records: int
    block: B


def _lowest(first: _Draw[B], second: _Draw[B]) -> _Draw[B]:
    return second if second.number < first.number else first


def sample_blocks(
    blocks: Iterable[tuple[int, B]],
    records: int,
    seed: int,
    report: Callable[[int], None] | None = None,
) -> tuple[list[B], Sampling]:
    """Draw one block of every run of neighbours, reading the input to its end.

    Runs are as short as `records` allows; their lengths are powers of two, except the
    last. Only the drawn blocks are in memory.

    Args:
        blocks: number of records of each block, and the block.
        records: maximum records of the sample, unless a single block has more.
        seed: random seed.
        report: called with the number of records read.

    Returns:
        The drawn blocks in input order, and the figures of the sample.
    """
    draws: list[_Draw[B]] = []  # one for each run
    run = 1
    num_drawn = 0
    total = 0
    position = 0
    for position, (block_records, block) in enumerate(blocks):
        total += block_records
        if report:
            report(total)

        draw = _Draw(
            number=derive(seed, "sample", position),
            num_records=block_records,
            block=block,
        )
        is_start_of_run = position % run == 0
        if not is_start_of_run:
            previous = draws.pop()
            num_drawn -= previous.num_records
            draw = _lowest(draw, previous)
        draws.append(draw)
        num_drawn += draw.num_records

        while num_drawn > records and len(draws) > 1:
            run *= 2
            draws = _join_runs(draws)
            num_drawn = sum(draw.num_records for draw in draws)

    sampling = Sampling(
        records=num_drawn,
        total=total,
        places=len(draws),
        run=run,
        last_run=position % run + 1,
        seed=seed,
    )
    return [draw.block for draw in draws], sampling


def _join_runs(draws: list[_Draw[B]]) -> list[_Draw[B]]:
    """Return the draws of runs of double length."""
    pairs = zip(draws[::2], draws[1::2], strict=False)
    draws_of_pairs = [_lowest(first, second) for first, second in pairs]
    if len(draws) % 2:
        draws_of_pairs.append(draws[-1])
    return draws_of_pairs


def head_blocks(
    blocks: Iterable[tuple[int, B]], records: int, seed: int
) -> tuple[list[B], Sampling]:
    """Take the first blocks of an input that may be endless.

    Args:
        blocks: number of records of each block, and the block.
        records: number of records at which to stop, at least 1.
        seed: recorded as the seed of the sample.

    Returns:
        The blocks, and the figures of the sample; its total is known if the input
        ended.
    """
    stream = iter(blocks)
    head: list[B] = []
    num_records = 0
    for block_records, block in stream:
        head.append(block)
        num_records += block_records
        if num_records >= records:
            break

    is_at_end = next(stream, None) is None
    sampling = Sampling(
        records=num_records,
        total=num_records if is_at_end else None,
        places=len(head),
        run=1,
        last_run=1,
        seed=seed,
    )
    return head, sampling
