from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from packstore import open as open_dataset
from packstore.io.dataset.dataset import find_dataset


@pytest.fixture
def ds(kit, written):
    return written.dataset([kit.some_packs(90)], shard_tokens=300)


def test_row_groups(kit, ds):
    table = ds.row_groups
    assert table.rows.sum() == len(ds) == 90
    assert (ds.group_rows == table.rows).all()
    assert len(set(table.shard.tolist())) == len(ds.manifest.shards) > 1
    for group in range(len(table)):
        packs = ds.read_packs(group)
        assert len(packs) == table.rows[group]
        assert len(packs.input_ids) == table.tokens[group]
        assert packs.segment_lengths.max() == table.longest[group]


def test_pickled_by_place(ds, kit):
    ds.read_packs(0)
    copy = pickle.loads(pickle.dumps(ds))
    assert copy.manifest.fingerprint == ds.manifest.fingerprint
    kit.assert_packs_equal(copy.read_packs(1), ds.read_packs(1))


def test_many_threads_read(ds, kit):
    expected = list(ds.iter_packs())
    fresh, failures = open_dataset(ds.url), []

    def read(seed: int) -> None:
        for group in np.random.default_rng(seed).permutation(len(expected)):
            try:
                kit.assert_packs_equal(fresh.read_packs(group), expected[group])
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_find(ds, tmp_path):
    found = find_dataset(tmp_path / "ds")
    assert found is not None
    assert found.url == ds.url
    (tmp_path / "x.jsonl").write_text("{}")
    for other in (str(tmp_path / "x.jsonl"), f"{tmp_path}/*.jsonl", str(tmp_path), [1], None):
        assert find_dataset(other) is None


def test_verify_finds_repeated_ids(kit, written):
    packs = [kit.some_packs(20), kit.some_packs(20, seed=1, first_id=19)]
    problems = written.dataset(packs).verify().problems
    assert len(problems) == 1
    assert "example ids must be distinct; found 1 that repeat, the first of them 19" in problems[0]


def test_any_parquet_reader_opens_it(ds, kit):
    import duckdb
    import polars
    import pyarrow.dataset

    packs = kit.some_packs(90)
    ids = [packs.row(i).input_ids.tolist() for i in range(90)]
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
