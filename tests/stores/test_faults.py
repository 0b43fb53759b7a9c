"""Packing and reading through a proxy that breaks requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_proxy import Faults, faulty
from fault_runs import RECORDS, SETTINGS, epoch, epoch_run, pack_run, through
from stores import Store

import packstore
from packstore.errors import IntegrityError, StorageError
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.store.location import Location
from packstore.torch import PackedDataset

RATE = 0.15


@pytest.fixture
def good(tmp_path: Path) -> Dataset:
    return packstore.pack(RECORDS, str(tmp_path / "good"), **SETTINGS)


@pytest.mark.parametrize("seed", range(3))
def test_a_pack_is_whole_or_not_there(s3: Store, good: Dataset, seed: int) -> None:
    found = pack_run(s3, RATE, seed, good)
    assert not found.wrong
    assert found.faults


def test_an_epoch_is_right_or_an_error(s3: Store, good: Dataset) -> None:
    packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    for seed in range(3):
        found = epoch_run(s3, s3.url, RATE, seed, epoch(good, seed=seed))
        assert not found.wrong
        assert found.faults


def test_what_is_damaged_on_the_way_up_is_not_stored(s3: Store, tmp_path: Path) -> None:
    """A put and a part of an upload: both carry a checksum that the server compares."""
    for size in (1000, 9 << 20):
        local = tmp_path / "file"
        local.write_bytes(bytes(size))
        faults = Faults(1.0, 1, ["flip up"])
        with faulty(s3.endpoint, faults) as endpoint:
            place = Location(s3.url, {**through(s3, endpoint), "retry_attempts": 2})
            with pytest.raises(StorageError):
                place.put_file(str(local), f"x{size}")
        assert faults.counts["flip up"]
        assert not Location(s3.url, s3.options).exists(f"x{size}")


def test_damage_in_the_store_names_the_object(s3: Store) -> None:
    packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    data = open_dataset(s3.url, s3.options)
    shard = data.manifest.shards[0]
    fs, path = data.location.filesystem(shard.path)
    fs.pipe_file(path, bytes(shard.bytes))
    fs.invalidate_cache()
    etag = fs.info(path)["ETag"].strip('"')
    with pytest.raises(IntegrityError, match=rf"(?s){shard.path}.*Fetched 2 times of ETag {etag}"):
        list(PackedDataset(data))
