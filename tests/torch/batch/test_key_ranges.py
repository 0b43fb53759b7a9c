"""The keys of a batch as ranges of rows, against its index of keys.

As kernels read them: tiles of queries read runs, tiles of keys have readers.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from forests import forest_packs
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.format import Packs
from packstore.torch import PackedBatch, collate, pad_batch, pad_segments
from packstore.torch.batch.ranges import MAX_SPLITS, MIN_ITEM, TILE, KeyRanges

SEEDS = st.integers(0, 1000)


def random_batch(seed: int) -> PackedBatch:
    """Return a forest with turns from one token to several tiles, maybe padded."""
    rng = np.random.default_rng(seed)
    longest_turn = int(rng.choice([3, 20, 90, 200]))
    _, packs = forest_packs(seed, "sft", size=6, longest_turn=longest_turn)
    batch = collate(packs, "sft")
    choice = seed % 5
    if choice == 1:
        return pad_segments(batch, 8)
    if choice == 2:
        return batch.to_concat()
    size = batch.num_tokens + 70
    if choice == 3:
        return pad_batch(batch, num_tokens=size, num_segments=batch.num_segments + 80)
    if choice == 4 and batch.key_runs is not None:
        num_runs = batch.key_runs.shape[1] + 900
        num_keys = batch.num_keys + 2 * size
        return pad_batch(batch, num_tokens=size, num_keys=num_keys, num_runs=num_runs)
    return batch


def keys_of_queries(batch: PackedBatch) -> np.ndarray:
    """Return a matrix of rows: 1 where a query reads a key, by `kv_index`."""
    reads = np.zeros((batch.num_tokens, batch.num_tokens), np.int8)
    index = np.arange(batch.num_keys)
    if batch.kv_index is not None:
        index = batch.kv_index.numpy()
    key_edges = itertools.pairwise(batch.cu_seqlens_k.tolist())
    query_edges = itertools.pairwise(batch.cu_seqlens.tolist())
    for (first_key, end_key), (first, end) in zip(key_edges, query_edges, strict=True):
        keys = index[first_key:end_key]
        num_omitted = len(keys) - (end - first)
        for row in range(first, end):
            reads[row, keys[: num_omitted + row - first + 1]] += 1
    return reads


def rows_of_tile(ranges: KeyRanges, tile: int) -> np.ndarray:
    """Return the rows of a tile."""
    segment, first = ranges.tiles[:, tile].tolist()
    end = int(ranges.offsets[segment + 1])
    return np.arange(first, min(first + TILE, end))


def reads_of_tiles(ranges: KeyRanges, size: int) -> np.ndarray:
    """Return how often tiles of queries read each key."""
    reads = np.zeros((size, size), np.int8)
    for tile, segment in enumerate(ranges.tiles[0].tolist()):
        if segment < 0:
            continue
        rows = rows_of_tile(ranges, tile)
        position = 0
        if ranges.runs is not None and ranges.run_offsets is not None:
            first, end = ranges.run_offsets[segment : segment + 2].tolist()
            assert ranges.runs[:, end - 1].tolist() == [segment, 0]
            for owner, tokens in ranges.runs[:, first : end - 1].T.tolist():
                assert ranges.positions[owner] == position
                position += tokens
                start = int(ranges.offsets[owner])
                reads[rows, start : start + tokens] += 1
        assert ranges.positions[segment] == position
        start = int(ranges.offsets[segment])
        for row in rows:
            reads[row, start : row + 1] += 1
    return reads


def reads_of_items(ranges: KeyRanges, size: int) -> np.ndarray:
    """Return how often items compute each pair of query and key."""
    reads = np.zeros((size, size), np.int8)
    for tile, part, first, end, _ in ranges.items.T.tolist():
        if tile < 0:
            continue
        segment = int(ranges.tiles[0, tile])
        start, end_row = ranges.offsets[segment : segment + 2].tolist()
        keys = rows_of_tile(ranges, tile)
        if part == 0:
            for key in keys:
                reads[key:end_row, key] += 1
        for i in range(first, end):
            assert ranges.readers is not None
            assert ranges.reader_offsets is not None
            assert ranges.reader_offsets[segment] <= i
            assert i < ranges.reader_offsets[segment + 1]
            reader, tokens = ranges.readers[:, i].tolist()
            first_row, last_row = ranges.offsets[reader : reader + 2].tolist()
            assert first_row < last_row
            end_key = min(int(keys[-1]) + 1, start + tokens)
            assert keys[0] < end_key, "a reader that does not reach the tile"
            reads[first_row:last_row, keys[0] : end_key] += 1
    return reads


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_every_query_reads_its_keys_once(seed: int) -> None:
    batch = random_batch(seed)
    ranges = batch.layout.ranges
    assert ranges is not None
    expected = keys_of_queries(batch)
    np.testing.assert_array_equal(reads_of_tiles(ranges, batch.num_tokens), expected)
    np.testing.assert_array_equal(reads_of_items(ranges, batch.num_tokens), expected)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_tiles_cover_the_row_and_sizes_are_fixed(seed: int) -> None:
    batch = random_batch(seed)
    ranges = batch.key_ranges
    num_tiles = int((ranges.tiles[0] >= 0).sum())
    rows = [row for tile in range(num_tiles) for row in rows_of_tile(ranges, tile)]
    assert rows == list(range(batch.num_tokens))

    most_tiles = batch.num_tokens // TILE + batch.num_segments
    num_splits = 0 if batch.key_runs is None else MAX_SPLITS
    assert ranges.tiles.shape == (2, most_tiles)
    assert ranges.items.shape == (5, most_tiles + num_splits)
    assert ranges.splits.shape == (3, num_splits)
    assert ranges.num_slots == 2 * num_splits
    for tensor in ranges[:-1]:
        assert tensor is None or tensor.dtype == torch.int32


def shared_prompt(num_responses: int, prompt: int = 150, response: int = 40) -> Packs:
    """Return a pack of one example: responses to one prompt, which the first stores."""
    responses = [prompt + response, *[response] * (num_responses - 1)]
    size = sum(responses)
    distances = np.arange(num_responses, dtype=np.int32)
    return Packs(
        signed_ids=np.arange(size, dtype=np.int32),
        reward=np.zeros(num_responses, np.float32),
        lengths=np.full(num_responses, prompt + response, np.int32),
        seq_boundaries=np.cumsum([0, *responses]).astype(np.int32),
        num_responses=np.array([num_responses], np.int32),
        example_ids=np.zeros(1, np.int64),
        token_offsets=np.array([0, size]),
        sequence_offsets=np.array([0, num_responses]),
        example_offsets=np.array([0, 1]),
        parent_distances=distances,
    )


@pytest.mark.parametrize("num_responses", [2, 64, 1000])
def test_readers_of_a_prompt_are_divided(num_responses: int) -> None:
    """Each item has about as many query rows, and each slot is summed once."""
    ranges = collate(shared_prompt(num_responses), "scored").key_ranges
    items = [item for item in ranges.items.T.tolist() if item[0] >= 0]
    items_of_tile = Counter(tile for tile, *_ in items)
    assert all(tile >= 0 for tile in items_of_tile)
    if num_responses == 2:
        assert max(items_of_tile.values()) == 1
    else:
        assert min(items_of_tile[0], items_of_tile[1]) > 1
        query_rows = [(end - first) * 40 for _, _, first, end, _ in items]
        limit = max(MIN_ITEM, 4 * num_responses * 40 / MAX_SPLITS)
        assert max(query_rows) <= limit + 40

    slots = [slot for *_, slot in items if slot >= 0]
    assert slots == [*range(len(slots))]
    assert len(slots) <= ranges.num_slots
    summed = []
    for tile, first, count in ranges.splits.T.tolist():
        if tile >= 0:
            assert count == items_of_tile[tile] > 1
            summed += range(first, first + count)
    assert summed == slots
    divided = {tile for tile, *_, slot in items if slot >= 0}
    assert divided == {tile for tile, count in items_of_tile.items() if count > 1}
