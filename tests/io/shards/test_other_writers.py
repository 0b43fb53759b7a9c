"""Shards of other writers: what the format leaves open is read, what it forbids is
refused.
"""

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


def dataset_of(
    kit: Any, folder: Path, file_format: str
) -> tuple[Dataset, pa.Table, list[int]]:
    """A dataset of one shard, its packs, and the packs of each row group."""
    how = {"shard_tokens": 1 << 20, "row_group_tokens": 300, "format": file_format}
    dataset = kit.made(folder / "ds", 40, strategy="pool", **how)
    (shard,) = dataset.manifest.shards
    rows = shard.row_groups.rows.tolist()
    assert len(rows) > 1
    return dataset, read_shard(folder / "ds" / shard.path), rows


@pytest.mark.parametrize(
    ("file_format", "how"),
    [
        ("parquet", {"write_page_checksum": False, "data_page_version": "2.0"}),
        (
            "parquet",
            {"write_page_checksum": True, "compression": "lz4", "store_schema": False},
        ),
        (
            "arrow",
            {
                "options": pa.ipc.IpcWriteOptions(
                    metadata_version=pa.ipc.MetadataVersion.V4
                )
            },
        ),
    ],
    ids=str,
)
def test_what_is_left_open(
    kit: Any, tmp_path: Path, file_format: str, how: Any
) -> None:
    """Also of a scan, which reads single columns."""
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


def test_lists_of_another_name(kit: Any, tmp_path: Path) -> None:
    dataset, table, rows = dataset_of(kit, tmp_path, "parquet")
    replace_shard(tmp_path / "ds", relabelled(shard_bytes(table, rows, "parquet")))
    again = packstore.open(dataset.url)
    assert not again.verify().ok
    with pytest.raises(IntegrityError, match=r"bags\.element"):
        again.read_packs(0)


@pytest.mark.parametrize("name", ["item", "bags", "element"])
def test_elements_of_side_data(kit: Any, tmp_path: Path, name: str) -> None:
    dataset = kit.made(tmp_path / "ds", 9)
    with SideWriter(
        str(tmp_path / "side"), dataset, {"ref_logps": "list<float32>"}
    ) as writer:
        for packs in dataset.iter_packs():
            writer.write(packs.example_ids, {"ref_logps": packs.reward})
    (path,) = (tmp_path / "side/data").iterdir()
    table = read_shard(path)
    logps = pa.list_(
        pa.field(name.replace("bags", "element"), pa.float32(), nullable=False)
    )
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
    with pytest.raises(IntegrityError):
        list(joined)


def test_the_highest_example_id(kit: Any, tmp_path: Path) -> None:
    dataset, top = kit.made(tmp_path / "ds", 40, shard_tokens=1 << 20), 2**63 - 1
    edit_manifest(
        dataset.url, lambda m: m["shards"][0].update(example_id_base=top - 39)
    )
    highest = packstore.open(dataset.url)
    assert highest.verify().ok
    assert max(i for p in highest.iter_packs() for i in p.example_ids.tolist()) == top
