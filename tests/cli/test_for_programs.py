"""Output for programs: JSON results, JSON log lines, quiet runs, errors of one line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from children import run_python
from small_jobs import write_jsonl, write_tokenizer

import packstore
from packstore.cli import COMMANDS, main

RECORDS = [
    {"prompt": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."}
    for i in range(20)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    write_jsonl(folder / "pairs.jsonl", [*RECORDS, {**RECORDS[0], "rejected": ""}])
    write_jsonl(folder / "new.jsonl", RECORDS[:3])
    write_tokenizer(folder / "t.json")
    assert main(command(folder, "pack pairs.jsonl packed --tokenizer t.json")) == 0
    return folder


def command(folder: Path, text: str) -> list[str]:
    """Words of a command; names of files are in `folder`."""
    files = (
        "pairs.jsonl",
        "packed",
        "t.json",
        "out",
        "more",
        "joined",
        "out.npy",
        "none",
        "new.jsonl",
    )
    return [str(folder / word) if word in files else word for word in text.split()]


RESULTS_WITH_A_DATASET = {
    "append": ("append packed new.jsonl --tokenizer t.json", "packed"),
    "clean": ("clean packed", "packed"),
    "concat": ("concat packed packed joined --overwrite", "joined"),
    "estimate": ("estimate packed", "packed"),
    "export": ("export nemo packed out.npy --overwrite", "packed"),
    "inspect": ("inspect packed", "packed"),
    "pack": ("pack pairs.jsonl out --tokenizer t.json --overwrite", "out"),
    "show": ("show packed --tokenizer t.json", "packed"),
    "stats": ("stats packed", "packed"),
    "verify": ("verify packed", "packed"),
}
"""Command -> its command line, and the dataset that its result is about."""

RESULTS_ELSEWHERE = {"evaluate", "publish", "ref-logps", "train"}
"""Commands whose results are tested with the model or the hub that they need."""

NO_RESULT = {"completion", "view"}


def test_every_command_is_in_a_table() -> None:
    assert RESULTS_WITH_A_DATASET.keys() | RESULTS_ELSEWHERE | NO_RESULT == set(
        COMMANDS
    )


@pytest.mark.parametrize("name", RESULTS_WITH_A_DATASET)
def test_results_name_the_dataset_and_its_version(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, place = RESULTS_WITH_A_DATASET[name]
    assert main([*command(folder, text), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    dataset = packstore.open(folder / place)
    assert (result["url"], result["version"]) == (dataset.url, dataset.version)


@pytest.mark.parametrize("name", ["inspect", "show", "stats", "verify"])
def test_results_name_an_older_version(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / "pairs.jsonl")
    tokenizer = str(folder / "t.json")
    for _ in range(2):
        packstore.pack(source, folder / "twice", tokenizer, overwrite=True)
    assert main([name, str(folder / "twice"), "--version", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pack pairs.jsonl out --tokenizer t.json --overwrite",
            {"kind": "preference", "shards": 1},
        ),
        ("append packed new.jsonl --tokenizer t.json", {"version": 2}),
        ("concat packed packed more --overwrite", {"version": 1, "pack_size": 8192}),
        ("verify packed", {"ok": True, "problems": []}),
        ("clean packed", {"deleted": False, "leftovers": []}),
        ("pack pairs.jsonl none --tokenizer t.json --dry-run", {"ok": True}),
        ("export nemo packed out.npy --overwrite", {"format": "nemo"}),
        ("stats packed", {}),
        ("estimate pairs.jsonl --tokenizer t.json", {"kind": "preference"}),
        ("inspect packed", {"kind": "preference"}),
        ("show packed --tokenizer t.json", {"layout": "shared_prefix"}),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_results_are_json(
    folder: Path,
    text: str,
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([*command(folder, text), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert expected.items() <= found.items()


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "packstore", *command(folder, text))


def test_log_lines_are_json(folder: Path) -> None:
    done = run(
        folder, "pack pairs.jsonl out --tokenizer t.json --overwrite --log-format json"
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"level", "message", "time"} <= lines[0].keys()
    assert any(line["message"].startswith("pack: read 21") for line in lines)
    assert any(
        line["level"] == "warning" and "empty_side" in line["message"] for line in lines
    )
    failed = run(folder, "pack none out --tokenizer t.json --log-format json")
    (line,) = map(json.loads, failed.stderr.splitlines())
    assert (line["level"], failed.returncode) == ("error", 1)
    assert failed.stdout == ""


def test_packs_as_json_have_what_a_loader_reads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["show", *command(folder, "packed --tokenizer t.json --json --count 2")])
    (shown, *_) = json.loads(capsys.readouterr().out)["packs"]
    pack = packstore.open(str(folder / "packed")).read_packs(0).row(0)
    ids = [i for own in shown["sequences"] for i in own["input_ids"]]
    labels = [i for own in shown["sequences"] for i in own["labels"]]
    assert ids == pack.input_ids.tolist()
    assert labels == [
        i if on else -100 for i, on in zip(ids, pack.supervised, strict=True)
    ]
    assert "?" in shown["sequences"][0]["text"]


def test_quiet_leaves_the_result_and_warnings(folder: Path) -> None:
    done = run(folder, "pack pairs.jsonl out --tokenizer t.json --overwrite --quiet")
    assert "empty_side" in done.stderr
    assert "fields used" not in done.stderr
    assert "records packed" in done.stdout
    assert run(folder, "verify packed --quiet").stderr == ""
