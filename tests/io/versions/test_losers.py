"""A job that loses, or cannot know whether it has committed, removes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from places import Files, at_each, manifest_path
from small_jobs import SETTINGS, pairs

import packstore
from packstore import Dataset
from packstore.errors import MissingFilesError, StorageError

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
RECORDS = pairs(60)
ACTS: dict[str, Callable[[str, Dataset], Dataset]] = {
    "pack": lambda place, _: packstore.pack(
        pairs(20, 0), place, overwrite=True, **SETTINGS
    ),
    "append": lambda place, _: packstore.append(place, pairs(20, 900)),
    "concat": lambda place, other: packstore.concat(
        [place, other], place, overwrite=True
    ),
}


@pytest.mark.parametrize("how", ACTS)
def test_a_commit_without_its_shards_is_told(place: str, how: str) -> None:
    """A shard is removed between the last look and the put."""
    old = packstore.pack(RECORDS, place, **SETTINGS)
    other = packstore.pack(RECORDS[:30], f"{place}-other", **SETTINGS)
    files, named = Files(place), {s.path for s in old.manifest.shards}

    def lose_a_shard(path: str) -> None:
        if path == manifest_path(2):
            files.remove(min(n for n in files.names() - named if n.startswith("data/")))

    with (
        at_each("create_bytes", lose_a_shard),
        pytest.raises(MissingFilesError, match="version 2"),
    ):
        ACTS[how](place, other)
    broken = packstore.open(place)
    assert broken.version == 2
    with pytest.raises(StorageError, match=r"data/.*, row group 0"):
        list(broken.iter_packs())
    with pytest.raises(MissingFilesError, match="version 2"):
        packstore.append(place, pairs(20, 2000))
    with pytest.raises(MissingFilesError, match="version 2"):
        packstore.concat([place, other], f"{place}-out")
    assert packstore.open(place, version=1).verify().ok


@pytest.mark.parametrize("how", ACTS)
def test_a_call_returns_what_it_committed(place: str, how: str) -> None:
    """Also where another job commits the next version before the call returns."""
    packstore.pack(RECORDS, place, **SETTINGS)
    other = packstore.pack(RECORDS[:30], f"{place}-other", **SETTINGS)
    later: list[Dataset] = []

    def overtake(path: str) -> None:
        if path == manifest_path(2):
            later.append(
                packstore.pack(pairs(5, 3000), place, overwrite=True, **SETTINGS)
            )

    with at_each("create_bytes", after=overtake):
        made = ACTS[how](place, other)
    assert (made.version, later[0].version, packstore.open(place).version) == (2, 3, 3)
    stored = packstore.open(place, version=2)
    assert made.manifest.to_json() == stored.manifest.to_json()
    assert made.verify().ok
