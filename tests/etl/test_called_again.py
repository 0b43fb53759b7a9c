"""A call that is made again after it has ended well, as schedulers do, finds its work
done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import Files
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer

import packstore
from packstore import Dataset
from packstore.errors import DatasetExistsError

THERE = "already there, same input and settings"
PAIRS = [
    {"prompt": f"What is {i}? ", "chosen": f"It is {i}.", "rejected": "No idea."}
    for i in range(60)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["What is it? No idea."])


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "pairs.jsonl", PAIRS)


def files(dataset: Dataset) -> dict[str, bytes]:
    return Files(dataset.url).all()


@pytest.mark.parametrize("kind", ["file", "list", "generator", "dataset"])
def test_pack(
    kind: str, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        "tokenizer": tokenizer,
        "dedup": "pair",
        "carry": ["prompt"],
    }
    sources: dict[str, Callable[[], Any]] = {
        "file": lambda: write_jsonl(tmp_path / "more.jsonl", PAIRS),
        "list": lambda: PAIRS,
        "generator": lambda: iter(PAIRS),
        "dataset": lambda: str(tmp_path / "base"),
    }
    if kind == "dataset":
        packstore.pack(PAIRS, tmp_path / "base", tokenizer)
        settings = {}
    first = packstore.pack(sources[kind](), tmp_path / "ds", pack_size=256, **settings)
    before = files(first)
    with caplog.at_level(logging.INFO, "packstore"):
        again = packstore.pack(
            sources[kind](), tmp_path / "ds", pack_size=256, **settings
        )
    assert THERE in caplog.text
    assert (again.version, again.manifest.fingerprint) == (
        1,
        first.manifest.fingerprint,
    )
    assert files(again) == before


@pytest.mark.parametrize("partitions", [1, 2])
def test_another_job_is_refused(
    partitions: int, source: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    out, settings = str(tmp_path / "ds"), {"pack_size": 256, "partitions": partitions}
    first = packstore.pack(source, out, tokenizer, **settings)
    before = files(first)
    again = packstore.pack(source, out, tokenizer, num_workers=2, **settings)
    assert again.version == 1
    with pytest.raises(DatasetExistsError, match=r"settings\.seed"):
        packstore.pack(source, out, tokenizer, seed=1, **settings)
    with pytest.raises(DatasetExistsError, match=r"tokenizer\."):
        packstore.pack(
            source, out, trained_tokenizer(["quite other words"]), **settings
        )
    write_jsonl(Path(source), PAIRS[1:])
    with pytest.raises(DatasetExistsError, match=r"sources\."):
        packstore.pack(source, out, tokenizer, **settings)
    assert files(first) == before
    assert (
        packstore.pack(source, out, tokenizer, overwrite=True, **settings).version == 2
    )
    again = packstore.pack(
        source, out, tokenizer, **settings
    )  # overwriting decides no byte
    assert again.version == 2


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("lost", [None, "train", "validation"])
def test_both_parts(
    lost: str | None, partitions: int, source: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A job that is killed between its two commits leaves one of them."""
    out = tmp_path / "ds"
    settings = {"pack_size": 256, "validation_fraction": 0.3, "partitions": partitions}
    packstore.pack(source, str(out), tokenizer, **settings)
    prints = [
        packstore.open(out / p).manifest.fingerprint for p in ("train", "validation")
    ]
    if lost:
        for manifest in (out / lost / "_packstore").iterdir():
            manifest.unlink()
    found = packstore.pack(source, str(out), tokenizer, **settings)
    assert found.url.endswith("train")
    again = [packstore.open(out / p) for p in ("train", "validation")]
    assert [d.manifest.fingerprint for d in again] == prints
    assert all(d.verify().ok for d in again)


@pytest.mark.parametrize("partitions", [1, 2])
def test_append(
    partitions: int,
    source: str,
    tmp_path: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = str(tmp_path / "ds")
    packstore.pack(source, out, tokenizer, pack_size=256, partitions=partitions)
    more = write_jsonl(
        tmp_path / "more.jsonl", [{**r, "prompt": "Why? "} for r in PAIRS]
    )
    grown = packstore.append(out, more, tokenizer)
    before = files(grown)
    with caplog.at_level(logging.INFO, "packstore"):
        again = packstore.append(out, more, tokenizer)
    assert THERE in caplog.text
    assert (again.version, again.manifest.fingerprint) == (
        2,
        grown.manifest.fingerprint,
    )
    assert files(again) == before
    with pytest.raises(DatasetExistsError, match="version 2"):
        packstore.pack(source, out, tokenizer, pack_size=256, partitions=partitions)
    for part, settings in ((source, {}), (more, {"fields": {"prompt": "chosen"}})):
        with pytest.raises(DatasetExistsError):
            packstore.append(out, part, tokenizer, **settings)


@pytest.mark.parametrize("bad", [0, 5])
def test_append_without_duplicates(
    bad: int,
    source: str,
    tmp_path: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of it that is kept is there; the report of what was not is still that of the
    first.
    """
    out, rejects = str(tmp_path / "ds"), tmp_path / "rejects.jsonl"
    packstore.pack(source, out, tokenizer, pack_size=256, dedup="pair")
    records = [{**r, "prompt": "Why? "} for r in PAIRS] + [
        {**PAIRS[0], "chosen": ""}
    ] * bad
    more = write_jsonl(tmp_path / "more.jsonl", records + PAIRS[:9])
    grown = packstore.append(out, more, tokenizer, rejects=str(rejects))
    before, report = files(grown), rejects.read_bytes()
    assert report.count(b"duplicate_pair") == 9
    with caplog.at_level(logging.INFO, "packstore"):
        again = packstore.append(out, more, tokenizer, rejects=str(rejects))
    assert "already there, every record to keep is a duplicate" in caplog.text
    assert again.version == 2
    assert files(again) == before
    assert rejects.read_bytes() == report
    other = write_jsonl(
        tmp_path / "other.jsonl", PAIRS[::-1]
    )  # of which no report is there yet
    assert packstore.append(out, other, tokenizer, rejects=str(rejects)).version == 2
    assert rejects.read_bytes().count(b"duplicate_pair") == len(PAIRS)


def test_concat(
    source: str, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    a = packstore.pack(source, str(tmp_path / "a"), tokenizer, pack_size=256)
    b = packstore.pack(PAIRS[:9], str(tmp_path / "b"), tokenizer, pack_size=256)
    whole = packstore.concat([a, b], str(tmp_path / "whole"))
    with caplog.at_level(logging.INFO, "packstore"):
        again = packstore.concat([a, b], str(tmp_path / "whole"))
    assert "already there, of the same datasets" in caplog.text
    assert (again.version, again.manifest.fingerprint) == (
        1,
        whole.manifest.fingerprint,
    )
    with pytest.raises(DatasetExistsError):
        packstore.concat([b, a], str(tmp_path / "whole"))
    with pytest.raises(DatasetExistsError, match="version 1"):
        packstore.pack(source, whole.url, tokenizer, pack_size=256)
