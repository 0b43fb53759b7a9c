"""The keys of each segment as ranges of rows, and how kernels divide the work on them.

A kernel that reads keys where they lie in the row, and not as copies in the order of
the sequences, needs three lists: the runs of rows that each segment reads, the segments
that read each segment (for the gradients of its keys), and tiles of rows, the work of a
program. Their sizes vary with the data, so they are computed on the CPU: on a GPU the
host would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packstore.format.arrays import Int64, to_offsets

TILE = 64
"""Rows of a tile; the blocks of kernels divide it."""

MIN_ITEM = 512
"""Query rows of an item below which a tile of keys is not divided any further."""

MAX_SPLITS = 64
"""Maximum number of items that the division of tiles adds.

It is bounded, as each part needs memory for its sums. On 132 processors, with 8 heads
of keys, an item then takes at most a quarter of the time of the whole kernel.
"""


class KeyRanges(NamedTuple):
    """The rows that each segment reads; int32 tensors on one device.

    S segments, R runs, M tiles, I items, X divided tiles. M, I, X and `num_slots`
    depend on T and S only, so they are fixed if :func:`pad_batch` fixes these; lists
    are filled up with entries of -1.

    Attributes:
        offsets: `[S + 1]`, the row where each segment starts.
        positions: `[S]`, the position of each segment's first token in its sequence.
        runs: `[2, R]`, the segments that each sequence reads, from their first row on,
            and how many of their tokens: those of the ancestors, then 0 for the own
            segment, which is read causally. Sorted by reader. None: no segment omits
            tokens, and each reads itself alone.
        run_offsets: `[S + 1]`, offsets of the runs of each segment, or None.
        readers: `[2, R]`, for each segment the other segments that read it, and how
            many of its tokens, in descending order; the end is unused. Or None.
        reader_offsets: `[S + 1]`, offsets of the readers of each segment, or None.
        tiles: `[2, M]`, segment and first row of each tile: up to 64 rows of a segment.
        items: `[5, I]`, the work on gradients of keys. A tile; the part of the tile,
            where part 0 also has the queries of its own segment; the first and the end
            of its readers, as indices in `readers`; the slot for its sums, or -1 if the
            tile is not divided.
        splits: `[3, X]`, divided tiles: the tile, its first slot, its number of slots.
        num_slots: number of slots for partial sums.
    """

    offsets: Tensor
    positions: Tensor
    runs: Tensor | None
    run_offsets: Tensor | None
    readers: Tensor | None
    reader_offsets: Tensor | None
    tiles: Tensor
    items: Tensor
    splits: Tensor
    num_slots: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> KeyRanges:
        """Return the ranges with `change` applied to each tensor."""
        changed: dict[str, Any] = {
            name: change(value)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor)
        }
        return self._replace(**changed)


class _Reads(NamedTuple):
    """Reads of ancestors: sorted by the ancestor, most tokens first.

    Attributes:
        ancestors: int64 `[A]`, the segment that is read.
        readers: int64 `[A]`, the segment that reads it.
        tokens: int64 `[A]`, number of tokens that it reads.
    """

    ancestors: Int64
    readers: Int64
    tokens: Int64


def compute_key_ranges(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, key_runs: Tensor | None
) -> KeyRanges:
    """Return the ranges of a batch; its tensors must be on the CPU.

    Args:
        cu_seqlens: int32 `[S + 1]`, offsets of the segments.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the logical sequences.
        key_runs: int32 `[3, R]`, see :attr:`PackedBatch.key_runs`.
    """
    offsets = cu_seqlens.numpy().astype(np.int64)
    lengths = np.diff(offsets)
    positions = np.diff(cu_seqlens_k.numpy()) - lengths
    num_segments = len(lengths)

    tile_segments, tile_rows = _compute_tiles(offsets)
    num_tiles = int(offsets[-1]) // TILE + num_segments
    tiles = _fill_up([tile_segments, tile_rows], num_tiles)

    runs = run_offsets = readers = reader_offsets = None
    no_reads = np.zeros(0, np.int64)
    reads = _Reads(ancestors=no_reads, readers=no_reads, tokens=no_reads)
    if key_runs is not None:
        run_array = key_runs.numpy().astype(np.int64)
        run_counts = np.bincount(run_array[0], minlength=num_segments)
        runs = _int32(run_array[1:])
        run_offsets = _int32(to_offsets(run_counts))

        reads = _find_reads(run_array, lengths)
        reader_counts = np.bincount(reads.ancestors, minlength=num_segments)
        readers = _fill_up([reads.readers, reads.tokens], run_array.shape[1])
        reader_offsets = _int32(to_offsets(reader_counts))

    items, splits = _divide_work(tile_segments, tile_rows, offsets, reads)
    num_splits = 0 if key_runs is None else MAX_SPLITS
    return KeyRanges(
        offsets=cu_seqlens,
        positions=_int32(positions),
        runs=runs,
        run_offsets=run_offsets,
        readers=readers,
        reader_offsets=reader_offsets,
        tiles=tiles,
        items=_fill_up(items, num_tiles + num_splits),
        splits=_fill_up(splits, num_splits),
        num_slots=2 * num_splits,
    )


def _compute_tiles(offsets: Int64) -> tuple[Int64, Int64]:
    """Return the segment and the first row of each tile, in the order of the row."""
    tile_counts = -(-np.diff(offsets) // TILE)
    segments = np.repeat(np.arange(len(tile_counts)), tile_counts)
    first_tiles = to_offsets(tile_counts)[:-1]
    tiles_before = np.arange(len(segments)) - first_tiles[segments]
    return segments, offsets[segments] + TILE * tiles_before


def _find_reads(key_runs: Int64, lengths: Int64) -> _Reads:
    """Return the reads of ancestors by segments that have queries.

    Args:
        key_runs: int64 `[3, R]`.
        lengths: int64 `[S]`, lengths of the segments.
    """
    all_readers, all_segments, all_tokens = key_runs
    is_of_ancestor = (all_tokens > 0) & (lengths[all_readers] > 0)
    ancestors = all_segments[is_of_ancestor]
    readers = all_readers[is_of_ancestor]
    tokens = all_tokens[is_of_ancestor]
    order = np.lexsort((readers, -tokens, ancestors))
    return _Reads(ancestors[order], readers[order], tokens[order])


def _divide_work(
    tile_segments: Int64, tile_rows: Int64, offsets: Int64, reads: _Reads
) -> tuple[list[Int64], list[Int64]]:
    """Return columns of `items` and `splits`, see :class:`KeyRanges`.

    The readers of a tile of keys are divided in order, so that the query rows of an
    item do not exceed a limit by more than the last of them. A program that had all
    readers of a prompt with many responses would outlast all others.
    """
    num_tiles = len(tile_segments)
    # One entry for each pair of a tile and a reader: the own segment (-1), then others.
    pair_tiles, pair_readers = _pair_tiles_with_readers(tile_segments, reads)
    lengths = np.diff(offsets)
    own_rows = offsets[tile_segments + 1] - tile_rows
    tiles = np.concatenate([np.arange(num_tiles), pair_tiles])
    rows = np.concatenate([own_rows, lengths[reads.readers[pair_readers]]])
    readers = np.concatenate([np.full(num_tiles, -1), pair_readers])
    order = np.argsort(tiles, kind="stable")
    tiles, rows, readers = tiles[order], rows[order], readers[order]

    # Query rows of a tile's readers before each reader; at multiples of the limit a new
    # item starts. The limit is at least a share of all rows, which bounds the number of
    # items.
    limit = max(MIN_ITEM, -(-int(rows.sum()) // MAX_SPLITS))
    rows_before = to_offsets(rows)[:-1]
    is_first_of_tile = np.diff(tiles, prepend=-1) > 0
    rows_before -= rows_before[is_first_of_tile][tiles]
    is_start = np.diff(rows_before // limit, prepend=0) != 0
    starts = np.flatnonzero(is_first_of_tile | is_start)
    ends = np.append(starts[1:], len(tiles))

    item_tiles = tiles[starts]
    items_of_tile = np.bincount(item_tiles, minlength=num_tiles)
    first_items = to_offsets(items_of_tile)[:-1]
    part = np.arange(len(starts)) - first_items[item_tiles]

    # Readers of an item are neighbours in the list of readers. An item that has only
    # its own segment's queries gets an empty range.
    first_readers = np.where(readers[starts] < 0, 0, readers[starts])
    has_more = (readers[starts] < 0) & (ends - starts > 1)
    first_readers[has_more] = readers[starts[has_more] + 1]
    end_readers = readers[ends - 1] + 1

    is_divided = items_of_tile[item_tiles] > 1
    slots = np.where(is_divided, np.cumsum(is_divided) - 1, -1)
    items = [item_tiles, part, first_readers, end_readers, slots]

    is_first_part = is_divided & (part == 0)
    split_tiles = item_tiles[is_first_part]
    splits = [split_tiles, slots[is_first_part], items_of_tile[split_tiles]]
    return items, splits


def _pair_tiles_with_readers(
    tile_segments: Int64, reads: _Reads
) -> tuple[Int64, Int64]:
    """Return each tile with each of its readers in `reads`: two arrays of indices.

    A reader of n tokens reads the first tiles of a segment, those that begin before
    its n-th token.
    """
    tile_counts = -(-reads.tokens // TILE)
    readers = np.repeat(np.arange(len(tile_counts)), tile_counts)
    tiles_before = np.arange(len(readers)) - to_offsets(tile_counts)[:-1][readers]
    first_tiles = np.searchsorted(tile_segments, reads.ancestors[readers])
    return first_tiles + tiles_before, readers


def _fill_up(columns: list[Int64], size: int) -> Tensor:
    """Return columns as int32 rows `[number of columns, size]`, filled up with -1."""
    filled = np.full((len(columns), size), -1, np.int32)
    for row, column in zip(filled, columns, strict=True):
        row[: len(column)] = column
    return torch.from_numpy(filled)


def _int32(values: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
