"""Writers and cleaners that stop in the middle, and wake when others have been
there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from places import Files, at_each, manifest_path
from small_jobs import DAY, SETTINGS, later, pairs

import packstore
from packstore import append, clean, concat
from packstore.errors import DatasetExistsError, StorageError

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
TOO_LATE = "one writer"


class Paused(threading.Thread):
    """Acts until it is about to put a manifest; goes on, and ends, in :meth:`wake`."""

    def __init__(self, number: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act, self.number = act, number
        self.stopped, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        with at_each("create_bytes", self.pause):
            self.start()
            assert self.stopped.wait(120)

    def pause(self, path: str) -> None:
        if threading.current_thread() is self and path == manifest_path(self.number):
            self.stopped.set()
            assert self.go.wait(120)

    def run(self) -> None:
        try:
            self.act()
        except Exception as error:
            self.error = error
        finally:
            self.stopped.set()

    def wake(self) -> Exception | None:
        """Lets it go on to its end; returns its error."""
        self.go.set()
        self.join()
        return self.error


def ids(dataset: Any) -> list[int]:
    return sorted(
        i for packs in dataset.iter_packs() for i in packs.example_ids.tolist()
    )


@pytest.mark.parametrize("days", [0, 8])
def test_a_writer_wakes_after_another_and_clean(
    place: str, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    """It loses, whether its own shards are there or were cleaned, and damages
    nothing.
    """
    packstore.pack(pairs(20), place, **SETTINGS)
    late = Paused(
        2, lambda: packstore.pack(pairs(30, 100), place, overwrite=True, **SETTINGS)
    )
    packstore.pack(pairs(40, 200), place, overwrite=True, **SETTINGS)
    with monkeypatch.context() as patch:
        later(patch, days * DAY)
        clean(place, delete=True)
    assert isinstance(error := late.wake(), DatasetExistsError)
    assert TOO_LATE in str(error)
    for version, examples in ((1, 20), (2, 40)):
        dataset = packstore.open(place, version=version)
        assert dataset.manifest.pairs == examples
        assert dataset.verify().ok
    with pytest.raises(StorageError):
        packstore.open(place, version=3)


def test_a_number_that_a_cleaner_has_freed_is_lost(place: str) -> None:
    """Two others commit while a job writes, and the first of their versions is
    removed.
    """
    packstore.pack(pairs(20), place, **SETTINGS)
    moments: list[str] = []

    def overtake(path: str) -> None:
        if path.endswith(".index") and not moments:
            moments.append(path)
            for start in (100, 200):
                packstore.pack(pairs(10, start), place, overwrite=True, **SETTINGS)
            Files(place).remove(manifest_path(2))

    with at_each("put_file", overtake), pytest.raises(DatasetExistsError):
        packstore.pack(pairs(30, 300), place, overwrite=True, **SETTINGS)
    assert packstore.open(place).version == 3
    assert manifest_path(2) not in Files(place).names()


@pytest.mark.parametrize("dead", [False, True])
def test_clean_leaves_what_a_late_writer_commits(place: str, dead: bool) -> None:
    """Also where its marker was removed."""
    packstore.pack(pairs(20), place, **SETTINGS)
    late = Paused(
        2, lambda: packstore.pack(pairs(40, 100), place, overwrite=True, **SETTINGS)
    )
    if dead:
        files = Files(place)
        (marker,) = (
            name for name in files.names() if name.startswith("_packstore/writers/")
        )
        files.remove(marker)
    assert clean(place, delete=True).removable == []
    assert late.wake() is None
    assert packstore.open(place).version == 2
    assert packstore.open(place).verify().ok


def test_of_two_that_append_none_is_lost(place: str) -> None:
    packstore.pack(pairs(20), place, **SETTINGS)
    late = Paused(2, lambda: append(place, pairs(10, 100)))
    append(place, pairs(15, 200))
    assert isinstance(error := late.wake(), DatasetExistsError)
    assert TOO_LATE in str(error)
    assert packstore.open(place).manifest.pairs == 35
    grown = append(place, pairs(10, 100))
    assert (grown.version, grown.manifest.pairs) == (3, 45)
    assert grown.verify().ok
    assert len(set(ids(grown))) == 45
    clean(place, delete=True, older_than=0, no_writers=True)
    assert all(packstore.open(place, version=v).verify().ok for v in (1, 2, 3))


class OvertakenParts(list[str]):
    """Paths of datasets; another process appends to the first while they are read."""

    is_overtaken = False

    def __iter__(self) -> Iterator[str]:
        for path in super().__iter__():
            yield path
            if not self.is_overtaken:
                self.is_overtaken = True
                append(path, pairs(15, 200))


def test_what_is_appended_while_concat_begins_is_not_lost(place: str) -> None:
    """`concat` has read the version that it extends, and has not begun to write."""
    packstore.pack(pairs(20), place, **SETTINGS)
    packstore.pack(pairs(10, 500), f"{place}-other", **SETTINGS)
    with pytest.raises(DatasetExistsError, match=TOO_LATE):
        concat(OvertakenParts([place, f"{place}-other"]), place, overwrite=True)
    grown = concat([place, f"{place}-other"], place, overwrite=True)
    assert (grown.version, grown.manifest.pairs) == (3, 45)
    assert grown.verify().ok
    # An older version may be meant, where it is handed over.
    old = concat(
        [packstore.open(place, version=1), f"{place}-other"], place, overwrite=True
    )
    assert (old.version, old.manifest.pairs) == (4, 30)


def no_answer(path: str) -> None:
    if path == manifest_path(1):
        raise StorageError("no answer.")


def test_who_gave_up_loses_to_another_that_committed(place: str) -> None:
    """Its put has not arrived."""
    with (
        at_each("create_bytes", no_answer),
        pytest.raises(StorageError, match="no answer"),
    ):
        packstore.pack(pairs(20), place, **SETTINGS)
    packstore.pack(pairs(30, 100), place, **SETTINGS)
    clean(place, delete=True)
    with pytest.raises(DatasetExistsError):
        packstore.pack(pairs(20), place, **SETTINGS)
    dataset = packstore.open(place)
    assert (dataset.version, dataset.manifest.pairs) == (1, 30)
    assert dataset.verify().ok


def test_a_rerun_after_an_unknown_outcome_finds_its_version(place: str) -> None:
    """The put had arrived, only its answer was lost: the same bytes are there, once."""
    with (
        at_each("create_bytes", after=no_answer),
        pytest.raises(StorageError, match="no answer"),
    ):
        packstore.pack(pairs(20), place, **SETTINGS)
    assert packstore.pack(pairs(20), place, **SETTINGS).version == 1
    clean(place, delete=True, older_than=0, no_writers=True)
    assert packstore.open(place).verify().ok
    assert clean(place).leftovers == []


def test_a_cleaner_wakes_after_a_commit(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops between two removals; what it looked at long ago is looked at again."""
    packstore.pack(pairs(60), place, **SETTINGS)
    files = Files(place)
    text = files.read(manifest_path(1))
    files.remove(manifest_path(1))
    first = f"data/{'0' * 12}-00000-{'0' * 16}.parquet"
    files.write(first, b"1")
    later(monkeypatch, 8 * DAY)

    def sleep(path: str) -> None:
        if path == first:
            files.write(manifest_path(1), text)
            later(monkeypatch, 8 * DAY + 3600)

    # One removal after another, as otherwise its moment would be any.
    module = sys.modules["packstore.io.versions.clean"]
    monkeypatch.setattr(
        module, "run_parallel", lambda calls: [call() for call in calls]
    )
    with at_each("remove", after=sleep) as removed:
        clean(place, delete=True)
    assert removed == [first]
    assert packstore.open(place).verify().ok
