"""A page of bad inputs: each a one-line error that names the place, exit code 1, and no
dataset.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import trained_tokenizer

import packstore
from packstore.cli import main

GOOD = {
    "prompt": "What is two and two?",
    "chosen": "It is four.",
    "rejected": "It is five.",
}
LINES = [
    json.dumps({**GOOD, "prompt": f"{GOOD['prompt']} ({i})"}) + "\n" for i in range(40)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a good input, a tokenizer, and a dataset that is already
    there.
    """
    monkeypatch.chdir(tmp_path)
    trained_tokenizer(LINES).save("tokenizer.json")
    Path("good.jsonl").write_text("".join(LINES), encoding="utf-8")
    return tmp_path


def one(**fields: object) -> bytes:
    return json.dumps({**GOOD, **fields}).encode() + b"\n"


FIRST = LINES[0].encode()

CASES: dict[str, tuple[bytes | None, list[str], list[str]]] = {
    # Content of the file, arguments, parts of the message; files that cannot be read:
    # io/inputs.
    "missing file": (None, ["nowhere.jsonl"], ["nowhere.jsonl"]),
    "missing field": (
        FIRST + b'{"prompt": "p", "chosen": "c"}\n',
        ["bad.jsonl"],
        ["bad.jsonl, line 2", "rejected"],
    ),
    "wrong type everywhere": (
        one(prompt=7),
        ["bad.jsonl"],
        ["bad.jsonl, line 1", "wrong_type"],
    ),
    "invalid UTF-8": (
        FIRST + b'{"prompt": "\xff"}\n',
        ["bad.jsonl"],
        ["bad.jsonl, line 2"],
    ),
    "unknown strategy": (
        None,
        ["good.jsonl", "--strategy", "pol"],
        ["unknown strategy 'pol'; choose one of: pool, ", "Did you mean 'pool'?"],
    ),
    "pack size smaller than every pair": (
        None,
        ["good.jsonl", "--pack-size", "8"],
        ["40 of 40 dropped: 40 overlong", "Raise pack_size"],
    ),
    "a share below one percent": (
        FIRST + one(rejected=GOOD["chosen"]),
        ["bad.jsonl", "--max-drop-rate", "0.0001"],
        ["at most 0.01% of the records may be dropped"],
    ),
    "unknown store": (None, ["nope://bucket/x.jsonl"], ["nope://bucket/x.jsonl"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, arguments, texts = CASES[case]
    if content is not None:
        Path(arguments[0]).write_bytes(content)
    code = main(
        ["pack", arguments[0], "out", *arguments[1:], "--tokenizer", "tokenizer.json"]
    )
    check(code, capsys.readouterr().err, texts)
    assert not Path("out").exists()


def check(code: int, err: str, texts: list[str]) -> None:
    assert code == 1, err
    (line,) = [x for x in err.splitlines() if x.startswith("packstore: ")]
    assert line.startswith("packstore: error: "), line
    for text in texts:
        assert text in line, line
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (".", "a dataset needs a folder without its inputs; found good.jsonl"),
        ("mine", "raw.csv"),
    ],
)
def test_a_folder_that_holds_other_files(
    out: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`clean` and readers of the folder could not tell them from the dataset's."""
    Path("mine/data").mkdir(parents=True)
    Path("mine/data/raw.csv").write_text("a", encoding="utf-8")
    before = sorted(folder.rglob("*"))
    code = main(["pack", "good.jsonl", out, "--tokenizer", "tokenizer.json"])
    check(code, capsys.readouterr().err, [out, said, "Name an"])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", ["inspect", "show", "verify", "stats"])
def test_no_dataset(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([command, "nowhere"])
    check(code, capsys.readouterr().err, ["nowhere", "must be a dataset"])


WITHOUT = """
import sys
for name in ("accelerate", "huggingface_hub", "peft", "safetensors", "torch", "transformers"):
    sys.modules[name] = None
import packstore
from packstore.cli import main
print([main(command.split()) for command in sys.argv[1:]])
"""


def test_a_command_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    commands = ["train --model m --train-dataset d --output-dir o"]
    commands += ["evaluate d --model m", "ref-logps d r --model m", "publish d me/d"]
    packstore.pack(
        [{"prompt": [1], "chosen": [2], "rejected": [3]}], str(tmp_path / "d")
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *commands],
        cwd=tmp_path, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.stdout == f"{[1] * 4}\n"
    for line, command in zip(done.stderr.splitlines(), commands, strict=True):
        assert re.fullmatch(
            rf"packstore: error: packstore {command.split()[0]} needs the package '\w+', which "
            r"is not installed. Run: pip install 'packstore\[train\]'", line,
        )  # fmt: skip
