"""Nothing that reads packs believes what they say, also where every hash fits."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import hostile_values
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forged import MANIFEST, checksums, replace_shard

import packstore.torch as pt
from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import IntegrityError

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden" / "v1"


def golden(tmp_path: Path, name: str, change: Any, read_back: bool = False) -> Dataset:
    """A golden dataset whose first shard `change` writes anew, given its path and batches."""
    folder = tmp_path / "ds"
    shutil.copytree(GOLDEN / name, folder)
    shard = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["shards"][0]
    path, crc32 = folder / shard["path"], shard["row_groups"]["crc32"]
    change(path, hostile_values.read_batches(path.read_bytes()))
    if path.suffix == ".arrow" or read_back:
        with contextlib.suppress(AttributeError):  # columns that are no lists
            crc32 = checksums(path.read_bytes())
    replace_shard(folder, path.read_bytes(), crc32)
    return open_dataset(str(folder))


def test_compressed_arrow_bodies_are_refused(tmp_path: Path) -> None:
    def compress(path: Path, batches: list[pa.RecordBatch]) -> None:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(str(path), batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)

    data = golden(tmp_path, "preference-concat-plain-arrow", compress)
    with pytest.raises(IntegrityError, match="not be compressed"):
        list(data.iter_packs())
    with pytest.raises(IntegrityError, match="not be compressed"):
        list(pt.PackedDataset(data.url))
    assert any("not be compressed" in problem for problem in data.verify().problems)


def test_dictionaries_that_grow_are_refused_where_sizes_are_read(tmp_path: Path) -> None:
    """Some kilobytes that would become gigabytes, in columns that are read alone."""

    def bomb(path: Path, batches: list[pa.RecordBatch]) -> None:
        schema = batches[0].schema
        with pq.ParquetWriter(path, schema, use_dictionary=True, compression="zstd") as writer:
            for batch in batches:
                at = schema.get_field_index("lengths")
                lists = pa.ListArray.from_arrays(
                    np.linspace(0, 30_000_000, len(batch) + 1).astype(np.int32),
                    pa.array(np.full(30_000_000, 9, np.int32)),
                    type=schema.field(at).type,
                )
                writer.write_table(
                    pa.Table.from_batches([batch.set_column(at, schema.field(at), lists)])
                )

    data = golden(tmp_path, "preference-concat-plain", bomb)
    before = pa.total_allocated_bytes()
    with pytest.raises(IntegrityError, match="must have"):
        data.read_columns(0, ["lengths"])
    assert pa.total_allocated_bytes() - before < 1 << 24


def test_labels_of_other_tokens_are_refused(tmp_path: Path) -> None:
    """A loader has one array for ids and labels, so it must not read others as if they agreed."""

    def relabel(path: Path, batches: list[pa.RecordBatch]) -> None:
        schema = batches[0].schema
        at = schema.get_field_index("labels")
        with pa.ipc.new_file(str(path), schema) as writer:
            for batch in batches:
                lists = batch.column(at)
                flat = lists.flatten().to_numpy().copy()
                flat[np.flatnonzero(flat >= 0)[-1]] += 1
                labels = pa.ListArray.from_arrays(lists.offsets, flat, type=lists.type)
                writer.write_batch(batch.set_column(at, schema.field(at), labels))

    data = golden(tmp_path, "preference-concat-plain-arrow", relabel)
    with pytest.raises(IntegrityError, match=r"row \d+: .*\[labels-are-ids\]"):
        list(pt.PackedDataset(data.url))
    assert any("[labels-are-ids]" in problem for problem in data.verify().problems)


def test_another_schema_is_refused_again_and_again(tmp_path: Path) -> None:
    """Also after the first look at it, whose error may have been passed over."""

    def flat(path: Path, batches: list[pa.RecordBatch]) -> None:
        at = batches[0].schema.get_field_index("reward")
        field = pa.field("reward", pa.uint32())
        made = [b.set_column(at, field, pa.array([1] * len(b), pa.uint32())) for b in batches]
        with pa.ipc.new_file(str(path), made[0].schema) as writer:
            for batch in made:
                writer.write_batch(batch)

    data = golden(tmp_path, "preference-concat-plain-arrow", flat)
    data.expect(0)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="schema must be the one"):
            data.read_packs(0)
    with pytest.raises(IntegrityError, match="schema must be the one"):
        list(pt.PackedDataset(data.url))


@pytest.mark.parametrize("codec", ["lz4", "none"])
def test_other_codecs_are_read(tmp_path: Path, codec: str) -> None:
    def recode(path: Path, batches: list[pa.RecordBatch]) -> None:
        how = {"compression": codec, "use_dictionary": False, "write_page_checksum": True}
        with pq.ParquetWriter(path, batches[0].schema, **how) as writer:
            for batch in batches:
                writer.write_batch(batch)

    data = golden(tmp_path, "preference-concat-plain", recode, read_back=True)
    expected = open_dataset(str(GOLDEN / "preference-concat-plain"))
    for batch, other in zip(data.iter_batches(), expected.iter_batches(), strict=True):
        assert batch.equals(other)
