"""The golden datasets: today's reader reads what lies there, today's writer writes the same."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packstore import Dataset
from packstore import open as open_dataset
from packstore.format import FEATURES, FORMAT_VERSION, KINDS, LAYOUTS
from packstore.torch import PackedDataset, open_side

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
V1 = GOLDEN / "v1"
SIDE_V1 = GOLDEN / "side-v1"
NAMES = sorted(path.stem for path in V1.glob("*.json"))
SIDES = sorted(path.stem for path in SIDE_V1.glob("*.json"))
BYTE_DEPENDENT = {"path", "bytes", "sha256", "footer_bytes", "footer_sha256"}


def rows(dataset: Dataset) -> list[dict[str, Any]]:
    return [row for batch in dataset.iter_batches() for row in batch.to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def meaning(dataset: Dataset) -> dict[str, Any]:
    """The manifest without what depends on the release of pyarrow."""
    manifest = json.loads(dataset.manifest.to_json())
    for shard in manifest["shards"]:
        del shard["row_groups"]["crc32"]
        for name in BYTE_DEPENDENT:
            del shard[name]
    del manifest["totals"]["bytes"]
    for name in ("path", "bytes", "sha256"):
        del manifest["pack_index"][name]
    return manifest


def test_every_version_and_every_variant_is_there() -> None:
    assert sorted(p.name for p in GOLDEN.glob("v*")) == [f"v{FORMAT_VERSION}"]
    manifests = [open_dataset(str(V1 / name)).manifest for name in NAMES]
    assert sorted(p.name for p in V1.iterdir() if p.is_dir()) == NAMES
    variants = {(m.kind, m.layout, *m.features) for m in manifests if m.file_format == "parquet"}
    every = {(k, v) for k in KINDS for v in LAYOUTS}
    assert variants == every | {(*pair, name) for pair in every for name in FEATURES}
    assert {m.file_format for m in manifests} == {"parquet", "arrow"}
    assert any(m.carry for m in manifests)
    assert any(len(m.shards) > 1 and len(m.shards[0].row_groups) > 1 for m in manifests)


@pytest.mark.parametrize("name", NAMES)
def test_read(name: str) -> None:
    dataset = open_dataset(str(V1 / name))
    expected = json.loads((V1 / f"{name}.json").read_text(encoding="utf-8"))
    assert [dataset.manifest.kind, dataset.manifest.layout] == [
        expected["kind"],
        expected["layout"],
    ]
    assert len(dataset.row_groups) > 1
    assert rows(dataset) == expected["packs"]
    assert dataset.manifest.pack_index is not None
    assert dataset.pack_index.tokens.tolist() == [len(p["input_ids"]) for p in expected["packs"]]
    report = dataset.verify()
    assert report.ok, report.problems


def side_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for batch in open_side(str(folder)).iter_batches() for row in batch.to_pylist()]


@pytest.mark.parametrize("name", SIDES)
def test_read_sides(name: str, validator: Any) -> None:
    """Every type of column; joined to the dataset that it was derived from."""
    side, dataset = open_side(str(SIDE_V1 / name)), open_dataset(str(V1 / name))
    expected = json.loads((SIDE_V1 / f"{name}.json").read_text(encoding="utf-8"))
    assert side_rows(SIDE_V1 / name) == expected["rows"]
    types = {"string", "int64", "float64", "bool", "float32", "list<float32>"}
    assert set(side.manifest.columns.values()) == types
    validator("side").validate(json.loads(side.manifest.to_json()))
    for packs in PackedDataset(dataset, rank=0, world_size=1, side=[side]):
        assert len(packs.ref_logps) == len(packs.lengths)


@pytest.mark.parametrize("name", NAMES)
def test_manifest_fits_the_json_schema(name: str, validator: Any) -> None:
    validator("manifest").validate(json.loads(open_dataset(str(V1 / name)).manifest.to_json()))
    kind = name.partition("-")[0]
    for row in json.loads((V1 / f"{name}.json").read_text(encoding="utf-8"))["packs"]:
        validator(f"pack#/$defs/{kind}").validate(row)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("arrow")])
def test_physical_form(name: str) -> None:
    """Checks the rules of format.md about Parquet on the files themselves."""
    dataset = open_dataset(str(V1 / name))
    labels = "label_spans" if "spans" in name else "labels"
    for shard in dataset.manifest.shards:
        file = pq.ParquetFile(V1 / name / shard.path)
        assert shard.path.endswith(f"-{shard.sha256[:16]}.parquet")
        assert file.schema_arrow.names[1] == labels
        assert file.schema_arrow.equals(dataset.manifest.stored_schema, check_metadata=True)
        for leaf in range(len(file.schema)):
            column = file.schema.column(leaf)
            assert column.path.split(".")[1:] == ["list", "element"]
            assert column.max_definition_level == 1
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            columns = [metadata.column(i) for i in range(metadata.num_columns)]
            starts = [c.data_page_offset for c in columns]
            sizes = [c.total_compressed_size for c in columns]
            assert starts[1:] == [a + b for a, b in zip(starts, sizes, strict=True)][:-1]
            assert {c.compression for c in columns} == {"ZSTD"}
            assert not any(c.has_dictionary_page or c.is_stats_set for c in columns)


def test_the_script_writes_the_same(tmp_path: Path) -> None:
    script = runpy.run_path(str(GOLDEN / "make.py"))
    script["make"](tmp_path / "v1")
    script["make_sides"](tmp_path / "side-v1", tmp_path / "v1")
    for name in SIDES:
        text = (tmp_path / "side-v1" / f"{name}.json").read_bytes()
        assert (SIDE_V1 / f"{name}.json").read_bytes() == text
        assert side_rows(tmp_path / "side-v1" / name) == json.loads(text)["rows"]
    for name in NAMES:
        old, new = open_dataset(str(V1 / name)), open_dataset(str(tmp_path / "v1" / name))
        assert rows(old) == rows(new)
        assert meaning(old) == meaning(new)
        text = (tmp_path / "v1" / f"{name}.json").read_bytes()
        assert (V1 / f"{name}.json").read_bytes() == text
    (sample, *_) = (V1 / "preference-concat-plain").glob("data/*.parquet")
    if pq.read_metadata(sample).created_by.endswith(f"version {pa.__version__}"):
        assert contents(V1) == contents(tmp_path / "v1")
        assert contents(SIDE_V1) == contents(tmp_path / "side-v1")
