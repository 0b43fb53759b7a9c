"""`packstore completion`: what bash completes with it, and that each shell gets a script."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from packstore.cli import main
from packstore.cli.completion import SHELLS

ASK = """
COMP_WORDS=({words}) COMP_CWORD={place}
"$(complete -p packstore | sed 's/.*-F \\([^ ]*\\).*/\\1/')" packstore
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="writes the scripts")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "publish" in script
    assert "ref-logps" in script
    assert "pack-size" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "found"), [("packstore pub", "publish"), ("packstore pack --pack-s", "--pack-size")]
)
def test_bash_completes(words: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="writes the scripts")
    assert main(["completion", "bash"]) == 0
    ask = ASK.format(words=words, place=len(words.split()) - 1)
    script = capsys.readouterr().out + ask
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, encoding="utf-8", check=False, timeout=60
    )
    assert found in done.stdout.split(), done.stderr


def test_without_shtab_its_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
