"""Draws a sample: blocks spread over all of the input, which is read to its end, by a
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from packstore.format.seeds import derive

SAMPLE_BLOCK_BYTES = 1 << 16
"""Approximate bytes of a block of a sample: small, so that a sample has many places."""

B = TypeVar("B")
_RANDOM, _SIZE = itemgetter(0), itemgetter(1)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Figures of a sample."""

    records: int
    total: int | None  # records of the whole input; None: only its start was read
    places: int  # blocks or row groups; the records in each are neighbours
    run: int  # neighbouring blocks from which each place was drawn
    last_run: int  # those of the last place
    seed: int

    @property
    def whole(self) -> bool:
        """True if the sample is the whole input."""
        return self.records == self.total


def sample_blocks(
    blocks: Iterable[tuple[int, B]],
    records: int,
    seed: int,
    report: Callable[[int], None] | None = None,
) -> tuple[list[B], Sampling]:
    """Draws one block of every run of neighbours, in input order; keeps only these in
    memory.

    Runs are as short as `records` allows; their lengths are powers of two, except the
    last. At most `records` are drawn, or one block. `blocks`: each with its records;
    `report` gets those read.
    """
    kept: list[
        tuple[int, int, B]
    ] = []  # of each run: the least random number, records, block
    run, held, total, number = 1, 0, 0, 0
    for number, (size, block) in enumerate(blocks):
        total += size
        if report:
            report(total)
        drawn = [(derive(seed, "sample", number), size, block)]
        if number % run:
            drawn.append(kept.pop())
            held -= _SIZE(drawn[1])
        kept.append(min(drawn, key=_RANDOM))
        held += _SIZE(kept[-1])
        while held > records and len(kept) > 1:
            run *= 2
            kept = [min(kept[i : i + 2], key=_RANDOM) for i in range(0, len(kept), 2)]
            held = sum(map(_SIZE, kept))
    return [block for _, _, block in kept], Sampling(
        records=held,
        total=total,
        places=len(kept),
        run=run,
        last_run=number % run + 1,
        seed=seed,
    )


def head_blocks(
    blocks: Iterable[tuple[int, B]], records: int, seed: int
) -> tuple[list[B], Sampling]:
    """Takes the first blocks of an input that may be endless; its total is known if it
    ended.
    """
    kept, held, stream = list[B](), 0, iter(blocks)
    while held < records and (pair := next(stream, None)):
        held += pair[0]
        kept.append(pair[1])
    total = held if held < records or next(stream, None) is None else None
    return kept, Sampling(
        records=held, total=total, places=len(kept), run=1, last_run=1, seed=seed
    )
