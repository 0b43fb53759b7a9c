from __future__ import annotations

import numpy as np
import pytest

from packstore.config import PackConfig, TokenizeConfig
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer, detect_kind
from packstore.tokenizer.chat.messages import ASSISTANT, HUMAN, split_messages, split_texts
from packstore.tokenizer.records.shapes import parse_record
from packstore.tokenizer.refusals import Refused

CONFIG = TokenizeConfig()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def parts(record, kind="preference", config=CONFIG):
    found = parse_record(record, kind, config)
    as_list = lambda v: v.tolist() if isinstance(v, np.ndarray) else v  # noqa: E731
    return as_list(found.prompt), [as_list(r) for r in found.responses], found.rewards


CHAT = {"chosen": [user("p"), assistant("c")], "rejected": [user("p"), assistant("r")]}

GOOD = {
    "text": ({"prompt": "p", "chosen": "c", "rejected": "r"}, ("p", ["c", "r"], [1.0, 0.0])),
    "nemo": (
        {
            "prompt": "p",
            "chosen_response": "c",
            "rejected_response": "r",
            "chosen_reward": 3,
            "rejected_reward": 1,
        },
        ("p", ["c", "r"], [3.0, 1.0]),
    ),
    "null means absent": (
        {"prompt": None, **CHAT, "rejected_reward": None},
        ([user("p")], [[assistant("c")], [assistant("r")]], [1.0, 0.0]),
    ),
    "message prompt": (
        {"prompt": [user("p")], "chosen": "c", "rejected": "r"},
        ([user("p")], [[assistant("c")], [assistant("r")]], [1.0, 0.0]),
    ),
    "message responses": (
        {"prompt": "p", "chosen": [assistant("c")], "rejected": assistant("r")},
        ([user("p")], [[assistant("c")], [assistant("r")]], [1.0, 0.0]),
    ),
    "whole dialogues and their prompt": (
        {
            "prompt": "p",
            "chosen": [user("p"), assistant("c")],
            "rejected": [user("p"), assistant("r")],
        },
        ([user("p")], [[assistant("c")], [assistant("r")]], [1.0, 0.0]),
    ),
    "whole dialogues": (
        CHAT,
        ([user("p")], [[assistant("c")], [assistant("r")]], [1.0, 0.0]),
    ),
    "ids": (
        {"prompt": [1, 2], "chosen": [3], "rejected": []},
        ([1, 2], [[3], []], [1.0, 0.0]),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_shapes(name):
    record, expected = GOOD[name]
    assert parts(record) == expected


OTHER_KINDS = {
    "ranked": ("ranked", {"prompt": "p", "responses": ["a", "b", "c"], "scores": [0, 2.5, 0]}),
    "ranked ids": ("ranked", {"prompt": [1], "responses": [[2], [3]], "scores": [1, 0]}),
    "sft": ("sft", {"messages": [user("p"), assistant("a")]}),
    "share gpt": ("sft", {"conversations": [{"from": "human", "value": "p"}]}),
    "completion": ("sft", {"prompt": "p", "completion": "a"}),
    "sft ids": ("sft", {"input_ids": [1, 2], "labels": [-100, 2]}),
    "preference": ("preference", CHAT),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_kinds_are_detected_and_parsed(name):
    kind, record = OTHER_KINDS[name]
    assert detect_kind(record, CONFIG) == kind
    parse_record(record, kind, CONFIG)


def test_ranked_keeps_order_and_scores():
    record = OTHER_KINDS["ranked"][1]
    assert parts(record, "ranked") == ("p", ["a", "b", "c"], [0.0, 2.5, 0.0])


def test_labels_become_supervision():
    found = parse_record(OTHER_KINDS["sft ids"][1], "sft", CONFIG)
    assert [on.tolist() for on in found.supervised] == [[False, True]]


WHOLE = {"chosen": [1, 2], "rejected": np.array([1, 3])}
IDS = {
    "labels of whole sequences": (
        "preference",
        {**WHOLE, "chosen_labels": [-100, 2], "rejected_labels": [-100, 3], "other": np.ones(2)},
    ),
    "masks": ("sft", {"input_ids": [1, 2], "completion_mask": [0, 1]}),
    "arrays": ("ranked", {"prompt": [1], "responses": np.array([[2], [3]]), "scores": [1, 0]}),
}


@pytest.mark.parametrize("name", IDS)
def test_records_of_ids(rows, name):
    kind, record = IDS[name]
    packed, _ = RecordTokenizer(None, PackConfig(), kind)(rows([record]))
    assert packed.input_ids[:2].tolist() == [1, 2]
    assert packed.supervised[:2].tolist() == [False, True]


def test_fields_by_other_names():
    config = TokenizeConfig(fields={"prompt": "q", "chosen": "better", "rejected": "worse"})
    record = {"q": "p", "better": "c", "worse": "r", "prompt": "no", "chosen": "no"}
    assert detect_kind(record, config) == "preference"
    assert parts(record, config=config)[:2] == ("p", ["c", "r"])


@pytest.mark.parametrize("record", [{"text": "x"}, ["x"], 3, {}])
def test_unknown_kind_names_what_was_found(record):
    with pytest.raises(RecordError, match="it must have chosen and rejected"):
        detect_kind(record, CONFIG)


P = {"prompt": "p", "chosen": "c", "rejected": "r"}
BAD = {
    "no object": ("preference", ["x"], "not_an_object"),
    "no rejected": ("preference", {"prompt": "p", "chosen": "c"}, "missing_field"),
    "null": ("preference", {**P, "rejected": None}, "missing_field"),
    "boolean": ("preference", {**P, "chosen": True}, "wrong_type"),
    "number": ("preference", {**P, "prompt": 3}, "wrong_type"),
    "list of text": ("preference", {**P, "chosen": ["c"]}, "wrong_type"),
    "reward text": ("preference", {**P, "chosen_reward": "1"}, "wrong_type"),
    "reward boolean": ("preference", {**P, "chosen_reward": True}, "wrong_type"),
    "reward nan": ("preference", {**P, "chosen_reward": float("nan")}, "wrong_type"),
    "reward infinite": ("preference", {**P, "rejected_reward": float("inf")}, "wrong_type"),
    "role": ("preference", {**P, "prompt": [{"role": "x", "content": ""}]}, "bad_role"),
    "tools": ("preference", {**P, "prompt": [user("p")], "tools": "{"}, "wrong_type"),
    "ids and text": ("preference", {**P, "prompt": [1, 2]}, "wrong_type"),
    "ids no prompt": ("preference", {"chosen": [1], "rejected": [2]}, "missing_field"),
    "ids negative": ("preference", {"prompt": [1], "chosen": [-1], "rejected": [2]}, "wrong_type"),
    "ids mixed": ("preference", {"prompt": [1], "chosen": [1, "2"], "rejected": [2]}, "wrong_type"),
    "ids nested": (
        "preference",
        {"prompt": [1], "chosen": [1, [2]], "rejected": [2]},
        "wrong_type",
    ),
    "ids floats": (
        "preference",
        {"prompt": [1], "chosen": [1, 2.5], "rejected": [2]},
        "wrong_type",
    ),
    "ids huge": ("preference", {"prompt": [1], "chosen": [1 << 70], "rejected": [2]}, "wrong_type"),
    "one response": ("ranked", {"prompt": "p", "responses": ["a"], "scores": [1]}, "wrong_type"),
    "scores": ("ranked", {"prompt": "p", "responses": ["a", "b"], "scores": [1]}, "wrong_type"),
    "no scores": ("ranked", {"prompt": "p", "responses": ["a", "b"]}, "missing_field"),
    "no prompt": ("ranked", {"responses": ["a", "b"], "scores": [1, 2]}, "missing_field"),
    "labels length": ("sft", {"input_ids": [1, 2], "labels": [1]}, "wrong_type"),
    "labels shifted": ("sft", {"input_ids": [1, 2], "labels": [2, -100]}, "wrong_type"),
    "no labels": ("sft", {"input_ids": [1, 2]}, "missing_field"),
    "no messages": ("sft", {"text": "x"}, "missing_field"),
    "messages text": ("sft", {"messages": "x"}, "wrong_type"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    kind, record, reason = BAD[name]
    with pytest.raises(Refused) as caught:
        parse_record(record, kind, CONFIG)
    assert caught.value.reason == reason


def dialogue(*turns):
    return "".join((HUMAN, ASSISTANT)[i % 2] + " " + turn for i, turn in enumerate(turns))


TEXTS = {
    "last turn differs": (
        dialogue("a", "b", "c", "d"),
        dialogue("a", "b", "c", "e"),
        dialogue("a", "b", "c") + ASSISTANT,
    ),
    "parts before the last turn": (
        dialogue("a", "b", "c", "d"),
        dialogue("a", "x", "y", "z"),
        dialogue("a") + ASSISTANT,
    ),
    "a human turn differs": (
        dialogue("a", "b", "c", "d"),
        dialogue("a", "b", "x", "d"),
        dialogue("a") + ASSISTANT,
    ),
    "one is longer": (
        dialogue("a", "b", "c", "d"),
        dialogue("a", "b"),
        dialogue("a") + ASSISTANT,
    ),
    "empty answer": (dialogue("a") + ASSISTANT, dialogue("a", "b"), dialogue("a") + ASSISTANT),
    "same": (dialogue("a", "b"), dialogue("a", "b"), dialogue("a") + ASSISTANT),
    "plain words": ("Q: what? yes it is", "Q: what? yellow", "Q: what?"),
    "ends at a word": ("one two", "one two three", "one two"),
    "line breaks stay": ("Q\nA: x", "Q\nA: y", "Q\nA:"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_common_text(name):
    a, b, prompt = TEXTS[name]
    assert split_texts([a, b]) == (prompt, [a.removeprefix(prompt), b.removeprefix(prompt)])
    assert split_texts([b, a]) == (prompt, [b.removeprefix(prompt), a.removeprefix(prompt)])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("abc", "xyz"),
        ("abc", "abd"),
        ("", "a"),
        (dialogue("a", "b"), dialogue("x", "y")),
    ],
)
def test_nothing_in_common(a, b):
    with pytest.raises(Refused) as caught:
        split_texts([a, b])
    assert caught.value.reason == "no_common_prompt"


def test_common_messages():
    u, a, b = user("u"), assistant("a"), assistant("b")
    assert split_messages([[u, a, u, a], [u, a, u, b]]) == ([u, a, u], [[a], [b]])
    assert split_messages([[u, a, u, a], [u, a]]) == ([u], [[a, u, a], [a]])
    assert split_messages([[u, a, u, a], [u, a, user("x"), a]]) == (
        [u],
        [[a, u, a], [a, user("x"), a]],
    )
    for pair in ([[a], [b]], [[u, a], [user("x"), a]], [[u], [u]]):
        with pytest.raises(Refused):
            split_messages(pair)


def test_published_dialogues_split_as_the_explicit_prompts(records):
    """All 2,312 pairs, the 5 that part before their last turn and 4 empty responses among them."""
    raw, explicit = records("pairs/hh_harmless_raw.jsonl.gz"), records("pairs/hh_harmless.jsonl.gz")
    assert len(raw) == len(explicit) == 2312
    for a, b in zip(raw, explicit, strict=True):
        found = parse_record(a, "preference", CONFIG)
        assert (found.prompt, found.responses) == (b["prompt"], [b["chosen"], b["rejected"]])
