"""Doctor sees what training would suffer from, and counts duplicates as packing leaves
them out.
"""

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
    """A tokenizer that merges across the end of a prompt, and knows no marker of
    ChatML.
    """
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
        records,
        tmp_path / "out",
        tokenizer,
        pack_size=64,
        dedup=dedup,
        max_drop_rate=1.0,
    )
    check, reason = {
        "prompt": ("duplicate_prompts", "duplicate_prompt"),
        "pair": ("duplicate_records", "duplicate_pair"),
    }[dedup]
    assert (
        findings(records, tokenizer)[check].records
        == packed.manifest.records.dropped[reason]
    )


DIALOGUE = {
    "prompt": [{"role": "user", "content": "Say yes."}],
    "chosen": [{"role": "assistant", "content": "Yes."}],
    "rejected": [{"role": "assistant", "content": "No."}],
}
BLANK = DIALOGUE | {"prompt": [{"role": "user", "content": " "}]}
CUT_OFF = DIALOGUE | {"chosen": [{"role": "assistant", "content": "Yes, b"}]}
GOES_ON = DIALOGUE | {"chosen": [{"role": "assistant", "content": "Yes!"}]}
ENDING = (
    "{% for m in messages %}{{ m.content }}{% if m.content[-1] != 'b' %}</s>\n{% "
    "endif %}"
)
ENDING += "{% if m.content[-1] == '!' %}-{% endif %}"
ENDING += "{% endfor %}"
IDS = {"prompt": [1], "chosen": [2, 4], "rejected": [3, 4]}
RATED = PAIR | {"chosen_reward": 2, "rejected_reward": 2}
REVERSED = PAIR | {"chosen_reward": 1, "rejected_reward": 4}


def answer(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


@pytest.mark.parametrize(
    ("check", "good", "bad", "template"),
    [
        ("reward_reversed", RATED, REVERSED, None),
        (
            "reward_rounded",
            RATED,
            PAIR | {"chosen_reward": 1e9 + 1, "rejected_reward": 1e9},
            None,
        ),
        ("empty_prompt", PAIR, PAIR | {"prompt": ""}, None),
        ("empty_prompt", PAIR, PAIR | {"prompt": " \n"}, None),
        ("empty_prompt", answer("Say. ", "Yes."), answer("", "Yes."), None),
        ("empty_prompt", IDS, IDS | {"prompt": []}, None),
        ("empty_prompt", DIALOGUE, BLANK, "plain"),
        (
            "empty_prompt",
            {"messages": [{"role": "user", "content": "Q"}, *DIALOGUE["chosen"]]},
            {"messages": [*BLANK["prompt"], *DIALOGUE["chosen"]]},
            "plain",
        ),
        ("glued_prompt", answer("Who?", " Many."), answer("Who?", "Many."), None),
        ("glued_prompt", answer("Who?\n", "Many."), answer("Say", "yes"), None),
        ("glued_prompt", answer("谁？", "很多。"), answer("Say", "yes"), None),
        ("glued_prompt", answer("<|assistant|>", "Many."), answer("Say", "yes"), None),
        ("glued_prompt", PAIR, PAIR | {"prompt": "Who?", "chosen": " Many."}, None),
        ("marker_no_token", PAIR, DIALOGUE, "chatml"),
        ("no_eos", DIALOGUE, CUT_OFF, ENDING),
        ("no_eos", DIALOGUE, GOES_ON, ENDING),
    ],
)
def test_records_that_read_wrongly(
    check: str, good: Any, bad: Any, template: str | None, tokenizer: Path
) -> None:
    """The second of two is named, and the first is well."""
    finding = findings([good, bad], tokenizer, chat_template=template)[check]
    assert finding.records == 1
    assert finding.level == (
        "remark" if check in ("empty_prompt", "glued_prompt") else "problem"
    )
    assert "item 2" in finding.examples[0]
    assert check not in findings([good], tokenizer, chat_template=template)


def test_every_place_is_told_as_the_reader_tells_it(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Lines of a file are lines in every row of the table."""
    source = tmp_path / "pairs.jsonl"
    empty = {**PAIR, "chosen": ""}
    lines = [json.dumps(r) for r in (PAIR, PAIR, empty, {**PAIR, "prompt": ""})]
    source.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    found = findings(source, tokenizer)
    assert found["duplicate_records"].examples == (f"{source}, line 3",)
    assert found["empty_side"].examples[0].startswith(f"{source}, line 5")
    assert found["empty_prompt"].examples == (f"{source}, line 7",)


def test_the_forms_of_the_records_are_named(tokenizer: Path) -> None:
    alike = {"instruction": "Say yes.", "input": "Now.", "output": "Yes."}
    records = [
        {"prompt": "Say yes.", "response": "Yes."},
        alike,
        alike | {"output": "Sure."},
    ]
    found = doctor(records, tokenizer, chat_template="plain")
    assert found.forms == {"alpaca": 2, "none": 1}


def test_a_carried_column_is_not_reported_as_unread(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither before the work nor after it, nor by a dry run."""
    carried = {**PAIR, "source": "web"}
    records = [carried, {**carried, "note": "n"}] * 2
    checks = findings(records, tokenizer, carry=["source"])
    assert "field_not_used: note" in checks
    assert "field_not_used: source" not in checks

    caplog.set_level("INFO", "packstore")
    for name, inputs in {"later": records, "first": records[1:]}.items():
        caplog.clear()
        packstore.pack(inputs, tmp_path / name, tokenizer, carry=["source"])
        lines = [line for line in caplog.text.splitlines() if "not read" in line]
        assert any("note" in line for line in lines), name
        assert not any("source" in line for line in lines), name
