"""Forged datasets: what a read notices, what the fingerprint, and what ``verify``
alone.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged import MANIFEST, checksums, sealed

import packstore
from packstore.config import ReadConfig
from packstore.errors import FormatError, IntegrityError

Try = Callable[[Path, Path], object]


def made(folder: Path, seed: int) -> Path:
    """A dataset of four shards, of several row groups each."""
    draw = random.Random(seed)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    records = [
        {n: [draw.randrange(1, 50) for _ in range(8)] for n in names}
        for _ in range(200)
    ]
    sizes = {
        "pack_size": 64,
        "shard_tokens": 2000,
        "row_group_tokens": 512,
        "num_workers": 0,
    }
    packstore.pack(records, str(folder), None, **sizes)
    return folder


def shards(folder: Path) -> list[Path]:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    return [folder / shard["path"] for shard in manifest["shards"]]


def ids(dataset: packstore.Dataset) -> list[Any]:
    return [pack.input_ids.tolist() for pack in dataset.iter_packs()]


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest, with the right hash of itself."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    (folder / MANIFEST).write_bytes(sealed(manifest))


def exchange(x: Path, _: Path) -> None:
    first, second, *_others = shards(x)
    both = first.read_bytes(), second.read_bytes()
    second.write_bytes(both[0])
    first.write_bytes(both[1])


def replace_and_sign(x: Path, y: Path) -> None:
    shutil.copy(shards(y)[0], shards(x)[0])
    crc32 = checksums(shards(y)[0].read_bytes())
    edit(x, lambda m: m["shards"][0]["row_groups"].__setitem__("crc32", crc32))


def append(x: Path, more: bytes) -> None:
    with shards(x)[1].open("ab") as file:
        file.write(more)


READ_NOTICES: dict[str, Try] = {
    "a shard of another set": lambda x, y: shutil.copy(shards(y)[0], shards(x)[0]),
    "two shards exchanged": exchange,
    "fewer shards": lambda x, _: edit(x, lambda m: m["shards"].pop()),
    "other counts": lambda x, _: edit(x, lambda m: m["totals"].update(examples=199)),
    "another set's manifest": lambda x, y: shutil.copytree(
        y / "_packstore", x / "_packstore", dirs_exist_ok=True
    ),
}
VERIFY_NOTICES: dict[str, Try] = {
    "extended by zeros": lambda x, _: append(x, bytes(64)),
    "extended by a shard": lambda x, y: append(x, shards(y)[1].read_bytes()),
    "sha256 of a shard": lambda x, _: edit(
        x, lambda m: m["shards"][0].update(sha256="0" * 64)
    ),
    "order of shards": lambda x, _: edit(x, lambda m: m["shards"].reverse()),
}
NOBODY_NOTICES: dict[str, Try] = {
    "lineage": lambda x, _: edit(x, lambda m: m["provenance"].update(lineage="0" * 64)),
    "settings": lambda x, _: edit(
        x, lambda m: m["provenance"].update(package_version="9")
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("forged")
    return made(folder / "a", 1), made(folder / "b", 2)


@pytest.fixture
def forged(pair: tuple[Path, Path], tmp_path: Path) -> Callable[[Try], str]:
    def run(attempt: Try) -> str:
        shutil.copytree(pair[0], tmp_path / "x")
        attempt(tmp_path / "x", pair[1])
        return str(tmp_path / "x")

    return run


@pytest.mark.parametrize("name", READ_NOTICES)
def test_a_read_notices(name: str, forged: Callable[[Try], str]) -> None:
    url = forged(READ_NOTICES[name])
    with pytest.raises((IntegrityError, FormatError, packstore.errors.StorageError)):
        ids(packstore.open(url))


@pytest.mark.parametrize("name", VERIFY_NOTICES)
def test_verify_notices(
    name: str, forged: Callable[[Try], str], pair: tuple[Path, Path]
) -> None:
    """The packs are those of the set, in its order unless the fingerprint differs."""
    dataset = packstore.open(forged(VERIFY_NOTICES[name]))
    original = packstore.open(str(pair[0]))
    assert not dataset.verify().ok
    same = dataset.manifest.fingerprint == original.manifest.fingerprint
    assert same == name.startswith("extended")
    assert sorted(ids(dataset)) == sorted(ids(original))
    assert not same or ids(dataset) == ids(original)


@pytest.mark.parametrize("name", NOBODY_NOTICES)
def test_the_fingerprint_is_of_the_packs_alone(
    name: str, forged: Callable[[Try], str], pair: tuple[Path, Path]
) -> None:
    """As the page says: the rest of a manifest is proved by comparing its own
    sha256.
    """
    dataset, original = (
        packstore.open(forged(NOBODY_NOTICES[name])),
        packstore.open(str(pair[0])),
    )
    assert dataset.verify().ok
    assert dataset.manifest.fingerprint == original.manifest.fingerprint
    own = {
        json.loads(Path(d.url, MANIFEST).read_bytes())["sha256"]
        for d in (dataset, original)
    }
    assert len(own) == 2
    page = (Path(__file__).parents[2] / "docs/security.md").read_text(encoding="utf-8")
    assert "the fingerprint proves the packs alone" in " ".join(page.split())


def test_a_shard_with_a_renewed_checksum_is_noticed_by_verify_alone(
    forged: Callable[[Try], str], pair: tuple[Path, Path]
) -> None:
    dataset = packstore.open(forged(replace_and_sign))
    assert (
        dataset.manifest.fingerprint
        == packstore.open(str(pair[0])).manifest.fingerprint
    )
    assert not dataset.verify().ok


def test_behind_the_cache_only_its_own_bytes_are_read(
    forged: Callable[[Try], str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    url, reading = (
        forged(lambda *_: None),
        ReadConfig(cache_dir=str(tmp_path / "cache")),
    )
    expected = ids(packstore.open(url, reading=reading))
    ids(packstore.open(str(pair[1]), reading=reading))
    cached = sorted(path for path in (tmp_path / "cache").glob("*/*") if path.is_file())
    for one, other in zip(cached[::2], cached[1::2], strict=False):
        shutil.copy(other, one)
    assert ids(packstore.open(url, reading=reading)) == expected
    exchange(Path(url), pair[1])
    assert not packstore.open(url).verify().ok
