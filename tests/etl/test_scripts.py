"""A function of the script that packs: workers must not run the script to load it."""

from __future__ import annotations

from pathlib import Path

from children import run_python
from small_jobs import trained_tokenizer

import packstore

SCRIPT = """
import packstore

print("begun")


def read_chat(record):
    turns = [{"role": who, "content": text} for who, text in record["said"]]
    return packstore.Chat(messages=turns)


records = [{"said": [["user", f"q {i}"], ["assistant", "a"]]} for i in range(20)]
packstore.pack(
    records, "packed", "t.json", adapter=read_chat, chat_template="chatml", num_workers=2
)
"""


def test_a_script_with_an_adapter_runs_once(tmp_path: Path) -> None:
    trained_tokenizer(["q a user assistant"]).save(str(tmp_path / "t.json"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1
    assert packstore.open(tmp_path / "packed").manifest.totals.examples == 20
