"""Output for programs: JSON results, JSON log lines, quiet runs, errors of one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_jobs import write_jsonl, write_tokenizer

import packstore
from packstore import cli
from packstore.cli import COMMANDS, main
from packstore.cli._parser import SUMMARIES

RECORDS = [
    {"prompt": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."} for i in range(20)
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
    files = ("pairs.jsonl", "packed", "t.json", "out", "more", "out.npy", "none", "new.jsonl")
    return [str(folder / word) if word in files else word for word in text.split()]


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
        ("doctor pairs.jsonl --tokenizer t.json", {"ok": False, "records": 21}),
        ("export nemo packed out.npy --overwrite", {"format": "nemo"}),
        ("stats packed", {}),
        ("estimate pairs.jsonl --tokenizer t.json", {"kind": "preference"}),
        ("inspect packed", {"kind": "preference"}),
        ("show packed --tokenizer t.json", {"layout": "concat"}),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_results_are_json(
    folder: Path, text: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*command(folder, text), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert expected.items() <= found.items()


def test_the_result_of_a_job_counts_every_record(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*command(folder, "pack pairs.jsonl out --tokenizer t.json --overwrite"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["records"]["read"] == 21
    assert found["records"]["dropped"] == {"empty_side": 1}
    assert found["totals"]["examples"] == 20
    assert packstore.open(found["url"]).version == found["version"]


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "packstore", *command(folder, text)]
    return subprocess.run(words, capture_output=True, encoding="utf-8", check=False)


def test_log_lines_are_json(folder: Path) -> None:
    done = run(folder, "pack pairs.jsonl out --tokenizer t.json --overwrite --log-format json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"level", "message", "time"} <= lines[0].keys()
    assert any(line["message"].startswith("pack: read 21") for line in lines)
    assert any(line["level"] == "warning" and "empty_side" in line["message"] for line in lines)
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
    assert labels == [i if on else -100 for i, on in zip(ids, pack.supervised, strict=True)]
    assert "?" in shown["sequences"][0]["text"]


def test_quiet_leaves_the_result_and_warnings(folder: Path) -> None:
    done = run(folder, "pack pairs.jsonl out --tokenizer t.json --overwrite --quiet")
    assert "empty_side" in done.stderr
    assert "fields used" not in done.stderr
    assert "records packed" in done.stdout
    assert run(folder, "verify packed --quiet").stderr == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pak", "packstore: error: argument COMMAND: invalid choice: 'pak'"),
        ("pack", "packstore pack: error: "),
        ("pack a b --pack-sise 3", "--pack-sise 3. Did you mean --pack-size? See `packstore pack "),
        ("pack a b --layout shared", "Did you mean shared_prefix? See `packstore pack --help`."),
        ("export nem a b", "Did you mean nemo? See `packstore export --help`."),
        ("stats a --jsn", "unrecognized arguments: --jsn. Did you mean --json? See "),
        ("verify a --jobs 2x", "error: --jobs must be a whole number; found '2x'. See "),
        ("pack a b --field foo", "must have the form FIELD=NAME; found 'foo'. See "),
        ("evaluate a --model m --ref-model m", "Did you mean --reference-model? See "),
        ("estimate a --pack-sizes many", "must be whole numbers, comma-separated. See "),
    ],
)
def test_usage_errors_are_one_line(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(text.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert expected in line


def test_the_front_page_has_an_example_of_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    page = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in page
        assert f"$ packstore {name} " in page
    assert sorted(SUMMARIES) == sorted(COMMANDS)


def test_help_of_a_command_begins_with_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words, usage in (
        ("pack", "usage: packstore pack [options] SOURCE … OUT"),
        ("doctor", "usage: packstore doctor --tokenizer PATH [options] SOURCE …"),
        ("export megatron", "usage: packstore export megatron [options] DATASET FOLDER"),
        ("train", "usage: packstore train [options] [CONFIG]"),
    ):
        for line in (["help", *words.split()], [*words.split(), "--help"]):
            with pytest.raises(SystemExit) as caught:
                main(line)
            assert caught.value.code == 0
            assert capsys.readouterr().out.splitlines()[0] == usage


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser, and those of all commands below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from parsers(sub)


def test_the_help_of_every_flag_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = {}
    for parser in parsers(cli.parser()):
        page = parser.format_help().splitlines()
        for action in parser._actions:
            if action.option_strings and action.help:
                text = action.help.replace("%%", "%")
                if not any(line.endswith(text) for line in page):
                    long[f"{parser.prog} {action.option_strings[0]}"] = text
    assert long == {}
