"""A store, file or worker that fails in training: a named error, or a recovery."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_proxy import Faults, faulty, website

from packstore import Dataset
from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError, WorkerError
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, PreferenceLoss, count_step

N = 96


@pytest.fixture
def stored(kit: SimpleNamespace, tmp_path: Path) -> Dataset:
    """96 packs of one pair in several row groups and shards."""
    packs = kit.packed(random_examples(N), [1] * N, "concat")
    data: Dataset = kit.write(str(tmp_path / "ds"), packs)
    assert len(data.row_groups) > 4
    assert len(data.manifest.shards) > 1
    return data


@pytest.fixture
def server(stored: Dataset, tmp_path: Path) -> Iterator[str]:
    """The endpoint of that dataset over HTTP."""
    with website(tmp_path) as endpoint:
        yield endpoint


def ids(url: str, **settings: Any) -> list[int]:
    """Example ids of the packs that count, in the order in which they come."""
    reading = ReadConfig(on_error=settings.pop("on_error", "raise"))
    options = {"retry_backoff": 0.001, **settings}
    data = PackedDataset(url, lanes=4, reading=reading, storage_options=options)
    loader = PackedDataLoader(data, packs_per_batch=2)
    batches = list(loader)
    assert len(batches) == len(loader) == N // 2
    assert all(len(batch.weights) == 2 for batch in batches)
    return [i for b in batches for i in b.example_ids[b.weights > 0].tolist()]


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *(("error 503", 2), ("flip", 1)),
        *(
            pytest.param(*fault, marks=pytest.mark.slow)
            for fault in (("refuse", 0), ("error 403", 2), ("error 500", 2))
        ),
    ],
)
def test_a_store_is_asked_again_and_gives_what_the_disk_does(
    stored: Dataset, server: str, kind: str, most: int
) -> None:
    faults = Faults(1.0, kinds=[kind], path="/data/", most=most)
    with faulty(server, faults) as endpoint:
        assert ids(f"{endpoint}/ds") == ids(stored.url)
    assert faults.counts[kind] == most


def test_the_patience_ends(stored: Dataset, server: str) -> None:
    bad = Path(stored.shard_urls[1]).name
    with (
        faulty(server, Faults(1.0, kinds=["error 503"], path=bad, after=2)) as endpoint,
        pytest.raises(StorageError, match=f"{bad}, row group"),
    ):
        ids(f"{endpoint}/ds", retry_seconds=0.2)


def spoil(stored: Dataset, group: int) -> int:
    """Damages a row group where it lies; returns how many packs it has."""
    table = stored.row_groups
    shard = stored.manifest.shards[int(table.shard[group])]
    path = Path(stored.shard_urls[int(table.shard[group])])
    data = bytearray(path.read_bytes())
    index = int(table.index[group])
    place = 8 if index == 0 else len(data) - shard.footer_bytes - 3
    data[place] ^= 1
    path.write_bytes(data)
    return int(table.rows[group])


def test_quarantine_keeps_the_counts(
    stored: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ids(stored.url)
    lost = spoil(stored, 0)
    with pytest.raises(IntegrityError, match="row group 0"):
        ids(stored.url)
    kept = ids(stored.url, on_error="quarantine")
    assert len(kept) == N - lost
    assert [i for i in whole if i in set(kept)] == kept
    assert "left out" in caplog.text
    assert "row group 0" in caplog.text


def test_quarantine_is_counted_and_equal_on_all_ranks(stored: Dataset) -> None:
    lost = spoil(stored, 0)
    weights = []
    for rank in range(3):
        data = PackedDataset(
            stored.url,
            lanes=6,
            rank=rank,
            world_size=3,
            reading=ReadConfig(on_error="quarantine"),
        )
        batches = list(PackedDataLoader(data, packs_per_batch=2))
        assert len(batches) == N // 6
        weights += [w for b in batches for w in b.weights.tolist()]
        assert all(b.num_packs == 2 for b in batches)
        assert data.quarantined in ([], [f"{stored.shard_urls[0]}, row group 0"])
    assert weights.count(0) == lost
    assert len(weights) == N


def test_the_exact_divisor_of_a_step_with_stand_ins(stored: Dataset) -> None:
    """The plan counts what was left out as well; the weights do not."""
    lost = spoil(stored, 0)
    data = PackedDataset(stored.url, lanes=4, reading=ReadConfig(on_error="quarantine"))
    steps = [
        list(step)
        for _, step in groupby(
            PackedDataLoader(data, packs_per_batch=2, gradient_accumulation_steps=4),
            key=lambda batch: batch.step.index,
        )
    ]
    loss_fn, short = PreferenceLoss("dpo"), 0.0
    for batches in steps:
        planned = count_step(batches, loss_fn).count
        exact = count_step([b.replace(step=None) for b in batches], loss_fn).count
        assert exact == sum(float(b.weights.sum()) for b in batches)
        short += planned - exact
    assert short == lost  # of one example each


def test_nothing_readable_is_an_error(stored: Dataset) -> None:
    for url in stored.shard_urls:
        Path(url).write_bytes(b"")
    with pytest.raises(IntegrityError, match="row group"):
        ids(stored.url, on_error="quarantine")


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
def test_a_worker_that_is_killed_is_named(stored: Dataset) -> None:
    """As the out-of-memory killer does it."""
    loader = PackedDataLoader(PackedDataset(stored), num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    with pytest.raises(WorkerError, match="PackedDataLoader"):
        list(batches)
