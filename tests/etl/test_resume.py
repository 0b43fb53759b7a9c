"""Jobs that were interrupted: what the rerun takes over, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_jobs import SETTINGS, pairs, write_jsonl

import packstore
from packstore.io.store.location import Location

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
CUT: dict[str, Any] = {"partitions": 4, "row_group_tokens": 512, "shard_tokens": 1500}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file of a dozen blocks."""
    return write_jsonl(tmp_path / "pairs.jsonl", pairs(800))


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., Any]:
    def run(out: str, source: Any = None, **settings: Any) -> Any:
        return packstore.pack(source or pairs(120), out, **{**SETTINGS, **settings})

    return run


def files(url: str) -> dict[str, bytes]:
    """Every file at a place, by path."""
    place = Location(url)
    fs, root = place.filesystem()
    found = fs.find(root) if fs.exists(root) else []
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in found}


def break_put(monkeypatch: pytest.MonkeyPatch, at: int | str, error: BaseException) -> list[str]:
    """The n-th put, or one whose path has a text in it, raises; returns the paths that were put."""
    done: list[str] = []
    real = Location.put_file

    def put(self: Location, local_path: str, path: str) -> None:
        if len(done) == at or (isinstance(at, str) and at in path):
            raise error
        real(self, local_path, path)
        done.append(path)

    monkeypatch.setattr(Location, "put_file", put)
    return done


def stop_in_partition(number: int, error: BaseException, job: Callable[[], Any]) -> list[str]:
    """Runs a job that ends when it puts the first shard of a partition; returns what it put."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):  # noqa: PT012
        put = break_put(patch, f"-p{number:05d}-", error)
        job()
    assert put
    return put


def watched(job: Callable[[], Any]) -> list[str]:
    """Runs a job; returns the shards that it put."""
    with pytest.MonkeyPatch.context() as patch:
        put = break_put(patch, "nowhere", KeyboardInterrupt())
        job()
    return [path for path in put if path.startswith("data/")]


def partitions(paths: list[str]) -> set[str]:
    return {path.split("-")[1] for path in paths}


def test_the_bytes_of_the_input_decide_the_number_of_partitions(
    pack: Callable[..., Any], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "packstore.etl.sources.PARTITION_BYTES", Path(source).stat().st_size // 3 + 1
    )
    whole, out = str(tmp_path / "whole"), str(tmp_path / "out")
    dataset = pack(whole, source)
    assert dataset.manifest.provenance["settings"]["partitions"] == 3
    assert dataset.manifest.statistics.planning["partitions"] == 3
    assert pack(whole, source).version == 1  # already there
    pack(out, source, partitions=3)
    assert files(out) == files(whole)
    grown = packstore.append(out, pairs(20, 5000))
    assert grown.manifest.statistics.planning["parts"][1]["partitions"] == 1


@pytest.mark.parametrize("damaged", ["shard", "note"])
def test_a_partition_that_changed_is_made_again(
    place: str, pack: Callable[..., Any], source: str, tmp_path: Path, damaged: str
) -> None:
    whole = files(pack(str(tmp_path / "whole"), source, **CUT).url)
    before = stop_in_partition(3, KeyboardInterrupt(), lambda: pack(place, source, **CUT))
    fs, root = Location(place).filesystem()
    hurt = next(p for p in before if "-p00001-" in p)
    if damaged == "note":
        hurt = next(p for p in files(place) if p.endswith("-00001.json"))
    data = fs.cat_file(f"{root}/{hurt}")
    fs.pipe_file(f"{root}/{hurt}", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    after = watched(lambda: pack(place, source, **CUT))
    assert partitions(after) == {"p00001", "p00003"}
    assert files(place) == whole


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
