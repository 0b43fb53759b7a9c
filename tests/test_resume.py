"""Jobs that were interrupted: the rerun, the refusal, and what is left behind."""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import packstore
from packstore.errors import (
    CompatibilityError,
    DatasetExistsError,
    DatasetNotFoundError,
    StorageError,
)
from packstore.io.clean import clean
from packstore.io.job import WriteJob, writing
from packstore.io.manifest import commit_manifest
from packstore.io.storage import Location

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
SETTINGS: dict[str, Any] = {"pack_size": 64, "row_group_tokens": 128, "shard_tokens": 1}


def pairs(n: int, first: int = 0) -> list[dict[str, list[int]]]:
    """Records of token ids, which need no tokenizer."""
    return [
        {"prompt": [5, 6, 7], "chosen": [8, 10 + i, 11 + i], "rejected": [9] * (1 + i % 7)}
        for i in range(first, first + n)
    ]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "ds")
    return f"memory://{uuid.uuid4().hex}/ds"


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., Any]:
    def run(out: str, records: list[dict[str, list[int]]] | None = None, **settings: Any) -> Any:
        spill = {"spill_dir": str(tmp_path)}
        return packstore.pack(records or pairs(120), out, **{**SETTINGS, **spill, **settings})

    return run


def files(url: str) -> dict[str, bytes]:
    """Every file at a place, by path."""
    place = Location(url)
    fs, root = place._open()
    found = fs.find(root) if fs.exists(root) else []
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in found}


def break_put(monkeypatch: pytest.MonkeyPatch, n: int, error: BaseException) -> list[str]:
    """The n-th shard that is put from now on raises; returns the paths that were put."""
    done: list[str] = []
    real = Location.put_file

    def put(self: Location, local_path: str, path: str) -> None:
        if len(done) == n:
            raise error
        real(self, local_path, path)
        done.append(path)

    monkeypatch.setattr(Location, "put_file", put)
    return done


@pytest.mark.parametrize(
    "error", [StorageError("the network is gone."), KeyboardInterrupt(), SystemExit(143)]
)
def test_a_rerun_goes_on(
    place: str,
    pack: Callable[..., Any],
    tmp_path: Path,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = files(pack(str(tmp_path / "whole")).url)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):  # noqa: PT012
        before = break_put(patch, 5, error)
        pack(place)
    with pytest.raises(DatasetNotFoundError):
        packstore.open(place)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "packstore"):
        after = break_put(patch, 10**6, error)
        pack(place)
    assert "going on with an interrupted run: 5 shards" in caplog.text
    assert not set(before) & set(after)
    assert files(place) == whole
    assert clean(place, spill_dir=str(tmp_path)).leftovers == []


def test_a_shard_that_changed_is_written_again(
    place: str, pack: Callable[..., Any], tmp_path: Path
) -> None:
    whole = files(pack(str(tmp_path / "whole")).url)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        before = break_put(patch, 5, KeyboardInterrupt())
        pack(place)
    fs, root = Location(place)._open()
    data = fs.cat_file(f"{root}/{before[3]}")
    fs.pipe_file(f"{root}/{before[3]}", data[:-9] + b"X" + data[-8:])
    with pytest.MonkeyPatch.context() as patch:
        after = break_put(patch, 10**6, KeyboardInterrupt())
        pack(place)
    assert set(before) & set(after) == set(before[3:])
    assert files(place) == whole


def test_another_job_is_refused(place: str, pack: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        before = break_put(patch, 5, KeyboardInterrupt())
        pack(place)
    left = files(place)
    with pytest.raises(CompatibilityError, match=r"found settings.pack_size 64 then, 96 now"):
        pack(place, pack_size=96)
    with pytest.raises(CompatibilityError, match=r"sources\.0\.sha256 .* then, .* now"):
        pack(place, pairs(119))
    assert files(place) == left
    new = pack(place, pack_size=96, fresh=True)
    assert set(before) <= set(files(place))
    clean(place, delete=True, older_than=0, no_writers=True, spill_dir=str(tmp_path))
    assert not set(before) & set(files(place))
    assert {*new.manifest.provenance["sources"][0]} >= {"sha256"}
    assert clean(place, spill_dir=str(tmp_path)).leftovers == []
    with pytest.raises(DatasetExistsError, match="pack_size 96 then, 64 now"):
        pack(place)


def test_a_bad_job_leaves_shards_to_clean(place: str, pack: Callable[..., Any]) -> None:
    """An equal job may be about to commit them. No journal stays that would refuse another one."""
    for error in (RuntimeError("a defect"), DatasetExistsError("too late.")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):  # noqa: PT012
            break_put(patch, 5, error)
            pack(place)
        assert {path.partition("/")[0] for path in files(place)} == {"data"}
    pack(place, pack_size=96)
    clean(place, delete=True, older_than=0, no_writers=True)
    shards = {shard.path for shard in packstore.open(place).manifest.shards}
    assert {path for path in files(place) if path.startswith("data/")} == shards


def test_many_writers_at_once_have_one_winner(place: str, pack: Callable[..., Any]) -> None:
    """Each of different records, then all replacing: nobody disturbs the winner."""
    for overwrite in (False, True):
        start, outcomes = threading.Barrier(8), []

        def job(number: int, overwrite: bool = overwrite) -> None:
            start.wait()  # noqa: B023
            try:
                dataset = pack(place, pairs(40, 100 * number), overwrite=overwrite)
                outcomes.append(dataset.manifest.fingerprint)  # noqa: B023
            except DatasetExistsError as error:
                outcomes.append(type(error).__name__)  # noqa: B023

        threads = [threading.Thread(target=job, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dataset = packstore.open(place)
        assert dataset.verify().ok
        assert dataset.manifest.fingerprint in outcomes
        winners = [o for o in outcomes if not o.endswith("Error")]
        assert len(winners) == dataset.version - int(overwrite)
    clean(place, delete=True, older_than=0, no_writers=True)
    assert packstore.open(place).verify().ok
    assert clean(place).leftovers == []


def test_a_version_that_came_meanwhile_is_not_replaced(
    place: str, pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the manifest decides."""
    first = pack(place)

    def confirm(self: WriteJob, shards: Any) -> None:
        commit_manifest(self.location, first.manifest, overwrite=True)

    monkeypatch.setattr(WriteJob, "confirm", confirm)
    with pytest.raises(DatasetExistsError, match="only one writer may commit at a time"):
        pack(place, pairs(50), overwrite=True)
    current = packstore.open(place)
    assert (current.version, current.manifest.pairs) == (2, 120)
    assert current.verify().ok
    clean(place, delete=True, older_than=0, no_writers=True)
    assert packstore.open(place).verify().ok
    assert clean(place).leftovers == []


def test_a_job_that_lost_a_shard_stops(place: str, pack: Callable[..., Any]) -> None:
    location = Location(place)
    shards = pack(place).manifest.shards
    with writing(location, overwrite=True) as job:
        job.confirm(shards)
        location.remove(shards[1].path)
        with pytest.raises(StorageError, match=r"its shards must stay .* removed or changed"):
            job.confirm(shards)


def test_a_reader_never_sees_a_mixture(place: str, pack: Callable[..., Any]) -> None:
    """While it is replaced again and again, every version read is one that was written."""
    pack(place, pairs(40))
    stop, seen, failures = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            try:
                dataset = packstore.open(place)
                ids = [i for packs in dataset.iter_packs() for i in packs.example_ids.tolist()]
                seen.add((dataset.version, tuple(sorted(ids))))
            except Exception as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(41, 47):
        pack(place, pairs(n), overwrite=True)
    stop.set()
    reader.join()
    assert failures == []
    assert seen <= {(n - 39, tuple(range(n))) for n in range(40, 47)}


def test_clean_removes_what_no_version_names(
    place: str, pack: Callable[..., Any], tmp_path: Path
) -> None:
    location = Location(place)
    with pytest.raises(DatasetNotFoundError, match="must be a dataset, or the place of an"):
        clean(place)
    for n in (40, 41, 42):
        pack(place, pairs(n), overwrite=True)
    whole = files(place)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        break_put(patch, 3, KeyboardInterrupt())
        pack(place, pairs(43), overwrite=True)
    location.create_bytes("data/from-somewhere.parquet", b"12345")
    left = files(place)
    report = clean(place, delete=True, spill_dir=str(tmp_path))
    assert {x.spared for x in report.leftovers} == {"it is too young"}
    assert {x.path for x in report.leftovers} == left.keys() - whole.keys()
    assert files(place) == left
    everything: dict[str, Any] = {"delete": True, "older_than": 0, "no_writers": True}
    clean(place, **everything, spill_dir=str(tmp_path))
    assert files(place) == whole
    clean(place, **everything, keep_versions=2, spill_dir=str(tmp_path))
    with pytest.raises(DatasetNotFoundError, match="must have version 1; found 2 to 3"):
        packstore.open(place, version=1)
    for version in (2, 3):
        assert packstore.open(place, version=version).verify().ok
    named = [packstore.open(place, version=v).manifest for v in (2, 3)]
    shards = {s.path for m in named for s in m.shards}
    assert {p for p in files(place) if p.startswith("data/")} == shards


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    import os

    before = os.umask(0)
    os.umask(before)
    yield lambda mask: os.umask(mask) and None
    os.umask(before)


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_files_have_the_users_umask(
    tmp_path: Path, pack: Callable[..., Any], umask: Callable[[int], None], mask: int
) -> None:
    umask(mask)
    pack(str(tmp_path / "ds"))
    found = itertools.chain([tmp_path / "ds"], (tmp_path / "ds").rglob("*"))
    modes = {(p.is_dir(), p.stat().st_mode & 0o777) for p in found}
    assert modes == {(True, 0o777 & ~mask), (False, 0o666 & ~mask)}
