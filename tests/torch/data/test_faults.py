"""A store, file or worker that fails in training: a named error, or a recovery."""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packstore import Dataset
from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError, WorkerError
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, PreferenceLoss, count_step

pytest.importorskip("aiohttp", reason="fsspec reads http with it")

N = 96
Fault = Callable[[str, int, int], bytes | int | None]


class Server:
    """A folder over HTTP with ranges.

    `fault(path, n, m)` sees the n-th GET of ranges of each file, which is the m-th of that range.
    It returns a status to answer with, bytes to put in place of the right ones, or None.
    """

    def __init__(self, folder: Path) -> None:
        self.fault: Fault = lambda path, n, m: None
        self.ranges: Counter[str] = Counter()
        again: Counter[tuple[str, int]] = Counter()
        lock = threading.Lock()

        class Handler(SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(handler, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(handler) -> None:
                path = Path(handler.translate_path(handler.path))
                place = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
                if not place or not path.is_file():
                    super().do_GET()
                    return
                data = path.read_bytes()
                start, end = int(place[1]), min(int(place[2]) + 1, len(data))
                with lock:
                    self.ranges[path.name] += 1
                    again[path.name, start] += 1
                    fault = self.fault(path.name, self.ranges[path.name], again[path.name, start])
                part = b"" if isinstance(fault, int) else data[start:end]
                if isinstance(fault, bytes):
                    part = fault + part[len(fault) :]
                handler.send_response(fault if isinstance(fault, int) else 206)
                handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
                handler.send_header("Content-Length", str(len(part)))
                handler.end_headers()
                handler.wfile.write(part)

            def end_headers(handler) -> None:
                handler.send_header("Accept-Ranges", "bytes")
                super().end_headers()

            def log_message(handler, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/ds"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def stored(kit: SimpleNamespace, tmp_path: Path) -> Dataset:
    """96 packs of one pair in several row groups and shards."""
    packs = kit.packed(random_examples(N), [1] * N, "concat")
    data: Dataset = kit.write(str(tmp_path / "ds"), packs)
    assert len(data.row_groups) > 4
    assert len(data.manifest.shards) > 1
    return data


@pytest.fixture
def server(stored: Dataset, tmp_path: Path) -> Iterator[Server]:
    """That dataset over HTTP."""
    server = Server(tmp_path)
    yield server
    server.close()


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


def a_shard(stored: Dataset, number: int = 1) -> Path:
    """Path of one of its shards."""
    return Path(stored.shard_urls[number])


def test_a_store_reads_as_the_disk_does(stored: Dataset, server: Server) -> None:
    assert ids(server.url) == ids(stored.url)
    # A footer for each shard, and one read for each row group, or two where a lane ends inside it.
    groups, shards = len(stored.row_groups), len(stored.manifest.shards)
    assert groups + shards <= sum(server.ranges.values()) <= groups + shards + 4


def test_a_store_that_refuses_now_and_then_is_asked_again(stored: Dataset, server: Server) -> None:
    server.fault = lambda path, n, m: (403, 500, 503)[n % 3] if m == 1 else None
    assert ids(server.url) == ids(stored.url)


def test_the_patience_ends(stored: Dataset, server: Server) -> None:
    bad = a_shard(stored).name
    server.fault = lambda path, n, m: 503 if path == bad and n > 2 else None
    with pytest.raises(StorageError, match=rf"(?s){bad}, row group .*Tried \d+ times\."):
        ids(server.url, retry_seconds=0.2)


def test_a_truncated_shard(stored: Dataset) -> None:
    shard = a_shard(stored)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        IntegrityError, match=rf"(?s){shard.name}, row group \d+: .*Fetched 2 times"
    ):
        ids(stored.url)


def test_one_wrong_checksum_is_fetched_once_more(stored: Dataset, server: Server) -> None:
    damaged = []

    def flip_once(path: str, n: int, m: int) -> bytes | None:
        if n == 3 and not damaged:
            damaged.append(path)
            return b"\xff\xfe"
        return None

    server.fault = flip_once
    assert ids(server.url) == ids(stored.url)
    assert damaged


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


def test_quarantine_keeps_the_counts(stored: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    whole = ids(stored.url)
    lost = spoil(stored, 0)
    with pytest.raises(IntegrityError, match=r"(?s)row group 0: .*Fetched 2 times"):
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
            stored.url, lanes=6, rank=rank, world_size=3, reading=ReadConfig(on_error="quarantine")
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
            PackedDataLoader(data, packs_per_batch=2, accumulation=4),
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
    with pytest.raises(IntegrityError, match="at least one row group must be readable"):
        ids(stored.url, on_error="quarantine")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_that_is_killed_is_named(stored: Dataset) -> None:
    """As the out-of-memory killer does it."""
    loader = PackedDataLoader(PackedDataset(stored), num_workers=1, prefetch=1)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    with pytest.raises(WorkerError, match=r"^PackedDataLoader: workers must live .*\(pid"):
        list(batches)
