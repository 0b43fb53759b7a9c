"""Tokenizer files that attack: refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fuzz_targets import tokenizer_seeds

import packstore
from packstore.errors import PackstoreError, TokenizerError

pytestmark = pytest.mark.usefixtures("no_collector")

GOOD: dict[str, Any] = json.loads(tokenizer_seeds()[0])
STEP = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100}


def edited(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def one_id(token_id: int) -> bytes:
    model = {**GOOD["model"], "vocab": {**GOOD["model"]["vocab"], "h": token_id}}
    return edited(model=model)


def added(ids: list[int], pieces: list[Any]) -> dict[str, Any]:
    """A post-processor that puts these pieces around a text; `pieces[0]` is a list of
    them.
    """
    special = {"id": "[X]", "ids": ids, "tokens": ["h"] * len(ids)}
    template = {
        "type": "TemplateProcessing",
        "single": [*pieces[0], *pieces[1:]],
        "pair": [],
    }
    return {**template, "special_tokens": {"[X]": special}}


SPECIAL = {"SpecialToken": {"id": "[X]", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
FILES = {
    "texts that grow": edited(normalizer={**STEP, "content": "a" * 100_000}),
    "texts that grow step by step": edited(
        normalizer={"type": "Sequence", "normalizers": [STEP] * 20}
    ),
    "ids added to each text": edited(
        post_processor=added([1] * 100, [[SPECIAL] * 100, TEXT])
    ),
    "texts that are repeated": edited(post_processor=added([1], [[TEXT], TEXT, TEXT])),
    "an id beyond 31 bits": one_id(1 << 31),
    "an id that overflows": one_id((1 << 64) - 1),
    "deep": b'{"model": ' + b"[" * 1_000_000,
    "not Unicode": b'{"version": "\xff"}',
    "an unknown model": edited(model={"type": "Python", "call": "os.system"}),
    "merges that do not exist": edited(
        model={**GOOD["model"], "merges": [["zz", "yy"]]}
    ),
}


def use(path: Path) -> None:
    packstore.doctor([{"prompt": "hello", "chosen": "h", "rejected": "o"}] * 9, path)


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(FILES[name])
    with pytest.raises(PackstoreError) as caught:
        use(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", ["[" * 1_000_000, "9" * 100_000, "null", "\0"])
def test_a_settings_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_seeds()[0])
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        use(tmp_path)


def test_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "tokenizer.json"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(TokenizerError, match=path.name):
            use(path)
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(TokenizerError, match="2147483648"):
        use(tmp_path / "large.json")
