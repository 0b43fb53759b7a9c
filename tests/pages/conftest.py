"""A dataset whose texts attack browsers, terminals and readers, and one of harmless
texts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_jobs import trained_tokenizer, write_jsonl

import packstore
from packstore import Dataset

ATTACK = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=document.title='owned'>"
    "<!--<script>\u2028\u2029\x1b]0;owned\x07\u202egnp.exe\u2066\u200b&lt;b&gt;'\"` 語🙂é"
)


def pack(folder: Path, text: str, **settings: object) -> Dataset:
    """Packs forty pairs with `text` in each prompt and response."""
    tokenizer = folder / "tokenizer.json"
    trained_tokenizer(["a word and another word"] * 9).save(str(tokenizer))
    records = [
        {
            "prompt": f"prompt {i} {text}",
            "chosen": f"good {i} {text}",
            "rejected": f"bad {text * (i % 3)}!",
            "chosen_reward": i / 8,
            "rejected_reward": -1,
            "note": text,
        }
        for i in range(40)
    ]
    sources = [
        write_jsonl(folder / f"{n}.jsonl", records[n == "b" :: 2]) for n in ("a", "b")
    ]
    made: Dataset = packstore.pack(
        sources,
        folder / "made",
        str(tokenizer),
        pack_size=4096,
        row_group_tokens=8192,
        carry=("note",),
        **settings,
    )
    return made


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return pack(tmp_path_factory.mktemp("hostile"), ATTACK, layout="shared_prefix")


@pytest.fixture(scope="session")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return pack(tmp_path_factory.mktemp("harmless"), "quiet " * 40)
