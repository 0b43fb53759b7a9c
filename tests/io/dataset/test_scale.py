"""Large datasets: a manifest of many row groups is opened shard by shard, and order is lazy."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packstore import Dataset
from packstore.io.manifest.manifest import Manifest
from packstore.io.shards.shard import RowGroups

GROUPS = 500


@pytest.fixture(scope="module")
def small(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset whose manifest is enlarged."""
    written = kit.Written(str(tmp_path_factory.mktemp("data") / "ds"))
    data: Dataset = written.dataset([kit.some_packs()])
    return data


def enlarged(manifest: Manifest, shards: int) -> Manifest:
    """The manifest of a dataset of so many shards of 500 row groups."""
    ones = np.ones(GROUPS, np.int64)
    groups = RowGroups(
        rows=32 * ones, examples=64 * ones, tokens=640 * ones, longest=10 * ones, crc32=7 * ones
    )
    sums = {"rows": 32 * GROUPS, "examples": 64 * GROUPS, "sequences": 128 * GROUPS}
    one = replace(manifest.shards[0], row_groups=groups, tokens=640 * GROUPS, **sums)
    made = tuple(replace(one, path=f"data/{i}.parquet") for i in range(shards))
    totals = {
        name: shards * getattr(one, name)
        for name in ("examples", "sequences", "tokens", "supervised_tokens", "bytes")
    }
    return replace(
        manifest,
        shards=made,
        pack_index=None,
        totals=replace(manifest.totals, packs=shards * one.rows, **totals),
        records=replace(
            manifest.records, read=totals["examples"], packed=totals["examples"], dropped={}
        ),
    )


def test_opening_takes_little_more_than_the_result(small: Dataset) -> None:
    data = enlarged(small.manifest, 100).to_json()
    Manifest.from_json(data)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    manifest = Manifest.from_json(data)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(manifest.shards) == 100
    assert after - before < 100 * GROUPS * 5 * 8 * 1.2
    assert peak - after < len(data) / 3  # objects for all of the text take more than its bytes
