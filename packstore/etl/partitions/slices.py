"""Cuts an input into partitions, and reads the blocks and keys of each.

A partition takes blocks from all over the input, as real data is often sorted. The
choice follows from the sizes of the inputs and the number of partitions, so every
machine reads the same blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from packstore.config import PackConfig
from packstore.etl.dedup_and_split import dedup_keys
from packstore.etl.engines import Run
from packstore.etl.tokenize import Part, Tokenize
from packstore.format.arrays import Int64
from packstore.format.seeds import U64
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader

Owner = TypeVar("Owner")

SHARES = 16
"""Approximate shares of the input for a partition. More would mix sources of one file
each better, but more partitions would read each file.
"""

FILES, READERS = 64, 4
"""A partition takes blocks of `FILES` files, as long as no file is read by more than
`READERS` partitions, each to its end: a tenth of the time of tokenizing the file. It
takes fewer shares where more would read it: ten partitions of ten files took 20 % more
on a cluster with 8 reads.
"""

BLOCKS = 128
"""Approximate minimum of blocks for each of several partitions, down to the size below.
Fewer would mix a sorted file worse; blocks of less than 200 kB take up to a fifth
longer to tokenize.
"""

MIN_BLOCK_BYTES = 4 << 10

MANY_READS = 8
"""Reads of each file, by tasks of a cluster, above which two thirds of their time is
reading (``benchmarks/scale.py``).
"""


@dataclass(frozen=True)
class Slice:
    """Blocks of a file at equal distances."""

    input: Input
    first: int  # number of the first block, from 0
    step: int  # from one block to the next; 1: the whole file
    block_bytes: int  # approximate


Item = tuple[int, Sequence[Slice], Int64 | None]
"""Number of a partition, its slices, and the ids of its duplicates (int64, sorted); ids
None: an example is a duplicate if an earlier one of the partition has its key.
"""


def split(inputs: Sequence[tuple[Input, int]], partitions: int) -> list[list[Slice]]:
    """Assigns to each partition slices from all over the input, of about the same size
    in bytes.

    The input is cut into shares, and partition p takes the shares p, p + partitions, ….
    Share i of a file of m shares is its blocks i, i + m, i + 2 m, …. As many partitions
    read a file as it has shares, and each skips the other blocks, so compressed files
    work too.
    """
    slices: list[list[Slice]] = [[] for _ in range(partitions)]
    total = max(sum(size for _, size in inputs), 1)
    mixed = total // (partitions * BLOCKS) if partitions > 1 else BLOCK_BYTES
    block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, mixed))
    readers = min(READERS, -(-FILES * partitions // max(len(inputs), 1)))
    each = max(1, min(SHARES, READERS * len(inputs) // partitions))
    share = seen = 0
    for item, size in inputs:
        # Rounded up so far, so that all partitions get as many shares where sizes are
        # alike.
        before, seen = seen, seen + size
        wanted = -(-seen * partitions * each // total) - -(
            -before * partitions * each // total
        )
        shares = max(1, min(max(readers, wanted), partitions, -(-size // block_bytes)))
        for first in range(shares):
            slices[(share + first) % partitions].append(
                Slice(item, first, shares, block_bytes)
            )
        share += shares
    return slices


def read_blocks(
    partitions: Iterable[tuple[Owner, Sequence[Slice]]],
    config: PackConfig,
    on_file: Callable[[Owner, int, dict[str, Any], str], None] = lambda *_: None,
) -> Iterator[tuple[Owner, Block]]:
    """Yields blocks with their owners; each file is read once for all.

    Then `on_file` gets each owner, the ordinal of the file, its entry of `sources`, and
    its version in the store before it was read; empty if the store has none.
    """
    takers: dict[int, list[tuple[Owner, Slice]]] = {}
    for owner, slices in partitions:
        for part in slices:
            takers.setdefault(part.input.ordinal, []).append((owner, part))
    for ordinal in sorted(takers):
        _, first = takers[ordinal][0]
        version = first.input.location.object_version()
        reader = InputReader([], config=config, block_bytes=first.block_bytes)
        for number, block in enumerate(reader.read_file(first.input)):
            for owner, part in takers[ordinal]:
                if number % part.step == part.first:
                    yield owner, block
        for owner, _ in takers[ordinal]:
            on_file(owner, ordinal, reader.sources[-1], version)


def parts_with_owners(
    tokenize: Tokenize, pairs: Iterable[tuple[Owner, Block]], run: Run
) -> Iterator[tuple[Owner, Part, int]]:
    """Yields each owner with the part that its block becomes, and the bytes of the
    block.
    """
    pairs, ahead = itertools.tee(pairs)
    parts = tokenize.parts(run, (block for _, block in ahead))
    for (owner, block), part in zip(pairs, parts, strict=True):
        yield owner, part, block.bytes


def read_keys(
    tokenize: Tokenize,
    config: PackConfig,
    partitions: Sequence[Sequence[Slice]],
    run: Run,
    on_keys: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[tuple[U64, Int64]]:
    """Yields the keys that `dedup` compares, uint64 `[n]`, and example ids of each
    partition.
    """
    keys = [[np.empty(0, np.uint64)] for _ in partitions]
    ids = [[np.empty(0, np.int64)] for _ in partitions]
    pairs = read_blocks(enumerate(partitions), config)
    for number, (examples, _), size in parts_with_owners(tokenize, pairs, run):
        keys[number].append(dedup_keys(examples, config))
        ids[number].append(examples.example_ids)
        on_keys(examples.num_examples, size)
    yield from zip(map(np.concatenate, keys), map(np.concatenate, ids), strict=True)
