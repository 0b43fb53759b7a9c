"""``packstore.scan``: every example as it is in the packs, and only what a query needs
is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import packstore
from packstore import Dataset
from packstore.errors import (
    CompatibilityError,
    DatasetNotFoundError,
    IntegrityError,
)
from packstore.format.arrays import TopK
from packstore.io.side import SideWriter

KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "preference": lambda i: {
        "prompt": [5, 6, i],
        "chosen": [7] * (1 + i % 5),
        "rejected": [9, i],
    },
    "sft": lambda i: {"input_ids": [1, 2, i, 4], "labels": [-100, 2, -100, 4]},
    "scored": lambda i: {
        "prompt": [5, 6, i],
        "responses": [[10 + k] * (1 + i % 3) for k in range(2 + i % 3)],
        "scores": [float(k) for k in range(2 + i % 3)],
    },
}


def records_of(kind: str, n: int = 200) -> list[dict[str, Any]]:
    more = ({"lang": ["en", "de", "ü"][i % 3], "pack": i, "x": i / 2} for i in range(n))
    return [{**KINDS[kind](i), **of_i, "b": i % 2 == 0} for i, of_i in enumerate(more)]


def packed(tmp_path: Path, kind: str = "preference", **settings: Any) -> Dataset:
    carry = ["lang", "pack:int64", "x:float64", "b:bool"]
    how = {"pack_size": 64, "row_group_tokens": 256, "shard_tokens": 1024, **settings}
    return packstore.pack(
        records_of(kind), str(tmp_path / "out"), carry=carry, kind=kind, **how
    )


def expected(
    kit: Any, dataset: Dataset, *sources: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows by another way: the records of the example ids in the packs."""
    rows, number = [], 0
    counts = [len(shard.row_groups) for shard in dataset.manifest.shards]
    shard_of = np.repeat(np.arange(len(counts)), counts).tolist()
    for group, batch in enumerate(dataset.iter_batches()):
        for example_ids in batch.column("example_ids").to_pylist():
            for i in example_ids:
                record = sources[i >> 40][i % (1 << 40)]
                whole = kit.stored_row(record, i)
                spans = [slice(a, b) for a, b in pairwise(whole["seq_boundaries"])]
                rows.append(
                    {
                        "example_id": i,
                        "pack": number,
                        "shard": shard_of[group],
                        "lengths": whole["lengths"],
                        "rewards": whole["reward"],
                        "lang": record["lang"],
                        "pack_carried": record["pack"],
                        "x": record["x"],
                        "b": record["b"],
                        "input_ids": [whole["input_ids"][span] for span in spans],
                        "labels": [whole["labels"][span] for span in spans],
                    }
                )
            number += 1
    return rows


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_there_as_it_is_in_the_packs(
    kit: Any, kind: str, form: str, tmp_path: Path
) -> None:
    layout = "concat" if kind == "sft" else "shared_prefix"
    first = packed(tmp_path, kind, format=form, layout=layout)
    more = [{**record, "lang": "it", "x": 0.5} for record in records_of(kind, 9)]
    dataset = packstore.append(first, more)
    rows = expected(kit, dataset, records_of(kind), more)
    assert len(rows) == 209
    assert len(dataset.manifest.shards) > 1
    frame = packstore.scan(dataset.url, tokens=True)
    assert frame.collect().to_dicts() == rows
    assert frame.collect_schema() == frame.collect().schema
    plain = packstore.scan(dataset.url)
    bare = [
        {k: v for k, v in row.items() if k not in ("input_ids", "labels")}
        for row in rows
    ]
    assert plain.collect().to_dicts() == bare
    assert packstore.scan(Path(dataset.url), version=1).collect().height == 200
    some = plain.select("rewards", "b").tail(3).collect()
    assert some.rows() == [(row["rewards"], row["b"]) for row in rows[-3:]]


QUERIES: dict[str, Callable[[pl.LazyFrame], pl.LazyFrame]] = {
    "pack": lambda f: f.filter(pl.col("pack").is_between(3, 5)),
    "shard": lambda f: f.filter((pl.col("shard") == 1) | (pl.col("pack") == 0)).select(
        "x"
    ),
    "carried": lambda f: f.filter(pl.col("lang") == "de", pl.col("x") > 50).select(
        "input_ids"
    ),
    "lengths": lambda f: f.filter(pl.col("lengths").list.max() > 6).select(
        "example_id"
    ),
    "tokens": lambda f: f.filter(
        pl.col("labels").list.len() > 1, pl.col("x") < 5
    ).select("x"),
    "head": lambda f: f.head(30).filter(pl.col("b")),
    "filter, head": lambda f: f.filter(pl.col("b")).head(30),
    "slice": lambda f: f.slice(50, 25).select("lang"),
    "none": lambda f: f.filter(pl.col("x") > 1e9),
    "aggregate": lambda f: f.filter(pl.col("pack") == pl.col("pack").max()).select("x"),
    "group": lambda f: f.group_by("lang").agg(pl.col("x").sum()).sort("lang"),
    "count": lambda f: f.select(pl.len()),
}


@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
@pytest.mark.parametrize("name", QUERIES)
def test_queries_give_what_they_give_of_a_frame_in_memory(
    kit: Any, name: str, engine: Any, tmp_path: Path
) -> None:
    dataset = packed(tmp_path)
    lazy = packstore.scan(dataset, tokens=True)
    found = QUERIES[name](lazy).collect(engine=engine)
    rows = expected(kit, dataset, records_of("preference"))
    wanted = QUERIES[name](pl.DataFrame(rows, schema=lazy.collect_schema()).lazy())
    assert found.to_dicts() == wanted.collect().to_dicts()


def test_only_what_is_needed_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = packed(tmp_path)
    groups = len(dataset.row_groups)
    read: list[tuple[int, tuple[str, ...]]] = []
    columns, packs = Dataset.read_columns, Dataset.read_packs

    def noted(self: Dataset, group: int, names: Any) -> Any:
        read.append((group, tuple(names)))
        return columns(self, group, names)

    def whole(self: Dataset, group: int) -> Any:
        read.append((group, ()))
        return packs(self, group)

    monkeypatch.setattr(Dataset, "read_columns", noted)
    monkeypatch.setattr(Dataset, "read_packs", whole)
    frame = packstore.scan(dataset, tokens=True)
    assert not read
    frame.select("lang").collect()
    assert read == [(g, ("example_ids", "lang")) for g in range(groups)]
    read.clear()
    frame.filter(pl.col("pack") == 0).collect()
    assert read == [(0, ())]
    read.clear()
    found = (
        frame.filter(pl.col("pack_carried") == 17).select("input_ids", "pack").collect()
    )
    (group,) = (g for g, names in read if not names)
    first, end = dataset.group_offsets[group : group + 2].tolist()
    assert first <= found["pack"][0] < end
    assert len(read) == groups + 1
    read.clear()
    assert frame.head(5).collect().height == 5
    assert read == [(0, ())]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError):
        packstore.scan(tmp_path / "none")
    dataset = packed(tmp_path, layout="concat")
    shard = Path(dataset.shard_urls[0])
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    os.chmod(shard, 0o644)
    shard.write_bytes(data)
    for tokens in (False, True):
        with pytest.raises(IntegrityError, match=shard.name):
            packstore.scan(dataset, tokens=tokens).collect()


def write_side(url: Path, dataset: Dataset) -> None:
    """Write values that follow from the example id and the place in the example."""
    columns = {
        "text": "string",
        "shard": "float64",
        "ref_logps": "list<float32>",
        "old_logps": "token<float16>",
        "teacher": "token<top2,uint8>",
    }
    with SideWriter(str(url), dataset, columns) as writer:
        for packs in dataset.iter_packs():
            ids = packs.example_ids
            responses = packs.num_responses
            tokens = packs.num_targets
            place = np.concatenate([np.arange(n) for n in tokens])
            numbers = -np.repeat(ids % 16, tokens) - place / 8
            top_ids = place[:, None] + [0, 1000]
            values = {
                "text": np.array([f"text {i}" for i in ids], np.object_),
                "shard": ids / 2,
                "ref_logps": np.concatenate([np.arange(n) for n in responses]),
                "old_logps": numbers,
                "teacher": TopK(top_ids, np.full(top_ids.shape, -2.0)),
            }
            writer.write(ids, values, responses, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_tokens_stand_where_their_tokens_stand(
    kind: str, tmp_path: Path
) -> None:
    layout = "concat" if kind == "sft" else "shared_prefix"
    dataset = packed(tmp_path, kind, layout=layout)
    side = tmp_path / "side"
    write_side(side, dataset)
    lazy = packstore.scan(dataset.url, tokens=True, side=[side])
    frame = lazy.collect()
    assert frame.schema == lazy.collect_schema()
    for row in frame.iter_rows(named=True):
        example_id = row["example_id"]
        assert row["text"] == f"text {example_id}"
        assert row["shard_side"] == example_id / 2
        assert row["ref_logps"] == list(range(len(row["lengths"])))
        place = 0
        for labels, numbers, tops in zip(
            row["labels"], row["old_logps"], row["teacher"], strict=True
        ):
            for label, number, top in zip(labels, numbers, tops, strict=True):
                if label == -100:
                    assert number is None
                    assert top is None
                    continue
                assert number == -(example_id % 16) - place / 8
                assert top["ids"] == [place, 1000 + place]
                assert top["logps"] == pytest.approx([-2, -2])
                place += 1

    some = lazy.filter(pl.col("lang") == "de").select("old_logps").collect()
    assert some.equals(frame.filter(pl.col("lang") == "de").select("old_logps"))


def test_side_data_of_another_dataset_are_refused(tmp_path: Path) -> None:
    write_side(tmp_path / "side", packed(tmp_path))
    other = packed(tmp_path / "other", "sft", layout="concat")
    with pytest.raises(CompatibilityError, match="side"):
        packstore.scan(other, side=tmp_path / "side")
