"""Datasets of prefix trees are used as any others: queried, repacked, extended, joined
with side data, and loaded on any ranks; each sequence stays what its record was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_turns import agent_turns

import packstore
from packstore import Dataset
from packstore.torch import PackedDataLoader, PackedDataset, SideWriter

TREES: dict[str, Any] = {
    "share_prefixes": "pack",
    "pack_size": 300,
    "row_group_tokens": 600,
    "num_workers": 0,
}
RECORDS = agent_turns(num_tasks=12)
MORE = agent_turns(num_tasks=2, seed=1)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("trees")
    dataset = packstore.pack(RECORDS, folder / "trees", **TREES)
    totals = dataset.manifest.totals
    assert 3 * totals.tokens < totals.logical_tokens
    assert max(depth_of(packs) for packs in dataset.iter_packs()) > 3
    return dataset


def depth_of(packs: Any) -> int:
    """Return the most ancestors of a sequence."""
    depths: list[int] = []
    for i, parent in enumerate(packs.parents.tolist()):
        depths.append(depths[parent] + 1 if parent < i else 0)
    return max(depths)


def sequences(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of each example, sorted by example id."""
    frame = packstore.scan(dataset, tokens=True).collect().sort("example_id")
    return [
        (ids[0], labels[0])
        for ids, labels in zip(frame["input_ids"], frame["labels"], strict=True)
        if len(ids) == len(labels) == 1
    ]


def expected(records: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(record["input_ids"], record["labels"]) for record in records]


def as_lists(found: list[tuple[Any, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(list(ids), list(labels)) for ids, labels in found]


def require_true_statistics(dataset: Dataset) -> None:
    """`verify` recounts totals; these are the figures that readers allocate by."""
    assert dataset.verify().ok
    statistics = dataset.manifest.statistics
    rows = [p.row(i) for p in dataset.iter_packs() for i in range(len(p))]
    assert statistics.most_keys == max(int(row.lengths.sum()) for row in rows)
    assert statistics.most_targets == max(int(row.supervised.sum()) for row in rows)
    assert statistics.most_keys > dataset.manifest.pack_size


def test_a_query_returns_whole_sequences(trees: Dataset) -> None:
    """A turn that another row learns has no label where it is context."""
    assert as_lists(sequences(trees)) == expected(RECORDS)
    lengths = packstore.scan(trees).select("lengths").collect()["lengths"]
    assert sum(int(n) for row in lengths for n in row) == (
        trees.manifest.totals.logical_tokens
    )
    require_true_statistics(trees)


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "concat", "pack_size": 300},
        {"layout": "shared_prefix", "pack_size": 300},
        {"share_prefixes": "pack", "pack_size": 500, "seed": 3},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_repacking(trees: Dataset, tmp_path: Path, settings: dict[str, Any]) -> None:
    anew = packstore.pack(trees.url, tmp_path / "anew", num_workers=0, **settings)
    assert as_lists(sequences(anew)) == expected(RECORDS)
    assert anew.manifest.lineage == trees.manifest.lineage
    back = packstore.pack(anew.url, tmp_path / "back", **TREES)
    assert as_lists(sequences(back)) == expected(RECORDS)
    require_true_statistics(back)


def test_append_and_concat(trees: Dataset, tmp_path: Path) -> None:
    own = packstore.pack(RECORDS, tmp_path / "own", **TREES)
    grown = packstore.append(own, MORE)
    assert as_lists(sequences(grown)) == expected(RECORDS + MORE)
    appended = grown.manifest.totals.tokens - own.manifest.totals.tokens
    assert 3 * appended < sum(len(record["input_ids"]) for record in MORE)
    require_true_statistics(grown)

    both = packstore.concat([trees, grown], tmp_path / "both")
    assert as_lists(sequences(both)) == expected(RECORDS + RECORDS + MORE)
    require_true_statistics(both)


def test_side_data(trees: Dataset, tmp_path: Path) -> None:
    """Values belong to examples and sequences, wherever these stand."""
    columns = {"score": "float64", "ref_logps": "list<float32>"}
    with SideWriter(tmp_path / "side", trees, columns) as writer:
        for packs in trees.iter_packs():
            ids = packs.example_ids
            values = {"score": ids / 2, "ref_logps": -ids.astype(np.float32)}
            writer.write(ids, values, packs.num_responses)

    anew = packstore.pack(
        trees.url, tmp_path / "anew", layout="concat", pack_size=400, num_workers=0
    )
    for dataset in (trees, anew):
        data = PackedDataset(dataset, side=str(tmp_path / "side"))
        ids: list[int] = []
        for batch in PackedDataLoader(data):
            ids += batch.example_ids.tolist()
            assert batch.columns["score"].tolist() == (batch.example_ids / 2).tolist()
            assert batch.ref_logps.tolist() == (-batch.example_ids).tolist()
        assert sorted(ids) == list(range(len(RECORDS)))


def logical(batch: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Return example id -> ids and labels, of the examples that count."""
    whole = batch.to_concat()
    edges = whole.cu_seqlens.tolist()
    found = {}
    for i, number in enumerate(whole.example_ids.tolist()):
        if whole.weights[i] > 0:
            part = slice(edges[i], edges[i + 1])
            ids = whole.input_ids[part].tolist()
            found[number] = ids, whole.labels[part].tolist()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_load_each_sequence_once(trees: Dataset, world_size: int) -> None:
    found: list[tuple[int, tuple[list[int], list[int]]]] = []
    for rank in range(world_size):
        data = PackedDataset(trees, rank=rank, world_size=world_size)
        for batch in PackedDataLoader(data, packs_per_batch=2, drop_last=False):
            found += logical(batch).items()
    assert [i for i, _ in sorted(found)] == list(range(len(RECORDS)))
    assert [sequence for _, sequence in sorted(found)] == expected(RECORDS)


def test_a_run_is_resumed_on_other_ranks(trees: Dataset) -> None:
    """After a batch of each of two ranks, three ranks load what is left."""

    def loader(rank: int, world_size: int) -> PackedDataLoader:
        data = PackedDataset(trees, rank=rank, world_size=world_size, lanes=6)
        return PackedDataLoader(data, drop_last=False)

    seen: dict[int, Any] = {}
    states = []
    for rank in range(2):
        first = loader(rank, 2)
        batches = iter(first)
        seen |= logical(next(batches))
        states.append(json.dumps(first.state_dict()))
    assert 0 < len(seen) < len(RECORDS)

    for rank in range(3):
        resumed = loader(rank, 3)
        resumed.load_state_dict(json.loads(states[0]))
        for batch in resumed:
            assert seen.keys().isdisjoint(logical(batch))
            seen |= logical(batch)
    assert [seen[i] for i in sorted(seen)] == expected(RECORDS)


def test_trees_in_a_mix(trees: Dataset, tmp_path: Path) -> None:
    records = agent_turns(num_tasks=3, seed=2)
    other = packstore.pack(records, tmp_path / "other", layout="concat", pack_size=300)
    data = PackedDataset.mix({trees: 1, other: 1})
    found = {}
    for batch in PackedDataLoader(data):
        if not batch.sources.any():
            found |= logical(batch)
    assert found
    for number, sequence in found.items():
        assert sequence == expected(RECORDS)[number]
