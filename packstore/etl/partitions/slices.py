"""Cuts an input into partitions, and reads the blocks and keys of each.

A partition takes blocks from all over the input, as real data is often sorted. The choice follows
from the sizes of the inputs and the number of partitions, so every machine reads the same blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from packstore.config import PackConfig
from packstore.etl.dedup_and_split import dedup_keys
from packstore.etl.sources import Part
from packstore.format.arrays import Int64
from packstore.format.seeds import U64
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader

Owner = TypeVar("Owner")

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""An engine, or ``map``: yields the results of a function on items, in order."""

SHARES = 16
"""Approximate shares of the input for a partition. More would mix sources of one file each better,
but more partitions would read each file."""

MOST_READERS = 8
"""A partition takes fewer shares where each file would else be read by more partitions. Each reads
it to its end: with 8 reads, two fifths of the time of a cluster (``benchmarks/scale.py``)."""

FILES, READERS = 64, 4
"""A partition takes blocks of `FILES` files, as long as no file is read by more than `READERS`
partitions; those reads take a tenth of the time of tokenizing the file."""

BLOCKS = 128
"""Approximate minimum of blocks for each of several partitions, down to the size below. Fewer would
mix a sorted file worse; blocks of less than 200 kB take up to a fifth longer to tokenize."""

MIN_BLOCK_BYTES = 4 << 10


@dataclass(frozen=True)
class Slice:
    """Blocks of a file at equal distances.

    Attributes:
        input: the file.
        first: number of the first block, from 0.
        step: distance from one block to the next; 1: the whole file.
        block_bytes: approximate bytes of a block.
    """

    input: Input
    first: int
    step: int
    block_bytes: int

    def holds(self, block: int) -> bool:
        """Returns whether the file's block of this number belongs to the slice."""
        return block % self.step == self.first


Item = tuple[int, Sequence[Slice], Int64 | None]
"""Number of a partition, its slices, and the ids of its duplicates (int64, sorted); ids None: an
example is a duplicate if an earlier one of the partition has its key."""


def split(inputs: Sequence[tuple[Input, int]], partitions: int) -> list[list[Slice]]:
    """Assigns to each partition slices from all over the input, of about the same size in bytes.

    The input is cut into shares, and partition p takes the shares p, p + partitions, …. Share i of
    a file of m shares is its blocks i, i + m, i + 2 m, …. As many partitions read a file as it has
    shares, and each skips the other blocks, so compressed files work too.

    Args:
        inputs: each input and its bytes.
        partitions: number of partitions.
    """
    found: list[list[Slice]] = [[] for _ in range(partitions)]
    total = max(sum(size for _, size in inputs), 1)
    mixed = total // (partitions * BLOCKS) if partitions > 1 else BLOCK_BYTES
    block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, mixed))
    readers = min(READERS, -(-FILES * partitions // max(len(inputs), 1)))
    each = max(1, min(SHARES, MOST_READERS * len(inputs) // partitions))
    share = seen = 0
    for item, size in inputs:
        # Rounded up so far, so that all partitions get as many shares where sizes are alike.
        before, seen = seen, seen + size
        wanted = -(-seen * partitions * each // total) - -(-before * partitions * each // total)
        shares = max(1, min(max(readers, wanted), partitions, -(-size // block_bytes)))
        for first in range(shares):
            one = Slice(item, first, shares, block_bytes)
            found[(share + first) % partitions].append(one)
        share += shares
    return found


@dataclass(frozen=True)
class ReadFile:
    """A file, read to its end.

    Attributes:
        ordinal: number of the input.
        source: its `path`, `bytes`, `sha256` and `records`.
        version: its version in the store before it was read; empty if the store has none.
    """

    ordinal: int
    source: dict[str, Any]
    version: str


def blocks_of(
    partitions: Iterable[tuple[Owner, Sequence[Slice]]],
    config: PackConfig,
    on_file: Callable[[Owner, ReadFile], None] = lambda *_: None,
) -> Iterator[tuple[Owner, Block]]:
    """Yields the blocks of some partitions; each file is read once for all of them.

    Args:
        partitions: pairs of an owner, yielded with its blocks, and its slices.
        config: see :class:`InputReader`.
        on_file: called for each owner of blocks of a file, after the last block.
    """
    takers: dict[int, list[tuple[Owner, Slice]]] = {}
    for owner, slices in partitions:
        for one in slices:
            takers.setdefault(one.input.ordinal, []).append((owner, one))
    for ordinal in sorted(takers):
        one = takers[ordinal][0][1]
        version = one.input.location.object_version()
        reader = InputReader([], config=config, block_bytes=one.block_bytes)
        for number, block in enumerate(reader.read_file(one.input)):
            for owner, own in takers[ordinal]:
                if own.holds(number):
                    yield owner, block
        read = ReadFile(ordinal, reader.sources()[-1], version)
        for owner, _ in takers[ordinal]:
            on_file(owner, read)


def in_turn(
    work: Callable[[Any], Any] | None, pairs: Iterable[tuple[Owner, Any]], run: Run
) -> Iterator[tuple[Owner, Any]]:
    """Yields each owner with the result of `work` on its item; an item None stays None."""
    owners: deque[Owner] = deque()

    def items() -> Iterator[Any]:
        for owner, item in pairs:
            owners.append(owner)
            yield item

    for result in run(_Unless(work), items()):
        yield owners.popleft(), result


class _Unless:
    """Applies a function to items, and returns None for None."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.suits_threads = getattr(work, "suits_threads", False)

    def __call__(self, item: Any) -> Any:
        return None if item is None else self._work(item)


class ReadKeys:
    """Finds the keys that `dedup` compares, and their example ids. Picklable.

    Args:
        tokenize: turns a block into examples.
        config: all settings.
    """

    def __init__(self, tokenize: Callable[[Block], Part], config: PackConfig) -> None:
        self._tokenize, self._config = tokenize, config

    def __call__(
        self,
        partitions: Sequence[Sequence[Slice]],
        run: Run,
        on_keys: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[U64, Int64]]:
        """Yields uint64 `[n]` and int64 `[n]` of each partition, in input order.

        Args:
            partitions: the slices of each.
            run: tokenizes the blocks.
            on_keys: called with the number of keys of each block.
        """
        found: list[tuple[list[U64], list[Int64]]] = [
            ([np.empty(0, np.uint64)], [np.empty(0, np.int64)]) for _ in partitions
        ]
        pairs = blocks_of(enumerate(partitions), self._config)
        for number, (examples, _) in in_turn(self._tokenize, pairs, run):
            found[number][0].append(dedup_keys(examples, self._config))
            found[number][1].append(examples.example_ids)
            on_keys(examples.num_examples)
        for keys, ids in found:
            yield np.concatenate(keys), np.concatenate(ids)
