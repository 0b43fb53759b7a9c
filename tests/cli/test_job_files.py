"""Packing jobs: files of settings, dry runs, standard input, and stores of input and
output.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import write_jsonl, write_tokenizer

import packstore
from packstore.cli import main
from packstore.config.job import read_yaml, to_yaml

RECORDS = [
    {"question": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."}
    for i in range(20)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "pairs.jsonl", RECORDS)
    write_tokenizer(tmp_path / "t.json")
    return tmp_path


def job(**changes: Any) -> str:
    """Writes a job file; returns its name."""
    settings = {
        "source": ["pairs.jsonl"],
        "out": "packed",
        "tokenizer": "t.json",
        "fields": {"prompt": "question"},
        "pack_size": 64,
        "max_drop_rate": 1e-1,
    }
    Path("job.yaml").write_text(
        yaml.safe_dump({**settings, **changes}), encoding="utf-8"
    )
    return "job.yaml"


def test_a_job_file_is_the_same_job_as_flags(folder: Path) -> None:
    assert main(["pack", "--config", job()]) == 0
    flags = ["--tokenizer", "t.json", "--field", "prompt=question", "--pack-size", "64"]
    assert main(["pack", "pairs.jsonl", "other", *flags]) == 0
    one, other = packstore.open("packed"), packstore.open("other")
    assert one.manifest.fingerprint == other.manifest.fingerprint


def test_flags_override_the_file(folder: Path) -> None:
    assert (
        main(["pack", "--config", job(), "pairs.jsonl", "mine", "--pack-size", "128"])
        == 0
    )
    assert packstore.open("mine").manifest.pack_size == 128
    assert not Path("packed").exists()


def test_the_same_job_goes_to_another_place(folder: Path, capsys: Any) -> None:
    assert main(["pack", "--config", job(), "--out", "elsewhere"]) == 0
    assert Path("elsewhere").exists()
    assert not Path("packed").exists()
    with pytest.raises(SystemExit):
        main(["pack", "--config", job(), "pairs.jsonl", "mine", "--out", "elsewhere"])
    assert "OUT" in capsys.readouterr().err


def test_the_config_of_a_dataset_makes_it_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["pack", "--config", job(), "--layout", "shared_prefix", "--seed", "7"])
        == 0
    )
    capsys.readouterr()
    assert main(["inspect", "packed", "--as-config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    Path("again.yaml").write_text(
        yaml.safe_dump({**settings, "out": "again"}), encoding="utf-8"
    )
    assert main(["pack", "--config", "again.yaml"]) == 0
    one, again = packstore.open("packed"), packstore.open("again")
    assert one.manifest.fingerprint == again.manifest.fingerprint
    assert [s.sha256 for s in one.manifest.shards] == [
        s.sha256 for s in again.manifest.shards
    ]


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    "shown", ["both/{}", "{}", "."]
)  # from the folder around both, and so on
def test_the_config_of_a_part_makes_both_parts_again(
    part: str,
    shown: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job in the folder of one part would put two more parts inside that dataset."""
    places = {
        "source": [str(folder / "pairs.jsonl")],
        "tokenizer": str(folder / "t.json"),
    }
    config = job(**places, out="both", validation_fraction=0.3)
    assert main(["pack", "--config", config]) == 0
    before = packstore.open(f"both/{part}").manifest.fingerprint
    files = sorted(Path("both").rglob("*"))
    monkeypatch.chdir({"both/{}": folder, "{}": "both", ".": f"both/{part}"}[shown])
    capsys.readouterr()
    assert main(["inspect", shown.format(part), "--as-config"]) == 0
    printed = folder / "again.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")

    assert main(["pack", "--config", str(printed)]) == 0
    assert sorted((folder / "both").rglob("*")) == [folder / path for path in files]
    elsewhere = {
        **yaml.safe_load(printed.read_text(encoding="utf-8")),
        "out": str(folder / "new"),
    }
    printed.write_text(yaml.safe_dump(elsewhere), encoding="utf-8")
    assert main(["pack", "--config", str(printed)]) == 0
    assert packstore.open(str(folder / "new" / part)).manifest.fingerprint == before


def test_the_config_of_a_renamed_part_leaves_its_place_open(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "--config", job(out="both", validation_fraction=0.3)]) == 0
    Path("both/train").rename("kept-part")
    capsys.readouterr()
    assert main(["inspect", "kept-part", "--as-config"]) == 0
    assert "out" not in yaml.safe_load(capsys.readouterr().out)


def test_the_config_of_a_repacked_dataset_packs_that_dataset(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "--config", job()]) == 0
    assert main(["pack", "packed", "smaller", "--pack-size", "48"]) == 0
    capsys.readouterr()
    assert main(["inspect", "smaller", "--as-config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    Path("again.yaml").write_text(
        yaml.safe_dump({**settings, "out": "again"}), encoding="utf-8"
    )
    assert main(["pack", "--config", "again.yaml"]) == 0
    one, again = packstore.open("smaller"), packstore.open("again")
    assert one.manifest.fingerprint == again.manifest.fingerprint


def test_a_dataset_that_several_jobs_made_has_no_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "--config", job()]) == 0
    write_jsonl(
        folder / "more.jsonl", [{**r, "question": "More? "} for r in RECORDS[:5]]
    )
    assert main(["append", "packed", "more.jsonl", "--tokenizer", "t.json"]) == 0
    capsys.readouterr()
    assert main(["inspect", "packed", "--as-config"]) == 1
    assert "append" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["pack", "--config", "/dev/zero"],
        ["train", "/dev/zero"],
    ],
)
def test_a_file_of_settings_without_end_is_refused(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("the system has no /dev/zero")
    Path("zero.yaml").symlink_to("/dev/zero")
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "zero" in told
    assert "bytes" in told
    assert "internal error" not in told


BOMB = "".join(
    f"{n}: &{n} [{', '.join(9 * ['*' + m])}]\n" for m, n in pairwise("abcdefghij")
)
YAML_MISTAKES = {  # a file -> its error, which shows nothing of it but the place
    "a: b\nstorage_options: {secret: SECRET, key: }: x": "line 2, column 41: it must "
    "be YAML",
    "storage_options:\n  secret: *SECRET": "line 2, column 11: it must be YAML without "
    "aliases",
    "a: &SECRET 1\nb: *SECRET": "line 2, column 4",
    "storage_options: {secret: !SECRET x}": "line 1, column 27",
    "storage_options: {secret: %SECRET}": "found character … that cannot start any "
    "token",
    'storage_options: {secret: "SECRET': "found unexpected end of stream",
    "\tstorage_options: SECRET": r"found character '\t' that cannot start any token",
    "seed: 1\nseed: 2": "line 2, column 1: it must be YAML without aliases, and name "
    "each",
    "storage_options: {a: SECRET, a: SECRET}": "line 1, column 30",
    "storage_options:SECRET": "it must hold settings, name: value; found a text",
    "storage_options: [SECRET]": "storage_options: it must be name: value; found a "
    "list",
    "source: {a: 'http://u:SECRET@h'}": "source: it must be a path, glob or URL, or a "
    "list of",
    "out: [SECRET]": "out: it must be a path or URL; found a list",
    "seed: " + "9" * 5000: "it must be YAML without aliases",
    "[" * 1_000: "it must be YAML without aliases",
    "source: a\nout: b\npack_sise: 64": "unknown setting 'pack_sise'",
    'source: a\nout: b\npack_size: "64"': "setting pack_size must be a whole number; "
    "found '64'",
    "storage_options: {1: 2}": "job.yaml, storage_options: it must be name: value",
    "a: &a [1, 1]\n" + BOMB: "line 2, column 8: it must be YAML without aliases",
}


TEXTS = st.text(max_size=9) | st.sampled_from(
    ["on", "1e5", "012", "~", "<<", "2024-01-01", "\u202e"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


@hypothesis.settings(max_examples=50)
@given(st.dictionaries(TEXTS, LEAVES | st.dictionaries(TEXTS, LEAVES)))
def test_settings_are_the_same_after_yaml(settings: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(to_yaml(settings).encode())
        file.flush()
        assert read_yaml(file.name) == settings


def test_words_that_are_no_json_values_are_text(folder: Path) -> None:
    """A key of digits is no octal number, and the setting `on` no truth value."""
    words = ["0123456", "12:30:45", "2024-01-01", "yes", "off", "0x1F", "1_000"]
    Path("job.yaml").write_text(
        "on:\n" + "".join(f"  {word}: {word}\n" for word in words), encoding="utf-8"
    )
    assert read_yaml("job.yaml") == {"on": {word: word for word in words}}


@pytest.mark.parametrize(("text", "expected"), YAML_MISTAKES.items(), ids=lambda _: "")
def test_a_mistake_in_yaml_shows_no_secret(
    text: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(text, encoding="utf-8")
    assert main(["pack", "--config", "job.yaml"]) == 1
    told = capsys.readouterr().err
    assert expected in told
    assert "SECRET" not in told
    assert "internal error" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        "pack a b --storage-option SECRET",
        "pack a b --source-storage-option =SECRET",
        "train --storage-option SECRET",
        "verify a --storage-options key=SECRET",
        "verify a --storage-option key=a secret=SECRET",
        "verify a --storage-option retry_attempts=SECRET",
        "verify a --storage-option x={SECRET",
        "train numbers.yaml",
        "verify http:/u:SECRET@h/x",
        "verify a http://u:SECRET@h/x",
    ],
)
def test_a_mistake_on_the_command_line_shows_no_secret(
    arguments: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("numbers.yaml").write_text(
        "storage_options: {secret: [SECRET]}\nmodel: m\ntrain_dataset: d\noutput_dir: "
        "o",
        encoding="utf-8",
    )
    try:
        code = main(arguments.split())
    except SystemExit as error:
        code = int(str(error.code))
    assert code in (1, 2)
    told = capsys.readouterr().err
    assert "error: " in told
    assert "SECRET" not in told


def test_a_dry_run_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name for p in folder.iterdir()} | {"job.yaml"}
    assert main(["pack", "--config", job(), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["diagnosis"]["records"] == 20
    assert (found["estimate"]["pack_size"], found["estimate"]["examples"]) == (64, 20)
    assert {p.name for p in folder.iterdir()} == before
    main(["pack", "--config", job()])
    assert found["estimate"]["packs"] == len(packstore.open("packed"))


def test_a_dry_run_finds_what_would_stop_the_job(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(
        folder / "pairs.jsonl", RECORDS[:3] + 2 * [{**RECORDS[0], "rejected": ""}]
    )
    assert main(["pack", "--config", job(), "--dry-run"]) == 1
    assert "max_drop_rate" in capsys.readouterr().out
    assert main(["pack", "--config", job(max_drop_rate=0.5)]) == 0
    capsys.readouterr()
    assert main(["pack", "--config", job(max_drop_rate=0.5), "--dry-run"]) == 0
    assert "version 1" in capsys.readouterr().out


@pytest.mark.parametrize("validation_fraction", [0.0, 0.3])
@pytest.mark.parametrize(
    "change", ["none", "input", "settings", "append", "one_missing", "overwrite"]
)
def test_a_dry_run_compares_a_dataset_as_the_job_does(
    change: str,
    validation_fraction: float,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has the exit code of the job, which refuses a dataset of another one."""
    settings: dict[str, Any] = {"validation_fraction": validation_fraction}
    assert main(["pack", "--config", job(**settings)]) == 0
    if change in ("input", "overwrite"):
        write_jsonl(folder / "pairs.jsonl", RECORDS[:15])
    if change == "settings":
        settings["pack_size"] = 128
    if change == "append":
        write_jsonl(folder / "new.jsonl", RECORDS[:1])
        assert main(["append", "packed", "new.jsonl", "--tokenizer", "t.json"]) == 0
    if change == "one_missing":
        shutil.rmtree(folder / "packed" / ("train" if validation_fraction else ""))
    command = ["pack", "--config", job(**settings)]
    if change == "overwrite":
        command.append("--overwrite")
    capsys.readouterr()

    expected_code = 1 if change in ("input", "settings", "append") else 0
    assert main([*command, "--dry-run", "--json"]) == expected_code
    findings = json.loads(capsys.readouterr().out)["findings"]
    problems = [finding for finding in findings if finding["level"] == "problem"]
    assert main([*command, "--quiet"]) == expected_code
    error = capsys.readouterr().err
    assert len(problems) == expected_code
    for problem in problems:
        assert problem["check"] == "version"
        assert problem["text"] in error
    is_empty = change == "one_missing" and not validation_fraction
    datasets = [
        finding["text"] for finding in findings if finding["check"] == "dataset"
    ]
    assert ("none here yet" in datasets) == is_empty


def test_a_dry_run_says_that_standard_input_is_not_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert main(["pack", "--config", job()]) == 0
    data = (folder / "pairs.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    command = ["pack", "--config", job(source="-"), "--dry-run", "--json"]
    capsys.readouterr()
    assert main(command) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (level,) = [f["level"] for f in findings if f["check"] == "version"]
    assert level == "remark"


def test_a_dry_run_names_what_reads_the_records(folder: Path, capsys: Any) -> None:
    assert main(["pack", "--config", job(), "--dry-run"]) == 0
    assert "20 read by packstore's own field names" in capsys.readouterr().out


def test_a_dry_run_looks_at_the_records_of_the_job(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts, what is too long, and token ids, which need no tokenizer; what stops it
    counts.
    """
    odd: list[dict[str, Any]] = [
        {"question": ""},
        {"chosen": "word " * 90},
        {"chosen": None},
    ]
    write_jsonl(
        folder / "pairs.jsonl", [*RECORDS, *(RECORDS[0] | more for more in odd)]
    )
    assert main(["pack", "--config", job(), "--dry-run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    records = {f["check"]: f["records"] for f in found["diagnosis"]["findings"]}
    assert (
        records.items()
        >= {"empty_prompt": 1, "overlong": 1, "missing_field": 1}.items()
    )
    assert (found["estimate"]["examples"], found["estimate"]["dropped"]) == (21, 2)
    assert "missing_field" in found["findings"][-1]["text"]
    write_jsonl(folder / "ids.jsonl", [{"prompt": [1], "chosen": [2], "rejected": [3]}])
    assert main(["pack", "ids.jsonl", "out", "--dry-run"]) == 0
    assert "ok      records" in capsys.readouterr().out


def test_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def feed(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    main(["pack", "--config", job()])
    packed, lines = packstore.open("packed"), Path("pairs.jsonl").read_bytes()
    for out, data in {
        "piped": lines,
        "squeezed": gzip.compress(lines),
        "xz": lzma.compress(lines),
    }.items():
        feed(data)
        assert main(["pack", "-", out, "--config", job()]) == 0
        piped = packstore.open(out)
        assert (
            piped.read_packs(0).input_ids.tolist()
            == packed.read_packs(0).input_ids.tolist()
        )
    feed(lines)
    assert (
        main(["estimate", "-", "--tokenizer", "t.json", "--field", "prompt=question"])
        == 0
    )
    feed(b'{"question": "a", "chosen": "b", "rejected": "c"}\n{"question": \n')
    assert main(["pack", "-", "broken", "--config", job()]) == 1
    assert "<standard input>, line 2" in capsys.readouterr().err
    for data, said in {
        b"": "<standard input>: must hold at least one record",
        lzma.compress(lines)[
            :-9
        ]: "<standard input>: must be a complete xz file; found",
    }.items():
        feed(data)
        assert main(["pack", "-", "broken", "--config", job()]) == 1
        assert said in capsys.readouterr().err


def test_source_and_destination_have_options_of_their_own(folder: Path) -> None:
    """A chained file system cannot be opened without the options of its own store."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/jobs/pairs.jsonl", Path("pairs.jsonl").read_bytes())
    settings: dict[str, Any] = {"fields": {"prompt": "question"}, "pack_size": 64}
    source = {"fo": "/jobs", "target_protocol": "memory", "path": "/jobs"}
    dataset = packstore.pack(
        "dir://pairs.jsonl",
        "packed",
        "t.json",
        source_storage_options=source,
        storage_options={"auto_mkdir": True},
        **settings,
    )
    assert dataset.manifest.records.packed == 20
    write_jsonl(folder / "more.jsonl", RECORDS[:3])
    memory.pipe("/jobs/more.jsonl", Path("more.jsonl").read_bytes())
    grown = packstore.append(
        "packed", "dir://more.jsonl", "t.json", source_storage_options=source
    )
    assert grown.manifest.records.packed == 23
