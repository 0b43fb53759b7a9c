"""A night without records: an error, or nothing, as the caller says."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from small_jobs import pack, pairs, write_jsonl

import packstore
from packstore import errors
from packstore.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pack(tmp_path / "ds", pairs(30))
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n", encoding="utf-8")
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    write_jsonl(tmp_path / "new.jsonl", pairs(5, 30))
    return tmp_path


NOTHING = ["no/*.jsonl", "empty", "blank.jsonl", "none.jsonl.gz", "list.json"]


@pytest.mark.parametrize("source", [*NOTHING, [], io.BytesIO(b""), [NOTHING]])
def test_nothing_is_appended(source: Any, folder: Path) -> None:
    if isinstance(source, str):
        source = str(folder / source)
    elif source == [NOTHING]:
        source = [str(folder / name) for name in NOTHING]
    before = packstore.open(folder / "ds")
    with pytest.raises(errors.InputError):
        packstore.append(before, source)
    same = packstore.append(before, source, allow_empty=True)
    assert same.version == packstore.open(folder / "ds").version == 1
    assert packstore.clean(str(folder / "ds")).leftovers == []


def test_patterns_without_a_file_are_left_out(folder: Path) -> None:
    sources = [str(folder / name) for name in ("no/*.jsonl", "new.jsonl", "empty")]
    with pytest.raises(errors.InputError, match=r"no/\*"):
        packstore.append(folder / "ds", sources)
    grown = packstore.append(folder / "ds", sources, allow_empty=True)
    assert grown.manifest.pairs == 35


def test_files_of_an_earlier_append_are_refused_beside_new_ones(folder: Path) -> None:
    """As a pattern over all nights would match them: their records would count twice."""
    write_jsonl(folder / "newer.jsonl", pairs(7, 35))
    both = str(folder / "new*.jsonl")
    packstore.append(folder / "ds", folder / "new.jsonl")
    with pytest.raises(errors.DatasetExistsError, match=r"new\.jsonl") as refusal:
        packstore.append(folder / "ds", both)
    assert "newer.jsonl" not in str(refusal.value)
    assert packstore.open(folder / "ds").manifest.pairs == 35

    grown = packstore.append(folder / "ds", both, dedup="pair")
    assert (grown.version, grown.manifest.pairs) == (3, 42)


def test_empty_files_of_several_nights_are_not_the_same_records(folder: Path) -> None:
    for night in (1, 2):
        write_jsonl(folder / f"night-{night}.jsonl", pairs(4, 100 * night))
        sources = [str(folder / f"night-{night}.jsonl"), str(folder / "none.jsonl.gz")]
        grown = packstore.append(folder / "ds", sources)
    assert grown.manifest.pairs == 38


@pytest.mark.parametrize("source", ["typo.jsonl", "no/folder", "new.txt"])
def test_a_wrong_path_is_an_error(source: str, folder: Path) -> None:
    (folder / "new.txt").write_text("{}", encoding="utf-8")
    with pytest.raises(errors.InputError, match=source):
        packstore.append(folder / "ds", str(folder / source), allow_empty=True)


def test_records_that_are_all_dropped_are_not_nothing(folder: Path) -> None:
    broken = folder / "broken.jsonl"
    broken.write_text('{"prompt": \n', encoding="utf-8")
    for answers in ({}, {"not_json": "drop"}):
        with pytest.raises(errors.PackstoreError):
            packstore.append(folder / "ds", str(broken), allow_empty=True, on=answers)


def test_json_says_how_much_was_appended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for source in ("no/*.jsonl", "new.jsonl", "new.jsonl"):
        command = ["append", str(folder / "ds"), str(folder / source)]
        assert main([*command, "--allow-empty", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        results.append((result["version"], result["records_appended"]))
    assert results == [(1, 0), (2, 5), (2, 0)]
    assert main(["append", str(folder / "ds"), str(folder / "no/*.jsonl")]) == 1


def test_a_dry_run_appends_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sources in (["new.jsonl", "no/*.jsonl"], ["no/*.jsonl"]):
        command = ["append", str(folder / "ds"), "--allow-empty", "--dry-run", "--json"]
        assert main([*command, *(str(folder / name) for name in sources)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["ok"] is True
        if "new.jsonl" in sources:
            assert result["diagnosis"]["records"] == 5
            assert result["estimate"]["pack_size"] == 64
            assert any("version 1" in found["text"] for found in result["findings"])
    bad = write_jsonl(folder / "bad.jsonl", [{"prompt": [5], "chosen": [6]}])
    assert main(["append", str(folder / "ds"), bad, "--dry-run"]) == 1
    capsys.readouterr()
    assert packstore.open(folder / "ds").version == 1
    assert packstore.clean(str(folder / "ds")).leftovers == []


def test_a_dry_run_of_appending_a_dataset(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = pack(folder / "more", pairs(9, 30))
    for source in (more.url, str(folder / "new.jsonl")):
        assert main(["append", str(folder / "ds"), source, "--dry-run", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        num_records = 9 if source == more.url else 5
        assert result["diagnosis"]["records"] == num_records
        assert len(result["findings"]) > 1
    assert packstore.open(folder / "ds").version == 1
