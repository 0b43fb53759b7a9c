"""The local cache: less is fetched, its limit holds, and it never gives out what it should not."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from packstore.config import ReadConfig
from packstore.errors import ConfigError, StorageError
from packstore.io.dataset.cache import Cache, Key
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.reader import ShardReader

KEY = Key("ab" * 32, 0, 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=["parquet", "arrow"])
def stored(kit: Any, place: str, request: Any) -> Dataset:
    """60 packs in several row groups and shards."""
    data: Dataset = kit.Written(place).dataset(
        [kit.some_packs()], row_group_tokens=60, shard_tokens=500, format=request.param
    )
    assert len(data.manifest.shards) > 1
    return data


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts reads of each shard from the store."""
    found: Counter[str] = Counter()
    read = ShardReader._read

    def counted(reader: ShardReader, start: int, end: int) -> bytes:
        found[reader.shard.path] += 1
        return read(reader, start, end)

    monkeypatch.setattr(ShardReader, "_read", counted)
    return found


def files(folder: Path) -> list[Path]:
    return [p for p in folder.glob("packstore-*/??/*") if p.is_file()]


def used(folder: Path) -> int:
    return sum(p.stat().st_size for p in files(folder))


def check(kit: Any, data: Dataset, expected: Dataset) -> None:
    for a, b in zip(data.iter_packs(), expected.iter_packs(), strict=True):
        kit.assert_packs_equal(a, b)


def test_what_was_read_is_not_fetched_again(
    kit: Any, stored: Dataset, folder: Path, reads: Counter[str]
) -> None:
    reading = ReadConfig(cache_dir=str(folder))
    check(kit, stored.cached(reading), stored)
    before = Counter(reads)
    again = pickle.loads(pickle.dumps(open_dataset(stored.url, reading=reading)))
    packs = list(again.iter_packs())
    assert len(packs) == len(stored.row_groups)
    assert reads == before
    (home,) = folder.iterdir()
    modes = {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in [home, *home.rglob("*")]}
    assert modes == {0}


def test_a_damaged_file_is_fetched_again(
    kit: Any, stored: Dataset, folder: Path, reads: Counter[str]
) -> None:
    data = stored.cached(ReadConfig(cache_dir=str(folder)))
    list(data.iter_packs())
    for path in files(folder):
        spoiled = bytearray(path.read_bytes())
        spoiled[len(spoiled) // 2] ^= 1
        path.write_bytes(spoiled[: None if len(path.name) % 2 else -1])
    reads.clear()
    fresh = pickle.loads(pickle.dumps(data))
    check(kit, fresh, stored)
    assert reads
    check(kit, pickle.loads(pickle.dumps(data)), stored)


def test_a_cache_of_another_dataset_is_of_no_use_and_of_no_harm(
    kit: Any, stored: Dataset, folder: Path, tmp_path: Path
) -> None:
    """The same place, packed anew: names and ranges may be equal, hashes are not."""
    reading = ReadConfig(cache_dir=str(folder))
    list(stored.cached(reading).iter_packs())
    sizes = {"row_group_tokens": 60, "shard_tokens": 500}
    other = kit.Written(str(tmp_path / "other")).dataset([kit.some_packs(seed=1)], **sizes)
    check(kit, other.cached(reading), other)
    # Even under its very name, other bytes are refused.
    mine = other.cached(reading)
    shard = other.manifest.shards[0].sha256
    for path in files(folder):
        if path.name.startswith(shard):
            path.write_bytes(os.urandom(path.stat().st_size))
    check(kit, mine, other)


def test_the_limit_holds_and_what_was_used_last_stays(folder: Path) -> None:
    cache = Cache(str(folder), 10_000)

    def read(i: int) -> bool:
        fetched: list[int] = []
        wanted = bytes([i]) * 1000
        fetch = lambda: (fetched.append(i), wanted)[1]  # noqa: E731
        assert cache.read(KEY._replace(sha256=f"{i:064x}"), wanted.__eq__, fetch) == wanted
        return bool(fetched)

    for i in range(8):
        assert read(i)
    for i in range(30):
        assert not read(0)  # is used all the time
        assert read(100 + i)
        assert used(folder) <= 10_000
    assert read(1)  # was not


def test_smaller_than_a_shard_is_an_error(stored: Dataset, folder: Path) -> None:
    largest = max(s.bytes for s in stored.manifest.shards)
    with pytest.raises(ConfigError, match=f"largest shard of .*, {largest}; found 100"):
        stored.cached(ReadConfig(cache_dir=str(folder), cache_bytes=100))
    with pytest.raises(ConfigError, match="cache_bytes must be at least 1"):
        ReadConfig(cache_bytes=0)


@pytest.mark.parametrize("trap", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_have_prepared_is_refused(folder: Path, trap: str) -> None:
    home = folder / f"packstore-{os.getuid()}"
    folder.mkdir()
    if trap == "a file":
        home.write_text("")
    elif trap == "a link":
        (folder / "elsewhere").mkdir(mode=0o700)
        home.symlink_to(folder / "elsewhere")
    else:
        home.mkdir()
        home.chmod(0o777)
    with pytest.raises(StorageError, match="must be the user's own, and closed to others"):
        Cache(str(folder), 1000).home()
    # One that is prepared later is not used either, and the training goes on.
    assert Cache(str(folder), 1000).read(KEY, lambda data: True, lambda: b"good") == b"good"
    assert not list((folder / "elsewhere").rglob("*"))


def fail(error: int) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> Any:
        raise OSError(error, os.strerror(error))

    return failing


@pytest.mark.parametrize(
    "damage",
    ["removed", "a file", "unreadable", "read-only", "full", "no utime", "foreign file"],
)
def test_no_failure_of_the_folder_ends_the_reading(
    kit: Any,
    stored: Dataset,
    folder: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is kept half, then the folder fails: the same packs come, with one warning."""
    data = stored.cached(ReadConfig(cache_dir=str(folder)))
    data.read_packs(0)
    home = folder / f"packstore-{os.getuid()}"
    patches = {
        "unreadable": ("_open", errno.EACCES),
        "read-only": ("_open", errno.EROFS),
        "full": ("os.replace", errno.ENOSPC),
        "no utime": ("os.utime", errno.EROFS),
    }
    if damage in ("removed", "a file"):
        shutil.rmtree(folder)
        folder.write_text("")
    elif damage == "foreign file":
        (home / "of-another").mkdir()
        (home / "account").unlink()
    if damage in patches:
        name, code = patches[damage]
        monkeypatch.setattr(f"packstore.io.dataset.cache.{name}", fail(code))
    with caplog.at_level("WARNING", "packstore"):
        for _ in range(2):
            check(kit, data, stored)
    assert caplog.text.count("cannot cache in") <= 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packstore.io.dataset.cache.os.replace", full)
    cache = Cache(str(folder), 10_000)
    for _ in range(3):
        assert cache.read(KEY, lambda data: True, lambda: b"x" * 1000) == b"x" * 1000
    assert caplog.text.count("No space left") == 1
    assert not files(folder)


READERS = """
import sys, hashlib, random
from packstore.config import ReadConfig
from packstore.io.dataset.dataset import open as open_dataset
url, folder, limit, seed = sys.argv[1:]
data = open_dataset(url, reading=ReadConfig(cache_dir=folder, cache_bytes=int(limit)))
groups = list(range(len(data.row_groups))) * 3
random.Random(int(seed)).shuffle(groups)
found = {g: data.read_packs(g).input_ids.tobytes() for g in groups}
print(hashlib.sha256(b"".join(found[g] for g in sorted(found))).hexdigest())
"""


def test_processes_share_it(kit: Any, tmp_path: Path, folder: Path) -> None:
    """Four at once, in a cache with room for a third: all of them read the same."""
    written = kit.Written(str(tmp_path / "ds"))
    data = written.dataset([kit.some_packs(200)], row_group_tokens=300, shard_tokens=800)
    limit = max(sum(s.bytes for s in data.manifest.shards) // 3, 20_000)
    command = [sys.executable, "-c", READERS, data.url, str(folder), str(limit)]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(subprocess.check_output, [*command, str(i)]) for i in range(4)]
    assert len({run.result(timeout=120) for run in runs}) == 1
    assert used(folder) <= limit


WRITER = """
import os, sys, time
from packstore.io.dataset.cache import Cache, Key
def replace(*names):
    print("writing", flush=True)
    time.sleep(600)
os.replace = replace
Cache(sys.argv[1], 3000).read(Key("ab" * 32, 0, 1000), lambda data: True, lambda: bytes(1000))
"""


def test_nobody_waits_for_a_process_that_stands_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped while it held the lock."""
    cache = Cache(str(folder), 3000)
    assert cache.read(KEY, lambda data: True, lambda: b"x" * 1000) == b"x" * 1000
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    other = KEY._replace(start=1, end=1001)
    with open(Path(cache.home()) / "account", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache.read(other, lambda data: True, lambda: b"y" * 1000) == b"y" * 1000
        assert cache.read(KEY, lambda data: True, lambda: b"") == b"x" * 1000
    assert 0 < sum(waits) <= 5
    assert used(folder) == 1000
    assert cache.read(other, lambda data: True, lambda: b"y" * 1000) == b"y" * 1000
    assert used(folder) == 2000


def test_a_file_counts_before_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make_room = Cache._make_room

    def watched(self: Cache, home: str, own: str, size: int) -> bool:
        sizes.append(os.path.getsize(own))
        return make_room(self, home, own, size)

    monkeypatch.setattr(Cache, "_make_room", watched)
    Cache(str(folder), 3000).read(KEY, lambda data: True, lambda: bytes(1000))
    assert sizes == [1000]


def test_a_killed_writer_leaves_nothing_that_stays(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    cache = Cache(str(folder), 3000)

    def crowd() -> None:
        for i in range(6):
            key = KEY._replace(sha256=f"{i:064x}")
            assert len(cache.read(key, lambda data: True, lambda: bytes(1000))) == 1000

    process.send_signal(signal.SIGKILL)
    process.wait(120)
    process.stdout.close()
    (left,) = files(folder)
    assert left.stat().st_size == 1000  # counts, though half is never seen
    assert cache.read(KEY, b"y".__lt__, lambda: b"z" * 1000) == b"z" * 1000
    assert left in files(folder)
    crowd()
    assert left not in files(folder)
    assert 1000 < used(folder) <= 3000
