"""``rejects``: every dropped record, whoever reads them, and whole or not there at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer

import packstore
from packstore.errors import ConfigError, DropRateError

ONE = {"prompt": "What is it? ", "chosen": "It is one.", "rejected": "No idea."}
LOOSE = {"max_drop_rate": 0.9, "on": {"missing_field": "drop"}, "pack_size": 256}


def record(i: int) -> dict[str, Any]:
    """Records of which a third is dropped, for several reasons."""
    found = {**ONE, "prompt": f"What is {i}? "}
    return {
        0: {**found, "rejected": ""},
        4: {**found, "chosen": found["rejected"]},
        8: {"prompt": found["prompt"], "chosen": "c"},
        12: {**found, "chosen": i},
    }.get(i % 15, found)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["What is it? No idea."])


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Three files; the last lines of each are a line of the first one."""
    return [
        write_jsonl(
            tmp_path / f"{n}.jsonl", [record(i) for i in range(300 * n, 300 * n + 300)] + [ONE]
        )
        for n in range(3)
    ]


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(sources: list[str]) -> list[tuple[str, str]]:
    """Place and reason of each record that is dropped, in order."""
    reasons = {0: "empty_side", 4: "identical_sides", 8: "missing_field", 12: "wrong_type"}
    found = []
    for n, source in enumerate(sources):
        found += [
            (f"{source}, line {i + 1}", reasons[(300 * n + i) % 15])
            for i in range(300)
            if (300 * n + i) % 15 in reasons
        ]
        found += [(f"{source}, line 301", "duplicate_pair")] * (n > 0)
    return found


def told(path: Path) -> list[tuple[str, str]]:
    return [(line["place"], line["reason"]) for line in read(path)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_dropped_record_in_order(
    num_workers: int,
    sources: list[str],
    tmp_path: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, settings = tmp_path / "rejects.jsonl", {**LOOSE, "dedup": "pair"}
    with caplog.at_level(logging.WARNING, "packstore"):
        packed = packstore.pack(
            sources, str(tmp_path / "ds"), tokenizer, rejects=str(out), num_workers=num_workers,
            **settings,
        )  # fmt: skip
    assert told(out) == expected(sources)
    assert read(out)[0] == {
        "place": f"{sources[0]}, line 1",
        "reason": "empty_side",
        "detail": "response 2 of 2",
    }
    assert len(told(out)) == sum(packed.manifest.records.dropped.values())
    assert f"dropped 60 records: empty_side; the first: {sources[0]}, line 1: " in caplog.text
    # It does not decide the bytes, and nothing else is left.
    plain = packstore.pack(sources, str(tmp_path / "plain"), tokenizer, **settings)
    assert plain.manifest.fingerprint == packed.manifest.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".jsonl") == ["ds", "plain"]


@pytest.mark.parametrize("before", [True, False])
def test_partitions_that_are_taken_over(
    before: bool,
    sources: list[str],
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    """Also where nobody wanted them in the run that was interrupted."""
    settings = {**LOOSE, "partitions": 2, "num_workers": 0}
    first, out = tmp_path / "first.jsonl", tmp_path / "out.jsonl"
    packstore.pack(sources, str(tmp_path / "a"), tokenizer, rejects=str(first), **settings)

    def stop(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "write" and done == total:  # in the second partition
            raise KeyboardInterrupt

    wanted = {"rejects": str(out)} if before else {}
    with pytest.raises(KeyboardInterrupt):
        packstore.pack(sources, tmp_path / "b", tokenizer, progress=stop, **settings, **wanted)
    assert (tmp_path / "b" / "_packstore" / "partitions").is_dir()
    out.unlink(missing_ok=True)
    packstore.pack(sources, str(tmp_path / "b"), tokenizer, **settings, rejects=str(out))
    assert out.read_bytes() == first.read_bytes()


def test_a_job_that_drops_too_much_tells_which(
    sources: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    out = tmp_path / "new" / "rejects.jsonl"
    with pytest.raises(DropRateError):
        packstore.pack(
            sources, str(tmp_path / "ds"), tokenizer, rejects=str(out),
            on={"missing_field": "drop"},
            max_drop_rate=0.01,
        )  # fmt: skip
    assert told(out) == [line for line in expected(sources) if line[1] != "duplicate_pair"]


def test_anywhere_that_fsspec_reaches(
    sources: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = {**LOOSE, "rejects": "memory://rejects/deep/r.jsonl"}
    packstore.pack(sources, str(tmp_path / "ds"), tokenizer, **settings)
    whole = fsspec.filesystem("memory").cat_file("/rejects/deep/r.jsonl").decode()
    assert len(whole.splitlines()) == len(expected(sources)) - 2
    fsspec.filesystem("memory").rm_file("/rejects/deep/r.jsonl")


def test_refuses_an_input_and_a_folder(
    sources: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    before = Path(sources[1]).read_bytes()
    (tmp_path / "link").symlink_to(sources[1])
    for place in (sources[1], str(tmp_path / "link"), str(tmp_path)):
        with pytest.raises(ConfigError, match="must name a file that is no input and no folder"):
            packstore.pack(sources, str(tmp_path / "ds"), tokenizer, rejects=place, **LOOSE)
    assert Path(sources[1]).read_bytes() == before
