"""A sample of the input: blocks from all over it, chosen by a seed.

The input is read to its end, which tells how many records there are; only the blocks of the sample
are kept, and only they are tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from packstore.records import Int64
from packstore.seeds import derive

SAMPLE_BLOCK_BYTES = 1 << 16
"""Bytes of a block of a sample, about: small, so that a sample has many places."""


class _Counted(Protocol):
    @property
    def records(self) -> int: ...


B = TypeVar("B", bound=_Counted)


class RowGroup(NamedTuple):
    """A row group of a dataset: its number, and the examples in it."""

    number: int
    records: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sample was taken.

    Attributes:
        records: in the sample.
        total: in the whole input; None: not known, as only its beginning was read.
        places: blocks or row groups of the sample; its records are neighbours inside of each.
        run: each place was drawn from so many neighbours.
        last_run: those that the last place was drawn from.
        seed: what decided the places.
    """

    records: int
    total: int | None
    places: int
    run: int
    last_run: int
    seed: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the input."""
        return self.records == self.total


class _Drawn(NamedTuple):
    """A block that was drawn from a run of neighbours, the first of which has this number."""

    first: int
    run: int
    block: _Counted


def sample_blocks(
    blocks: Iterable[B], records: int, seed: int, report: Callable[[int], None] | None = None
) -> tuple[list[B], Sampling]:
    """One block of every run of neighbours, in input order: `records` at most, or one block.

    Runs are as short as that allows, powers of two but for the last. Each block of a run has the
    same chance. Memory holds the sample alone.

    Args:
        blocks: all blocks of the input.
        records: how many are wanted at most; at least a third of them come, if there are as many,
            and blocks hold about as many records each.
        seed: decides which block of a run is taken.
        report: told how many records were read so far.
    """
    run = 1
    kept: list[_Drawn] = []  # of complete runs, and at the end of ever shorter ones
    held = total = 0
    for number, block in enumerate(blocks):
        total += block.records
        if report:
            report(total)
        held += _append(kept, _Drawn(number, 1, block), run, seed)
        while held > records and run <= number:  # a longer run has nothing to draw from
            run *= 2
            before, kept = kept, []
            held = sum(_append(kept, drawn, run, seed) for drawn in before)
    while len(kept) > 1 and kept[-2].run < run:  # the rest is the last run
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
    """Appends one, draws from the last two as long as their runs are equal and shorter than `run`.

    Returns:
        Records that are held more than before.
    """
    more = drawn.block.records
    kept.append(drawn)
    while len(kept) > 1 and kept[-2].run == kept[-1].run < run:
        more -= kept[-2].block.records + kept[-1].block.records
        kept[-2:] = [_draw(kept[-2], kept[-1], seed)]
        more += kept[-1].block.records
    return more


def _draw(a: _Drawn, b: _Drawn, seed: int) -> _Drawn:
    """One of two, with chances as large as their runs."""
    run = a.run + b.run
    first = derive(seed, "sample", a.first, run) % run < a.run
    return _Drawn(a.first, run, a.block if first else b.block)


def head_blocks(blocks: Iterable[B], records: int, seed: int) -> tuple[list[B], Sampling]:
    """The first blocks, of an input that may have no end; its total is known if it ended."""
    kept: list[B] = []
    held = 0
    stream = iter(blocks)
    while held < records and (block := next(stream, None)):
        kept.append(block)
        held += block.records
    total = held if held < records or next(stream, None) is None else None
    return kept, Sampling(records=held, total=total, places=len(kept), run=1, last_run=1, seed=seed)


def sample_groups(examples: Int64, records: int, seed: int) -> tuple[list[int], Sampling]:
    """Numbers of row groups, chosen as blocks are; `examples` are those of each."""
    groups = (RowGroup(number, n) for number, n in enumerate(examples.tolist()))
    chosen, sampling = sample_blocks(groups, records, seed)
    return [group.number for group in chosen], sampling
