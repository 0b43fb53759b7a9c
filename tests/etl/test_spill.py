"""The spill: what goes in comes out in the order of the plan, from one segment or from many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packstore.config import PackConfig
from packstore.etl import spill as spilling
from packstore.etl.spill import Spill
from packstore.format.arrays import Examples, to_offsets
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes
from packstore.pack.plan import plan
from packstore.testing import assert_examples_equal


def some_examples(number: int, first: int) -> Examples:
    rng = np.random.default_rng(first)
    sequences = to_offsets(rng.integers(1, 30, 2 * number))
    return Examples(
        input_ids=rng.integers(0, 1000, sequences[-1]).astype(np.int32),
        supervised=rng.random(sequences[-1]) < 0.5,
        sequence_offsets=sequences,
        example_offsets=to_offsets(np.full(number, 2)),
        reward=rng.random(2 * number).astype(np.float32),
        example_ids=np.arange(first, first + number),
        columns={
            "source": np.array([f"é{i}" for i in range(number)], object),
            "weight": rng.random(number),
            "good": rng.random(number) < 0.5,
        },
    )


@pytest.mark.parametrize("segment_bytes", [1 << 30, 3000, 1])
def test_packs_come_back_in_the_order_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(spilling, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(spilling, "MAX_BUCKETS", 7)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    parts = [some_examples(n, first) for n, first in [(50, 0), (1, 50), (120, 51), (9, 171)]]
    whole, spill = Examples.concat(parts), Spill()
    for part in [*parts[:2], Examples.empty(), *parts[2:]]:
        spill.append(part, sizes(part, "concat"))
    np.testing.assert_array_equal(spill.lengths(), sizes(whole, "concat"))
    config = PackConfig(pack_size=128, row_group_tokens=256)
    packing = plan(spill.lengths(), config=config)
    packs = Examples.concat([unpack(packs) for packs in spill.packs(packing, config)])
    expected = whole.take(packing.order)
    assert_examples_equal(packs, expected)
    for name, column in expected.columns.items():
        assert packs.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(packs.columns[name], column)
    spill.close()
    assert not list(tmp_path.iterdir())  # nothing stays in the temporary folder
