"""No text of a dataset commands the terminal: control characters are shown, newlines
stay.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from children import run_python

from packstore.cli import main
from packstore.errors import CONTROL, visible

TITLE, CLIPBOARD, LINK = (
    "\x1b]0;owned\x07",
    "\x1b]52;c;b3duZWQ=\x07",
    "\x1b]8;;http://x\x1b\\",
)
ATTACK = f"{TITLE}{CLIPBOARD}{LINK}\x1b[2J\x9b2J\x9d0;x\x9c\x00\x08\x0b\x0c\r\x7f\u202e\u2066[link=http://x]y"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Colours, which rich puts around text where it writes to a terminal."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose tokens and manifest hold terminal escapes."""
    folder = tmp_path_factory.mktemp("hostile")
    vocab = {"a": 0, ATTACK: 1, "?": 2, "line\nbreak": 3}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    split = {
        "type": "Split",
        "pattern": {"String": "|"},
        "behavior": "Removed",
        "invert": False,
    }
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": split}),
        encoding="utf-8",
    )
    record = {
        "prompt": f"?|{ATTACK}|",
        "chosen": f"{ATTACK}|line\nbreak|a",
        "rejected": f"?|{ATTACK}",
    }
    source = folder / "pairs.jsonl"
    source.write_text(
        "".join(json.dumps({**record, "n": i}) + "\n" for i in range(3)),
        encoding="utf-8",
    )
    made = folder / "made"
    command = [
        "pack",
        str(source),
        str(made),
        "--tokenizer",
        str(tokenizer),
        "--carry",
        "prompt",
    ]
    assert main([*command, "--pack-size", "64", "--dedup", "none"]) == 0
    (made / "data" / "x\nFAKE:well").touch()
    path = made / "_packstore" / "manifest-000001.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest.pop("sha256", None)  # whoever writes a manifest can also write its hash
    manifest |= {"strategy": ATTACK, "pack_order": ATTACK}
    manifest["statistics"]["planning"] = {
        ATTACK: ATTACK,
        "n": [ATTACK, {ATTACK: ATTACK}],
    }
    manifest["records"]["noted"] = {ATTACK: 1}
    provenance = manifest["provenance"]
    provenance["settings"] |= {ATTACK: ATTACK}
    provenance["package_version"] = ATTACK
    provenance["sources"][0]["path"] = ATTACK
    path.write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
@pytest.mark.parametrize(
    "command",
    [
        *(
            "show",
            "show --ids",
            "inspect",
            "inspect --json",
            "inspect --as-config",
            "stats",
            "stats --json",
        ),
        *("verify", "clean", "pack --dry-run"),
    ],
)
def test_no_control_characters_are_printed(
    hostile: Path,
    command: str,
    terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    places = [str(hostile / "made")]
    if command == "pack --dry-run":
        places = [
            str(hostile / "pairs.jsonl"),
            str(hostile / "new"),
            "--tokenizer",
            str(hostile / "tokenizer.json"),
        ]
    main([*command.split(), *places])
    told = capsys.readouterr()
    assert told.out
    plain = STYLE.sub("", told.out + told.err)
    assert CONTROL.findall(plain) == []
    assert "\nFAKE" not in plain
    if command in ("show", "inspect") and not terminal:  # a terminal folds cells
        assert "[link=http://x]y" in plain
    if command == "show":
        assert r"\x1b[2J\x9b2J\x9d0;x\x9c\x00\x08\x0b\x0c\r\x7f" in plain
        assert "line\nbreak" in plain
    if command == "inspect --json":
        assert json.loads(told.out)["strategy"] == ATTACK
    if command == "inspect --as-config":
        assert yaml.safe_load(told.out)["source"] == ATTACK


def test_a_log_line_is_one_line_without_control_characters(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of fields and files are those of whoever made the records."""
    name = re.sub("[/=\0]", "", ATTACK) + "\nFAKE:well"
    spoken = os.fsdecode(name.encode())  # as this test's locale has it
    record = {"prompt": "a|?", "chosen": "a|?", "rejected": "?|a"}
    source = tmp_path / f"{spoken}.jsonl"
    lines = [json.dumps({**record, name: 1}) for _ in range(3)]
    source.write_text(
        "\n".join([*lines, json.dumps({**record, "chosen": "a|" * 99})]),
        encoding="utf-8",
    )
    tokenizer = str(hostile / "tokenizer.json")
    flags = ["--tokenizer", tokenizer, "--pack-size", "64", "--dedup", "none"]
    command = [
        "pack",
        str(source),
        str(tmp_path / "ds"),
        *flags,
        "--max-drop-rate",
        "0.5",
    ]
    told = [
        run_python("-m", "packstore", *command).stderr
    ]  # its log is not the one of pytest
    for more in (
        [f"--{spoken}"],
        ["--config", spoken],
        ["--debug", "--tokenizer", spoken],
    ):
        with suppress(SystemExit):
            main(["pack", str(source), "x", *more])
        told.append(capsys.readouterr().err)
    for text in told:
        assert "FAKE:well" in text
        assert CONTROL.findall(text) == []
        assert "\nFAKE" not in text


def test_visible() -> None:
    assert visible("a\n\tb\x1b\x9b\r\x00\x7f é") == "a\n\tb\\x1b\\x9b\\r\\x00\\x7f é"
    assert visible("a\u202eb\u2069 مر") == "a\\u202eb\\u2069 مر"
