"""Shards of other writers: what the format leaves open is read, what it forbids is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from forged import read_shard, replace_shard, shard_bytes
from places import edit_manifest, manifest_path

import packstore
from packstore import Dataset
from packstore.errors import IntegrityError
from packstore.torch import PackedDataset, SideWriter, open_side

SIDE = manifest_path(1, "side")


def dataset_of(kit: Any, folder: Path, file_format: str) -> tuple[Dataset, pa.Table, list[int]]:
    """A dataset of one shard, its packs, and the packs of each row group."""
    how = {"shard_tokens": 1 << 20, "row_group_tokens": 300, "format": file_format}
    dataset = kit.made(folder / "ds", 40, strategy="pool", **how)
    (shard,) = dataset.manifest.shards
    rows = shard.row_groups.rows.tolist()
    assert len(rows) > 1
    return dataset, read_shard(folder / "ds" / shard.path), rows


def renamed(table: pa.Table) -> pa.Table:
    """The same lists, whose elements have another name."""
    fields = [
        pa.field(f.name, pa.list_(pa.field("item", f.type.value_type, nullable=False)), False)
        for f in table.schema
    ]
    return table.cast(pa.schema(fields, table.schema.metadata))


@pytest.mark.parametrize(
    ("file_format", "how"),
    [
        ("parquet", {"write_page_checksum": False}),
        ("parquet", {"write_page_checksum": True}),
        ("parquet", {"data_page_version": "2.0"}),
        ("parquet", {"store_schema": False}),
        ("parquet", {"compression": "lz4"}),
        ("arrow", {"options": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)}),
    ],
    ids=str,
)
def test_what_is_left_open(kit: Any, tmp_path: Path, file_format: str, how: Any) -> None:
    dataset, table, rows = dataset_of(kit, tmp_path, file_format)
    before, frame = list(dataset.iter_batches()), packstore.scan(dataset).collect()
    replace_shard(tmp_path / "ds", shard_bytes(table, rows, file_format, **how))
    again = packstore.open(dataset.url)
    assert again.verify().problems == ()
    assert list(again.iter_batches()) == before
    assert packstore.scan(again).collect().equals(frame)


def relabelled(data: bytes) -> bytes:
    """The same Parquet file, whose lists have a level named bags."""
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert b"list" in data[footer:]
    return data[:footer] + data[footer:].replace(b"list", b"bags")


@pytest.mark.parametrize(
    ("file_format", "how"),
    [
        ("parquet", {"use_compliant_nested_type": False}),
        ("parquet", {"use_compliant_nested_type": False, "store_schema": False}),
        ("arrow", {}),
    ],
    ids=str,
)
def test_elements_of_another_name(kit: Any, tmp_path: Path, file_format: str, how: Any) -> None:
    """Readers of other languages find columns by the whole path."""
    dataset, table, rows = dataset_of(kit, tmp_path, file_format)
    replace_shard(tmp_path / "ds", shard_bytes(renamed(table), rows, file_format, **how))
    again = packstore.open(dataset.url)
    assert not again.verify().ok
    with pytest.raises(IntegrityError, match=r"its schema must be|must be named list.element"):
        again.read_packs(0)


def test_lists_of_another_name(kit: Any, tmp_path: Path) -> None:
    dataset, table, rows = dataset_of(kit, tmp_path, "parquet")
    replace_shard(tmp_path / "ds", relabelled(shard_bytes(table, rows, "parquet")))
    again = packstore.open(dataset.url)
    assert not again.verify().ok
    with pytest.raises(IntegrityError, match=r"must be named list\.element; found bags\.element"):
        again.read_packs(0)


@pytest.mark.parametrize("name", ["item", "bags", "element"])
def test_elements_of_side_data(kit: Any, tmp_path: Path, name: str) -> None:
    dataset = kit.made(tmp_path / "ds", 9)
    with SideWriter(str(tmp_path / "side"), dataset, {"ref_logps": "list<float32>"}) as writer:
        for packs in dataset.iter_packs():
            writer.write(packs.example_ids, {"ref_logps": packs.reward})
    (path,) = (tmp_path / "side/data").iterdir()
    table = read_shard(path)
    logps = pa.list_(pa.field(name.replace("bags", "element"), pa.float32(), nullable=False))
    fields = [table.schema.field(0), pa.field("ref_logps", logps, nullable=False)]
    table = table.cast(pa.schema(fields, table.schema.metadata))
    data = shard_bytes(table, [9], "parquet", use_compliant_nested_type=False)
    data = relabelled(data) if name == "bags" else data
    path.write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(tmp_path / "side", lambda m: m["shards"][0].update(facts), SIDE)
    joined = PackedDataset(dataset, side=[open_side(str(tmp_path / "side"))])
    if name == "element":
        assert sum(len(p.ref_logps) for p in joined) == 18
        return
    with pytest.raises(IntegrityError, match=r"must be named list\.element|rows of the columns"):
        list(joined)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_example_ids_of_63_bits(kit: Any, tmp_path: Path, file_format: str) -> None:
    dataset, table, rows = dataset_of(kit, tmp_path, file_format)
    top = 2**63 - 1
    edit_manifest(dataset.url, lambda m: m["shards"][0].update(example_id_base=top - 39))
    highest = packstore.open(dataset.url)
    assert highest.verify().ok
    assert max(i for p in highest.iter_packs() for i in p.example_ids.tolist()) == top
    edit_manifest(dataset.url, lambda m: m["shards"][0].update(example_id_base=top - 38))
    moved = table["example_ids"].to_pylist()
    moved[0][0] = -1
    column = pa.array(moved, table.schema.field("example_ids").type)
    negative = table.set_column(
        table.schema.names.index("example_ids"), table.schema.field("example_ids"), column
    )
    for base, data in ((top - 38, None), (0, shard_bytes(negative, rows, file_format))):
        if data is not None:
            replace_shard(tmp_path / "ds", data)
        edit_manifest(dataset.url, lambda m, b=base: m["shards"][0].update(example_id_base=b))
        report = packstore.open(dataset.url).verify()
        assert any(
            "must have example ids of at least 0, and below 2^63" in p for p in report.problems
        )
        with pytest.raises(IntegrityError, match="example ids of at least 0"):
            list(PackedDataset(dataset.url))


@pytest.mark.parametrize("rule", ["first-unsupervised", "supervised-nonempty"])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_loaders_check_what_is_learned(
    kit: Any, tmp_path: Path, layout: str, file_format: str, rule: str
) -> None:
    """The log-prob of a segment's first token would be another's, and of no token it is 0."""
    how = {"layout": layout, "format": file_format, "shard_tokens": 1 << 20}
    dataset = kit.made(tmp_path / "again", 40, row_group_tokens=300, strategy="pool", **how)
    table = read_shard(Path(dataset.shard_urls[0]))
    rows = dataset.manifest.shards[0].row_groups.rows.tolist()
    ids, labels = table["input_ids"][-1].as_py(), table["labels"].to_pylist()
    start, stop = table["seq_boundaries"][-1].as_py()[1:3]  # of the second sequence
    if rule == "first-unsupervised":
        labels[-1][start] = ids[start]
    else:
        labels[-1][start:stop] = [-100] * (stop - start)
    place, field = table.schema.names.index("labels"), table.schema.field("labels")
    table = table.set_column(place, field, pa.array(labels, field.type))
    assert list(PackedDataset(dataset.url))
    replace_shard(tmp_path / "again", shard_bytes(table, rows, dataset.manifest.file_format))
    with pytest.raises(IntegrityError, match=rf"\[{rule}\]"):
        list(PackedDataset(dataset.url))
    assert any(f"[{rule}]" in p for p in packstore.open(dataset.url).verify().problems)
