"""The pack index: sizes of every pack without opening a shard, and what becomes
of it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forged import MANIFEST, fit, replace_shard, sealed
from places import edit_manifest
from plain_reader import READER
from small_jobs import pairs

import packstore
from packstore import Dataset, concat
from packstore import open as open_dataset
from packstore.errors import IntegrityError
from packstore.format import PackSizes, to_offsets
from packstore.io.dataset import put_index
from packstore.io.store import Location
from packstore.torch import PackedDataLoader, PackedDataset

SIZES = ("tokens", "examples", "squares")
COUNTS = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
EMPTY_ROW_GROUPS = {"rows": [], "examples": [], "tokens": [], "longest": []}
EMPTY_ROW_GROUPS |= {"crc32": ""}


def plainly(dataset: Dataset, names: tuple[str, ...] = SIZES) -> list[tuple[int, ...]]:
    """Figures of each pack, by the reader beside the format."""
    rows = (row for batch in dataset.iter_batches() for row in batch.to_pylist())
    sizes = (READER["sizes"](row, dataset.manifest.kind) for row in rows)
    return [tuple(of_pack[name] for name in names) for of_pack in sizes]


def told(sizes: PackSizes) -> list[tuple[int, int, int]]:
    columns = (sizes.tokens, sizes.examples, sizes.squares)
    assert {c.dtype for c in columns} == {np.dtype(np.int64)}
    return list(zip(*(c.tolist() for c in columns), strict=True))


def without_index(dataset: Dataset) -> Dataset:
    return Dataset(
        dataset.location, replace(dataset.manifest, pack_index=None), dataset.version
    )


def index_path(dataset: Dataset) -> Path:
    return Path(dataset.url) / dataset.manifest.pack_index.path


def test_it_lies_beside_the_manifest(ds):
    info = ds.manifest.pack_index
    assert info.path == f"_packstore/packs-000001-{info.sha256[:16]}.index"
    file = pq.ParquetFile(index_path(ds))
    assert file.schema_arrow.names == [*SIZES, *COUNTS]
    rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert rows == [s.rows for s in ds.manifest.shards]
    assert len(rows) > 1
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    columns = file.read().to_pydict()
    sizes = [columns.pop(name) for name in ("tokens", "examples", "squares")]
    assert list(zip(*sizes, strict=True)) == plainly(ds)
    assert list(zip(*columns.values(), strict=True)) == plainly(ds, COUNTS)


def test_a_shard_of_another_writer_may_have_no_packs(ds, tmp_path):
    folder = tmp_path / "empty"
    shutil.copytree(ds.url, folder)
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, ds.manifest.stored_schema).close()
    data = sink.getvalue().to_pybytes()
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    shard = manifest["shards"][0]
    empty = {name: 0 if isinstance(value, int) else "" for name, value in shard.items()}
    empty |= {"path": "data/empty.parquet", "row_groups": EMPTY_ROW_GROUPS}
    fit(empty, data)
    (folder / empty["path"]).write_bytes(data)
    manifest["shards"].insert(1, empty)
    manifest["totals"]["bytes"] += empty["bytes"]
    del manifest["pack_index"]
    path.write_bytes(sealed(manifest))

    dataset = open_dataset(str(folder))
    assert dataset.verify().problems == ()
    assert len(PackedDataset(dataset, shuffle=False)) == len(PackedDataset(ds))
    both = concat([dataset, dataset], str(tmp_path / "both"))
    assert both.manifest.pack_index
    assert both.verify().problems == ()
    assert told(both.pack_index) == 2 * plainly(ds)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_sizes_are_those_of_the_packs(kit, tmp_path, kind, layout, file_format):
    how = {
        "format": file_format,
        "layout": layout,
        "strategy": "pool",
        "pack_size": 200,
    }
    ds = kit.made(tmp_path / "ds", 90, kind, row_group_tokens=600, **how)
    assert ds.group_rows.max() > 1
    assert told(ds.pack_index) == plainly(ds)
    assert list(map(tuple, ds.pack_index.counts.tolist())) == plainly(ds, COUNTS)
    assert told(without_index(ds).pack_index) == plainly(ds)
    assert without_index(ds).pack_index.counts is None
    assert told(pickle.loads(pickle.dumps(ds)).pack_index) == plainly(ds)
    assert ds.verify().ok


def test_shards_are_not_read_where_there_is_an_index(ds):
    expected = plainly(ds)
    for shard in ds.manifest.shards:
        (Path(ds.url) / shard.path).unlink()
    assert told(open_dataset(ds.url).pack_index) == expected


def lying(ds: Dataset, change) -> Dataset:
    """The dataset with an index of other content, which its manifest names rightly."""
    table = change(pq.read_table(index_path(ds)))
    rows = [s.rows for s in ds.manifest.shards]
    how = {"use_dictionary": False, "compression": "zstd"}
    with pq.ParquetWriter(index_path(ds), table.schema, **how) as writer:
        for start, size in zip(to_offsets(np.array(rows)), rows, strict=False):
            if start < table.num_rows:
                writer.write_table(table.slice(start, size))
    info = dict(vars(ds.manifest.pack_index))
    fit(info, index_path(ds).read_bytes())
    info = replace(ds.manifest.pack_index, **info)
    return Dataset(ds.location, replace(ds.manifest, pack_index=info), ds.version)


def with_column(name: str, change):
    def apply(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        values = change(table.column(name).to_numpy().copy())
        return table.set_column(
            at,
            table.schema.field(name),
            pa.array(values, table.schema.field(name).type),
        )

    return apply


def one_more(values):
    values[0] += 1
    return values


def moved(by: int):
    """Takes from one pack what another gets, so that sums stay."""

    def change(values):
        values[[0, 1]] += np.array([by, -by], values.dtype)
        return values

    return change


def all_set_to(value: int):
    return lambda values: values * 0 + value


def all_raised_by(amount: int):
    return lambda values: values + amount


IMPOSSIBLE = {
    "tokens": [moved(1000), moved(-1000), one_more],
    "examples": [moved(-1), moved(-(2**20)), one_more],
    "squares": [all_set_to(0), all_raised_by(2**40)],
    "best_tokens": [
        all_set_to(-5),
        all_set_to(0),
        all_raised_by(10**6),
        moved(2**62),
    ],
    "pairs_best_vs_rest": [all_raised_by(-2), all_raised_by(99)],
    "pairs_all": [all_set_to(-1), all_raised_by(2**62)],
    "pairs_adjacent": [all_set_to(-1), all_raised_by(999)],
}
"""Column -> changes to values that no packs of the dataset can have."""


@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_sizes_that_no_pack_has_are_refused(kit, tmp_path, kind):
    """Loaders allocate, plan and divide losses by them."""
    ds = kit.made(tmp_path / "ds", 60, kind)
    for name, changes in IMPOSSIBLE.items():
        stored = index_path(ds).read_bytes()
        mentioned = "pairs" if name.startswith("pairs") else name
        for change in changes:
            with pytest.raises(IntegrityError, match=mentioned):
                _ = lying(ds, with_column(name, change)).pack_index
            index_path(ds).write_bytes(stored)


@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_a_loader_compares_the_index_with_the_packs(kit, tmp_path, kind):
    ds = kit.made(
        tmp_path / "ds", 60, kind, pack_size=200, strategy="pool", row_group_tokens=600
    )
    assert sum(len(batch.num_responses) for batch in loader(ds)) == 60
    stored = index_path(ds).read_bytes()
    for name in (*SIZES, *(COUNTS if kind == "scored" else COUNTS[:1])):
        # A difference of one keeps to all bounds, but in packs of one example.
        change = moved(1) if name in ("tokens", "examples") else one_more
        wrong = lying(ds, with_column(name, change))
        with pytest.raises(IntegrityError, match=r"\.index"):
            list(loader(wrong))
        index_path(ds).write_bytes(stored)


def loader(ds: Dataset) -> PackedDataLoader:
    return PackedDataLoader(PackedDataset(ds, seed=0), examples_per_step=8)


def test_a_pack_without_segments_has_no_size(kit, tmp_path):
    """Boundaries of only a 0, its tokens in the next pack: all sums are right."""
    ds = kit.made(
        tmp_path / "ds",
        12,
        pack_size=200,
        row_group_tokens=1 << 20,
        shard_tokens=1 << 20,
    )
    path = Path(ds.url) / ds.manifest.shards[0].path
    table = pq.read_table(path)
    bounds = table.column("seq_boundaries").to_pylist()
    bounds[0], bounds[1] = [0], [0, *(bounds[0][-1] + n for n in bounds[1][1:])]
    at = table.schema.get_field_index("seq_boundaries")
    field = table.schema.field(at)
    table = table.set_column(at, field, pa.array(bounds, field.type))
    how = {
        "use_dictionary": False,
        "write_page_checksum": True,
        "write_statistics": False,
    }
    pq.write_table(table, path, compression="zstd", **how)
    replace_shard(Path(ds.url), path.read_bytes())
    with pytest.raises(IntegrityError, match="seq_boundaries"):
        _ = open_dataset(ds.url).pack_index


@pytest.mark.parametrize(
    "change", [lambda t: t.drop_columns("squares"), lambda t: t.slice(0, 7)]
)
def test_another_shape_is_refused(ds, change):
    wrong = lying(ds, change)
    with pytest.raises(IntegrityError, match=r"\.index"):
        _ = wrong.pack_index


def test_sizes_are_looked_up_shard_by_shard(kit, tmp_path):
    ds = kit.made(tmp_path / "ds", 400, row_group_tokens=1, shard_tokens=1)
    assert len(ds.manifest.shards) == 400  # more than are kept
    everything, again, rng = (
        ds.pack_index,
        open_dataset(ds.url),
        np.random.default_rng(0),
    )
    for n in (0, 1, 7, 300):
        packs = rng.integers(0, len(ds), n)
        assert told(again.sizes(packs)) == told(everything.take(packs))
        assert told(without_index(ds).sizes(packs)) == told(everything.take(packs))


def test_an_append_writes_the_index_that_is_written_at_once(tmp_path: Path) -> None:
    """Whether it extends the index of its dataset, or there is none."""
    one = packstore.pack(pairs(40), tmp_path / "ds", pack_size=64, shard_tokens=1)
    two = packstore.append(one, pairs(9, first=40))
    sizes = (two.shard_sizes(number) for number in range(len(two.manifest.shards)))
    at_once = put_index(Location(str(tmp_path / "other")), sizes, two.version)
    assert two.manifest.pack_index == at_once

    without = packstore.pack(pairs(40), tmp_path / "without", pack_size=64)
    edit_manifest(without.url, lambda manifest: manifest.pop("pack_index"))
    grown = packstore.append(without.url, pairs(9, first=40))
    assert grown.manifest.pack_index is not None
    assert len(grown.pack_index) == len(grown)
    assert grown.verify().ok


def test_the_folder_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    records = [{"prompt": [1], "chosen": [2] * n, "rejected": [3]} for n in (1, 2, 3)]
    url = str(tmp_path / os.fsdecode(b"caf\xe9"))
    packed = packstore.pack(records, url, pack_size=16)
    assert packstore.append(packed, records[:1]).verify().ok
