"""Side data with a value for each supervised token, or its k most probable ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import packstore
import packstore.torch as pt

COLUMNS = {
    "old_logps": "token<float32>",
    "half": "token<float16>",
    "teacher": "token<top4,float16>",
    "coarse": "token<top4,uint8>",
}


def values_of(example_ids: np.ndarray, num_targets: np.ndarray) -> dict[str, object]:
    """Values that follow from the id of an example and the place of a token in it."""
    starts = np.cumsum(num_targets) - num_targets
    place = np.arange(num_targets.sum()) - np.repeat(starts, num_targets)
    numbers = -(np.repeat(example_ids, num_targets) % 7 + place / 8)
    ids = (place[:, None] * 4 + np.arange(4)).astype(np.int32)
    logps = numbers[:, None] - np.arange(4) / 4
    return {
        "old_logps": numbers.astype(np.float32),
        "half": numbers.astype(np.float16),
        "teacher": pt.TopK(ids, logps.astype(np.float16)),
        "coarse": pt.TopK(ids, logps),
    }


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    records = [
        {"prompt": [1, 2, i % 7], "chosen": [3] * (1 + i % 9), "rejected": [4] * 3}
        for i in range(40)
    ]
    dataset = packstore.pack(records, str(tmp_path / "first"), pack_size=64)
    side = str(tmp_path / "side")
    with pt.SideWriter(side, dataset, COLUMNS) as writer:
        for packs in dataset.iter_packs():
            values = values_of(packs.example_ids, packs.num_targets)
            writer.write(packs.example_ids, values, None, packs.num_targets)

    again = packstore.pack(dataset, str(tmp_path / "b"), pack_size=100, layout=layout)
    loader = pt.PackedDataLoader(pt.PackedDataset(again, side=side), packs_per_batch=3)
    for batch in loader:
        expected = values_of(batch.example_ids.numpy(), batch.num_targets.numpy())
        for name in ("old_logps", "half"):
            np.testing.assert_array_equal(batch.token_columns[name], expected[name])
        for name, tolerance in {"teacher": 0, "coarse": 0.02}.items():
            ids, logps = batch.token_columns[name]
            np.testing.assert_array_equal(ids, expected[name].ids)
            np.testing.assert_allclose(logps, expected[name].logps, 0, tolerance)
