from __future__ import annotations

import contextlib
import errno
import os
import pickle
import threading
from pathlib import Path

import pytest
from rights import closed

from packstore.errors import DatasetExistsError, FormatError, MissingExtraError, StorageError
from packstore.io.store.location import Entry, Location, check_relative
from packstore.io.store.storage_errors import means_exists


def test_files_come_and_go(place, tmp_path):
    location = Location(place)
    assert not location.exists()
    assert location.files() == []
    location.create_bytes("a/one.json", b"0123456789")
    staged = tmp_path / "staged"
    staged.write_bytes(b"two")
    location.put_file(str(staged), "a/two.bin")
    assert location.files("a") == [Entry("one.json", 10), Entry("two.bin", 3)]
    assert location.files() == []  # folders are not files
    assert location.is_dir("a")
    assert not location.is_dir("a/one.json")
    assert location.size("a/one.json") == 10
    assert location.read_bytes("a/one.json") == b"0123456789"
    assert location.read_bytes("a/one.json", 2, 5) == b"234"
    assert location.read_bytes("a/one.json", 8, 20) == b"89"
    with location.open_read("a/one.json") as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"789"
    assert [p.read_bytes() for p in location.join("*/*.bin").glob()] == [b"two"]
    location.remove("a/two.bin")
    location.remove("a/two.bin")
    assert not location.exists("a/two.bin")


def test_create_never_replaces(place):
    location = Location(place)
    location.create_bytes("x.json", b"first")
    with pytest.raises(DatasetExistsError, match=r"x\.json: must not exist yet"):
        location.create_bytes("x.json", b"second")
    assert location.read_bytes("x.json") == b"first"
    assert [e.name for e in location.files()] == ["x.json"]


@pytest.mark.parametrize("renames", [True, False])
def test_a_full_disk_without_hard_links_leaves_no_half_file(tmp_path, monkeypatch, renames):
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    def full(handle: int) -> None:
        os.ftruncate(handle, 3)
        if os.path.exists(tmp_path / "x.json") or renames:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refused)
    if not renames:
        monkeypatch.setattr("packstore.io.store.local._rename_new", lambda *_: False, raising=False)
    place = Location(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="space"):
            place.create_bytes("x.json", b"0123456789")
    assert os.listdir(tmp_path) == []
    place.create_bytes("x.json", b"0123456789")
    assert place.read_bytes("x.json") == b"0123456789"
    with pytest.raises(DatasetExistsError):
        place.create_bytes("x.json", b"others")
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_creators_exactly_one_wins(tmp_path, monkeypatch, links):
    def no_links(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for attempt in range(20):
        path = f"{attempt}.json"
        winners = race(Location(str(tmp_path)), path, 4)
        assert len(winners) == 1
        assert (tmp_path / path).read_bytes() == b"%d" % winners[0] * 1000


def race(place: Location, path: str, writers: int) -> list[int]:
    start, winners = threading.Barrier(writers), []

    def create(number: int) -> None:
        start.wait()
        with contextlib.suppress(DatasetExistsError):
            place.create_bytes(path, b"%d" % number * 1000)
            winners.append(number)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners


def test_no_space_leaves_nothing(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write; found no space left .* Free some space"):
        Location(str(tmp_path)).create_bytes("a/x.json", b"data")
    assert list((tmp_path / "a").iterdir()) == []


def test_refusals_are_sentences(place, tmp_path):
    location = Location(place)
    for action in (location.read_bytes, location.size, location.open_read):
        with pytest.raises(StorageError, match=r"/nope: cannot read; found no such file or folder"):
            action("nope")
    (tmp_path / "file").write_bytes(b"")
    beside = Location(str(tmp_path / "file"))
    assert beside.files("x") == []
    assert not beside.exists("x")
    with pytest.raises(StorageError, match="found a file where a folder must be"):
        beside.create_bytes("x/y.json", b"")
    with pytest.raises(StorageError, match="found a folder where a file must be"):
        Location(str(tmp_path)).open_read()


def test_missing_rights(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "secret").write_bytes(b"x")
    place = Location(str(folder))
    assert (place.read_bytes("secret"), len(place.files())) == (b"x", 1)
    with closed(0o000, folder):
        for action in (
            lambda: place.read_bytes("secret"),
            lambda: place.exists("secret"),
            lambda: place.files(),
            lambda: place.create_bytes("new.json", b""),
        ):
            with pytest.raises(StorageError, match=r"permission denied\. Check the rights"):
                action()


def test_pickles_as_url_and_options(tmp_path):
    place = Location(Path(tmp_path), {"auto_mkdir": True})
    place.exists()
    assert place.__getstate__() == {"url": str(tmp_path), "storage_options": {"auto_mkdir": True}}
    assert pickle.loads(pickle.dumps(place)) == place


def test_secrets_stay_secret():
    url = "memory://user:hunter2@host/x?signature=abcdef"
    options = {"secret": "s3cr3t", "client_kwargs": {"aws_session_token": "t0ken", "region": "eu"}}
    place = Location(url, options)
    for text in (repr(place), place.display, str(place)):
        assert not any(s in text for s in ("hunter2", "abcdef", "s3cr3t", "t0ken"))
    with (
        pytest.raises(StorageError, match="cannot read") as caught,
        place.guard("read"),
    ):
        raise ValueError(f"denied for s3cr3t and t0ken in eu at {url}")
    text = str(caught.value)
    assert not any(s in text for s in ("hunter2", "abcdef", "s3cr3t", "t0ken"))
    assert "in eu at" in text


def test_join_keeps_the_query():
    assert Location("http://host/a?sig=1").join("b.json").url == "http://host/a/b.json?sig=1"
    assert Location("/odd?name").join("b").url == "/odd?name/b"


def test_unknown_protocol():
    with pytest.raises(StorageError, match=r"nowhere://x: cannot open; .*Protocol not known"):
        Location("nowhere://x").exists()


def test_missing_package_names_the_extra(monkeypatch):
    def absent(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3") from ModuleNotFoundError(
            "No module named 's3fs'", name="s3fs"
        )

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(MissingExtraError, match=r"'s3fs'.*pip install 'packstore\[s3\]'"):
        Location("s3://bucket/x").exists()
    with pytest.raises(MissingExtraError, match="Install s3fs"):
        Location("odd://x").exists()


def test_a_refused_conditional_put_means_exists():
    class ClientError(Exception):
        response = {"Error": {"Code": "PreconditionFailed"}}  # noqa: RUF012

    refused = OSError(errno.EINVAL, "bad request")
    refused.__cause__ = ClientError()
    assert means_exists(refused)
    assert not means_exists(OSError(errno.EINVAL, "bad request"))


OUTSIDE = (
    "/etc/passwd",
    "../x",
    "data/../../x",
    "s3://b/x",
    "data//x",
    "",
    ".",
    "data/.hidden",
    "data\\x",
    "data/x\0y",
    "data/x\n",
    "~/x",
    "C:/x",
    "data/",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_stay_inside(path):
    with pytest.raises(FormatError, match="stay inside the dataset"):
        check_relative(path, "manifest")


def test_good_paths():
    assert check_relative("data/0123-00000-abc.parquet", "m") == "data/0123-00000-abc.parquet"
