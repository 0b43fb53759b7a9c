"""Reading ahead: every row group once, few in memory, and threads that end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore import Dataset
from packstore.config import ReadConfig
from packstore.errors import StorageError
from packstore.io.dataset.order import PackOrder
from packstore.io.dataset.read_ahead import ReadAhead
from packstore.io.side.side import SideWriter

LANES = 4


@pytest.fixture(scope="module")
def stored(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 packs in several row groups and shards."""
    written = kit.Written(str(tmp_path_factory.mktemp("data") / "ds"))
    data: Dataset = written.dataset([kit.some_packs()], row_group_tokens=60, shard_tokens=500)
    assert len(data.row_groups) > 2 * LANES
    assert len(data.manifest.shards) > 1
    return data


@pytest.fixture
def remote(kit: Any, place: str) -> Dataset:
    """The same on a local disk and on another filesystem."""
    data: Dataset = kit.Written(place).dataset(
        [kit.some_packs()], row_group_tokens=60, shard_tokens=500
    )
    return data


def reading(data: Dataset, batches: list[np.ndarray], **config: Any) -> ReadAhead:
    order = PackOrder(data.group_rows, lanes=LANES)
    return ReadAhead(data, order, batches, ReadConfig(**config), set())


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


def batches_of(n: int, size: int) -> list[np.ndarray]:
    return np.array_split(np.arange(n), range(size, n, size))


@pytest.mark.parametrize("ahead", [0, 1, 16 << 20])
@pytest.mark.parametrize("requests", [1, 5])
def test_gives_what_is_stored(kit: Any, remote: Dataset, requests: int, ahead: int) -> None:
    order = PackOrder(remote.group_rows, lanes=LANES)
    batches = batches_of(len(remote), 7)
    found = list(reading(remote, batches, requests=requests, read_ahead_bytes=ahead))
    assert [len(packs) for packs in found] == [len(batch) for batch in batches]
    groups = [remote.read_packs(g) for g in range(len(remote.row_groups))]
    for packs, batch in zip(found, batches, strict=True):
        for pack, group, row in zip(packs, *order.locate(batch), strict=True):
            kit.assert_packs_equal(pack, groups[group].row(row))


def test_mapped_row_groups_are_decoded_without_a_thread(kit: Any, tmp_path: Any) -> None:
    """Arrow shards on a local disk."""
    data = kit.Written(str(tmp_path / "ds")).dataset(
        [kit.some_packs()], format="arrow", row_group_tokens=60, shard_tokens=500
    )
    order, batches = PackOrder(data.group_rows, lanes=LANES), batches_of(len(data), 7)
    running = iter(reading(data, batches))
    for batch in batches:
        found = next(running)
        assert not reader_threads()
        for pack, group, row in zip(found, *order.locate(batch), strict=True):
            kit.assert_packs_equal(pack, data.read_packs(group).row(row))


@given(st.lists(st.integers(0, 59), max_size=40), st.integers(1, 9))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_positions_in_any_order(kit: Any, stored: Dataset, wanted: Any, size: int) -> None:
    indices = np.array(wanted, np.int64)
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    order = PackOrder(stored.group_rows, lanes=LANES)
    found = [p for packs in reading(stored, batches, read_ahead_bytes=5000) for p in packs]
    assert len(found) == len(indices)
    for pack, group, row in zip(found, *order.locate(indices), strict=True):
        kit.assert_packs_equal(pack, stored.read_packs(group).row(row))


def test_reads_ahead_within_its_bytes(stored: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, fetched = stored.row_groups.tokens * 4, set[int]()
    fetch = stored.fetch
    monkeypatch.setattr(stored, "fetch", lambda group: (fetched.add(group), fetch(group))[1])
    groups, _ = PackOrder(stored.group_rows, lanes=LANES).locate(np.arange(len(stored)))
    ahead = 3 * int(sizes.max())
    for number, _ in enumerate(reading(stored, batches_of(len(stored), 1), read_ahead_bytes=ahead)):
        waiting = fetched - set(groups[: number + 1].tolist())
        assert sum(sizes[list(waiting)]) <= ahead + int(sizes.max())


def test_one_request_for_a_row_group(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = kit.Written("memory://requests/ds").dataset(
        [kit.some_packs()], row_group_tokens=60, shard_tokens=500
    )
    requests: list[tuple[str, int, int]] = []
    read_bytes = type(data.location).read_bytes

    def counting(location: Any, path: str, start: int, end: int) -> bytes:
        requests.append((path, start, end))
        return read_bytes(location, path, start, end)

    monkeypatch.setattr(type(data.location), "read_bytes", counting)
    list(reading(data, batches_of(len(data), 4)))
    groups, shards = len(data.row_groups), len(data.manifest.shards)
    assert groups + shards <= len(requests) <= groups + shards + LANES
    assert sum(end - start for _, start, end in requests) < 1.5 * data.manifest.totals.bytes


@pytest.mark.parametrize("how", ["close", "collect", "exhaust"])
def test_threads_end(kit: Any, how: str) -> None:
    data = kit.Written(f"memory://threads/{how}").dataset(
        [kit.some_packs()], row_group_tokens=60, shard_tokens=500
    )
    batches = iter(reading(data, batches_of(len(data), 3)))
    next(batches)
    next(batches)
    threads = reader_threads()
    assert threads
    if how == "close":
        batches.close()  # type: ignore[attr-defined]
    elif how == "collect":
        del batches
        gc.collect()
    else:
        list(batches)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_reads_on(kit: Any, stored: Dataset) -> None:
    """No thread of the parent lives in the child: no iterator may wait for one there."""
    batches = iter(reading(stored, batches_of(len(stored), 3), read_ahead_bytes=5000))
    next(batches)
    next(batches)
    child = os.fork()
    if not child:
        status = 1
        try:
            left = sum(len(packs) for packs in batches)
            fresh = sum(len(packs) for packs in reading(stored, batches_of(len(stored), 3)))
            status = 0 if (left, fresh) == (len(stored) - 6, len(stored)) else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert sum(len(packs) for packs in batches) == len(stored) - 6


_SCRIPT = """
import sys, threading, time
import numpy as np
from packstore.config import ReadConfig
from packstore.errors import StorageError
from packstore.io.dataset.dataset import Dataset, open
from packstore.io.dataset.order import PackOrder
from packstore.io.dataset.read_ahead import ReadAhead

data = open(sys.argv[1])
fetch = Dataset.fetch
def slowly(self, group):
    if group % 3 == 0 and sys.argv[2] == "interrupt":
        error = StorageError("busy.")
        error.passing = True
        raise error
    time.sleep(0.02)
    return fetch(self, group)
Dataset.fetch = slowly
order = PackOrder(data.group_rows)
source = iter(ReadAhead(data, order, [np.array([i]) for i in range(60)], ReadConfig(), set()))
print("begun", flush=True)
for number, _ in enumerate(source):
    if sys.argv[2] == "exit" and number == 3:
        sys.exit(7)
"""


@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_the_process_ends_while_threads_read(stored: Dataset, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, stored.url, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
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


def test_the_first_error_is_that_of_the_batch_it_belongs_to(
    stored: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = PackOrder(stored.group_rows, lanes=LANES)
    groups, _ = order.locate(np.arange(len(stored)))
    bad = int(groups[-1])
    fetch = stored.fetch

    def failing(group: int) -> Any:
        if group == bad:
            error = StorageError("no.")
            error.passing = False
            raise error
        return fetch(group)

    monkeypatch.setattr(stored, "fetch", failing)
    batches = iter(reading(stored, batches_of(len(stored), 1)))
    for _ in range(int(np.flatnonzero(groups == bad)[0])):
        next(batches)
    with pytest.raises(StorageError, match=r"^no\.$"):
        next(batches)


_READ_EVERYTHING = """
import os, sys
import fsspec
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.side import open_side

def threads():
    return len(os.listdir("/proc/self/task"))

fsspec.filesystem("memory").put(sys.argv[1], "/ds", recursive=True)
local, remote = open_dataset(sys.argv[1]), open_dataset("memory://ds")
before = threads()
groups = range(len(local.group_rows))
for dataset in (local, remote):
    for group in reversed(groups):
        dataset.read_packs(group)
        dataset.read_columns(group, ["lengths"])
    dataset.pack_index
for batch in open_side(sys.argv[2]).iter_batches():
    pass
assert threads() == before, "Arrow started threads of its own"
assert [local.fetch(g) for g in groups] == [remote.fetch(g) for g in groups]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_arrow_reads_in_our_threads_alone(kit: Any, tmp_path: Any, format_: str) -> None:
    """A thread of Arrow's that still holds a Python file kills a process that ends just then.

    It asks for the interpreter's lock, which ends the thread inside a destructor of C++.
    """
    data = kit.Written(str(tmp_path / "ds")).dataset([kit.some_packs()], format=format_)
    with SideWriter(str(tmp_path / "side"), data, {"score": "int64"}, provenance={}) as writer:
        for packs in data.iter_packs():
            writer.write(packs.example_ids, {"score": packs.example_ids})
    command = [sys.executable, "-c", _READ_EVERYTHING, data.url, str(tmp_path / "side")]
    subprocess.run(command, check=True, timeout=120)
