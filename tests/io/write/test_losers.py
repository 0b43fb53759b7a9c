"""A job that loses, or cannot know whether it has committed, removes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from small_jobs import SETTINGS, pairs

import packstore
from packstore.errors import MissingFilesError, StorageError
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import manifest_path
from packstore.io.store.location import Location
from packstore.io.write.write_job import WriteJob

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
RECORDS = pairs(60)


class Job(threading.Thread):
    """Packs, and stops once where it is told to, by the names of method and path."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.error, self.reached = place, None, threading.Event()
        self.go = threading.Event()

    def run(self) -> None:
        try:
            packstore.pack(RECORDS, self.place, **SETTINGS)
        except Exception as error:
            self.error = error
        finally:
            self.reached.set()

    def stop_here(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(120)


@pytest.mark.parametrize("wakes", ["before the look", "before the put"])
def test_the_same_job_restarted_elsewhere(
    place: str, monkeypatch: pytest.MonkeyPatch, wakes: str
) -> None:
    """The first one wakes while the second, which took over its shards, is about to commit."""
    first, second = Job(place), Job(place)
    confirm, create = WriteJob.confirm, Location.create_bytes

    def stopped_confirm(self: WriteJob, shards: Any) -> None:
        if threading.current_thread() is first and wakes == "before the look":
            first.stop_here()
        confirm(self, shards)

    def stopped_create(self: Location, path: str, data: bytes) -> None:
        if path == manifest_path(1):
            job = threading.current_thread()
            assert isinstance(job, Job)
            job.stop_here()
        create(self, path, data)

    monkeypatch.setattr(WriteJob, "confirm", stopped_confirm)
    monkeypatch.setattr(Location, "create_bytes", stopped_create)
    first.start()
    assert first.reached.wait(120)
    second.start()
    assert second.reached.wait(120)
    order = (first, second) if wakes == "before the look" else (second, first)
    for job in order:
        job.go.set()
        job.join()
    assert [job.error for job in order] == [None, None]  # their manifests are the same
    dataset = packstore.open(place)
    assert dataset.version == 1
    assert dataset.verify().ok


@pytest.mark.parametrize("how", ["pack", "append", "concat"])
def test_a_commit_without_its_shards_is_told(
    place: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A shard is removed between the last look and the put."""
    old = packstore.pack(RECORDS, place, **SETTINGS)
    other = packstore.pack(RECORDS[:30], f"{place}-other", **SETTINGS)
    create = Location.create_bytes

    def removed(self: Location, path: str, data: bytes) -> None:
        if path == manifest_path(2):
            named = {s.path for s in old.manifest.shards}
            own = [f"data/{e.name}" for e in self.files("data") if f"data/{e.name}" not in named]
            self.remove(own[0])
        create(self, path, data)

    act = {
        "pack": lambda: packstore.pack(pairs(20, 0), place, overwrite=True, **SETTINGS),
        "append": lambda: packstore.append(place, pairs(20, 900)),
        "concat": lambda: packstore.concat([place, other], place, overwrite=True),
    }[how]
    with monkeypatch.context() as patch:
        patch.setattr(Location, "create_bytes", removed)
        with pytest.raises(MissingFilesError, match=r"version 2, which was just .* found 1 of its"):
            act()
    broken = packstore.open(place)
    assert broken.version == 2
    with pytest.raises(StorageError, match=r"data/.*, row group 0"):
        list(broken.iter_packs())
    with pytest.raises(MissingFilesError, match="must have all files that version 2 names"):
        packstore.append(place, pairs(20, 2000))
    with pytest.raises(MissingFilesError, match="must have all files that version 2 names"):
        packstore.concat([place, other], f"{place}-out")
    assert packstore.open(place, version=1).verify().ok


@pytest.mark.parametrize("how", ["pack", "append", "concat"])
def test_a_call_returns_what_it_committed(
    place: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also where another job commits the next version before the call returns."""
    packstore.pack(RECORDS, place, **SETTINGS)
    other = packstore.pack(RECORDS[:30], f"{place}-other", **SETTINGS)
    create, later = Location.create_bytes, list[Dataset]()

    def overtaken(self: Location, path: str, data: bytes) -> None:
        create(self, path, data)
        if path == manifest_path(2):
            later.append(packstore.pack(pairs(5, 3000), place, overwrite=True, **SETTINGS))

    act = {
        "pack": lambda: packstore.pack(pairs(20, 0), place, overwrite=True, **SETTINGS),
        "append": lambda: packstore.append(place, pairs(20, 900)),
        "concat": lambda: packstore.concat([place, other], place, overwrite=True),
    }[how]
    with monkeypatch.context() as patch:
        patch.setattr(Location, "create_bytes", overtaken)
        made = act()
    assert (made.version, later[0].version, packstore.open(place).version) == (2, 3, 3)
    stored = packstore.open(place, version=2)
    assert made.manifest.to_json() == stored.manifest.to_json()
    assert made.verify().ok
