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
        records: number in the sample.
        total: number in the whole input; None: unknown, as only its start was read.
        places: number of blocks or row groups; the records in each are neighbours.
        run: number of neighbouring blocks from which each place was drawn.
        last_run: the same for the last place.
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


class _Drawn(NamedTuple):
    """A block drawn from a run of neighbours; `first`: number of the run's first block."""

    first: int
    run: int
    block: _Counted


def sample_blocks(
    blocks: Iterable[B], records: int, seed: int, report: Callable[[int], None] | None = None
) -> tuple[list[B], Sampling]:
    """Draws one block of every run of neighbours, in input order; keeps only these in memory.

    Runs are as short as `records` allows; their lengths are powers of two, except the last. Each
    block of a run is equally likely. The sample has at least one block.

    Args:
        blocks: all blocks of the input.
        records: maximum number of records; at least a third as many are drawn, if the input has
            so many and the blocks are of similar size.
        seed: decides which block of a run is drawn.
        report: called with the number of records read so far.
    """
    run = 1
    kept: list[_Drawn] = []  # from complete runs, then from shorter and shorter ones
    held = total = 0
    for number, block in enumerate(blocks):
        total += block.records
        if report:
            report(total)
        held += _append(kept, _Drawn(number, 1, block), run, seed)
        while held > records and run <= number:  # a longer run would exceed the blocks so far
            run *= 2
            before, kept = kept, []
            held = sum(_append(kept, drawn, run, seed) for drawn in before)
    while len(kept) > 1 and kept[-2].run < run:  # merges shorter runs into the last
        kept[-2:] = [_draw(kept[-2], kept[-1], seed)]
    chosen: list[B] = [drawn.block for drawn in kept]  # type: ignore[misc]
    return chosen, Sampling(
        records=sum(block.records for block in chosen),
        total=total,
        places=len(chosen),
        run=run,
        last_run=kept[-1].run if kept else run,
        seed=seed,
    )


def _append(kept: list[_Drawn], drawn: _Drawn, run: int, seed: int) -> int:
    """Appends `drawn`; merges the last two while their runs are equal and shorter than `run`.

    Returns:
        Increase of the records held.
    """
    more = drawn.block.records
    kept.append(drawn)
    while len(kept) > 1 and kept[-2].run == kept[-1].run < run:
        more -= kept[-2].block.records + kept[-1].block.records
        kept[-2:] = [_draw(kept[-2], kept[-1], seed)]
        more += kept[-1].block.records
    return more


def _draw(a: _Drawn, b: _Drawn, seed: int) -> _Drawn:
    """Draws one of two, with probabilities proportional to their runs."""
    run = a.run + b.run
    first = derive(seed, "sample", a.first, run) % run < a.run
    return _Drawn(a.first, run, a.block if first else b.block)


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
