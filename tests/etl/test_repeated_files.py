"""Input files with equal bytes: all are packed, and one warning names them."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer

import packstore
from packstore.etl.reports.records import dry_run

PAIRS = [
    {"prompt": f"what comes after {i}?", "chosen": f"{i + 1}", "rejected": f"{i + 2}"}
    for i in range(8)
]

MARK = "repeat the bytes"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["what comes after 0123456789?"], vocab_size=280)


@pytest.fixture
def warnings_of(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Callable[..., list[str]]:
    """Packs files and returns the warnings about repeated ones.

    All records of all files must be packed, and a dry run must report the same.
    """

    def run(files: Sequence[str], num_records: int, **settings: int) -> list[str]:
        out = tmp_path / "out"
        dataset = packstore.pack(files, out, tokenizer, pack_size=64, **settings)
        assert dataset.manifest.records.packed == num_records
        warnings = [text for text in caplog.messages if MARK in text]
        caplog.clear()

        report, _ = dry_run(files, tmp_path / "elsewhere", tokenizer, pack_size=64)
        findings = [
            f"{finding.text}: {', '.join(finding.examples)}"
            for finding in report.findings
            if finding.check == "repeated_files"
        ]
        assert findings == warnings
        return warnings

    return run


def test_equal_files_of_two_folders(
    warnings_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = write_jsonl(tmp_path / "one" / "prefs.jsonl", PAIRS)
    second = write_jsonl(tmp_path / "two" / "prefs.jsonl", PAIRS)
    (warning,) = warnings_of([first, second], 16)
    assert warning.startswith("1 of 2 files")
    assert warning.endswith(f": {second} (as {first})")


def test_a_link_and_a_file_given_twice(
    warnings_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", PAIRS[:5])
    second = write_jsonl(tmp_path / "b.jsonl", PAIRS[5:])
    link = str(tmp_path / "link.jsonl")
    Path(link).symlink_to(first)
    (warning,) = warnings_of([first, second, link, second], 16)
    assert warning.startswith("2 of 4 files")
    assert warning.endswith(f": {link} (as {first}), {second} (as {second})")


def test_files_without_records_and_compressed_copies_are_not_named(
    warnings_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The bytes of a compressed copy differ."""
    plain = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    compressed = f"{plain}.gz"
    Path(compressed).write_bytes(gzip.compress(Path(plain).read_bytes()))
    empty = [write_jsonl(tmp_path / f"empty-{n}.jsonl", []) for n in range(2)]
    assert warnings_of([plain, compressed, *empty], 16) == []


@pytest.mark.parametrize("dedup", ["pair", "prompt"])
def test_no_warning_about_records_that_are_dropped(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, dedup: str
) -> None:
    files = [write_jsonl(tmp_path / f"{n}.jsonl", PAIRS) for n in range(2)]
    out = tmp_path / "out"
    dataset = packstore.pack(files, out, tokenizer, pack_size=64, dedup=dedup)
    assert dataset.manifest.records.packed == len(PAIRS)
    assert MARK not in caplog.text
    assert f"duplicate_{dedup}" in caplog.text


@pytest.mark.parametrize("partitions", [1, 3])
def test_many_files_are_counted_and_three_of_them_named(
    warnings_of: Callable[..., list[str]], tmp_path: Path, partitions: int
) -> None:
    """In the order of the input, in which partitions need not read them."""
    files = [write_jsonl(tmp_path / f"{n:02}.jsonl", PAIRS) for n in range(12)]
    (warning,) = warnings_of(files, 96, partitions=partitions)
    assert warning.startswith("11 of 12 files")
    examples = ", ".join(f"{path} (as {files[0]})" for path in files[1:4])
    assert warning.endswith(f": {examples}")
