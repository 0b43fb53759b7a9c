"""Output that is no terminal: the same whatever the terminal, the locale and the paths are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import write_jsonl

from packstore.cli import main

LONG = "a-folder-whose-name-is-longer-than-any-cell-of-a-table-would-be-if-it-were-folded/[b]"
"""Its last part looks like markup."""

RECORDS = [
    {"prompt": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."} for i in range(20)
]
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0, "é": 1, "?": 2}, "unk_token": "a"},
    "pre_tokenizer": {"type": "Whitespace"},
}
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
"""A locale without Unicode."""


def write(path: Path, records: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, records)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, records with an empty response, and a dataset."""
    folder = tmp_path_factory.mktemp("output") / LONG
    source = write(folder / "pairs.jsonl", [*RECORDS, {**RECORDS[0], "rejected": ""}])
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(TOKENIZER))
    assert main(["pack", str(source), str(folder / "packed"), "--tokenizer", str(tokenizer)]) == 0
    return folder


@pytest.mark.parametrize("width", ["40", "400"])
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("doctor {0}/pairs.jsonl --tokenizer {0}/tokenizer.json", "{0}/pairs.jsonl, line 21: resp"),
        ("pack {0}/packed {0}/again --overwrite", "preference dataset {0}/again\n"),
        ("inspect {0}/packed", " {0}/pairs.jsonl "),
        ("stats {0}/packed", "dataset {0}/packed\n"),
        ("show {0}/packed", "{0}/pairs.jsonl, line 7 · rejected · reward 0 · tokens "),
        ("estimate {0}/pairs.jsonl --tokenizer {0}/tokenizer.json", "  padded  saved  packs "),
    ],
    ids=lambda text: text.split()[0] if " {" in text else "",
)
def test_no_cell_is_folded(
    folder: Path,
    command: str,
    text: str,
    width: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    main([part.format(folder) for part in command.split()])
    assert text.format(folder) in capsys.readouterr().out


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "packstore", *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        check=False,
    )


def test_names_beyond_the_locale(folder: Path) -> None:
    here = os.fsencode(folder)
    records = [{"问": r["prompt"], "来源": "甲", **r} for r in RECORDS]
    for record in records:
        del record["prompt"]
    os.replace(write(folder / "source.jsonl", records), here + "/数据.jsonl".encode())
    os.link(folder / "tokenizer.json", here + "/分词.json".encode())
    written = ["--tokenizer", "分词.json", "--field", "prompt=问", "--carry", "来源"]
    options = [os.fsdecode(text.encode()) for text in written]  # as this test's locale has them
    source, out, missing = (os.fsdecode(f"{n}".encode()) for n in ("数据.jsonl", "果", "无.jsonl"))
    done = run(folder, "pack", source, out, *options, **PLAIN)
    assert done.returncode == 0, done.stderr.decode()
    assert "preference dataset 果" in done.stdout.decode()
    shown = run(folder, "inspect", out, **PLAIN).stdout.decode()
    for text in (" 数据.jsonl ", " 分词.json ", " 来源:string "):
        assert text in shown
    wrong = run(folder, "pack", missing, "o", *options, **PLAIN)
    assert wrong.stderr.decode().startswith("packstore: error: 无.jsonl: must exist")
    shown = run(folder, "show", out, "--ids", PYTHONIOENCODING="latin-1").stdout.decode("latin-1")
    assert r"supervised text stands in \u27e6 \u27e7" in shown


def test_a_terminated_command_says_so() -> None:
    code = (
        "import os, signal, packstore.io.dataset.dataset as d\n"
        "def stop(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "d.open = stop\n"
        "from packstore.cli import main\n"
        "main(['inspect', 'nothing'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.decode() == "packstore: terminated\n"
