"""Stores where two writers could both commit are refused as targets, and can be
read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_jobs import SETTINGS, pairs

import packstore
from packstore.errors import ConfigError
from packstore.torch import SideWriter

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
REFUSED = "_packstore"


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder through a filesystem of fsspec that packstore has no proof of."""
    return f"dir::file://{tmp_path}/far"


def test_such_a_place_is_refused_before_anything_is_written(
    place: str, tmp_path: Path
) -> None:
    local = packstore.pack(pairs(20), str(tmp_path / "local"), **SETTINGS)
    acts: list[Callable[[], Any]] = [
        lambda: packstore.pack(pairs(20), place, **SETTINGS),
        lambda: packstore.concat([local], place),
        lambda: SideWriter(place, local, {"value": "float64"}),
    ]
    for act in acts:
        with pytest.raises(ConfigError, match=REFUSED):
            act()
    assert not (tmp_path / "far").exists()
    (problem,) = [finding for finding in packstore.check(place) if not finding.ok]
    assert "copy the folder data" in problem.text


def test_a_copy_of_a_dataset_is_read_there(place: str, tmp_path: Path) -> None:
    local = packstore.pack(pairs(20), str(tmp_path / "local"), **SETTINGS)
    far, root = fsspec.url_to_fs(place)
    for folder in ("data", "_packstore"):
        far.put(f"{local.url}/{folder}", f"{root}/{folder}", recursive=True)
    assert packstore.open(place).manifest.fingerprint == local.manifest.fingerprint
    assert packstore.open(place).verify().ok
    with pytest.raises(ConfigError, match=REFUSED):
        packstore.append(place, pairs(20, 900))
