from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from same import same

import packstore


def test_row_groups(ds):
    table = ds.row_groups
    assert table.rows.sum() == len(ds) == 60
    assert (ds.group_rows == table.rows).all()
    assert len(set(table.shard.tolist())) == len(ds.manifest.shards) > 1
    for group in range(len(table)):
        packs = ds.read_packs(group)
        assert len(packs) == table.rows[group]
        assert len(packs.input_ids) == table.tokens[group]
        assert packs.segment_lengths.max() == table.longest[group]


def test_pickled_by_place(ds):
    ds.read_packs(0)
    copy = pickle.loads(pickle.dumps(ds))
    assert copy.manifest.fingerprint == ds.manifest.fingerprint
    assert same(copy.read_packs(1), ds.read_packs(1))


def test_many_threads_read(ds):
    expected, fresh = list(ds.iter_packs()), packstore.open(ds.url)

    def read(seed: int) -> None:
        for group in np.random.default_rng(seed).permutation(len(expected)):
            assert same(fresh.read_packs(group), expected[group])

    with ThreadPoolExecutor(6) as pool:
        assert len(list(pool.map(read, range(6)))) == 6


def test_any_parquet_reader_opens_it(ds, kit):
    import duckdb
    import polars
    import pyarrow.dataset

    ids = [row["input_ids"] for row in kit.rows(ds)]
    frame = polars.read_parquet(f"{ds.url}/data")
    assert frame["input_ids"].to_list() == ids
    assert frame.columns == ds.schema.names
    table = pyarrow.dataset.dataset(ds.url).to_table()
    assert table["labels"].to_pylist() == frame["labels"].to_list()
    found = duckdb.sql(f"select input_ids from '{ds.url}/data/*.parquet'").fetchall()
    assert [row[0] for row in found] == ids


@pytest.mark.slow
def test_hugging_face_datasets_opens_it(ds, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(ds.url, cache_dir=str(tmp_path / "cache"))["train"]
    assert len(loaded) == len(ds)
    assert loaded.column_names == ds.schema.names
