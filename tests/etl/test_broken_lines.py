"""Lines that are no JSON: an error by default, counted and listed if they are to be
left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_jobs import pairs

import packstore
from packstore.cli import main
from packstore.errors import InputError, RecordError
from packstore.etl.reports import doctor, dry_run

BROKEN = [
    b'{"prompt": [5], "chosen": [6]',  # cut
    b"{'prompt': [5], 'chosen': [6], 'rejected': [7]}",  # Python's
    b'{"prompt": [5]} {"prompt": [5]}',
    b'{"prompt": "\xff\xfe"}',  # no UTF-8
    b"plain words",
    b"\xef\xbb\xbf{}",
]
"""Lines that are no JSON, in UTF-8."""

SETTINGS: dict[str, Any] = {"pack_size": 64, "max_drop_rate": 1}
DROP = {**SETTINGS, "on": {"not_json": "drop"}}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines, records as JSON, to a file."""

    def go(name: str, *lines: Any) -> str:
        path = tmp_path / name
        texts = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        data = b"".join(text + b"\n" for text in texts)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return go


@pytest.mark.parametrize(
    ("good", "line", "num_workers"),
    [
        *((good, line, 0) for good in (0, 1) for line in BROKEN[:5]),
        *((good, BROKEN[3], 2) for good in (0, 1, 12_000)),
        (12_000, BROKEN[0], 0),
    ],
)
def test_the_first_broken_line_stops_a_job(
    good: int, line: bytes, num_workers: int, write: Write, tmp_path: Path
) -> None:
    """In the first block and in later ones; also as the first line of all."""
    source = write("in.jsonl", *pairs(good), line, *pairs(2), b"{")
    with pytest.raises(RecordError, match=rf"in\.jsonl, line {good + 1}: ") as caught:
        packstore.pack(source, f"{tmp_path}/out", num_workers=num_workers, **SETTINGS)
    assert "not_json" in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_broken_lines_are_left_out_counted_and_listed(
    name: str, num_workers: int, write: Write, tmp_path: Path
) -> None:
    """By the numbers of the lines of the file, blank ones among them."""
    lines = [
        pairs(1)[0],
        b"",
        *BROKEN[:3],
        b"  ",
        pairs(2)[1],
        *BROKEN[3:],
        pairs(3)[2],
    ]
    source, rejects = write(name, *lines), tmp_path / "rejects.jsonl"
    dataset = packstore.pack(
        source, f"{tmp_path}/out", num_workers=num_workers, rejects=str(rejects), **DROP
    )
    counts = dataset.manifest.records
    assert (counts.read, counts.packed, counts.dropped) == (9, 3, {"not_json": 6})
    listed = [
        json.loads(line) for line in rejects.read_text(encoding="utf-8").splitlines()
    ]
    assert [entry["reason"] for entry in listed] == ["not_json"] * 6
    numbers = [int(entry["place"].rpartition(" ")[2]) for entry in listed]
    assert numbers == [i for i, line in enumerate(lines, 1) if line in BROKEN]
    assert all(entry["detail"] for entry in listed)
    assert dataset.verify().ok


def test_ids_of_the_other_lines_do_not_change(write: Write, tmp_path: Path) -> None:
    """A record has the id of its line, whatever its neighbours are."""
    records = pairs(3)
    blank = write("blank.jsonl", records[0], {"x": 1}, *records[1:])
    broken = write("broken.jsonl", records[0], BROKEN[0], *records[1:])
    on = {"not_json": "drop", "missing_field": "drop"}
    ids = [
        packstore.scan(
            packstore.pack(path, f"{path}.out", kind="preference", **{**SETTINGS, "on": on})
        ).collect()["example_id"].sort().to_list()
        for path in (blank, broken)
    ]  # fmt: skip
    assert ids[0] == ids[1]


def test_a_broken_first_line_decides_nothing(write: Write, tmp_path: Path) -> None:
    source = write("in.jsonl", BROKEN[0], *pairs(2))
    dataset = packstore.pack(source, f"{tmp_path}/out", **DROP)
    assert (dataset.manifest.kind, dataset.manifest.records.packed) == ("preference", 2)


def test_a_file_of_broken_lines_alone(write: Write, tmp_path: Path) -> None:
    source = write("in.jsonl", *BROKEN)
    with pytest.raises(RecordError, match=r"in\.jsonl, line 1"):
        packstore.pack(source, f"{tmp_path}/out", **DROP)


def test_they_count_against_the_rate_of_drops(write: Write, tmp_path: Path) -> None:
    source = write("in.jsonl", *pairs(3), BROKEN[0])
    with pytest.raises(packstore.errors.DropRateError, match="not_json"):
        packstore.pack(source, f"{tmp_path}/out", **{**DROP, "max_drop_rate": 0.1})


def test_on_the_command_line(write: Write, tmp_path: Path) -> None:
    source, rejects = (
        write("in.jsonl", *pairs(30), BROKEN[0]),
        tmp_path / "rejects.jsonl",
    )
    command = ["pack", source, f"{tmp_path}/out"]
    assert main(command) == 1
    assert main([*command, "--on", "not_json=drop", "--rejects", str(rejects)]) == 0
    assert "line 31" in rejects.read_text(encoding="utf-8")


def test_append_leaves_them_out_as_the_dataset_does(
    write: Write, tmp_path: Path
) -> None:
    dataset = packstore.pack(write("in.jsonl", *pairs(9)), f"{tmp_path}/out", **DROP)
    more = write("more.jsonl", *pairs(3, 9), BROKEN[0])
    appended = packstore.append(dataset, more, max_drop_rate=1)
    assert appended.manifest.records.dropped == {"not_json": 1}


@pytest.mark.parametrize("on", [{}, {"not_json": "drop"}])
def test_a_cut_archive_and_a_broken_array_are_errors(
    on: dict[str, str], write: Write, tmp_path: Path
) -> None:
    """The records behind the break cannot be counted."""
    settings = {**SETTINGS, "on": on}
    cut = Path(write("cut.jsonl.gz", *pairs(2000)))
    cut.write_bytes(cut.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz"):
        packstore.pack(str(cut), f"{tmp_path}/a", **settings)
    array = Path(write("in.json"))
    array.write_text(json.dumps(pairs(4))[:-20], encoding="utf-8")
    with pytest.raises(InputError, match=r"in\.json"):
        packstore.pack(str(array), f"{tmp_path}/b", **settings)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_dry_run_lists_all_of_its_sample(
    has_tokenizer: bool,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Doctor names a few of them, as it reads all records."""
    record: dict[str, Any] = {"prompt": "a", "chosen": "a a", "rejected": "?"}
    if not has_tokenizer:
        record = pairs(1)[0]
    lines = [BROKEN[i % 6] if i % 4 == 3 else record for i in range(80)]
    source = write("in.jsonl", *lines)
    tokenizer = None
    if has_tokenizer:
        from small_jobs import write_tokenizer

        tokenizer = str(write_tokenizer(tmp_path / "t.json"))
    report, findings = dry_run(source, f"{tmp_path}/out", tokenizer, pack_size=64)
    (broken,) = [finding for finding in report.findings if finding.check == "not_json"]
    assert broken.records == 20
    expected = [i for i, line in enumerate(lines, 1) if line in BROKEN]
    numbers = [
        int(place.partition(", line ")[2].partition(":")[0])
        for place in broken.examples
    ]
    assert numbers == expected
    assert not all(finding.ok for finding in findings)  # the job would stop
    flags = ["--tokenizer", tokenizer] if tokenizer else []
    assert main(["pack", source, f"{tmp_path}/out", "--dry-run", *flags]) == 1
    printed = capsys.readouterr().out
    assert all(f"in.jsonl, line {number}:" in printed for number in expected)
    if tokenizer:
        (few,) = [
            f for f in doctor(source, tokenizer).findings if f.check == "not_json"
        ]
        assert (few.records, len(few.examples)) == (20, 3)
