"""A page of bad inputs: each a one-line error that names the place, exit code 1, and no dataset."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rights import closed
from small_jobs import trained_tokenizer

from packstore.cli import main

GOOD = {"prompt": "What is two and two?", "chosen": "It is four.", "rejected": "It is five."}
LINES = [json.dumps({**GOOD, "prompt": f"{GOOD['prompt']} ({i})"}) + "\n" for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a good input, a tokenizer, and a dataset that is already there."""
    monkeypatch.chdir(tmp_path)
    trained_tokenizer(LINES).save("tokenizer.json")
    Path("good.jsonl").write_text("".join(LINES), encoding="utf-8")
    return tmp_path


def write(name: str, content: str | bytes) -> Callable[[], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda: Path(name).write_bytes(data) and None  # type: ignore[func-returns-value]


def broken_gzip() -> None:
    lines = LINES.copy()
    lines[16] = '{"prompt": "broken\n'
    Path("bad.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))


def truncated_gzip() -> None:
    data = gzip.compress("".join(LINES).encode())
    Path("bad.jsonl.gz").write_bytes(data[: len(data) // 2])


def dataset_there() -> None:
    assert main(["pack", "good.jsonl", "there", "--tokenizer", "tokenizer.json"]) == 0


def one(**fields: object) -> str:
    return json.dumps({**GOOD, **fields}) + "\n"


def nothing() -> None:
    pass


CASES: dict[str, tuple[Callable[[], None], list[str], list[str]]] = {
    "missing file": (nothing, ["nowhere.jsonl"], ["nowhere.jsonl"]),
    "unknown suffix": (write("bad.docx", "x"), ["bad.docx"], ["bad.docx", ".jsonl"]),
    "missing field": (
        write("bad.jsonl", LINES[0] + json.dumps({"prompt": "p", "chosen": "c"}) + "\n"),
        ["bad.jsonl"],
        ["bad.jsonl, line 2", "rejected"],
    ),
    "wrong type everywhere": (
        write("bad.jsonl", one(prompt=7)),
        ["bad.jsonl"],
        ["bad.jsonl, line 1", "wrong_type"],
    ),
    "broken JSON in a gzip": (broken_gzip, ["bad.jsonl.gz"], ["bad.jsonl.gz, line 17"]),
    "truncated gzip": (truncated_gzip, ["bad.jsonl.gz"], ["bad.jsonl.gz", "compressed"]),
    "invalid UTF-8": (
        write("bad.jsonl", LINES[0].encode() + b'{"prompt": "\xff"}\n'),
        ["bad.jsonl"],
        ["bad.jsonl, line 2"],
    ),
    "empty file": (write("bad.jsonl", ""), ["bad.jsonl"], ["bad.jsonl", "no records"]),
    "garbage parquet": (write("bad.parquet", "PAR1 nope"), ["bad.parquet"], ["bad.parquet"]),
    "unknown strategy": (
        nothing,
        ["good.jsonl", "--strategy", "bestest"],
        ["unknown strategy 'bestest'", "pool"],
    ),
    "no chat template": (
        write("bad.jsonl", one(prompt=[{"role": "user", "content": "hi"}])),
        ["bad.jsonl"],
        ["chat template"],
    ),
    "pack size smaller than every pair": (
        nothing,
        ["good.jsonl", "--pack-size", "8"],
        ["40 of 40 dropped: 40 overlong", "Raise pack_size"],
    ),
    "unknown store": (nothing, ["nope://bucket/x.jsonl"], ["nope://bucket/x.jsonl"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, arguments, texts = CASES[case]
    prepare()
    given = [] if "--tokenizer" in arguments else ["--tokenizer", "tokenizer.json"]
    code = main(["pack", arguments[0], "out", *arguments[1:], *given])
    check(code, capsys.readouterr().err, texts)
    assert not Path("out").exists()


def check(code: int, err: str, texts: list[str]) -> None:
    (line,) = [x for x in err.splitlines() if x.startswith("packstore: ")]
    assert code == 1
    assert line.startswith("packstore: error: "), line
    for text in texts:
        assert text in line, line
    assert "Traceback" not in err


def test_a_dataset_that_is_already_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset_there()
    before = sorted(p.name for p in Path("there").rglob("*"))
    capsys.readouterr()
    code = main(["pack", "good.jsonl", "there", "--tokenizer", "tokenizer.json", "--seed", "1"])
    check(code, capsys.readouterr().err, ["there", "seed", "--overwrite"])
    assert sorted(p.name for p in Path("there").rglob("*")) == before


def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = folder / "locked"
    locked.mkdir()
    dataset_there()
    capsys.readouterr()
    with closed(0o555, locked):
        code = main(["pack", "good.jsonl", "locked/out", "--tokenizer", "tokenizer.json"])
    check(code, capsys.readouterr().err, ["locked/out", "permission denied"])
    assert not any(locked.iterdir())


@pytest.mark.parametrize("command", ["inspect", "show", "verify", "stats"])
def test_no_dataset(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([command, "nowhere"])
    check(code, capsys.readouterr().err, ["nowhere", "must be a dataset"])
