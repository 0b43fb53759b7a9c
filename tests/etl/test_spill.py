"""The spill: what goes in comes out in the order of the plan, from one segment or from many."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from packstore.etl import spill as spilling
from packstore.etl.spill import Spill
from packstore.format.arrays import Examples, to_offsets


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
    whole = Examples.concat(parts)
    order = np.random.default_rng(1).permutation(180)
    offsets = np.concatenate([np.arange(0, 180, 3), [180]])
    with Spill() as spill:
        for part in [*parts[:2], Examples.empty(), *parts[2:]]:
            spill.append(part, np.add.reduceat(part.lengths, part.example_offsets[:-1])
                         if part.num_examples else np.empty(0, np.int32))  # fmt: skip
        np.testing.assert_array_equal(
            spill.lengths(), np.add.reduceat(whole.lengths, whole.example_offsets[:-1])
        )
        found = []
        for examples, own, cuts in spill.parts(order, offsets):
            found += [examples.take(own[a:b]) for a, b in itertools.pairwise(cuts)]
        expected = [whole.take(order[a:b]) for a, b in itertools.pairwise(offsets)]
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            for name in ("input_ids", "supervised", "sequence_offsets", "example_offsets",
                         "reward", "example_ids"):  # fmt: skip
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
            for name, column in want.columns.items():
                assert got.columns[name].dtype == column.dtype
                np.testing.assert_array_equal(got.columns[name], column)
    assert not list(tmp_path.iterdir())  # nothing stays in the temporary folder
