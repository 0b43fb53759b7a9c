"""The local cache: less is fetched, and nothing is returned that the store did not
give.
"""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import Files
from same import same

import packstore
from packstore.config import ReadConfig
from packstore.errors import FormatError, StorageError
from packstore.io.store import Location


@pytest.fixture(params=["parquet", "arrow"])
def stored(kit: Any, place: str, request: Any) -> Any:
    """60 packs in several row groups and shards."""
    return kit.made(place, row_group_tokens=60, shard_tokens=500, format=request.param)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("packstore-*/*") if path.is_file()]


def test_what_was_read_is_not_fetched_again(stored: Any, tmp_path: Path) -> None:
    reading = ReadConfig(cache_dir=str(tmp_path / "cache"))
    data = packstore.open(stored.url, reading=reading)
    expected = list(stored.iter_packs())
    list(data.iter_packs())
    for shard in Path(stored.url).glob("data/*"):
        shard.unlink()
    again = packstore.open(stored.url, reading=reading)
    with ThreadPoolExecutor(4) as pool:
        packs = list(pool.map(again.read_packs, range(len(expected))))
    for a, b in zip(packs, expected, strict=True):
        assert same(a, b)
    home = tmp_path / "cache" / f"packstore-{os.getuid()}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_copy_elsewhere_does_not_fill_the_cache_of_a_dataset(
    kit: Any, tmp_path: Path
) -> None:
    """A forged copy can keep every checksum; so no bytes of it may be read as the
    original's.
    """
    data = kit.made(tmp_path / "ds", row_group_tokens=60, shard_tokens=500)
    shutil.copytree(data.url, tmp_path / "copy")
    reading = ReadConfig(cache_dir=str(tmp_path / "cache"))
    list(packstore.open(str(tmp_path / "copy"), reading=reading).iter_packs())
    before = {*files(tmp_path / "cache")}
    list(packstore.open(data.url, reading=reading).iter_packs())
    assert len({*files(tmp_path / "cache")}) == 2 * len(before) > 0


def test_places_of_one_name_are_kept_apart() -> None:
    """One URL at two endpoints is two places; with another login, or relative, it is
    the same.
    """
    one, other = (
        {"client_kwargs": {"endpoint_url": url}, "key": "k", "secret": "s"}
        for url in ("a", "b")
    )
    assert (
        Location("s3://bucket/ds", one).digest
        != Location("s3://bucket/ds", other).digest
    )
    again = {**one, "key": "another", "token": "t"}
    assert (
        Location("s3://bucket/ds", one).digest
        == Location("s3://bucket/ds", again).digest
    )
    assert Location("ds").digest == Location(os.path.abspath("ds")).digest


def test_bytes_that_were_changed_are_fetched_again(stored: Any, tmp_path: Path) -> None:
    reading = ReadConfig(cache_dir=str(tmp_path))
    list(packstore.open(stored.url, reading=reading).iter_packs())
    for number, path in enumerate(files(tmp_path)):
        spoiled = bytearray(path.read_bytes())
        spoiled[len(spoiled) // 2] ^= 1
        path.write_bytes(spoiled[: -(number % 2) or None])
    for _ in range(2):
        packs = packstore.open(stored.url, reading=reading).iter_packs()
        for a, b in zip(packs, stored.iter_packs(), strict=True):
            assert same(a, b)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_tenth_of_the_disk_stays_free(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """Counted with the bytes to be cached."""
    largest = max(shard.bytes for shard in stored.manifest.shards)
    total = 1 << 40
    free = total // 10 + (2 * largest if has_room else 0)
    usage = SimpleNamespace(total=total, used=total - free, free=free + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    data = packstore.open(
        stored.url, reading=ReadConfig(cache_dir=str(tmp_path / "cache"))
    )
    for a, b in zip(data.iter_packs(), stored.iter_packs(), strict=True):
        assert same(a, b)
    assert bool(files(tmp_path / "cache")) == has_room


def test_bytes_that_are_damaged_in_the_store_are_not_cached(
    stored: Any, tmp_path: Path
) -> None:
    for shard in stored.manifest.shards:
        Files(stored.url).write(shard.path, bytes(shard.bytes))
    reading = ReadConfig(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(FormatError):
        list(packstore.open(stored.url, reading=reading).iter_packs())
    assert not files(tmp_path / "cache")


@pytest.mark.parametrize("trap", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_have_prepared_is_refused(
    stored: Any, tmp_path: Path, trap: str
) -> None:
    home = tmp_path / f"packstore-{os.getuid()}"
    if trap == "a file":
        home.write_text("", encoding="utf-8")
    elif trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        home.symlink_to(tmp_path / "elsewhere")
    else:
        home.mkdir()
        home.chmod(0o777)
    with pytest.raises(StorageError, match=home.name):
        packstore.open(stored.url, reading=ReadConfig(cache_dir=str(tmp_path)))


def test_a_folder_that_fails_is_bypassed(
    stored: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = packstore.open(
        stored.url, reading=ReadConfig(cache_dir=str(tmp_path / "cache"))
    )
    data.read_packs(0)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("", encoding="utf-8")
    for _ in range(2):
        for a, b in zip(data.iter_packs(), stored.iter_packs(), strict=True):
            assert same(a, b)
    assert caplog.text.count("cannot cache in") == 1
