"""A job that loses, or cannot know whether it has committed, removes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_jobs import SETTINGS, pairs

import packstore
from packstore import Dataset
from packstore.errors import MissingFilesError, StorageError
from packstore.io.manifest.commit import manifest_path
from packstore.io.store.location import Location

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
RECORDS = pairs(60)
ACTS: dict[str, Callable[[str, Dataset], Dataset]] = {
    "pack": lambda place, _: packstore.pack(pairs(20, 0), place, overwrite=True, **SETTINGS),
    "append": lambda place, _: packstore.append(place, pairs(20, 900)),
    "concat": lambda place, other: packstore.concat([place, other], place, overwrite=True),
}


@pytest.mark.parametrize("how", ACTS)
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

    with monkeypatch.context() as patch:
        patch.setattr(Location, "create_bytes", removed)
        with pytest.raises(MissingFilesError, match=r"version 2, which was just .* found 1 of its"):
            ACTS[how](place, other)
    broken = packstore.open(place)
    assert broken.version == 2
    with pytest.raises(StorageError, match=r"data/.*, row group 0"):
        list(broken.iter_packs())
    with pytest.raises(MissingFilesError, match="must have all files that version 2 names"):
        packstore.append(place, pairs(20, 2000))
    with pytest.raises(MissingFilesError, match="must have all files that version 2 names"):
        packstore.concat([place, other], f"{place}-out")
    assert packstore.open(place, version=1).verify().ok


@pytest.mark.parametrize("how", ACTS)
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

    with monkeypatch.context() as patch:
        patch.setattr(Location, "create_bytes", overtaken)
        made = ACTS[how](place, other)
    assert (made.version, later[0].version, packstore.open(place).version) == (2, 3, 3)
    stored = packstore.open(place, version=2)
    assert made.manifest.to_json() == stored.manifest.to_json()
    assert made.verify().ok
