"""Examples at the limit include every truncated one, in each layout; their number is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer, write_jsonl

import packstore
from packstore.pages.packs import PackReader
from packstore.pages.search import Query, search

WORDS = ["one", "two", "three", "four", "five", "six"]
SETTINGS: list[dict[str, Any]] = [
    {"overlong": "truncate_response", "max_length": 60},
    {"overlong": "truncate_response"},
    {"overlong": "truncate_response", "layout": "shared_prefix", "pad_to_multiple": 8},
    {"overlong": "truncate_prompt", "max_length": 60, "layout": "shared_prefix"},
    {"overlong": "truncate_prompt", "pad_to_multiple": 8},
    {"overlong": "drop"},
]


def text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_truncated_examples_are_at_the_limit(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    draw = random.Random(5)
    records: list[dict[str, Any]] = []
    for _ in range(300):
        prompt, answers = text(draw, 30), [text(draw, 60) for _ in range(4)]
        if kind == "preference":
            records.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            records.append({"prompt": prompt, "responses": answers, "scores": [3, 2, 1, 0]})
    source = write_jsonl(tmp_path / "records.jsonl", records)
    tokenizer = tmp_path / "t.json"
    trained_tokenizer([" ".join(WORDS)] * 9).save(str(tokenizer))
    common = {"tokenizer": str(tokenizer), "max_drop_rate": 1.0}
    whole = packstore.pack(source, tmp_path / "whole", pack_size=4096, **common)
    made = packstore.pack(source, tmp_path / "made", pack_size=128, **common, **settings)
    lengths = {
        i: own
        for packs in whole.iter_packs()
        for i, own in zip(
            packs.example_ids.tolist(),
            packs.lengths.reshape(len(packs.example_ids), -1).tolist(),
            strict=True,
        )
    }
    reader = PackReader(made, None)
    found = set()
    truncated = 0
    for number in range(len(reader)):
        pack = reader.read(number)
        at_limit = reader.at_limit(pack).tolist()
        now = pack.lengths.reshape(len(at_limit), -1).tolist()
        for i, own, flag in zip(pack.example_ids.tolist(), now, at_limit, strict=True):
            truncated += own != lengths[i]
            assert flag or own == lengths[i]
            if flag:
                found.add(str(i))
    assert reader.truncated == truncated
    assert (truncated > 20) == (settings["overlong"] != "drop")
    assert len(found) < 300
    hits, first = set(), 0
    while first is not None:
        part = search(reader, Query.of({"limit": "1"}), first)
        hits |= {hit["id"] for hit in part["hits"]}
        first = part["next"]
    assert hits == found


def test_a_repacked_dataset_does_not_know_what_was_truncated(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "one", "chosen": "a", "rejected": "b"}])
    trained_tokenizer(WORDS).save(str(tmp_path / "t.json"))
    first = packstore.pack(source, tmp_path / "first", str(tmp_path / "t.json"), pack_size=64)
    assert PackReader(first, None).truncated == 0
    assert PackReader(packstore.pack(first, tmp_path / "second"), None).truncated is None
