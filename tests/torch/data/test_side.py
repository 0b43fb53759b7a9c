"""Columns beside the tokens in a batch: joined side data, and columns carried from the
input.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import packstore
from packstore.errors import ConfigError
from packstore.torch import PackedDataLoader, PackedDataset, SideWriter

CARRY = ("source:string", "turns:int64", "weight:float64", "checked:bool")
N = 150


def record(i: int) -> dict[str, Any]:
    return {
        "prompt": [1, 2, i % 9, i % 5],
        "chosen": [3] * (1 + i % 7),
        "rejected": [4, i % 50],
        "source": ("forum", "", "naïve ☃")[i % 3],
        "turns": 2**40 + i,
        "weight": i / 16,
        "checked": i % 2 == 0,
    }


def logp(ids: np.ndarray, k: int) -> np.ndarray:
    return (-ids - k / 4).astype(np.float32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same records packed, a side dataset of that, and what was packed anew from
    it.
    """
    folder = tmp_path_factory.mktemp("side")
    lines = folder / "pairs.jsonl"
    lines.write_text(
        "".join(json.dumps(record(i)) + "\n" for i in range(N)), encoding="utf-8"
    )
    how = {"row_group_tokens": 300, "shard_tokens": 400}
    first = packstore.pack(
        str(lines), str(folder / "a"), pack_size=48, carry=CARRY, **how
    )
    again = packstore.pack(
        first.url,
        str(folder / "b"),
        pack_size=100,
        layout="shared_prefix",
        seed=3,
        **how,
    )
    side = str(folder / "side")
    columns = {"ref_logps": "list<float32>", "score": "float64", "name": "string"}
    columns["advantage"] = "list<float32>"
    with SideWriter(side, first, columns) as writer:
        for packs in first.iter_packs():
            ids = packs.example_ids
            both = np.stack([logp(ids, 0), logp(ids, 1)], axis=1).ravel()
            names = np.array([f"n{i}" for i in ids], object)
            values = {
                "ref_logps": both,
                "score": ids / 2,
                "name": names,
                "advantage": both / 2,
            }
            writer.write(ids, values)
    return SimpleNamespace(first=first, again=again, side=side)


def batches(data: PackedDataset) -> Iterator[Any]:
    return iter(PackedDataLoader(data, packs_per_batch=3))


def assert_joined(batch: Any) -> None:
    ids = batch.example_ids.numpy()
    found = batch.ref_logps.view(-1, 2).numpy()
    np.testing.assert_array_equal(found, np.stack([logp(ids, 0), logp(ids, 1)], axis=1))
    assert torch.equal(batch.sequence_columns["advantage"], batch.ref_logps / 2)
    assert batch.columns["score"].dtype == torch.float64
    assert batch.columns["score"].tolist() == (ids / 2).tolist()
    assert batch.columns["name"].tolist() == [f"n{i}" for i in ids]


@pytest.mark.parametrize("which", ["first", "again"])
def test_joined_by_id_also_after_repacking(packed: SimpleNamespace, which: str) -> None:
    ds = getattr(packed, which)
    stream = PackedDataset(ds, lanes=4, side=[packed.side])
    assert (len(stream), stream.kind) == (len(ds), "preference")
    seen = []
    for batch in batches(stream):
        assert_joined(batch)
        assert_carried(batch)
        seen += batch.example_ids.tolist()
    assert sorted(seen) == list(range(N))


def test_through_the_loader_and_its_workers(packed: SimpleNamespace) -> None:
    stream = PackedDataset(packed.again, lanes=4, side=[packed.side])
    for workers in (0, 1):
        data = pickle.loads(pickle.dumps(stream))
        seen = []
        for batch in PackedDataLoader(data, packs_per_batch=2, num_workers=workers):
            assert "labels" not in vars(batch)  # joined, and still 4 bytes a token
            moved = batch.to("meta")
            assert moved.columns["turns"].is_meta
            assert moved.sequence_columns["advantage"].is_meta
            assert moved.columns["source"] is batch.columns["source"]
            assert_joined(batch)
            assert_carried(batch)
            seen += batch.example_ids[batch.weights > 0].tolist()
        assert sorted(seen) == list(range(N))


def test_two_columns_of_one_name(packed: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ref_logps"):
        PackedDataset(packed.first, side=[packed.side, packed.side])
    with SideWriter(str(tmp_path / "side"), packed.first, {"turns": "int64"}) as writer:
        writer.write(np.arange(N), {"turns": np.arange(N)})
    with pytest.raises(ConfigError, match="'turns'"):
        PackedDataset(packed.first, side=[str(tmp_path / "side")])


def test_a_side_of_all_joins_the_rest(packed: SimpleNamespace, tmp_path: Path) -> None:
    """Packing anew may drop examples."""
    settings: Any = {"pack_size": 15, "layout": "concat", "max_drop_rate": 0.5}
    fewer = packstore.pack(packed.first.url, str(tmp_path / "fewer"), **settings)
    assert 0 < fewer.manifest.totals.examples < N
    for batch in batches(PackedDataset(fewer, side=[packed.side])):
        assert_joined(batch)


def assert_carried(batch: Any) -> None:
    """The carried columns of each example, by its line."""
    records = [record(i) for i in batch.example_ids.tolist()]
    types = {"turns": torch.int64, "weight": torch.float64, "checked": torch.bool}
    assert {n: batch.columns[n].dtype for n in types} == types
    assert isinstance(batch.columns["source"], np.ndarray)
    for name in (*types, "source"):
        assert batch.columns[name].tolist() == [r[name] for r in records]
        assert len(batch.columns[name]) == batch.num_examples
