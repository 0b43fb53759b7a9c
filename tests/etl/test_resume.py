"""Jobs that were interrupted: what the rerun takes over, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import Files, at_each
from small_jobs import SETTINGS, pairs, write_jsonl

import packstore

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


def stop_in_partition(number: int, job: Callable[[], Any]) -> list[str]:
    """Runs a job that ends when it puts the first shard of a partition; returns what it put."""

    def stop(path: str) -> None:
        if f"-p{number:05d}-" in path:
            raise KeyboardInterrupt

    with at_each("put_file", stop) as put, pytest.raises(KeyboardInterrupt):
        job()
    assert put
    return put


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
    assert Files(out).all() == Files(whole).all()
    grown = packstore.append(out, pairs(20, 5000))
    assert grown.manifest.statistics.planning["parts"][1]["partitions"] == 1


@pytest.mark.parametrize("damaged", ["shard", "note"])
def test_a_partition_that_changed_is_made_again(
    place: str, pack: Callable[..., Any], source: str, tmp_path: Path, damaged: str
) -> None:
    whole = Files(pack(str(tmp_path / "whole"), source, **CUT).url).all()
    before = stop_in_partition(3, lambda: pack(place, source, **CUT))
    files = Files(place)
    hurt = next(p for p in before if "-p00001-" in p)
    if damaged == "note":
        hurt = next(p for p in files.names() if p.endswith("-00001.json"))
    data = files.read(hurt)
    files.write(hurt, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with at_each("put_file") as put:
        pack(place, source, **CUT)
    shards = [path for path in put if path.startswith("data/")]
    assert {path.split("-")[1] for path in shards} == {"p00001", "p00003"}
    assert files.all() == whole


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
