"""``rejects``: every dropped record, whoever reads them, and whole or not there
at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer

import packstore
from packstore.errors import ConfigError, DropRateError

ONE = {"prompt": "What is it? ", "chosen": "It is one.", "rejected": "No idea."}
REASONS = {0: "empty_side", 4: "identical_sides", 8: "missing_field", 12: "wrong_type"}


def record(i: int) -> dict[str, Any]:
    """Records of which a third is dropped, for several reasons."""
    good = {**ONE, "prompt": f"What is {i}? "}
    return {
        0: {**good, "rejected": ""},
        4: {**good, "chosen": good["rejected"]},
        8: {"prompt": good["prompt"], "chosen": "c"},
        12: {**good, "chosen": i},
    }.get(i % 15, good)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["What is it? No idea."])


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Three files; the first line of each is the same."""
    files = {f"{n}.jsonl": range(300 * n, 300 * n + 300) for n in range(3)}
    return [write_jsonl(tmp_path / f, [ONE, *map(record, r)]) for f, r in files.items()]


@pytest.fixture
def pack(
    sources: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> Callable[..., Any]:
    """Packs them into a folder of this name."""
    usual = {"max_drop_rate": 0.9, "on": {"missing_field": "drop"}, "pack_size": 256}

    def run(out: str, **settings: Any) -> packstore.Dataset:
        return packstore.pack(
            sources, tmp_path / out, tokenizer, **{**usual, **settings}
        )

    return run


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(sources: list[str], duplicates: bool = False) -> list[tuple[str, str]]:
    """Place and reason of each record that is dropped, in order."""
    dropped = []
    for n, source in enumerate(sources):
        reasons = {i: REASONS.get((300 * n + i) % 15) for i in range(300)}
        dropped += [(f"{source}, line 1", "duplicate_pair")] * (duplicates and n > 0)
        dropped += [
            (f"{source}, line {i + 2}", reason)
            for i, reason in reasons.items()
            if reason
        ]
    return dropped


def listed(path: Path) -> list[tuple[str, str]]:
    return [(line["place"], line["reason"]) for line in lines(path)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_dropped_record_in_order(
    num_workers: int,
    sources: list[str],
    pack: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "rejects.jsonl"
    with caplog.at_level(logging.WARNING, "packstore"):
        packed = pack("ds", rejects=str(out), num_workers=num_workers, dedup="pair")
    assert listed(out) == expected(sources, duplicates=True)
    place, detail = f"{sources[0]}, line 2", "response 2 of 2 empty"
    assert lines(out)[0] == {"place": place, "reason": "empty_side", "detail": detail}
    assert len(lines(out)) == sum(packed.manifest.records.dropped.values())
    assert (
        f"dropped 60 records: empty_side; the first: {sources[0]}, line 2: "
        in caplog.text
    )
    # It does not decide the bytes, and nothing else is left.
    assert (
        pack("plain", dedup="pair").manifest.fingerprint == packed.manifest.fingerprint
    )
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".jsonl") == [
        "ds",
        "plain",
    ]


@pytest.mark.parametrize("before", [True, False])
def test_partitions_that_are_taken_over(
    before: bool, pack: Callable[..., Any], tmp_path: Path
) -> None:
    """Also where nobody wanted them in the run that was interrupted."""
    settings = {"partitions": 2, "num_workers": 0}
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    pack("a", rejects=str(whole), **settings)

    def stop(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "write" and done == total:  # in the second partition
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(
            "b", progress=stop, **settings, **({"rejects": str(out)} if before else {})
        )
    assert (tmp_path / "b" / "_packstore" / "partitions").is_dir()
    out.unlink(missing_ok=True)
    pack("b", rejects=str(out), **settings)
    assert out.read_bytes() == whole.read_bytes()


def test_a_job_that_drops_too_much_tells_which(
    sources: list[str], pack: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "rejects.jsonl"
    with pytest.raises(DropRateError):
        pack("ds", rejects=str(out), max_drop_rate=0.01)
    assert listed(out) == expected(sources)


def test_anywhere_that_fsspec_reaches(
    sources: list[str], pack: Callable[..., Any]
) -> None:
    pack("ds", rejects="memory://rejects/deep/r.jsonl")
    memory = fsspec.filesystem("memory")
    text = memory.cat_file("/rejects/deep/r.jsonl").decode()
    assert len(text.splitlines()) == len(expected(sources))
    memory.rm("/rejects", recursive=True)


def test_refuses_an_input_and_a_folder(
    sources: list[str], pack: Callable[..., Any], tmp_path: Path
) -> None:
    before = Path(sources[1]).read_bytes()
    (tmp_path / "link").symlink_to(sources[1])
    for place in (sources[1], str(tmp_path / "link"), str(tmp_path)):
        with pytest.raises(ConfigError, match="rejects"):
            pack("ds", rejects=place)
    assert Path(sources[1]).read_bytes() == before
