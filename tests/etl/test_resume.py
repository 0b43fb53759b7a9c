"""Jobs that were interrupted: what the rerun takes over, and what is left behind."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from places import Files
from small_jobs import pack, pairs, stopping, write_jsonl

import packstore

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
CUT: dict[str, Any] = {"partitions": 4, "row_group_tokens": 512, "shard_tokens": 1500}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file of a dozen blocks."""
    return write_jsonl(tmp_path / "pairs.jsonl", pairs(800))


def test_the_bytes_of_the_input_decide_the_number_of_partitions(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_third = Path(source).stat().st_size // 3 + 1
    monkeypatch.setattr(
        "packstore.etl.sources.PARTITION_BYTES", a_third
    )  # else a gigabyte
    whole, out = str(tmp_path / "whole"), str(tmp_path / "out")
    dataset = pack(whole, source)
    assert dataset.manifest.provenance["settings"]["partitions"] == 3
    assert dataset.manifest.statistics.planning["partitions"] == 3
    assert pack(whole, source).version == 1  # already there
    pack(out, source, partitions=3)
    assert Files(out).all() == Files(whole).all()
    grown = packstore.append(out, pairs(20, 5000))
    assert grown.manifest.statistics.planning["parts"][1]["partitions"] == 1


@pytest.mark.parametrize("damaged", ["-p00001-", "-00001.json", "input"])
def test_a_partition_that_changed_is_made_again(
    place: str,
    source: str,
    tmp_path: Path,
    damaged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its shard, its note or its input (of the same size); it was stopped in the last
    of four.
    """
    whole = pack(str(tmp_path / "whole"), source, **CUT)
    with pytest.raises(KeyboardInterrupt):
        pack(place, source, progress=stopping("write", 0.9 * len(whole)), **CUT)
    files = Files(place)
    if damaged == "input":
        text = Path(source).read_text(encoding="utf-8")
        Path(source).write_text(
            text.replace("[8, 10, 11]", "[8, 12, 11]"), encoding="utf-8"
        )
        whole = pack(str(tmp_path / "changed"), source, **CUT)
    else:
        hurt = next(path for path in files.names() if damaged in path)
        data = files.read(hurt)
        files.write(hurt, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with caplog.at_level(logging.INFO, "packstore"):
        pack(place, source, **CUT)
    assert ("took over 2 of 4 partitions" in caplog.text) == (damaged != "input")
    packstore.clean(
        place, delete=True, older_than=0, no_writers=True
    )  # of the input as it was
    assert files.all() == Files(whole.url).all()


def test_a_reader_never_sees_a_mixture(place: str) -> None:
    """While it is replaced again and again, every version read is one that was
    written.
    """
    pack(place, pairs(40))
    stop, seen, failures = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            try:
                dataset = packstore.open(place)
                ids = [
                    i
                    for packs in dataset.iter_packs()
                    for i in packs.example_ids.tolist()
                ]
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
