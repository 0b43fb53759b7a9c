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
import pytest
from forged import MANIFEST, checksums, replace_shard

import packstore.torch as pt
from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import IntegrityError

GOLDEN = Path(__file__).parents[2] / "schemas" / "conformance" / "v1" / "datasets"


def golden(
    tmp_path: Path, name: str, changes: dict[str, Any] | None = None, **how: Any
) -> Dataset:
    """A golden dataset whose first shard was written anew, some columns changed by
    functions.
    """
    folder = tmp_path / "ds"
    shutil.copytree(GOLDEN / name, folder)
    shard = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["shards"][0]
    batches = hostile_values.read_batches((folder / shard["path"]).read_bytes())
    for column, change in (changes or {}).items():
        at = batches[0].schema.get_field_index(column)
        made = [change(batch.column(at)) for batch in batches]
        field = batches[0].schema.field(at).with_type(made[0].type)
        batches = [
            b.set_column(at, field, new) for b, new in zip(batches, made, strict=True)
        ]
    data, crc32 = (
        hostile_values.encode(batches, "arrow" in name, how),
        shard["row_groups"]["crc32"],
    )
    with contextlib.suppress(AttributeError):  # columns that are no lists
        crc32 = checksums(data)
    replace_shard(folder, data, crc32)
    return open_dataset(str(folder))


def test_compressed_arrow_bodies_are_refused(tmp_path: Path) -> None:
    data = golden(tmp_path, "preference-concat-arrow", compression="zstd")
    with pytest.raises(IntegrityError, match="compress"):
        list(data.iter_packs())
    with pytest.raises(IntegrityError, match="compress"):
        list(pt.PackedDataset(data.url))
    assert any("not be compressed" in problem for problem in data.verify().problems)


def test_dictionaries_that_grow_are_refused_where_sizes_are_read(
    tmp_path: Path,
) -> None:
    """Some kilobytes that would become gigabytes, in columns that are read alone."""

    def bomb(lists: pa.ListArray) -> pa.ListArray:
        offsets = np.linspace(0, 5_000_000, len(lists) + 1).astype(np.int32)
        nines = pa.array(np.full(5_000_000, 9, np.int32))
        return pa.ListArray.from_arrays(offsets, nines, type=lists.type)

    how = {"use_dictionary": True, "compression": "zstd"}
    data = golden(tmp_path, "preference-concat", {"lengths": bomb}, **how)
    before = pa.total_allocated_bytes()
    with pytest.raises(IntegrityError, match="5000000"):
        data.read_columns(0, ["lengths"])
    assert pa.total_allocated_bytes() - before < 1 << 24


def test_labels_of_other_tokens_are_refused(tmp_path: Path) -> None:
    """A loader has one array for ids and labels, so it must not read others as if they
    agreed.
    """

    def relabel(lists: pa.ListArray) -> pa.ListArray:
        flat = lists.flatten().to_numpy().copy()
        flat[np.flatnonzero(flat >= 0)[-1]] += 1
        return pa.ListArray.from_arrays(lists.offsets, flat, type=lists.type)

    data = golden(tmp_path, "preference-concat-arrow", {"labels": relabel})
    with pytest.raises(IntegrityError, match="labels-are-ids"):
        list(pt.PackedDataset(data.url))
    assert any("[labels-are-ids]" in problem for problem in data.verify().problems)


def test_another_schema_is_refused_again_and_again(tmp_path: Path) -> None:
    """Also after the first look at it, whose error may have been passed over."""
    flat = {"reward": lambda lists: pa.array([1] * len(lists), pa.uint32())}
    data = golden(tmp_path, "preference-concat-arrow", flat)
    data.prefetch(0)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="schema"):
            data.read_packs(0)
    with pytest.raises(IntegrityError, match="schema"):
        list(pt.PackedDataset(data.url))


@pytest.mark.parametrize("codec", ["lz4", "none"])
def test_other_codecs_are_read(tmp_path: Path, codec: str) -> None:
    how = {"compression": codec, "use_dictionary": False, "write_page_checksum": True}
    data = golden(tmp_path, "preference-concat", **how)
    expected = open_dataset(str(GOLDEN / "preference-concat"))
    for batch, other in zip(data.iter_batches(), expected.iter_batches(), strict=True):
        assert batch.equals(other)
