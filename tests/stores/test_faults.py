"""Packing and reading through a proxy that breaks requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fault_proxy import Faults, faulty
from fault_runs import RECORDS, SETTINGS, epoch_run, pack_run, rate_of, through
from stores import Store

import packstore
from packstore import Dataset
from packstore.errors import IntegrityError, StorageError
from packstore.io.store.location import Location
from packstore.torch import PackedDataset

FEW = [0.15] * 3
MANY = pytest.param([rate_of(seed) for seed in range(60)], marks=pytest.mark.slow)


@pytest.fixture
def good(tmp_path: Path) -> Dataset:
    return packstore.pack(RECORDS, str(tmp_path / "good"), **SETTINGS)


@pytest.mark.parametrize("rates", [FEW, MANY], ids=["few", "many"])
def test_whole_and_right_or_an_error(s3: Store, good: Dataset, rates: list[float]) -> None:
    """A pack is whole or not there, and a rerun mends it; an epoch is the right one."""
    packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    faults = Counter[str]()
    for seed, rate in enumerate(rates):
        for found in (pack_run(s3, rate, seed, good), epoch_run(s3, rate, seed, good)):
            assert not found.wrong, (seed, found)
            faults += found.faults
    assert faults.total() > faults["requests"]


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
    data = packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    shard = data.manifest.shards[0]
    fs, path = data.location.filesystem(shard.path)
    fs.pipe_file(path, bytes(shard.bytes))
    fs.invalidate_cache()
    etag = fs.info(path)["ETag"].strip('"')
    with pytest.raises(IntegrityError, match=rf"(?s){shard.path}.*Fetched 2 times of ETag {etag}"):
        list(PackedDataset(data))
