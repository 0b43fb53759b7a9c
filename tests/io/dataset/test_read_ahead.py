"""Reading ahead: every pack once, few row groups in memory, and threads that end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from same import same

from packstore import Dataset
from packstore.config import ReadConfig
from packstore.errors import StorageError
from packstore.format import Packs
from packstore.torch import PackedDataset

LANES = 4
TOGETHER = 8  # packs that are read at once
SMALL = {"row_group_tokens": 60, "shard_tokens": 500}


@pytest.fixture
def stored(kit: Any, tmp_path: Any) -> Dataset:
    """60 packs in several row groups and shards."""
    data: Dataset = kit.made(tmp_path / "ds", **SMALL)
    assert len(data.row_groups) > 2 * LANES
    assert len(data.manifest.shards) > 1
    return data


def reading(data: Dataset, **config: Any) -> Iterator[Packs]:
    how = {"lanes": LANES, "rank": 0, "world_size": 1, "reading": ReadConfig(**config)}
    return iter(PackedDataset(data, **how))


def group_of_example(data: Dataset) -> dict[int, int]:
    groups = enumerate(data.iter_packs())
    return {i: group for group, packs in groups for i in packs.example_ids.tolist()}


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    """Ignores threads that earlier tests left in this worker."""
    gc.collect()
    _earlier.clear()
    _earlier.update(threading.enumerate())


def reader_threads() -> list[threading.Thread]:
    """Our threads that this test began."""
    now = set(threading.enumerate()) - _earlier
    return [t for t in now if t.name.startswith("packstore")]


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
@pytest.mark.parametrize("ahead", [0, 1, 16 << 20])
@pytest.mark.parametrize("requests", [1, 5])
def test_gives_every_pack_once_as_it_is_stored(
    kit: Any, place: str, requests: int, ahead: int, format_: str
) -> None:
    data = kit.made(place, 30, format=format_, **SMALL)
    expected = [packs.row(i) for packs in data.iter_packs() for i in range(len(packs))]
    seen = list[int]()
    for pack in reading(data, requests=requests, read_ahead_bytes=ahead):
        seen += pack.example_ids.tolist()
        assert same(pack, expected[seen[-1]])
        # Decoding mapped row groups in a second thread would cost more than it saves.
        assert not reader_threads() or format_ == "parquet" or "://" in place
    assert sorted(seen) == list(range(30))


def test_reads_ahead_within_its_bytes(
    kit: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store tells which row group a request is for, so the method is replaced that
    reads it.
    """
    data = kit.made(tmp_path / "ds", 300, **SMALL)
    sizes, fetched, group_of = (
        data.row_groups.tokens * 4,
        set[int](),
        group_of_example(data),
    )
    fetch = data.fetch
    monkeypatch.setattr(
        data, "fetch", lambda group: (fetched.add(group), fetch(group))[1]
    )
    most, begun = int(sizes.max()), set[int]()
    for number, pack in enumerate(reading(data, read_ahead_bytes=3 * most)):
        if number in (10, 60):
            time.sleep(0.5)  # so that the threads read as far as they may
        begun.add(group_of[int(pack.example_ids[0])])
        assert (
            sum(sizes[list(fetched - begun)]) <= (4 + TOGETHER) * most < sizes.sum() / 4
        )
    assert fetched == set(range(len(sizes)))


def test_one_request_for_a_row_group(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those that two lanes share, one as it begins, one as it ends."""
    # More packs than are planned at once.
    data = kit.made(
        "memory://requests/ds", 3000, row_group_tokens=1500, shard_tokens=20_000
    )
    requests, read = list[int](), MemoryFileSystem.cat_file

    def counting(
        self: Any, path: str, start: Any = None, end: Any = None, **how: Any
    ) -> bytes:
        requests.append((end or 0) - (start or 0))
        return read(self, path, start, end, **how)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counting)
    list(reading(data, read_ahead_bytes=1))
    groups, shards = len(data.row_groups), len(data.manifest.shards)
    assert len(requests) == groups + shards + 1  # and the index
    assert sum(requests) < 1.1 * data.manifest.totals.bytes


@pytest.mark.parametrize("how", ["close", "collect", "exhaust"])
def test_threads_end(kit: Any, how: str) -> None:
    packs: Any = reading(kit.made(f"memory://threads/{how}", **SMALL))
    next(packs)
    next(packs)
    threads = reader_threads()
    assert threads
    if how == "close":
        packs.close()
    elif how == "collect":
        del packs
        gc.collect()
    else:
        list(packs)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
def test_a_fork_reads_on(stored: Dataset) -> None:
    """No thread of the parent lives in the child: no iterator may wait for one
    there.
    """
    packs = reading(stored, read_ahead_bytes=5000)
    for _ in range(6):
        next(packs)
    child = os.fork()
    if not child:
        status = 1
        try:
            left, fresh = len(list(packs)), len(list(reading(stored)))
            status = 0 if (left, fresh) == (len(stored) - 6, len(stored)) else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[
        0
    ] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert len(list(packs)) == len(stored) - 6


_SCRIPT = """
import sys, time
from packstore import Dataset, open
from packstore.errors import StorageError
from packstore.torch import PackedDataset

fetch = Dataset.fetch
def slowly(self, group):
    if group % 3 == 0 and sys.argv[2] == "interrupt":
        error = StorageError("busy.")
        error.transient = True
        raise error
    time.sleep(0.02)
    return fetch(self, group)
Dataset.fetch = slowly
source = iter(PackedDataset(sys.argv[1]))
print("begun", flush=True)
for number, _ in enumerate(source):
    if sys.argv[2] == "exit" and number == 3:
        sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_the_process_ends_while_threads_read(stored: Dataset, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, stored.url, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout.readline() == "begun\n"
    if how == "interrupt":
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == (7 if how == "exit" else -signal.SIGINT), errors
    assert ("KeyboardInterrupt" in errors) == (how == "interrupt")


def test_an_error_comes_where_its_packs_would(
    stored: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_of = group_of_example(stored)
    groups = [group_of[int(pack.example_ids[0])] for pack in reading(stored)]
    fetch = stored.fetch

    def failing(group: int) -> Any:
        if group == groups[-1]:
            error = StorageError("no.")
            error.transient = False
            raise error
        return fetch(group)

    monkeypatch.setattr(stored, "fetch", failing)
    seen = list[Packs]()
    with pytest.raises(StorageError, match=r"^no\.$"):
        seen.extend(reading(stored))
    first = groups.index(groups[-1])
    assert 0 < first - TOGETHER < len(seen) <= first


_READ_EVERYTHING = """
import os, sys
import fsspec, packstore

def threads():
    return len(os.listdir("/proc/self/task"))

fsspec.filesystem("memory").put(sys.argv[1], "/ds", recursive=True)
local, remote = packstore.open(sys.argv[1]), packstore.open("memory://ds")
before = threads()
groups = range(len(local.group_rows))
for dataset in (local, remote):
    for group in reversed(groups):
        dataset.read_packs(group)
        dataset.read_columns(group, ["lengths"])
    dataset.pack_index
assert threads() == before, "Arrow started threads of its own"
assert [local.fetch(g) for g in groups] == [remote.fetch(g) for g in groups]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_arrow_reads_in_our_threads_alone(
    kit: Any, tmp_path: Any, format_: str
) -> None:
    """A thread of Arrow's that still holds a Python file kills a process that ends just
    then.

    It asks for the interpreter's lock, which ends the thread inside a destructor of
    C++.
    """
    data = kit.made(tmp_path / "ds", format=format_)
    subprocess.run(
        [sys.executable, "-c", _READ_EVERYTHING, data.url], check=True, timeout=120
    )
