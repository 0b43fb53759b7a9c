"""Packing takes memory for a part of the tokens, however unevenly they are spread."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packstore.config import PackConfig
from packstore.etl.spill import Spill
from packstore.format import Examples, to_offsets

SEGMENT_BYTES = 100_000


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packstore.etl.spill.SEGMENT_BYTES", SEGMENT_BYTES)


def learned_last(rows: list[np.ndarray]) -> Examples:
    """An example of each row, whose last token is learned."""
    offsets = to_offsets(np.array([len(row) for row in rows]))
    supervised = np.zeros(offsets[-1], bool)
    supervised[offsets[1:] - 1] = True
    return Examples(
        input_ids=np.concatenate(rows).astype(np.int32),
        supervised=supervised,
        sequence_offsets=offsets,
        example_offsets=np.arange(len(rows) + 1),
        reward=np.zeros(len(rows), np.float32),
        example_ids=np.arange(len(rows)),
    )


def spilled(rows: list[np.ndarray], config: PackConfig) -> Spill:
    spill = Spill(config)
    for first in range(0, len(rows), 10):
        spill.append(learned_last(rows[first : first + 10]))
    return spill


def id_bytes(rows: list[np.ndarray]) -> int:
    return 4 * sum(len(row) for row in rows)


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that a call takes at most, besides those in use before it."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_plan_reads_a_part_where_the_examples_that_begin_alike_are_long() -> None:
    """2 % of the examples, with 98 % of the tokens, are neighbours once sorted."""
    rng = np.random.default_rng(0)
    schema = rng.integers(0, 1000, 64)
    long_rows = [np.append(schema, rng.integers(0, 1000, 40_000)) for _ in range(50)]
    short_rows = [rng.integers(0, 1000, 17) for _ in range(2000)]
    rows = long_rows + short_rows
    rows = [rows[i] for i in rng.permutation(len(rows))]
    config = PackConfig(pack_size=50_000, layout="shared_prefix", share_prefixes="pack")
    with contextlib.closing(spilled(rows[:400], config)) as spill:
        spill.plan(config)  # imports modules: to compile numpy.ma takes 10 MB
    with contextlib.closing(spilled(rows, config)) as spill:
        peak = peak_of(lambda: spill.plan(config))
    assert peak < id_bytes(rows) / 2


def test_a_few_packs_are_filled_at_once_where_neighbours_hold_many_tokens() -> None:
    """A tenth of the packs, the first ones, hold 60 % of the tokens, mostly shared."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(6):
        rollout = rng.integers(0, 1000, 2000)
        rows += [rollout[:length] for length in range(1000, 2000, 10)]
    rows += [rng.integers(0, 1000, 2000) for _ in range(300)]
    config = PackConfig(
        pack_size=2048,
        layout="shared_prefix",
        share_prefixes="pack",
        max_keys=100 * 2048,
        shuffle=False,
        row_group_tokens=2048,
    )
    with contextlib.closing(spilled(rows, config)) as spill:
        packing = spill.plan(config)
        peak = peak_of(lambda: sum(1 for _ in spill.packs(packing)))
    assert peak < 10 * SEGMENT_BYTES
