"""Stores where two writers could both commit: refused, unless the caller says that it is alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_jobs import SETTINGS, pairs

import packstore
from packstore.cli import main
from packstore.errors import ConfigError, DatasetExistsError
from packstore.etl.concat import append, concat
from packstore.io.maintain.clean import clean
from packstore.io.side.side import SideWriter, open_side
from packstore.io.store.clients import creates_exclusively
from packstore.io.store.location import Location

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
REFUSED = r"only one writer at a time may commit there; .* single_writer=True \(--single-writer\)"


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder through a filesystem of fsspec that packstore has no proof of."""
    return f"dir::file://{tmp_path}/far"


def test_which_stores_are_known() -> None:
    adlfs, gcsfs, s3fs = map(pytest.importorskip, ("adlfs", "gcsfs", "s3fs"))
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.implementations.webhdfs import WebHDFS

    known = (s3fs.S3FileSystem, gcsfs.GCSFileSystem, adlfs.AzureBlobFileSystem, MemoryFileSystem)
    for kind in known:
        assert creates_exclusively(object.__new__(kind))
    s3fsx = type("Other", (s3fs.S3FileSystem,), {"__module__": "s3fsx"})
    for other in (DirFileSystem, WebHDFS, s3fsx):
        assert not creates_exclusively(object.__new__(other))


def test_many_creators_of_a_file_in_memory_have_one_winner() -> None:
    location, outcomes = Location("memory://one-winner"), list[bool]()
    for n in range(50):
        start = threading.Barrier(8)

        def create(start: threading.Barrier = start, n: int = n) -> None:
            start.wait()
            try:
                location.create_bytes(f"{n}", threading.current_thread().name.encode())
                outcomes.append(True)
            except DatasetExistsError:
                outcomes.append(False)

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (sum(outcomes), len(outcomes)) == (50, 400)


def test_packing_appending_and_concatenating(place: str, tmp_path: Path) -> None:
    local = packstore.pack(pairs(20), str(tmp_path / "local"), **SETTINGS)
    acts: list[Callable[..., Any]] = [
        lambda **alone: packstore.pack(pairs(20), place, **SETTINGS, **alone),
        lambda **alone: append(place, pairs(20, 900), **alone),
        lambda **alone: concat([place, local], f"{place}-2", **alone),
    ]
    for act in acts:
        with pytest.raises(ConfigError, match=REFUSED):
            act()
        dataset = act(single_writer=True)
        assert dataset.verify().ok
        assert "single_writer" not in dataset.manifest.provenance["settings"]
    assert packstore.open(place).version == 2
    assert clean(place).leftovers == []


def test_the_bytes_are_those_of_any_other_store(place: str, tmp_path: Path) -> None:
    local = packstore.pack(pairs(20), str(tmp_path / "local"), **SETTINGS)
    far = packstore.pack(pairs(20), place, single_writer=True, **SETTINGS)
    assert far.manifest.to_json() == local.manifest.to_json()


def test_side_data(place: str, tmp_path: Path, kit: SimpleNamespace) -> None:
    dataset = packstore.pack(pairs(20), str(tmp_path / "local"), layout="concat", **SETTINGS)
    with pytest.raises(ConfigError, match=REFUSED):
        SideWriter(place, dataset, {"value": "float64"})
    with SideWriter(place, dataset, {"value": "float64"}, single_writer=True) as writer:
        writer.write(np.arange(20), {"value": np.arange(20.0)})
    assert len(open_side(place)) == 20


def test_check_and_the_commands(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", place]) == 0
    assert "commit       one writer at a time (--single-writer)" in capsys.readouterr().out
    for name, first in (("a", 0), ("b", 900)):
        packstore.pack(pairs(20, first), str(tmp_path / name), **SETTINGS)
    command = ["concat", str(tmp_path / "a"), str(tmp_path / "b"), place]
    assert main(command) == 1
    assert "only one writer at a time" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "--single-writer"]) == 0
    assert packstore.open(place).manifest.pairs == 40
