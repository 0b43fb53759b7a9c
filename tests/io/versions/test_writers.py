"""Markers of jobs: they warn, are removed, and never decide anything."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from places import Files, at_each, hook_listings
from small_jobs import SETTINGS, pairs

import packstore
from packstore import clean
from packstore.cli import main
from packstore.errors import DatasetExistsError, StorageError

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
WRITERS = "_packstore/writers"


def markers(place: str) -> list[str]:
    return [name for name in Files(place).names() if name.startswith(WRITERS)]


def own_marker(place: str) -> dict[str, Any]:
    """The marker of a job of this process."""
    found: dict[str, Any] = {}

    def records() -> Any:
        (path,) = markers(place)
        found.update(json.loads(Files(place).read(path)))
        yield from pairs(5)

    packstore.pack(records(), place, **SETTINGS)
    assert not markers(place)
    return found


@pytest.mark.parametrize(
    ("change", "age", "warned"),
    [
        ({"machine": "another"}, 0, True),
        ({"machine": "another"}, 3700, False),
        ({"machine": "", "pid": 0}, 0, True),
        ({"pid": "no number"}, 0, True),
        pytest.param({"started": "1"}, 0, False, marks=PROC),
        pytest.param({"pid": 1 << 62}, 0, False, marks=PROC),
        pytest.param({}, 3700, True, marks=PROC),
    ],
    ids=[
        "elsewhere",
        "old",
        "unknown",
        "unreadable",
        "pid given again",
        "dead",
        "lives",
    ],
)
def test_another_job_is_warned_of(
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    age: float,
    warned: bool,
) -> None:
    path = f"{WRITERS}/{'0' * 32}.json"
    marker = own_marker(place) | change
    Files(place).write(path, json.dumps(marker).encode())

    def make_old(entry: dict[str, Any]) -> None:
        if entry["name"].endswith(path):
            entry["mtime"] = entry["created"] = time.time() - age

    hook_listings(monkeypatch, change=make_old)
    with caplog.at_level(logging.WARNING, "packstore"):
        packstore.pack(pairs(20), place, overwrite=True, **SETTINGS)
    told = "the one that commits last will be refused"
    assert (told in caplog.text) == warned
    assert (clean(place).writer is not None) == warned
    assert markers(place) == [path]


def test_what_a_marker_says_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packstore.pack(pairs(5), str(tmp_path), **SETTINGS)
    (tmp_path / WRITERS).mkdir()
    (tmp_path / WRITERS / "0.json").write_text(
        json.dumps({"call": "[/x]\x1b[2J" + "y" * 99}), encoding="utf-8"
    )
    assert main(["clean", str(tmp_path)]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "'[/x]\\x1b[2J" in out
    assert "\x1b" not in out
    assert "may be writing here" in out


def test_a_store_may_refuse_markers(place: str) -> None:
    def no_markers(path: str) -> None:
        if path.startswith(WRITERS):
            raise StorageError("not here.")

    with at_each("create_bytes", no_markers):
        assert packstore.pack(pairs(20), place, **SETTINGS).verify().ok


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_read(
    place: str,
) -> None:
    def refuse(path: str) -> None:
        raise StorageError("cannot write.")

    def records() -> Any:
        raise AssertionError("was read")
        yield

    with (
        at_each("create_bytes", refuse),
        pytest.raises(StorageError, match="cannot write"),
    ):
        packstore.pack(records(), place, **SETTINGS)


@pytest.mark.parametrize("first_wins", [True, False])
def test_a_second_job_is_warned_and_never_blocked(
    place: str, caplog: pytest.LogCaptureFixture, first_wins: bool
) -> None:
    """Of other settings, while the first one has finished shards; who commits first
    wins.
    """
    reached, go, errors = threading.Event(), threading.Event(), list[Any]()

    def stop(path: str) -> None:
        if threading.current_thread() is first and not reached.is_set():
            reached.set()
            assert go.wait(120)

    def pack(records: Any, **settings: Any) -> None:
        try:
            packstore.pack(records, place, **{**SETTINGS, **settings})
        except DatasetExistsError as error:
            errors.append(error)

    first = threading.Thread(target=pack, args=(pairs(60),))
    with at_each("put_file", after=stop):
        first.start()
        assert reached.wait(120)
    records = iter(pairs(40, 900))

    def slow() -> Any:
        yield next(records)
        if first_wins:
            go.set()
            first.join()
        yield from records

    with caplog.at_level(logging.WARNING, "packstore"):
        pack(slow(), pack_size=96)
    assert "another job may be writing here ('pack', process" in caplog.text
    go.set()
    first.join()
    assert len(errors) == 1
    dataset = packstore.open(place)
    assert dataset.manifest.pack_size == (64 if first_wins else 96)
    assert dataset.verify().ok
    clean(place, delete=True, older_than=0, no_writers=True)
    assert packstore.open(place).verify().ok
    assert clean(place).leftovers == []


@PROC
def test_what_a_killed_job_left_is_no_writer(tmp_path: Path) -> None:
    place = str(tmp_path / "ds")
    code = f"""
import packstore, sys, time
def records():
    yield {{"prompt": [5], "chosen": [6], "rejected": [7]}}
    print("reading", flush=True)
    time.sleep(600)
packstore.pack(records(), {place!r}, pack_size=64)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"reading\n"
        assert f"'pack', process {job.pid} of this machine" == clean(place).writer
        job.send_signal(signal.SIGKILL)
    report = clean(place)
    assert report.writer is None
    assert {x.why for x in report.leftovers} >= {"marker of a job"}
    clean(place, delete=True, older_than=0, no_writers=True)
    assert not list((tmp_path / "ds").rglob("*.json"))


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_a_new_dataset_does_not_lie_inside_another(store: str, tmp_path: Path) -> None:
    """As a job of two parts would, if it were sent to the place of one of them."""
    place = str(tmp_path / "ds") if store == "disk" else f"memory://{tmp_path.name}/ds"
    outer = packstore.pack(pairs(5), place, **SETTINGS)
    before = Files(place).names()
    for inner in (f"{place}/train", f"{place}/a/b", f"{place}/data/c"):
        with pytest.raises(DatasetExistsError, match="inside"):
            packstore.pack(pairs(5), inner, **SETTINGS)
        with pytest.raises(DatasetExistsError, match="inside"):
            packstore.concat([outer], inner)
    with pytest.raises(DatasetExistsError, match="inside"):
        packstore.pack(pairs(5), place, validation_fraction=0.2, **SETTINGS)
    assert Files(place).names() == before

    packstore.pack(pairs(5), f"{place}-beside", **SETTINGS)
