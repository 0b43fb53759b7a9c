"""`clean` beside jobs: only what no version names, and what is old, goes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from places import Files, at_each, hook_listings, manifest_path
from small_jobs import DAY, later, pack, pairs, write_jsonl

import packstore
from packstore import clean
from packstore.cli import main
from packstore.errors import (
    ConfigError,
    DatasetBusyError,
    DatasetNotFoundError,
    FormatError,
    StorageError,
)

RUN = "0123456789ab"
SHARD = f"data/{RUN}-p00000-00000-0123456789abcdef.parquet"
NOW: dict[str, Any] = {"delete": True, "older_than": 0, "no_writers": True}

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def before_the_first_removal(
    act: Callable[[], object], of: Collection[str] = ()
) -> AbstractContextManager[list[str]]:
    """Acts before `clean` removes the first file, or the first one of these."""
    began: list[str] = []

    def once(path: str) -> None:
        if not began and (not of or path in of):
            began.append(path)
            act()

    return at_each("remove", once)


def files(url: str) -> set[str]:
    return Files(url).names()


def test_shards_of_a_failed_first_job_are_removed(place: str) -> None:
    def fail(path: str) -> None:
        if path.endswith(".index"):  # all shards are there
            raise StorageError("refused")

    with at_each("put_file", fail), pytest.raises(StorageError, match="refused"):
        pack(place)
    left = files(place)
    assert left
    assert all(name.startswith("data/") for name in left), left
    assert {x.path for x in clean(place).leftovers} == left
    clean(place, **NOW)
    assert not files(place)
    Files(place).write("data/table.parquet", b"of another program")
    with pytest.raises(DatasetNotFoundError, match="dataset"):
        clean(place, **NOW)


FOREIGN = {
    "data": "prefs.jsonl labels.csv train-00000-of-00002.parquet .x "
    "0123456789ab-00000-aa.arrow",
    "_packstore": "notes.txt manifest-1.json manifest-0000002.json packs-000001.index",
    "_packstore/writers": "todo.json",
    "_packstore/partitions": "list.json",
    "_packstore/.staging-abcdefgh": "report.txt",
    f"parts-{'0' * 16}": f"00000-{'1' * 63}.npz 1.npz .x",
    "parts-of-mine": f"00000-{'1' * 64}.npz",
}
OWN = (
    SHARD,
    f"data/.{SHARD[5:]}.{'0' * 32}",
    f"data/{RUN}-00000-0123456789abcdef.arrow",
    "_packstore/packs-000009-0123456789abcdef.index",
    f"_packstore/.packstore-{'0' * 32}",
    f"_packstore/.manifest-000002.json.{'0' * 32}",
    f"_packstore/writers/{'0' * 32}.json",
    f"_packstore/partitions/{RUN}-00000.json",
    f"parts-{'0' * 16}/00000-{'1' * 64}.npz",
    f"parts-{'0' * 16}/.00027-{'1' * 64}.npz.{'0' * 32}",
)


def test_only_names_of_packstore_go(place: str) -> None:
    pack(place)
    foreign = {
        f"{folder}/{name}"
        for folder, names in FOREIGN.items()
        for name in names.split()
    }
    if "://" in place:  # where no folders are staged
        foreign = {path for path in foreign if ".staging" not in path}
    named = files(place)
    for path in (*foreign, *OWN):
        Files(place).write(path, b"1")
    report = clean(place, **NOW)
    foreign -= {
        path for path in foreign if path.startswith("parts-of")
    }  # not looked into
    assert files(place) == named | foreign | {f"parts-of-mine/00000-{'1' * 64}.npz"}
    assert {
        x.path for x in report.leftovers if x.spared == "not a name of packstore's"
    } == foreign
    assert {x.path for x in report.removable} == set(OWN)
    assert not report.lists_uploads


def test_a_store_that_does_not_list_unfinished_uploads_is_named(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A local disk has none."""
    pack(place)
    assert main(["clean", place]) == 0
    assert ("uploads" in capsys.readouterr().out) == ("://" in place)


def test_parts_of_log_probs_go_once_all_are_old(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed before it committed anything leaves nothing else."""
    parts = [f"parts-{n * 16}/0000{n}-{n * 64}.npz" for n in "01"]
    for path in parts:
        Files(place).write(path, b"1")
    young = parts[1].replace("/00001", "/00002")
    Files(place).write(young, b"1")
    later(monkeypatch, 8 * DAY)
    Files(place).renew(young, 8 * DAY - 60)
    report = clean(place, delete=True)
    assert {x.path for x in report.removable} == {parts[0]}
    assert files(place) == {parts[1], young}
    assert not Path(place, f"parts-{'0' * 16}").exists()


def test_a_marker_goes_with_the_link_that_its_job_left(tmp_path: Path) -> None:
    """A job killed while it writes: removing one link changes the times of the
    other.
    """
    pack(str(tmp_path / "ds"))
    folder = tmp_path / "ds/_packstore/writers"
    folder.mkdir(exist_ok=True)
    marker = folder / f"{'1' * 32}.json"
    marker.write_text("{}", encoding="utf-8")
    (folder / f".{marker.name}.{'2' * 32}").hardlink_to(marker)
    time.sleep(1.1)
    clean(str(tmp_path / "ds"), **NOW)
    assert not folder.exists()


def test_a_file_that_is_written_anew_stays(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names follow from contents: a job may write those of an old version while that
    goes.
    """
    pack(place, shard_tokens=1 << 20)
    pack(place, pairs(30), overwrite=True)
    old = {shard.path for shard in packstore.open(place, version=1).manifest.shards}
    later(monkeypatch, 8 * DAY)

    def pack_again() -> None:
        pack(place, shard_tokens=1 << 20, overwrite=True)
        for path in old:
            Files(place).renew(path, 8 * DAY)

    with before_the_first_removal(pack_again, old) as asked:
        report = clean(place, delete=True, keep_versions=1)
    newest = packstore.open(place)
    assert (newest.version, {s.path for s in newest.manifest.shards}) == (3, old)
    assert newest.verify().ok
    assert {
        x.path for x in report.leftovers if x.spared == "it changed meanwhile"
    } == old
    assert manifest_path(1) in asked
    assert manifest_path(1) not in files(place)


def test_shards_that_a_rerun_takes_over_stay(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as old as before; the note of their partition is not."""
    source = write_jsonl(tmp_path / "in.jsonl", pairs(60))

    def run() -> None:
        pack(place, source, shard_tokens=1 << 20)

    def fail(path: str) -> None:
        if path.endswith(".index"):  # all shards and notes are there
            raise StorageError("refused")

    with at_each("put_file", fail), pytest.raises(StorageError, match="refused"):
        run()
    shards = {name for name in files(place) if name.startswith("data/")}
    later(monkeypatch, 8 * DAY)

    def resume() -> None:
        with at_each("put_file") as written:
            run()
        assert not shards & set(written)

    with before_the_first_removal(resume, shards):
        clean(place, delete=True)
    assert {s.path for s in packstore.open(place).manifest.shards} == shards
    assert packstore.open(place).verify().ok


@pytest.mark.parametrize("keep", [None, 1])
def test_it_lists_as_often_for_many_versions(
    monkeypatch: pytest.MonkeyPatch, keep: int | None
) -> None:
    listed, asked, url = (
        MemoryFileSystem.ls,
        list[str](),
        f"memory://{uuid.uuid4().hex}/ds",
    )
    pack(url)

    def count(fs: Any, path: str, *more: Any, **how: Any) -> Any:
        asked.append(path)
        return listed(fs, path, *more, **how)

    monkeypatch.setattr(MemoryFileSystem, "ls", count)
    counts = []
    for number in range(2, 40):
        Files(url).write(manifest_path(number), Files(url).read(manifest_path(1)))
        asked.clear()
        clean(url, keep_versions=keep)
        counts.append(len(asked))
    assert len(set(counts)) == 1


def test_small_ages_need_a_word(place: str) -> None:
    pack(place)
    for age in (0, 3599.0, -1):
        with pytest.raises(ConfigError, match="no_writers"):
            clean(place, older_than=age)
    clean(place, older_than=3600)
    reached, go = threading.Event(), threading.Event()

    def records() -> Any:
        yield from pairs(10)
        reached.set()
        assert go.wait(120)

    writer = threading.Thread(target=lambda: pack(place, records(), overwrite=True))
    writer.start()
    assert reached.wait(120)
    with pytest.raises(DatasetBusyError, match="'pack'"):
        clean(place, **NOW)
    assert "process" in (clean(place, delete=True).writer or "")
    go.set()
    writer.join()
    assert packstore.open(place).version == 2


@pytest.mark.parametrize(
    "unit", [("172000", "173000"), ("2879m", "2900m"), ("47h", "49h")]
)
def test_an_age_with_its_unit(
    place: str, monkeypatch: pytest.MonkeyPatch, unit: tuple[str, str]
) -> None:
    Files(place).write(SHARD, b"1")
    later(monkeypatch, 2 * DAY)
    for age in (None, "2.1d", unit[1], unit[0]):  # by default seven days
        assert files(place) == {SHARD}
        assert (
            main(["clean", place, "--delete", *(["--older-than", age] if age else [])])
            == 0
        )
    assert not files(place)


def test_a_run_is_as_young_as_its_youngest_file(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Files(place)
    note = f"_packstore/partitions/{RUN}-00007.json"
    for path in (SHARD, SHARD.replace(RUN, "ba9876543210"), note):
        location.write(path, b"1")
    later(monkeypatch, 9 * DAY)
    location.renew(note, 9 * DAY - 60)
    clean(place, delete=True)
    assert files(place) == {SHARD, note}


def test_a_report_of_spared_files_alone_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "Nothing to remove" is said only of a place without leftovers."""
    pack(tmp_path / "ds", pairs(9))
    for num_spared in (0, 2):
        for number in range(num_spared):
            Files(str(tmp_path / "ds")).write(f"{SHARD[:-9]}{number}.parquet", b"1")
        assert main(["clean", str(tmp_path / "ds"), "--delete"]) == 0
        *listed, verdict = capsys.readouterr().out.splitlines()
        assert len(listed) == num_spared
        assert ("nothing to remove" in verdict) == (num_spared == 0)
        assert (f"{num_spared} files are spared" in verdict) == (num_spared > 0)


def test_an_unknown_age_is_spared(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    location = Files(place)
    location.write(SHARD, b"1")
    location.write(f"_packstore/writers/{'0' * 32}.json", b"1")

    def drop_times(entry: dict[str, Any]) -> None:
        for name in ("mtime", "created"):
            entry.pop(name, None)

    hook_listings(monkeypatch, change=drop_times)
    assert {x.spared for x in clean(place, delete=True).leftovers} == {
        "its age is not known"
    }
    assert len(files(place)) == 2
    clean(place, **NOW)
    assert files(place) == set()


def test_versions_that_were_replaced_lately_stay(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (30, 31, 32):
        pack(place, pairs(n), overwrite=True)
    report = clean(place, delete=True, keep_versions=1)
    assert [x.why for x in report.leftovers] == ["version 1", "version 2"]
    assert report.removable == []
    assert packstore.open(place, version=1).verify().ok
    later(monkeypatch, 8 * DAY)
    Files(place).renew(
        manifest_path(3), 8 * DAY
    )  # until just now version 2 was the current one
    clean(place, delete=True, keep_versions=1)
    assert packstore.open(place, version=2).verify().ok
    with pytest.raises(DatasetNotFoundError, match="version 1"):
        packstore.open(place, version=1)
    later(monkeypatch, 16 * DAY)
    clean(place, delete=True, keep_versions=1)
    newest = packstore.open(place)
    assert newest.verify().ok
    shards = {s.path for s in newest.manifest.shards}
    assert {p for p in files(place) if p.startswith("data/")} == shards


def test_versions_after_a_spared_one_stay(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (30, 31, 32, 33):
        pack(place, pairs(n), overwrite=True)
    later(monkeypatch, 8 * DAY)
    Files(place).renew(manifest_path(2), 8 * DAY)  # version 1 was replaced just now
    report = clean(place, delete=True, keep_versions=1)
    assert [x.why for x in report.leftovers] == ["version 1", "version 2", "version 3"]
    assert report.removable == []
    for version in (1, 2, 3, 4):
        assert packstore.open(place, version=version).verify().ok


def test_a_folder_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    """Its files may be of another dataset."""
    pack(tmp_path / "ds")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "ds" / "data").rename(elsewhere)
    (tmp_path / "ds" / "data").symlink_to(elsewhere)
    (elsewhere / Path(SHARD).name).write_bytes(b"1")
    clean(str(tmp_path / "ds"), **NOW)
    assert (elsewhere / Path(SHARD).name).exists()
    assert packstore.open(str(tmp_path / "ds")).verify().ok


def test_a_folder_that_is_listed_as_its_own_entry_is_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty object with the folder's name, as consoles of stores make them."""
    place = f"memory://{uuid.uuid4().hex}/ds"
    pack(place)
    ls = MemoryFileSystem.ls

    def list_with_itself(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        entries = ls(self, path, *args, **kwargs)
        return [{"name": path.rstrip("/"), "size": 0, "type": "file"}, *entries]

    monkeypatch.setattr(MemoryFileSystem, "ls", list_with_itself)
    assert clean(place).leftovers == []


@pytest.mark.parametrize("look", [2, 3], ids=["the first look", "the second look"])
def test_what_is_named_meanwhile_stays(
    place: str, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """A version is committed, of old files, while they are listed."""
    pack(place)
    location = Files(place)
    path = manifest_path(1)
    text = location.read(path)
    location.remove(path)
    location.write(SHARD, b"1")
    later(monkeypatch, 8 * DAY)
    looks: list[str] = []

    def commit(folder: str) -> None:
        if folder.endswith("/data"):
            looks.append(folder)
            if len(looks) == look:  # one more than usual: is it a dataset at all?
                location.write(path, text)

    hook_listings(monkeypatch, before=commit)
    clean(place, delete=True)
    assert packstore.open(place).verify().ok
    assert SHARD not in files(place)


def test_the_index_of_a_new_version_is_never_an_old_one(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version whose packs have the sizes of an old one is committed right before a
    removal.
    """
    pack(place)
    old = packstore.open(place).manifest.pack_index
    pack(place, pairs(30), overwrite=True)
    later(monkeypatch, 8 * DAY)
    with before_the_first_removal(
        lambda: pack(place, pairs(60, 700), overwrite=True)
    ) as removed:
        clean(place, delete=True, keep_versions=1)
    newest = packstore.open(place)
    index = newest.manifest.pack_index
    assert old
    assert index
    assert old.path in removed
    assert (newest.version, index.sha256) == (3, old.sha256)
    assert newest.verify().ok


def test_nothing_goes_where_a_version_cannot_be_read(place: str) -> None:
    """Rule R1: what the damaged manifest names is not known."""
    for n in (30, 31):
        pack(place, pairs(n), overwrite=True)
    location, path = Files(place), manifest_path(1)
    damaged = location.read(path).replace(b'"shards"', b'"shardz"')
    location.remove(path)
    location.write(path, damaged)
    location.write(SHARD, b"1")
    before = files(place)
    with pytest.raises(FormatError):
        clean(place, **NOW)
    assert files(place) == before


def test_a_manifest_goes_before_its_files(place: str) -> None:
    """Rule R5: killed between two removals, a version is whole or gone."""
    for n in (30, 31):
        pack(place, pairs(n), overwrite=True)
    with at_each("remove") as removed:
        clean(place, **NOW, keep_versions=1)
    assert removed[0] == manifest_path(1)
    assert len(removed) > 2


def test_two_cleaners_are_harmless(place: str, tmp_path: Path) -> None:
    """Everything that one wants to remove was removed by another an instant before."""
    for n in (30, 31):
        pack(place, pairs(n), overwrite=True)
    Files(place).write(SHARD, b"1")
    if "://" not in place:  # of a killed job
        (Path(place) / "_packstore" / ".staging-abcdefgh").mkdir()
        (Path(place) / "_packstore" / ".staging-abcdefgh" / "1").write_bytes(b"1")
    how: dict[str, Any] = {**NOW, "keep_versions": 1}
    with before_the_first_removal(lambda: clean(place, **how)):
        report = clean(place, **how)
    assert len(report.removable) >= 4
    assert not list(tmp_path.rglob(".staging-*"))
    assert packstore.open(place).verify().ok
    assert SHARD not in files(place)
