"""An interrupted job, its rerun, and what is left behind, on real servers."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from places import Files, at_each
from small_jobs import SETTINGS, pairs, write_jsonl
from stores import Store

import packstore
from packstore import clean
from packstore.errors import DatasetExistsError, DatasetNotFoundError

RECORDS = pairs(120)
SHARD = "data/0123456789ab-00007-0123456789abcdef.parquet"
CUT: dict[str, Any] = {"pack_size": 64, "partitions": 3, "shard_tokens": 2000}


def test_a_rerun_goes_on_and_nothing_is_left(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "pairs.jsonl", RECORDS * 6)
    whole = packstore.pack(source, str(tmp_path / "ds"), **CUT)
    files, datasets = Files(store.url, **store.options), list[packstore.Dataset]()
    to_store: dict[str, Any] = {"storage_options": store.options}

    def stop(path: str) -> None:
        if "-p00002-" in path:
            raise KeyboardInterrupt

    with at_each("put_file", stop), pytest.raises(KeyboardInterrupt):
        packstore.pack(source, store.url, **to_store, **CUT)
    report = clean(store.url, **to_store)
    assert {x.path for x in report.leftovers} == files.names()
    assert report.removable == []

    def records() -> Any:
        """The input of another job, while which the first one is run again."""
        datasets.append(packstore.pack(source, store.url, **to_store, **CUT))
        raise KeyboardInterrupt
        yield

    caplog.set_level(logging.WARNING, "packstore")
    with at_each("put_file") as puts, pytest.raises(KeyboardInterrupt):
        packstore.pack(records(), store.url, **to_store, **SETTINGS)
    (dataset,) = datasets
    assert "another job may be writing here ('pack', process" in caplog.text
    own = [s.path for s in whole.manifest.shards if "-p00002-" in s.path]
    assert [path for path in puts if path.startswith("data/")] == own
    assert dataset.manifest.to_json() == whole.manifest.to_json()
    assert dataset.verify().ok
    assert files.sizes() == Files(whole.url).sizes()
    assert clean(store.url, **to_store).leftovers == []


def test_clean_looks_again_at_each_object(store: Store) -> None:
    """Its answer to a listing and to a look are the same, unless the object was put
    anew.
    """
    how: dict[str, Any] = {"storage_options": store.options}
    for n in (20, 30):
        packstore.pack(pairs(n), store.url, **how, **{**SETTINGS, "overwrite": n == 30})
    files, (first, *_) = (
        Files(store.url, **store.options),
        packstore.open(store.url, **how, version=1).manifest.shards,
    )

    def put_again(path: str) -> None:
        if path == first.path:
            files.write(path, b"another")

    with at_each("remove", put_again):
        clean(
            store.url,
            **how,
            delete=True,
            older_than=0,
            no_writers=True,
            keep_versions=1,
        )
    newest = packstore.open(store.url, **how)
    kept = {"_packstore/manifest-000002.json", first.path, *newest.manifest.files}
    assert files.names() == kept
    assert newest.verify().ok


def test_unfinished_uploads_are_ended(s3: Store) -> None:
    store = s3
    dataset = packstore.pack(
        RECORDS, store.url, storage_options=store.options, **SETTINGS
    )
    client, key = store.client(), f"{store.path}/{SHARD}"
    ids = [
        client.create_multipart_upload(Bucket=store.bucket, Key=name)["UploadId"]
        for name in (
            key,
            key,
            f"{store.path}-other/{SHARD}",
            f"{store.path}/data/raw.csv",
        )
    ]
    report = clean(store.url, storage_options=store.options, delete=True)
    spared = {x.path: x.spared for x in report.leftovers}
    assert spared == {
        SHARD: "it is too young",
        "data/raw.csv": "not a name of packstore's",
    }
    report = clean(
        store.url,
        storage_options=store.options,
        delete=True,
        older_than=0,
        no_writers=True,
    )
    assert [x.why for x in report.removable] == ["unfinished upload"]
    assert report.lists_uploads
    left = client.list_multipart_uploads(Bucket=store.bucket, Prefix=store.path)
    assert {u["UploadId"] for u in left.get("Uploads", ())} == set(ids[2:])
    assert dataset.verify().ok


@pytest.mark.parametrize("writers", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_writers_at_once_have_one_winner(store: Store, writers: int) -> None:
    """Into an empty place, then all replacing, while a reader looks all the time."""
    url, options = store.url, store.options
    settings = {**SETTINGS, "shard_tokens": 400, "storage_options": options}

    def job(number: int, overwrite: bool, start: threading.Barrier) -> str:
        records = RECORDS[number : number + 30 + number]
        start.wait()
        try:
            return packstore.pack(
                records, url, overwrite=overwrite, **settings
            ).manifest.fingerprint
        except DatasetExistsError as error:
            return type(error).__name__

    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(DatasetNotFoundError):
                dataset = packstore.open(url, storage_options=options)
                read = sum(len(packs.example_ids) for packs in dataset.iter_packs())
                assert read == dataset.manifest.pairs
                seen.add(dataset.manifest.fingerprint)

    with ThreadPoolExecutor(writers + 1) as pool:
        reader = pool.submit(look)
        won = set()
        for overwrite in (False, True):
            start = threading.Barrier(writers)
            jobs = [pool.submit(job, n, overwrite, start) for n in range(writers)]
            outcomes = [j.result(120) for j in jobs]
            winners = [o for o in outcomes if not o.endswith("Error")]
            dataset = packstore.open(url, storage_options=options)
            assert len(winners) == dataset.version - int(overwrite)
            assert dataset.manifest.fingerprint in winners
            assert dataset.verify().ok
            won |= set(winners)
        done.set()
        reader.result(120)
    assert seen <= won
    clean(url, storage_options=options, delete=True, older_than=0, no_writers=True)
    assert packstore.open(url, storage_options=options).verify().ok
