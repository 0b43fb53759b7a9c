"""The front page, help, usage errors, completion: what is read before a command does
anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from small_jobs import write_jsonl, write_tokenizer

import packstore
from packstore.cli import COMMANDS, build_parser, main
from packstore.config import PackConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pak", "'pak'"),
        ("pack", "SOURCE"),
        ("pack a b --pack-sise 3", "--pack-size"),
        ("pack a b --layout shared", "shared_prefix"),
        ("train --lr 1", "--learning-rate"),
        ("train --batch-size 4", "--examples-per-step"),
        ("train --beta=1", "--loss-parameter"),
        ("pack a b --batch-size 4", "examples_per_step"),
        ("export nem a b", "nemo"),
        ("stats a --jsn", "--json"),
        ("verify a --jobs 2x", "--jobs"),
        ("pack a b --field foo", "ROLE=NAME"),
    ],
)
def test_usage_errors_are_one_line(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(text.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith("packstore")
    assert expected in line


def test_the_front_page_has_an_example_of_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert len(COMMANDS) == 16
    for name in COMMANDS:
        assert f"\n  {name} " in page
        assert f"$ packstore {name} " in page
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert f"examples:\n  packstore {name} " in text
        flags = text.partition("options:\n")[2].partition("examples:")[0]
        # The help of a flag is one line, beside it or below it.
        assert not re.search(
            r"^  -.*\S {2,}\S.*\n {24}|^ {24}.*\n {24}", flags, re.M
        ), name


def test_the_defaults_of_append_are_those_of_the_dataset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["append", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "drop repeated records or prompts (default: DATASET's)" in text
    assert "fail if a larger fraction is dropped (default: 0.1)" in text


def test_flags_reach_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "t.json")
    record = {"q": "a", "chosen": " b c", "rejected": " d", "x": "e", "y": 1}
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [record])
    assert main(
        ["pack", "a.jsonl", "b.jsonl", "out", "--tokenizer", "t.json", "--pack-size", "512",
         "--field", "prompt=q", "--carry", "x", "--carry", "y:int64", "--no-append-eos",
         "--template-variable", "enable_thinking=false", "--storage-option", "auto_mkdir=true"]
    ) == 0  # fmt: skip
    manifest = packstore.open("out").manifest
    assert manifest.records.packed == 2
    expected = {
        "pack_size": 512,
        "fields": {"prompt": "q"},
        "carry": ["x:string", "y:int64"],
        "template_variables": {"enable_thinking": False},
        "append_eos": False,
        "add_bos": None,
    }
    assert expected.items() <= manifest.provenance["settings"].items()
    with pytest.raises(SystemExit):
        main(["pack", "--help"])
    flags = re.findall(r"--[\w-]+", capsys.readouterr().out)
    for name, field in PackConfig.__dataclass_fields__.items():
        assert "--" + field.metadata.get("flag", name).replace("_", "-") in flags


def test_storage_options_are_texts_but_for_words_of_json() -> None:
    """A secret of digits stays as it is."""
    options = {"key": "0123", "anon": False, "token": ""}
    flags = [
        f"--storage-option={text}" for text in ("key=0123", "anon=false", "token=")
    ]
    assert (
        build_parser(["verify"]).parse_args(["verify", "a", *flags]).storage_option
        == options
    )
    assert (
        build_parser(["train"]).parse_args(["train", *flags]).storage_options == options
    )


ASK = """
COMP_WORDS=({words}) COMP_CWORD={place}
"$(complete -p packstore | sed 's/.*-F \\([^ ]*\\).*/\\1/')" packstore
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="writes the scripts")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "publish" in script
    assert "ref-logps" in script
    assert "pack-size" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [("packstore pub", "publish"), ("packstore pack --pack-s", "--pack-size")],
)
def test_bash_completes(
    words: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="writes the scripts")
    assert main(["completion", "bash"]) == 0
    ask = ASK.format(words=words, place=len(words.split()) - 1)
    script = capsys.readouterr().out + ask
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )
    assert found in done.stdout.split(), done.stderr


def test_without_shtab_its_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err


OTHER_TRAINER = """\
model_name_or_path: Qwen3
dataset: pairs
finetuning_type: lora
cutoff_len: 2048
per_device_train_batch_size: 4
"""


def test_a_file_of_another_trainer_is_answered_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its names at once, before the settings that it lacks, which it has under
    those names.
    """
    config = tmp_path / "other.yaml"
    config.write_text(OTHER_TRAINER, encoding="utf-8")
    assert main(["train", str(config)]) == 1
    error = capsys.readouterr().err
    unknown = ["model_name_or_path", "dataset", "finetuning_type", "cutoff_len"]
    assert [name for name in unknown if name not in error] == []
    assert "'train_dataset'" in error
    assert "'peft_config'" in error
    assert "per_device_train_batch_size" not in error


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["train", "--bf16", "false"], "--no-bf16"),
        (["train", "--no-bf16", "True"], "--no-bf16"),
        (["pack", "in", "out", "--dry-run", "false"], "--dry-run"),
    ],
)
def test_a_switch_that_is_given_a_value_is_refused(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert remedy in capsys.readouterr().err
