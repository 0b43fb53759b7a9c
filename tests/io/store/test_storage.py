"""What a dataset asks of a store, and the sentences where it is refused."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from small_jobs import SETTINGS, pairs

import packstore
from packstore.errors import (
    ConfigError,
    DatasetExistsError,
    MissingExtraError,
    StorageError,
    message_with_notes,
)

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("how", ["links", "renames", "neither"])
def test_a_disk_that_is_full_at_the_commit_holds_no_half_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """On filesystems with hard links or not, and with a rename that never replaces or
    not.
    """
    place, commits = tmp_path / "ds", list[str]()
    if how != "links":
        monkeypatch.setattr(os, "link", no_links)
    if how == "neither":  # such a system cannot be had here
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())

    def full(handle: int) -> None:
        if "manifest-" in (path := os.readlink(f"/proc/self/fd/{handle}")):
            commits.append(path)
            if how != "neither" or len(commits) == 2:
                os.ftruncate(handle, 3)
                raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="no space left"):
            packstore.pack(pairs(20), place, **SETTINGS)
    assert not list(place.rglob("*manifest*"))
    assert packstore.pack(pairs(20), place, **SETTINGS).verify().ok
    assert [p.name for p in place.rglob("*manifest*")] == ["manifest-000001.json"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_writers_exactly_one_commits(
    place: str, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for attempt in range(5):
        start, won, lost = threading.Barrier(4), list[str](), list[str]()

        def write(number: int) -> None:
            records = pairs(5 + number)
            start.wait()  # noqa: B023
            try:
                made = packstore.pack(records, f"{place}{attempt}", **SETTINGS)  # noqa: B023
                won.append(made.manifest.fingerprint)  # noqa: B023
            except DatasetExistsError as error:
                lost.append(str(error))  # noqa: B023

        threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3)
        dataset = packstore.open(f"{place}{attempt}")
        assert (dataset.version, dataset.manifest.fingerprint) == (1, won[0])
        assert dataset.verify().ok


def test_files_in_memory_appear_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's own upload shows a file while it grows, to whoever reads in another
    thread.
    """
    commit, appeared = MemoryFile.commit, dict[str, int]()

    def noted(file: MemoryFile) -> None:
        appeared[file.path] = len(file.getbuffer())
        commit(file)

    monkeypatch.setattr(MemoryFile, "commit", noted)
    made = packstore.pack(pairs(20), "memory://whole/ds", overwrite=True, **SETTINGS)
    for shard in made.manifest.shards:
        assert appeared[f"/whole/ds/{shard.path}"] == shard.bytes


def test_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        packstore.pack(pairs(20), tmp_path / "file" / "x", **SETTINGS)


class Telling(MemoryFileSystem):
    """A client whose errors tell all that it knows."""

    protocol = "telling"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said = (
            f"denied for {options} in eu at telling://user:hunter2@host/x?sig=abcdef"
        )

    def info(self, path: str, **_: Any) -> Any:
        raise ValueError(self.said)

    ls = find = open = cat_file = info


def test_errors_tell_no_secret() -> None:
    fsspec.register_implementation("telling", Telling, clobber=True)
    options = {
        "secret": "s3cr3t",
        "client_kwargs": {"aws_session_token": "t0ken", "region": "eu"},
    }
    with pytest.raises(StorageError, match="telling://host/x") as caught:
        packstore.open("telling://user:hunter2@host/x?sig=abcdef", options)
    assert "in eu at" in str(caught.value)
    for secret in ("hunter2", "abcdef", "s3cr3t", "t0ken"):
        assert secret not in message_with_notes(caught.value) + repr(
            caught.value.__cause__
        )


def test_a_filesystem_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="nowhere://x"):
        packstore.open("nowhere://x")

    def absent(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3") from ModuleNotFoundError(
            "No module named 's3fs'", name="s3fs"
        )

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(MissingExtraError, match=r"packstore\[s3\]"):
        packstore.open("s3://bucket/x")
    with pytest.raises(MissingExtraError, match="s3fs"):
        packstore.open("odd://x")


class Flaky(MemoryFileSystem):
    """The files in memory, behind a client whose next requests fail."""

    protocol = "flaky"
    errors: list[Exception] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def ls(self, path: str, **how: Any) -> Any:
        self.fail()
        return super().ls(path, **how)

    def cat_file(self, path: str, *how: Any, **more: Any) -> Any:
        self.fail()
        return super().cat_file(path, *how, **more)


class Answer(Exception):
    """An error in the form of botocore's ClientError."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def payload_error() -> Exception:
    import aiohttp

    return aiohttp.ClientPayloadError("Response payload is not completed")


PASSING = [
    *(Answer(str(status), status) for status in (408, 429, 500, 502, 503, 504)),
    *(Answer("SlowDown", 503), Answer("RequestTimeout", 400), payload_error()),
    *(ConnectionResetError(), ConnectionRefusedError(), TimeoutError()),
]
LASTING = [
    (Answer("AccessDenied", 403), "AccessDenied"),
    (Answer("NoSuchBucket", 404), "NoSuchBucket"),
    (Answer("ExpiredToken", 400), "expired"),
    (Answer("RequestTimeTooSkewed", 403), "clock"),
    (Answer("PermanentRedirect", 301), "AWS_DEFAULT_REGION"),
    (Answer("QuotaExceeded", 403), "no space left"),
    (
        ValueError("Bucket is requester pays. Set `requester_pays=True`"),
        "requester_pays=true",
    ),
    (PermissionError(13, "no"), "permission denied"),
    (KeyError("odd"), "KeyError: 'odd'"),
]


@pytest.fixture
def flaky() -> Any:
    """Opens a dataset while the store fails with these errors."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    packstore.pack(pairs(5), "memory://flaky/ds", overwrite=True, **SETTINGS)

    def run(*errors: Exception, **options: Any) -> packstore.Dataset:
        Flaky.errors[:] = errors
        return packstore.open("flaky://flaky/ds", {"retry_backoff": 0.001, **options})

    yield run
    Flaky.errors.clear()


def test_what_passes_is_asked_again(
    flaky: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "packstore")
    for error in PASSING:
        caplog.clear()
        assert flaky(error, error).verify().ok
        assert caplog.text.count("Retrying in") == 2, error
        with pytest.raises(StorageError, match="Tried 4 times") as caught:
            flaky(*[error] * 9, retry_attempts="4")  # text, as from the command line
        assert len(Flaky.errors) == 5, caught.value


@pytest.mark.parametrize(("error", "text"), LASTING, ids=lambda x: str(x)[:40])
def test_what_lasts_is_not(flaky: Any, error: Exception, text: str) -> None:
    with pytest.raises(StorageError, match=text) as caught:
        flaky(error, error)
    assert "Tried" not in message_with_notes(caught.value)
    assert len(Flaky.errors) == 1


def test_settings_of_retries_are_checked(flaky: Any) -> None:
    with pytest.raises(StorageError, match=r"Tried \d+ times"):
        flaky(*[TimeoutError()] * 10_000, retry_seconds=0.1)
    assert 2 < len(Flaky.errors) < 9_997
    with pytest.raises(ConfigError, match="retry_attempts"):
        flaky(retry_attempts="often")
