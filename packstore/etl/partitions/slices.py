"""Assigns blocks of an input to partitions, and reads them and their keys.

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
from packstore.etl.tokenize import BlockTokenizer, TokenizedBlock
from packstore.format.arrays import Int64
from packstore.format.seeds import U64
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader

Owner = TypeVar("Owner")

SHARES = 16
"""Approximate shares of the input for a partition. More would mix the sources of one
file each better, but more partitions would read each file.
"""

FILES = 64
"""Files of which a partition takes blocks, as long as :data:`READERS` allows it."""

READERS = 4
"""Maximum partitions that read a file to mix :data:`FILES` files. Each reads it to its
end, in a tenth of the time of tokenizing it. A partition takes fewer shares where more
partitions would read a file: ten partitions of ten files took 20 % more on a cluster
with 8 reads.
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
    """Blocks of a file at equal distances.

    Attributes:
        input: the file.
        first: number of the first block, from 0.
        step: blocks from one to the next; 1: all blocks of the file.
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
        duplicate_ids: int64, sorted; None: an example is a duplicate if an earlier one
            of the partition has its key.
    """

    number: int
    slices: Sequence[Slice]
    duplicate_ids: Int64 | None


def assign_slices(
    inputs: Sequence[tuple[Input, int]], num_partitions: int
) -> list[list[Slice]]:
    """Return the slices of each partition, of about the same size in bytes.

    The input is cut into shares, and partition p takes the shares p,
    p + num_partitions, …. Share i of a file of m shares is its blocks i, i + m,
    i + 2 m, …. As many partitions read a file as it has shares, and each skips the
    other blocks, so compressed files work too.

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
    min_shares = min(READERS, _ceil_divide(FILES * num_partitions, num_inputs))
    shares_of_partition = READERS * len(inputs) // num_partitions
    shares_of_partition = max(1, min(SHARES, shares_of_partition))
    total_shares = num_partitions * shares_of_partition

    slices: list[list[Slice]] = [[] for _ in range(num_partitions)]
    next_partition = 0
    end_bytes = 0
    for item, size in inputs:
        start_bytes = end_bytes
        end_bytes += size
        # The sum of the shares is rounded up, not each file's: so all partitions get
        # as many shares where sizes are alike.
        num_shares = _ceil_divide(end_bytes * total_shares, total_bytes)
        num_shares -= _ceil_divide(start_bytes * total_shares, total_bytes)
        num_blocks = _ceil_divide(size, block_bytes)
        num_shares = max(num_shares, min_shares)
        num_shares = max(1, min(num_shares, num_partitions, num_blocks))
        for share in range(num_shares):
            partition = (next_partition + share) % num_partitions
            slices[partition].append(Slice(item, share, num_shares, block_bytes))
        next_partition += num_shares
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
        partitions: the owner and the slices of each partition.
        config: settings.
        on_file: called for each owner of a file that was read to its end, with the
            ordinal of the file, its entry of `sources`, and its version in the store
            before it was read; empty if the store has none.

    Yields:
        The owner of a block, and the block.
    """
    slices_of_files: dict[int, list[tuple[Owner, Slice]]] = {}
    for owner, slices in partitions:
        for part in slices:
            owners = slices_of_files.setdefault(part.input.ordinal, [])
            owners.append((owner, part))

    for ordinal in sorted(slices_of_files):
        owners = slices_of_files[ordinal]
        _, first_slice = owners[0]
        version = first_slice.input.location.object_version()
        reader = InputReader([], config=config, block_bytes=first_slice.block_bytes)
        for number, block in enumerate(reader.read_file(first_slice.input)):
            for owner, part in owners:
                if number % part.step == part.first:
                    yield owner, block
        for owner, _ in owners:
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
    """Yield the keys that `dedup` compares, uint64 `[n]`, and ids of each partition.

    Args:
        block_tokenizer: tokenizes the blocks.
        config: settings.
        partitions: the slices of each partition.
        run: runs the workers.
        on_keys: called with the number of new keys, and the bytes of their block.
    """
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
