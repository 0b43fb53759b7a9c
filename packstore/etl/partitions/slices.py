"""Assigns blocks of an input to partitions, and reads them and their keys.

A *block* is a run of consecutive records of one file, about 2 MB or less. A *slice* is
every m-th block of a file, e.g. the blocks 2, 7, 12, … for m = 5. A partition has
slices of files from all over the input, as real data is often sorted. The choice
follows from the sizes of the inputs and the number of partitions, so every machine
reads the same blocks.
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
from packstore.etl.tokenize import BlockTokenizer, TokenizedBlock
from packstore.format.arrays import Int64
from packstore.format.seeds import U64
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader

Owner = TypeVar("Owner")

MAX_SLICES = 16
"""Maximum slices per partition that :func:`assign_slices` aims at. With more, the files
of an input would be mixed better, but each be read by more partitions.
"""

FILES = 64
"""Files of which a partition takes blocks, as long as :data:`READERS` allows it."""

READERS = 4
"""Maximum partitions that read one file for the sake of :data:`FILES`. Each reads it to
its end, in a tenth of the time of tokenizing it. Where more partitions would read a
file, each takes fewer slices: ten partitions of ten files took 20 % more time on a
cluster with 8 reads of a file.
"""

BLOCKS = 128
"""Approximate minimum of blocks for each of several partitions: blocks get smaller for
that, down to :data:`MIN_BLOCK_BYTES`. Fewer would mix a sorted file worse; blocks of
less than 200 kB take up to a fifth longer to tokenize.
"""

MIN_BLOCK_BYTES = 4 << 10

MANY_READS = 8
"""Mean reads of a file, by tasks of a cluster, above which two thirds of their time is
reading (``benchmarks/scale.py``).
"""


@dataclass(frozen=True)
class Slice:
    """Blocks of a file at equal distances: numbers first, first + step, ….

    Attributes:
        input: the file.
        first: number of the first block, from 0; below `step`.
        step: distance between blocks; 1: all blocks of the file.
        block_bytes: approximate bytes of a block.
    """

    input: Input
    first: int
    step: int
    block_bytes: int


@dataclass(frozen=True, eq=False)
class Assignment:
    """The input of a partition.

    Attributes:
        number: number of the partition, from 0.
        slices: its blocks; none for examples that come from no files.
        duplicate_ids: int64 `[n]`, sorted ids of its duplicates, found in an earlier
            pass; None: there was none, so an example is a duplicate if an earlier one
            of the partition has its key.
    """

    number: int
    slices: Sequence[Slice]
    duplicate_ids: Int64 | None


def assign_slices(
    inputs: Sequence[tuple[Input, int]], num_partitions: int
) -> list[list[Slice]]:
    """Return the slices of each partition, of about the same size in bytes.

    A file of m slices has its blocks i, i + m, i + 2 m, … in slice i. The slices of all
    files, one after another, are given to the partitions in turn: partition p gets the
    slices p, p + num_partitions, …. As many partitions read a file as it has slices,
    and each skips the other blocks, so compressed files work too.

    For example, with four partitions of two files of the same size, each file has four
    slices, and partition 1 has the blocks 1, 5, 9, … of both.

    Args:
        inputs: files, each with its bytes.
        num_partitions: number of partitions.
    """
    total_bytes = max(sum(size for _, size in inputs), 1)
    num_inputs = max(len(inputs), 1)
    block_bytes = BLOCK_BYTES
    if num_partitions > 1:
        block_bytes = total_bytes // (num_partitions * BLOCKS)
        block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, block_bytes))
    # A file has at least so many that a partition can take slices of FILES files.
    min_slices = min(READERS, _ceil_divide(FILES * num_partitions, num_inputs))
    slices_per_partition = READERS * len(inputs) // num_partitions
    slices_per_partition = max(1, min(MAX_SLICES, slices_per_partition))
    total_slices = num_partitions * slices_per_partition

    slices: list[list[Slice]] = [[] for _ in range(num_partitions)]
    next_partition = 0
    end_bytes = 0
    for item, size in inputs:
        start_bytes = end_bytes
        end_bytes += size
        # A file has slices in proportion to its bytes. The running sum is rounded up,
        # not the number of each file: so where sizes are alike, all partitions get
        # equally many.
        num_slices = _ceil_divide(end_bytes * total_slices, total_bytes)
        num_slices -= _ceil_divide(start_bytes * total_slices, total_bytes)
        num_blocks = _ceil_divide(size, block_bytes)
        num_slices = max(num_slices, min_slices)
        num_slices = max(1, min(num_slices, num_partitions, num_blocks))
        for first_block in range(num_slices):
            partition = (next_partition + first_block) % num_partitions
            slices[partition].append(
                Slice(
                    input=item,
                    first=first_block,
                    step=num_slices,
                    block_bytes=block_bytes,
                )
            )
        next_partition += num_slices
    return slices


def _ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def _ignore_file(*_: object) -> None:
    """Do nothing when a file was read to its end."""


def read_blocks(
    partitions: Iterable[tuple[Owner, Sequence[Slice]]],
    config: PackConfig,
    on_file: Callable[[Owner, int, dict[str, Any], str], None] = _ignore_file,
) -> Iterator[tuple[Owner, Block]]:
    """Yield the blocks of several partitions, reading each file once for all.

    Args:
        partitions: the slices of each partition, with its owner: any object or number,
            which is yielded with each of its blocks.
        config: settings.
        on_file: called for each owner of a file that was read to its end, with the
            ordinal of the file, its entry of `sources`, and its version in the store
            before it was read; empty if the store has none.

    Yields:
        The owner of a block, and the block.
    """
    owned_slices: dict[int, list[tuple[Owner, Slice]]] = {}  # by ordinal of the file
    for owner, slices in partitions:
        for file_slice in slices:
            owned_slices.setdefault(file_slice.input.ordinal, []).append(
                (owner, file_slice)
            )

    for ordinal in sorted(owned_slices):
        _, first_slice = owned_slices[ordinal][0]
        version = first_slice.input.location.object_version()
        reader = InputReader([], config=config, block_bytes=first_slice.block_bytes)
        for number, block in enumerate(reader.read_file(first_slice.input)):
            for owner, file_slice in owned_slices[ordinal]:
                if number % file_slice.step == file_slice.first:
                    yield owner, block
        for owner, _ in owned_slices[ordinal]:
            on_file(owner, ordinal, reader.sources[-1], version)


def tokenize_blocks(
    block_tokenizer: BlockTokenizer, blocks: Iterable[tuple[Owner, Block]], run: Run
) -> Iterator[tuple[Owner, TokenizedBlock, int]]:
    """Yield each owner with its tokenized block, and the bytes of the block."""
    # Workers read ahead: the owners wait in a queue until results return.
    owned_blocks, ahead = itertools.tee(blocks)
    tokenized = block_tokenizer.tokenize(run, (block for _, block in ahead))
    for (owner, block), result in zip(owned_blocks, tokenized, strict=True):
        yield owner, result, block.bytes


def read_keys(
    block_tokenizer: BlockTokenizer,
    config: PackConfig,
    partitions: Sequence[Sequence[Slice]],
    run: Run,
    on_keys: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[U64, Int64]]:
    """Yield, for each partition, the keys that `dedup` compares, and the example ids.

    Both are arrays `[n]` of its n examples, uint64 and int64.

    Args:
        block_tokenizer: tokenizes the blocks.
        config: settings.
        partitions: the slices of each partition.
        run: runs the workers.
        on_keys: called with the number of new keys, and the bytes of their block.
    """
    # For each partition the arrays of its blocks, and one of length 0 to concatenate.
    keys = [[np.empty(0, np.uint64)] for _ in partitions]
    ids = [[np.empty(0, np.int64)] for _ in partitions]
    blocks = read_blocks(enumerate(partitions), config)
    for number, result, size in tokenize_blocks(block_tokenizer, blocks, run):
        examples, _ = result
        keys[number].append(dedup_keys(examples, config))
        ids[number].append(examples.example_ids)
        if on_keys is not None:
            on_keys(examples.num_examples, size)
    for partition_keys, partition_ids in zip(keys, ids, strict=True):
        yield np.concatenate(partition_keys), np.concatenate(partition_ids)
