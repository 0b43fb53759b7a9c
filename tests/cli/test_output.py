"""Output that is no terminal: the same whatever the terminal, the locale and the paths
are.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import trained_tokenizer, write_jsonl

from packstore.cli import _messages, main

LONG = "a-folder-whose-name-is-longer-than-any-cell-of-a-table-would-be-if-it-were-folded/[b]"
"""Its last part looks like markup."""

RECORDS = [
    {"prompt": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."}
    for i in range(20)
]
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
"""A locale without Unicode."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, records with an empty response, and datasets of both
    layouts.
    """
    folder = tmp_path_factory.mktemp("output") / LONG
    folder.mkdir(parents=True)
    source = write_jsonl(
        folder / "pairs.jsonl", [*RECORDS, {**RECORDS[0], "rejected": ""}]
    )
    trained_tokenizer(["Question Answer No."]).save(str(folder / "t.json"))
    packed = str(folder / "packed")
    tokenizer = ["--tokenizer", str(folder / "t.json")]
    assert main(["pack", source, packed, *tokenizer, "--layout", "concat"]) == 0
    assert (
        main(["pack", packed, str(folder / "shared"), "--layout", "shared_prefix"]) == 0
    )
    same_words = json.loads((folder / "t.json").read_text(encoding="utf-8"))
    same_words["model"]["merges"] = []
    (folder / "same_words.json").write_text(json.dumps(same_words), encoding="utf-8")
    other = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "other.json").write_text(
        json.dumps({"version": "1.0", "model": other}), encoding="utf-8"
    )
    return folder


TABLE = [
    (
        "pack {0}/pairs.jsonl {0}/new --tokenizer {0}/t.json --dry-run",
        0,
        ["{0}/pairs.jsonl, line 21: resp", "  packs  steps  dropped", "ok      write "],
    ),
    ("pack {0}/packed {0}/again --overwrite", 0, ["preference dataset {0}/again\n"]),
    (
        "inspect {0}/packed",
        0,
        [" {0}/pairs.jsonl ", "preference (K = 2)", "dropped: empty_side"],
    ),
    ("stats {0}/packed", 0, ["dataset {0}/packed\n", "sequence length", "median"]),
    ("show {0}/packed", 0, ["{0}/pairs.jsonl, line 7 · rejected · reward 0 · tokens "]),
    ("show {0}/packed", 0, ["Question 3?⟦ Answer 3.</s>⟧", "Question 3?⟦ No.</s>⟧"]),
    ("show {0}/packed --ids", 0, ["supervised text stands in ⟦ ⟧"]),
    ("show {0}/shared", 0, ["shared with sequence 0", "⟦ No.</s>⟧"]),
    ("show {0}/packed --pack 99", 1, ["--pack must lie in 0..0"]),
    ("show {0}/packed --tokenizer {0}/other.json", 1, ["must be the tokenizer that"]),
    (
        "show {0}/packed --tokenizer {0}/same_words.json",
        1,
        ["must be the tokenizer that"],
    ),
    (
        "estimate {0}/pairs.jsonl --tokenizer {0}/t.json",
        0,
        ["  packs  steps  dropped"],
    ),
    ("verify {0}/packed", 0, ["ok: 1 shards, 1 packs, 20 examples"]),
    ("clean {0}/packed", 0, ["nothing to remove"]),
]


@pytest.mark.parametrize("width", ["40", "400"])
@pytest.mark.parametrize(("command", "code", "texts"), TABLE, ids=lambda v: str(v)[:20])
def test_what_commands_print_in_any_width(
    folder: Path,
    command: str,
    code: int,
    texts: list[str],
    width: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main([part.format(folder) for part in command.split()]) == code
    printed = capsys.readouterr()
    for text in texts:
        assert text.format(folder) in printed.out + printed.err


def run(
    folder: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "packstore", *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        check=False,
    )


def test_a_line_for_each_column_that_is_not_read(folder: Path) -> None:
    """Their names and values are those of whoever made the records."""
    columns = {"comment": "a\nfake: b", "odd\nname": 1}
    write_jsonl(folder / "unread.jsonl", [{**RECORDS[0], **columns}])
    done = run(folder, "pack", "unread.jsonl", "unread", "--tokenizer", "t.json")
    assert done.returncode == 0
    lines = done.stderr.decode().splitlines()
    assert sum("comment" in line for line in lines) == 1
    assert sum("odd" in line and "name" in line for line in lines) == 1
    assert not any("comment" in line and "odd" in line for line in lines)
    assert not any(line.startswith(("fake", "name")) for line in lines)


@pytest.mark.parametrize(
    "command",
    [
        "pack pairs.jsonl memory://o --tokenizer t.json",
        "pack pairs.jsonl o --tokenizer t.json --rejects memory://o",
        "pack --config job.yaml",
        "concat packed packed memory://o",
        "export nemo packed memory://o.npy",
        "ref-logps packed memory://o --model m",
    ],
)
def test_output_that_would_end_with_the_process(
    folder: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program's own arguments, not those of a call, say whose process it is."""
    job = "source: pairs.jsonl\nout: memory://o\ntokenizer: t.json\n"
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["packstore", *command.split()])
    assert main() == 1
    assert "store in memory" in capsys.readouterr().err


@pytest.mark.slow
def test_names_beyond_the_locale(folder: Path) -> None:
    here = os.fsencode(folder)
    records = [{"问": r["prompt"], "source": "甲", **r} for r in RECORDS]
    for record in records:
        del record["prompt"]
    os.replace(
        write_jsonl(folder / "source.jsonl", records), here + "/数据.jsonl".encode()
    )
    os.link(folder / "t.json", here + "/分词.json".encode())
    written = ["--tokenizer", "分词.json", "--field", "prompt=问", "--carry", "source"]
    options = [
        os.fsdecode(text.encode()) for text in written
    ]  # as this test's locale has them
    source, out, missing = (
        os.fsdecode(f"{n}".encode()) for n in ("数据.jsonl", "果", "无.jsonl")
    )
    done = run(folder, "pack", source, out, *options, **PLAIN)
    assert done.returncode == 0, done.stderr.decode()
    assert "preference dataset 果" in done.stdout.decode()
    shown = run(folder, "inspect", out, **PLAIN).stdout.decode()
    for text in (" 数据.jsonl ", " 分词.json ", " source:string "):
        assert text in shown
    wrong = run(folder, "pack", missing, "o", *options, **PLAIN)
    assert wrong.stderr.decode().startswith("packstore: error: 无.jsonl: must exist")
    shown = run(folder, "show", out, "--ids", PYTHONIOENCODING="latin-1").stdout.decode(
        "latin-1"
    )
    assert r"supervised text stands in \u27e6 \u27e7" in shown


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_terminated_command_says_so(number: signal.Signals) -> None:
    code = (
        "import os, signal, packstore.io.dataset.dataset as d\n"
        "def stop(*_, **__):\n"
        f"    os.kill(os.getpid(), signal.{number.name})\n"
        "d.open = stop\n"
        "from packstore.cli import main\n"
        "main(['inspect', 'nothing'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 128 + number
    assert done.stderr.decode() == "packstore: terminated\n"


def test_an_interrupt_while_the_command_is_loaded() -> None:
    code = (
        "import os, signal, sys, packstore.cli as cli\n"
        "cli.build_parser = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(['inspect', 'nothing']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"packstore: interrupted\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("show packed --ids >&-", b""),
        ("show packed --ids 2>&-", b""),
        (
            "pack - out --tokenizer t.json <&-",
            b"<standard input>: must hold at least one record",
        ),
        (
            "inspect packed --json >/dev/full",
            b"error: standard output: must accept all output",
        ),
    ],
)
def test_streams_that_are_closed_or_full(
    folder: Path, command: str, said: bytes
) -> None:
    command = f"{sys.executable} -m packstore {command}"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == (1 if said else 0)
    assert said in done.stderr
    assert b"defect" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_into_a_closed_pipe(folder: Path) -> None:
    command = f"{sys.executable} -m packstore show packed --count 9 | head -n 1"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_unexpected_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(
        "packstore.io.dataset.dataset.open", fail
    )  # a defect cannot be asked for
    assert main(["inspect", "any"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "packstore: internal error: 'ZeroDivisionError: division by zero'."
    )
    assert main(["inspect", "any", "--debug"]) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_a_log_has_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says no more of the total than is known."""
    now = 0.0
    monkeypatch.setattr(_messages.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "packstore")
    args = argparse.Namespace(log_format="text", quiet=False)
    with _messages.show_progress("pack", args) as report:
        for stage, totals in {"compare": [900, 1100, 1000], "read": [1000]}.items():
            begun = now
            while now < begun + 200:
                done = round((now - begun) * 5)
                report(stage, done, totals[done % len(totals)], "records")
                now += 1
            report(stage, 1000, 1000, "records")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * (1 + 3 + 1)
    first, minute, *_ = lines
    assert first == "pack: compare (pass 1 of 2) 25 of about 1,100 records, 5/s"
    assert minute.startswith(
        "pack: compare (pass 1 of 2) 325 of about 1,100 records, 5/s, 0:02:"
    )
    assert lines[4] == "pack: compare (pass 1 of 2) 1,000 records, 5/s"
    assert (
        lines[6] == "pack: read (pass 2 of 2) 325 of 1,000 records, 5/s, 0:02:15 left"
    )


def test_clients_of_stores_do_not_announce_their_settings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With AWS_ENDPOINT_URL, botocore would log its endpoint in every call."""
    caplog.set_level(logging.INFO)
    main(["inspect", "nothing"])
    for name in ("botocore.configprovider", "aiobotocore.client", "s3fs", "gcsfs"):
        library = logging.getLogger(name)
        assert not library.isEnabledFor(logging.INFO)
        assert library.isEnabledFor(logging.WARNING)


def test_a_warning_says_that_it_is_one(folder: Path, tmp_path: Path) -> None:
    """It has the form of an error, but the command goes on."""
    out = str(tmp_path / "out")
    source = "pairs.jsonl"
    done = run(folder, "pack", source, source, out, "--tokenizer", "t.json")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.decode().splitlines()
    assert [line for line in lines if line.startswith("warning: ") and "repeat" in line]
    assert [line for line in lines if not line.startswith("warning: ")]
