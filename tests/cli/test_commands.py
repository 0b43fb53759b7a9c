"""The commands as a user meets them: what they print, and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import trained_tokenizer, write_jsonl

from packstore.cli import COMMANDS, main, parser
from packstore.config import PackConfig

PAIRS = [
    {"prompt": f"What is {i} and {i}?", "chosen": f"It is {2 * i}.", "rejected": "No idea."}
    for i in range(30)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained_tokenizer(["What is it? No idea."]).save(str(path))
    return path


@pytest.fixture
def dataset(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    source = tmp_path / "pairs.jsonl"
    write_jsonl(source, PAIRS)
    out = tmp_path / "packed"
    code = main(["pack", str(source), str(out), "--tokenizer", str(tokenizer), "--pack-size=128"])
    assert code == 0
    capsys.readouterr()
    return out


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def test_inspect(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "inspect", str(dataset))
    for text in (
        "kind",
        "preference (K = 2)",
        "fill rate",
        "records",
        "read",
        "provenance",
        "sha256",
    ):
        assert text in out
    manifest = json.loads(output(capsys, "inspect", str(dataset), "--json"))
    assert manifest["records"]["read"] == 30


def test_show_marks_what_is_supervised(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "show", str(dataset), "--count", "100")
    for i in (0, 29):
        assert f"What is {i} and {i}?⟦It is {2 * i}.</s>⟧" in out
    assert out.count("⟦No idea.</s>⟧") == 30
    assert "chosen" in out
    assert "rejected" in out
    ids = output(capsys, "show", str(dataset), "--ids")
    assert "What" not in ids
    assert "⟦" in ids


def test_show_a_shared_prefix(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = dataset.with_name("shared")
    output(capsys, "pack", str(dataset), str(shared), "--layout", "shared_prefix")
    out = output(capsys, "show", str(shared), "--count", "100")
    assert "shared with the first segment" in out
    assert out.count("What is") == 30


def test_show_refuses(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(dataset), "--pack", "99999"]) == 1
    assert "--pack must lie in 0.." in capsys.readouterr().err
    other = tmp_path / "tokenizer.json"
    other.write_text(
        '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
    )
    assert main(["show", str(dataset), "--tokenizer", str(other)]) == 1
    assert "must be the tokenizer that" in capsys.readouterr().err


def test_every_setting_is_a_flag_with_its_default_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["pack", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, field in PackConfig.__dataclass_fields__.items():
        flag = "--" + field.metadata.get("flag", name).replace("_", "-")
        assert flag in text, flag
    assert "(default: 8192)" in text


@pytest.mark.parametrize("command", COMMANDS.names())
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"packstore {command} " in capsys.readouterr().out


def test_flags_reach_the_settings() -> None:
    from packstore.cli.settings import read_settings

    args = parser().parse_args(
        ["pack", "a", "b", "c", "--pack-size", "512", "--field", "prompt=q", "--carry", "x",
         "--carry", "y:int64", "--no-append-eos", "--max-drop-rate", "0.1"]
    )  # fmt: skip
    assert args.places == ["a", "b", "c"]
    assert read_settings(args, PackConfig) == {
        "pack_size": 512,
        "fields": {"prompt": "q"},
        "carry": ("x", "y:int64"),
        "append_eos": False,
        "max_drop_rate": 0.1,
    }


def test_as_a_module_and_into_a_closed_pipe(dataset: Path) -> None:
    command = f"{sys.executable} -m packstore show {dataset} --count 9 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_unexpected_error_is_one_line_too(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("packstore.io.dataset.dataset.open", fail)
    assert main(["inspect", str(dataset)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("packstore: internal error: 'ZeroDivisionError: division by zero'.")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(dataset), "--debug"])
