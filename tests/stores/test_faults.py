"""Packing and reading through a proxy that breaks requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fault_proxy import Faults, faulty
from fault_runs import RECORDS, SETTINGS, epoch_run, pack_run, rate_of, through
from places import Files
from stores import Store

import packstore
from packstore import Dataset
from packstore.errors import IntegrityError, StorageError
from packstore.torch import PackedDataset

FEW = [0.2]
MANY = pytest.param([rate_of(seed) for seed in range(60)], marks=pytest.mark.slow)


@pytest.fixture
def good(tmp_path: Path) -> Dataset:
    return packstore.pack(RECORDS, str(tmp_path / "good"), **SETTINGS)


@pytest.mark.parametrize("rates", [FEW, MANY], ids=["few", "many"])
def test_whole_and_right_or_an_error(
    s3: Store, good: Dataset, rates: list[float]
) -> None:
    """A pack is whole or not there, and a rerun mends it; an epoch is the right one."""
    packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    faults = Counter[str]()
    for seed, rate in enumerate(rates):
        for found in (pack_run(s3, rate, seed, good), epoch_run(s3, rate, seed, good)):
            assert not found.wrong, (seed, found)
            faults += found.faults
    assert faults.total() > faults["requests"]


def test_what_is_damaged_on_the_way_up_is_not_stored(s3: Store) -> None:
    """A put and a part of an upload: both carry a checksum that the server compares."""
    faults = Faults(1.0, 1, ["flip up"])
    with faulty(s3.endpoint, faults) as endpoint:
        options = {**through(s3, endpoint), "retry_attempts": 2}
        with pytest.raises(StorageError):
            packstore.pack(RECORDS, s3.url, storage_options=options, **SETTINGS)
        faults.path = "-large"  # the file that `check` sends in parts
        assert not all(
            trial.ok for trial in packstore.check(s3.url, storage_options=options)
        )
    assert faults.counts["flip up"] > 2
    assert not Files(s3.url, **s3.options).names()


def test_damage_in_the_store_names_the_object(s3: Store) -> None:
    data = packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    shard = data.manifest.shards[0]
    Files(s3.url, **s3.options).write(shard.path, bytes(shard.bytes))
    key = {"Bucket": s3.bucket, "Key": f"{s3.path}/{shard.path}"}
    etag = s3.client().head_object(**key)["ETag"].strip('"')
    with pytest.raises(IntegrityError, match=rf"(?s){shard.path}.*{etag}"):
        list(PackedDataset(data))
