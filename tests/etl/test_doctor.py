"""Doctor sees what training would suffer from, and counts duplicates as packing leaves them out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer

import packstore
from packstore import doctor

PAIR = {"prompt": "Say yes.\n", "chosen": "Yes.", "rejected": "No."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that merges across the end of a prompt, and knows no marker of ChatML."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained_tokenizer(["abab abcabc bcbc"] * 9, vocab_size=280).save(str(path))
    return path


def findings(records: Any, tokenizer: Path, **settings: Any) -> dict[str, Any]:
    return {f.check: f for f in doctor(records, tokenizer, **settings).findings}


@pytest.mark.parametrize("dedup", ["prompt", "pair"])
def test_duplicates_are_those_that_dedup_leaves_out(
    tokenizer: Path, tmp_path: Path, dedup: str
) -> None:
    """Also of prompts whose last token depends on what follows, and of equal tokens."""
    draw = random.Random(0)
    texts = ["ab", "abc", "abab", "ca", "bcb", "cc"]
    records = [
        {"prompt": draw.choice(texts) + draw.choice(["", "a"]),
         "chosen": draw.choice(texts), "rejected": draw.choice(texts) + "x"}
        for _ in range(300)
    ]  # fmt: skip
    records.append({"prompt": "a", "chosen": "bab", "rejected": "bax"})
    records.append({"prompt": "ab", "chosen": "ab", "rejected": "ax"})
    packed = packstore.pack(
        records, tmp_path / "out", tokenizer, pack_size=64, dedup=dedup, max_drop_rate=1.0
    )
    check, reason = {
        "prompt": ("duplicate_prompts", "duplicate_prompt"),
        "pair": ("duplicate_records", "duplicate_pair"),
    }[dedup]
    assert findings(records, tokenizer)[check].records == packed.manifest.records.dropped[reason]


def test_rewards_against_the_sides(tokenizer: Path) -> None:
    rewards = {"chosen_reward": 1, "rejected_reward": 4}
    fair = {"chosen_reward": 2, "rejected_reward": 2}
    found = findings([PAIR | {"rejected": "Nay."}, PAIR | rewards, PAIR | fair], tokenizer)
    assert found["reward_reversed"].records == 1
    assert found["reward_reversed"].level == "problem"
    assert "item 2" in found["reward_reversed"].examples[0]


@pytest.mark.parametrize(
    "empty",
    [
        {"prompt": "", "chosen": "Yes.", "rejected": "No."},
        {"prompt": " \n", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "", "response": "Yes."},
        {"prompt": [1], "chosen": [2, 4], "rejected": [3, 4]},
        {
            "prompt": [{"role": "user", "content": " "}],
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        },
    ],
)
def test_empty_prompts(tokenizer: Path, empty: dict[str, Any]) -> None:
    full = json.loads(json.dumps(empty).replace('""', '"Say."').replace('" "', '"Say."'))
    if isinstance(empty["prompt"], list) and empty["prompt"][0] == 1:
        full, empty = empty, empty | {"prompt": []}
    full["prompt"] = "Say yes.\n" if full["prompt"] == " \n" else full["prompt"]
    settings = {"chat_template": "plain"}
    found = findings([full, empty], tokenizer, **settings)
    assert found["empty_prompt"].records == 1
    assert "item 2" in found["empty_prompt"].examples[0]
    assert "empty_prompt" not in findings([full], tokenizer, **settings)


def test_prompts_glued_to_answers(tokenizer: Path) -> None:
    glued = [
        {"prompt": "Who sang on Broadway?", "chosen": "Many did.", "rejected": " None."},
        {"prompt": "Say", "response": "yes"},
    ]
    apart = [
        {"prompt": "Who?", "chosen": " Many.", "rejected": "\nNone."},
        {"prompt": "Who?\n", "chosen": "Many.", "rejected": "None."},
        {"prompt": "谁？", "chosen": "很多。", "rejected": "没有。"},
        {"prompt": "<|assistant|>", "chosen": "Many.", "rejected": "None."},
    ]
    for record in glued:
        assert findings([record], tokenizer)["glued_prompt"].records == 1
    assert "glued_prompt" not in findings(apart, tokenizer)


CHAT = {
    "messages": [
        {"role": "user", "content": "Say yes."},
        {"role": "assistant", "content": "Yes."},
    ]
}


def test_markers_that_are_no_tokens(tokenizer: Path) -> None:
    found = findings([CHAT, CHAT], tokenizer, chat_template="chatml")
    assert found["marker_no_token"].records == 2
    assert found["marker_no_token"].level == "problem"
    assert "<|im_start|>" in found["marker_no_token"].examples[0]
    assert "marker_no_token" not in findings([CHAT], tokenizer, chat_template="plain")
    assert "marker_no_token" not in findings([PAIR], tokenizer, chat_template="chatml")


def test_every_place_is_told_as_the_reader_tells_it(tokenizer: Path, tmp_path: Path) -> None:
    """Lines of a file are lines in every row of the table."""
    source = tmp_path / "pairs.jsonl"
    empty = {**PAIR, "chosen": ""}
    lines = [json.dumps(r) for r in (PAIR, PAIR, empty, {**PAIR, "prompt": ""})]
    source.write_text("\n\n".join(lines) + "\n")
    found = findings(source, tokenizer)
    assert found["duplicate_records"].examples == (f"{source}, line 3",)
    assert found["empty_side"].examples[0].startswith(f"{source}, line 5")
    assert found["empty_prompt"].examples == (f"{source}, line 7",)
