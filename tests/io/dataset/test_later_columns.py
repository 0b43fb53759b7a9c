"""Carried columns of a later release: readers skip them, and nobody drops them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from forged import read_shard, replace_shard, shard_bytes
from places import edit_manifest

import packstore
from packstore import Dataset
from packstore.cli import main
from packstore.errors import UnsupportedFormatError
from packstore.torch import PackedDataset

LATER = {"tree": "list<list<int16>>", "source": "string", "_weight": "float64"}


def list_of(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", type_, nullable=False))


def extended(dataset: Dataset) -> pa.Table:
    """The only shard of a dataset that carries `source`, with two more columns around
    it.
    """
    table = read_shard(Path(dataset.shard_urls[0]))
    examples = [len(ids) for ids in table["example_ids"].to_pylist()]
    columns = {
        "tree": pa.array(
            [[[7] * 300] * n for n in examples],
            list_of(list_of(pa.int16())),  # more than tokens
        ),
        "source": table["source"],
        "_weight": pa.array([[0.5] * n for n in examples], list_of(pa.float64())),
    }
    metadata, table = table.schema.metadata, table.drop_columns("source")
    for name, column in columns.items():
        table = table.append_column(pa.field(name, column.type, nullable=False), column)
    return table.replace_schema_metadata(metadata)


@pytest.fixture(params=["parquet", "arrow"])
def later(kit: Any, tmp_path: Path, request: Any) -> tuple[Dataset, Dataset]:
    """A dataset, and the same with carried columns of a later release."""
    records = [{**r, "source": f"s{i % 3}"} for i, r in enumerate(kit.records(40))]
    how = {"format": request.param, "shard_tokens": 1 << 20, "row_group_tokens": 200}
    both = [
        packstore.pack(
            records, str(tmp_path / n), pack_size=64, carry=("source",), **how
        )
        for n in ("now", "later")
    ]
    rows = both[1].manifest.shards[0].row_groups.rows.tolist()
    assert len(rows) > 2
    data = shard_bytes(extended(both[1]), rows, request.param)
    replace_shard(tmp_path / "later", data)
    edit_manifest(both[1].url, lambda m: m.update(carry=LATER))
    return both[0], packstore.open(both[1].url)


def test_readers_skip_them(later: tuple[Dataset, Dataset]) -> None:
    now, new = later
    assert new.verify().ok
    assert list(new.iter_batches()) == list(now.iter_batches())
    tables = [packstore.scan(d, tokens=True).collect() for d in later]
    assert tables[0].equals(tables[1])
    assert packstore.scan(new).collect()["source"].n_unique() == 3
    streams = [list(PackedDataset(d, shuffle=False)) for d in later]
    for ours, theirs in zip(*streams, strict=True):
        assert ours.columns["source"].tolist() == theirs.columns["source"].tolist()
        assert ours.columns.keys() == theirs.columns.keys() == {"source"}
    assert main(["stats", new.url, "--by", "source"]) == 0
    assert main(["stats", new.url, "--by", "tree"]) == 1


def test_writers_keep_them_or_refuse(
    later: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    now, new = later
    twice = packstore.concat([new, new], str(tmp_path / "twice"))
    assert dict(twice.manifest.carry) == LATER
    assert list(twice.manifest.carry) == list(LATER)
    assert twice.verify().ok
    for change in (
        lambda: packstore.append(
            new, [{"prompt": [1], "chosen": [2], "rejected": [3]}]
        ),
        lambda: packstore.append(now, new),
        lambda: packstore.pack(new, str(tmp_path / "anew"), pack_size=128),
    ):
        with pytest.raises(UnsupportedFormatError, match=r"'(tree|_weight)'"):
            change()
