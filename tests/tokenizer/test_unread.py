"""Columns that nothing reads: what stops a job, what does not, and that every remedy
works.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import logging
import random
import re
import shlex
from typing import Any

import pytest

from packstore.cli import main
from packstore.config import PackConfig
from packstore.config.record_fields import SPELLINGS
from packstore.config.remedies import from_shell, spell
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer, Refused
from packstore.tokenizer.records import (
    BAD_WORDS,
    GOOD_WORDS,
    HISTORIES,
    IDS_AND_SOURCES,
    JUDGEMENTS,
    LABELS,
    MEDIA,
    SYSTEM_PROMPTS,
    WEIGHTS,
    Chat,
    adapter_of,
    advise_siblings,
    find_siblings,
    first_values,
    fold,
    names_of,
)
from tests.tokenizer.conftest import TEMPLATE

Q = {"role": "user", "content": "Q"}
A = {"role": "assistant", "content": "x"}
B = {"role": "assistant", "content": "y"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {}}}

RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("sft", {"prompt": "Q", "response": "x"}),
    "chat": ("sft", {"messages": [Q, A]}),
    "ids": ("sft", {"input_ids": [1, 2], "labels": [-100, 2]}),
    "pair": ("preference", {"prompt": "Q", "chosen": "x", "rejected": "y"}),
    "chat pair": ("preference", {"prompt": [Q], "chosen": [A], "rejected": [B]}),
    "id pair": (
        "preference",
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
    ),
    "scored": ("scored", {"prompt": "Q", "responses": ["x", "y"], "scores": [2, 1]}),
}
"""Records in packstore's own names, and their kinds."""

SINGLE = ["text", "chat", "ids"]
COMPARED = ["pair", "chat pair", "scored", "id pair"]
OF_TEXT = ["text", "chat", "pair", "chat pair", "scored"]


@functools.cache
def stage(kind: str, door: str, written: str) -> RecordTokenizer:
    """Return what reads records of a kind with some settings."""
    settings: dict[str, Any] = {"form": "none", **ast.literal_eval(written)}
    adapter = adapter_of(single_answer) if settings.pop("has_adapter", False) else None
    context = from_shell() if door == "shell" else contextlib.nullcontext()
    with context:
        return RecordTokenizer(None, PackConfig.of(**settings), kind, adapter=adapter)


def single_answer(record: dict[str, Any]) -> Chat:
    """Read a prompt and its answer."""
    return Chat(prompt=record["prompt"], response=record["response"])


def refusal_of(
    kind: str, record: dict[str, Any], door: str = "shell", **settings: Any
) -> Refused | None:
    """Return the refusal of a record, or None."""
    try:
        stage(kind, door, repr(settings)).read(record)
    except Refused as refused:
        if refused.reason not in ("unread_field", "unpaired_feedback"):
            raise
        return refused
    return None


def refusal(name: str, extra: dict[str, Any], **settings: Any) -> Refused | None:
    """Return the refusal of a record with further columns, or None."""
    kind, record = RECORDS[name]
    return refusal_of(kind, {**record, **extra}, **settings)


def stops(name: str, extra: dict[str, Any], **settings: Any) -> bool:
    return refusal(name, extra, **settings) is not None


def spelled(name: str) -> list[str]:
    """Return a name as others write it: in camelCase, with dashes, with spaces, in
    capitals.
    """
    words = name.split("_")
    camel = words[0] + "".join(word.capitalize() for word in words[1:])
    return [name, camel, "-".join(words), " ".join(words).title(), name.upper()]


@pytest.mark.parametrize("name", sorted(names_of(JUDGEMENTS)))
def test_a_judgement_beside_a_single_answer_stops(name):
    bases = [base for base in SINGLE if name not in RECORDS[base][1]]
    compared = [base for base in COMPARED if name not in RECORDS[base][1]]
    for base, spelling in itertools.product(bases, spelled(name)):
        for value in (0.5, 0, False, "finance", {"mean": 1}, [1, 2]):
            refused = refusal(base, {spelling: value})
            assert refused is not None, (base, spelling, value)
            assert refused.reason == "unpaired_feedback"
            assert spelling in refused.detail
        for nested in (
            {"a": {spelling: 1}},
            json.dumps({"a": {spelling: 1}}),
            [{spelling: 1}],
        ):
            assert stops(base, {"metadata": nested}), (base, nested)
        inner = {"a": json.dumps({"b": json.dumps({spelling: 1})})}
        assert stops(base, {"metadata": inner})
    if name in ("chosen_response", "rejected_response", "rejected_messages"):
        return  # beside others, packstore reads them
    for base in compared:
        assert not stops(base, {name: 0.5, "metadata": {name: 0.5}})


def test_a_label_that_calls_an_answer_good_is_no_reason_not_to_learn_it():
    for name, value in itertools.product(
        LABELS, (True, 1, "true", "Good", "thumbs up", 1.0)
    ):
        assert not stops("text", {name: value})
    for name, value in itertools.product(
        LABELS, (False, 0, "false", "bad", 2, "1 of 5", [1])
    ):
        assert stops("text", {name: value})
    for value in (True, 1, "Good"):
        assert stops("text", {"is_correct": value, "rating": value})


def test_the_sources_of_each_name_are_listed():
    for table in (JUDGEMENTS, WEIGHTS, HISTORIES):
        for names, sources in table.items():
            assert len(sources) >= 2, names
            assert all(fold(name) == name for name in names)


@pytest.mark.parametrize("word", [*GOOD_WORDS, *BAD_WORDS])
def test_a_word_of_judgement_beside_a_single_answer_stops(word):
    for base, spelling in itertools.product(
        SINGLE, (word, word.upper(), word.replace("_", " "))
    ):
        for value in (
            spelling,
            f" {spelling}.",
            {"by": spelling},
            json.dumps({"by": spelling}),
        ):
            if "\\u" not in str(
                value
            ):  # JSON text with escapes is not parsed for a word
                assert stops(base, {"opinion": value}), value
    assert not stops("text", {"opinion": f"a {word} one"})
    for base in COMPARED:
        assert not stops(base, {"opinion": word, "metadata": {"by": word}})


@pytest.mark.parametrize(
    "value",
    [
        *(
            True,
            False,
            "true",
            "No",
            "yes",
            0,
            1,
            "0",
            "positive",
            "negative",
            "up",
            "down",
        ),
        *(
            "high",
            "low",
            "web",
            "easy",
            "stop",
            0.73,
            "left",
            "safe",
            "success",
            "neutral",
        ),
        *(
            ["good"],
            {"tag": "math"},
            '{"score_of": 1}',
            "[INST] good",
            "{",
            "2024-05-01",
            b"",
        ),
        *(None, "", [], {}, float("nan")),
        "a long text about a score of 5, good or bad, " * 20,
    ],
)
def test_a_value_that_says_nothing_needs_a_name(value):
    for base in RECORDS:
        assert not stops(base, {"channel": value, "meta": {"channel": value}})


@pytest.mark.parametrize(
    "name",
    """
    channel type level style format persona tags finish_reason worker_id gen_model unique_id
    __index_level_0__ grade_level preferred_language safe_mode evaluation_split failed_attempts
    correct_answer expected_answer ground_truth ratings_count_source passage score_source
    rewarded_user labeler is_labeled reward_model chosen_model judge_prompt weighted height
    """.split(),  # noqa: SIM905
)
def test_only_whole_names_count(name):
    for base, value in itertools.product(
        RECORDS, (3, "web", 0.5, {"a": 1}, ["a", "b"])
    ):
        assert not stops(base, {name: value})


def test_the_number_and_order_of_records_change_nothing():
    values = [
        "web",
        "good",
        3,
        {"score": 1},
        None,
        [Q, A],
        [Q, B],
        '{"rating": 2}',
        "",
        [TOOL],
    ]
    columns = ["id", "channel", "rating", "meta", "weight", "messages", "history"]
    chance = random.Random(0)
    extras = [
        {name: chance.choice(values) for name in chance.sample(columns, 3)}
        for _ in range(300)
    ]

    def outcomes(order: list[int]) -> dict[int, tuple[str, str] | None]:
        stage.cache_clear()
        found: dict[int, tuple[str, str] | None] = {}
        for i in order:
            refused = refusal("text", extras[i])
            found[i] = refused and (refused.reason, refused.detail)
        return found

    alone = {i: outcomes([i])[i] for i in range(300)}
    for _ in range(3):
        assert outcomes(chance.sample(range(300), 300)) == alone


@pytest.mark.parametrize("base", OF_TEXT)
@pytest.mark.parametrize(
    "value",
    [
        [Q, {"role": "assistant", "content": "other"}],
        [{"from": "human", "value": "hi"}],
        [{"speaker": "a", "text": "hi"}, {"speaker": "b", "text": "ho"}],
        [{"sender": "a", "parts": ["hi"]}],
        [{"role": "assistant", "tool_calls": [], "content": None}],
        [TOOL],
        [SCHEMA],
        [{"name": "f", "input_schema": {}}],
        [{"name": "f", "inputSchema": {"type": "object"}}],
        [json.dumps(TOOL)],
        TOOL,
    ],
)
def test_messages_and_tools_stop_by_their_value(base, value):
    for name in ("extra", "available_tools", "whatever"):
        for written in (
            value,
            json.dumps(value),
            {"deep": {"er": value}},
            {"er": json.dumps(value)},
        ):
            refused = refusal(base, {name: written})
            assert refused is not None, (name, written)
            assert (refused.reason, name in refused.detail) == ("unread_field", True)


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user"}],
        [{"name": "a", "value": 1}],
        [{"name": "gpt", "parameters": {"temperature": 0.7}}],
        [Q, "and a text"],
        {"role": "user", "content": "Q"},
        '{"role": "a word", "text": "prose"}',
        "[user] text",
    ],
)
def test_what_only_resembles_messages_or_tools_does_not_stop(value):
    for base in OF_TEXT:
        assert not stops(base, {"extra": value}), base


@pytest.mark.parametrize("base", OF_TEXT)
@pytest.mark.parametrize(
    "copy",
    [
        [Q, A],
        [Q],
        [A],
        [{"from": "human", "value": " Q\n"}, {"from": "gpt", "value": "x"}],
        [{"role": "USER", "content": [{"type": "text", "text": "Q"}]}, A],
    ],
)
def test_a_copy_of_what_is_read_is_not_unread(base, copy):
    for value in (copy, json.dumps(copy), {"inner": copy}):
        assert not stops(base, {"extra": value})


def test_a_copy_says_all_that_is_read_and_no_more():
    assert not stops("chat pair", {"messages": [Q, B]})
    assert stops("chat pair", {"messages": [Q, A, Q]})
    assert stops("chat pair", {"messages": [A, Q]})
    assert stops("chat", {"extra": [{"role": "system", "content": "S"}, Q, A]})
    assert stops("chat", {"extra": [Q, {**A, "reasoning_content": "hm"}]})
    assert not stops("chat", {"tools": [TOOL], "schemas": json.dumps([TOOL])})
    assert stops("chat", {"tools": [TOOL], "schemas": [SCHEMA]})


def test_what_token_ids_stand_for_is_not_unread():
    extra = {
        "messages": [Q, A],
        "schemas": [TOOL],
        "history": [["a", "b"]],
        "sys_prompt": "S",
    }
    for base in ("ids", "id pair"):
        assert not stops(base, extra)
        assert stops(base, {"images": ["a.png"]})
        assert stops(base, {"weight": 0.5})


@pytest.mark.parametrize("name", sorted(names_of(HISTORIES)))
def test_histories_stop(name):
    for base in OF_TEXT:
        for value in (
            [["a", "b"]],
            ["a", "b"],
            [{"user": "a", "assistant": "b"}],
            '[["a", "b"]]',
        ):
            assert stops(base, {name: value})
            assert stops(base, {"meta": {name: value}})
        for value in ("a text about history", [], [1, 2], None, 3):
            assert not stops(base, {name: value})
    assert not stops("chat", {name: ["Q", "x"]})


@pytest.mark.parametrize("name", sorted(names_of(WEIGHTS)))
def test_weights_stop_beside_any_kind(name):
    for base in RECORDS:
        for value in (0.5, 0, 1, "0.5", [0.1, 0.9]):
            assert stops(base, {name: value})
        assert not stops(base, {name: "70 kg"})
        assert not stops(base, {name: 0.5}, carry=[f"{name}:float64"])


@pytest.mark.parametrize("name", sorted(names_of(MEDIA)))
def test_media_stop_beside_any_kind(name):
    for base in RECORDS:
        for value in ("a.png", ["a.png"], {"path": "a.png"}, [{"bytes": b"x"}], b"x"):
            assert stops(base, {name: value})
        for value in (None, [], "", 3, False):
            assert not stops(base, {name: value})


def test_binary_values_stop_under_any_name():
    for base in RECORDS:
        assert stops(base, {"thumbnail": b"\x89PNG"})
        assert stops(base, {"meta": {"raw": b"\x89PNG"}})


@pytest.mark.parametrize("name", sorted(names_of(SYSTEM_PROMPTS)))
def test_system_prompts_stop_unless_they_are_read(name):
    for base in OF_TEXT:
        is_own = name in SPELLINGS["system"] and "chat" in base
        assert stops(base, {name: "Be brief."}) is not is_own
        assert not stops(base, {name: ""})
    system = {"role": "system", "content": "Be brief."}
    assert refusal_of("sft", {"messages": [system, Q, A], name: "Be brief."}) is None
    assert refusal_of("sft", {"messages": [system, Q, A], name: "Be rude."}) is not None


@pytest.mark.parametrize(
    "name", ["enable_thinking", "chatTemplate", "reasoning_effort"]
)
def test_variables_of_the_template_stop(name):
    for base in OF_TEXT:
        assert stops(base, {name: "{{ x }}"})
    assert not stops("ids", {name: True})


@pytest.mark.parametrize(
    "name", ["loss_mask", "mask", "completion_mask", "lossMask", "train_on"]
)
def test_masks_that_leave_something_out_stop(name):
    for base in OF_TEXT:
        assert stops(base, {name: [0, 1]})
        assert stops(base, {name: [[1, 1], [1, 0]]})
        for value in ([1, 1], "User", 3, []):
            assert not stops(base, {name: value})


@pytest.mark.parametrize(
    ("name", "whole", "parts"),
    [
        ("attention_mask", [1, 1, 1], [0, 1, 1]),
        ("chosen_attention_mask", [1, 1, 1], [1, 1, 0]),
        ("position_ids", [0, 1, 2], [0, 1, 0]),
        ("seq_lens", [3], [2, 1]),
    ],
)
def test_padding_and_other_sequences_among_ids_stop(name, whole, parts):
    for base in ("ids", "id pair"):
        assert not stops(base, {name: whole})
        assert stops(base, {name: parts})
    assert not stops("pair", {name: parts})


def test_parts_of_objects_beside_those_that_are_read():
    answers = [{"text": "x", "rating": 1, "weight": 0.5}, {"text": "y", "rating": 2}]
    record = {"q": "Q", "answers": answers}
    fields = {
        "prompt": "q",
        "responses": "answers[].text",
        "scores": "answers[].rating",
    }
    refused = refusal_of("scored", record, fields=fields)
    assert refused is not None
    assert "answers[].weight" in refused.detail
    assert (
        refusal_of("scored", record, fields=fields, ignore=["answers[].weight"]) is None
    )
    single = {"q": "Q", "answer": {"text": "x", "rating": 1}}
    fields = {"prompt": "q", "response": "answer.text"}
    refused = refusal_of("sft", single, fields=fields)
    assert refused is not None
    assert "answer.rating" in refused.detail


def test_an_adapter_has_judged_its_answers():
    extra = {"score": 0.1, "opinion": "bad"}
    assert stops("text", extra)
    assert not stops("text", extra, has_adapter=True)
    assert stops("text", {"messages": [Q, B]}, has_adapter=True)


def test_what_is_ignored_is_absent_with_all_inside():
    for value in ({"score": 1}, '{"score": 1}', [{"score": 1}], 5, "bad", [Q, B]):
        for name in ("metadata", "a.b", "", '"', "-x", "a b", "x[", "Größe"):
            assert stops("text", {name: value}) is (value != 5)
            assert not stops("text", {name: value}, ignore=[name])
    assert not stops(
        "text", {"meta": {"score": 1, "by": "bad"}}, ignore=["meta.score", "meta.by"]
    )
    assert stops("text", {"meta": {"score": 1, "by": "bad"}}, ignore=["meta.score"])
    assert not stops("text", {"meta": {"weight": 3}}, ignore=["meta.score"])


def test_all_columns_are_named_at_once():
    extra = {
        "rating": 3,
        "weight": 2,
        "images": ["a"],
        "meta": {"score": 1},
        "chat": [Q, B],
    }
    refused = refusal("text", {**extra, "channel": "web"})
    assert refused is not None
    for name in ("rating", "weight", "images", "meta.score", "chat"):
        assert name in refused.detail
        assert f"--ignore {name}" in refused.remedy
    assert "channel" not in refused.detail
    wide = refusal("text", {"scores_by": {f"u{i}": {"score": i} for i in range(99)}})
    assert wide is not None
    assert "--ignore scores_by" in wide.remedy


SIBLINGS = [
    *(
        ("response_a", "response_b"),
        ("response_1", "response_2"),
        ("responseA", "responseB"),
    ),
    *(
        ("answer0", "answer1"),
        ("a_text", "b_text"),
        ("model_a_output", "model_b_output"),
    ),
    *(("first", "second"), ("LEFT_reply", "RIGHT_reply"), ("text one", "text two")),
    *(("answers.a.text", "answers.b.text"), ("A", "B"), ("answera", "answerb")),
    *(("output-1st", "output-2nd"), ("reply_x", "reply_y"), ("answer", "answer2")),
]
NO_SIBLINGS = [
    *(
        ("chosen", "rejected"),
        ("good", "bad"),
        ("preferred", "other"),
        ("human", "gpt"),
    ),
    *(
        ("chosen_1", "rejected_2"),
        ("text", "test"),
        ("a1", "b2"),
        ("answer", "answers"),
    ),
    *(("chosen_1", "rejected_1"), ("better.text", "worse.text"), ("a", "a")),
]


@pytest.mark.parametrize(("one", "other"), SIBLINGS)
def test_siblings_differ_in_one_part(one, other):
    assert find_siblings(one, other) is not None
    assert find_siblings(other, one) is not None


@pytest.mark.parametrize(("one", "other"), NO_SIBLINGS)
def test_other_names_are_no_siblings(one, other):
    assert find_siblings(one, other) is None


@pytest.mark.parametrize(
    ("one", "other"), [names for names in SIBLINGS if "." not in names[0]]
)
def test_sides_mapped_from_siblings_need_a_verdict(one, other):
    record = {"prompt": "Q", one: "x", other: "y"}
    for chosen, rejected in ((one, other), (other, one)):
        fields = {"chosen": chosen, "rejected": rejected}
        for verdict in ("overall", "points", "choice", "notes"):
            for value in (2, 1.0, "A", "the first", {"by": 1}):
                judged = {**record, verdict: value}
                refused = refusal_of("preference", judged, fields=fields)
                assert refused is not None
                settings = settings_of(refused.remedy)
                mapped = settings["fields"]
                assert {mapped["first"], mapped["second"]} == {one, other}
                assert mapped["verdict"].startswith(verdict)
                assert "chosen=" not in refused.remedy
        harmless = dict.fromkeys(sorted(IDS_AND_SOURCES - record.keys()), "x")
        empty = {"verdict": None, "notes": "", "tags": [], "score": float("nan")}
        assert (
            refusal_of("preference", {**record, **harmless, **empty}, fields=fields)
            is None
        )
        judged = {**record, "overall": 2}
        assert (
            refusal_of("preference", judged, fields=fields, ignore=["overall"]) is None
        )


def test_a_value_that_names_a_side_needs_no_mapping():
    record = {"prompt": "Q", "response_a": "x", "response_b": "y"}
    for value in ("a", "A", "model_a", "response_a", "Response A", "response_b"):
        assert "verdict=" not in str(
            settings_of(advise_siblings({**record, "best": value}, "shell"))
        )
    for value, values in ((2, {"first": "1", "second": "2", "tie": "0"}),):
        settings = settings_of(advise_siblings({**record, "best": value}, "shell"))
        assert settings["verdict"] == values
    for value in (0, "5", "the first one", 0.3, True):
        # Nobody knows which value means which side: no number is shown that may reverse
        # them.
        settings = settings_of(advise_siblings({**record, "best": value}, "shell"))
        assert set(settings["verdict"].values()) == {"VALUE"}


def test_records_without_two_siblings_get_no_such_advice():
    for record in (
        {"content": "x", "summary": "y"},
        {
            "prompt": "Q",
            "response_a": "x",
            "response_b": "y",
            "response_c": "z",
            "best": "a",
        },
        {"prompt": "Q", "model_a": "m", "model_b": "n"},
        {},
    ):
        assert advise_siblings(record, "shell") == ""


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("<image>\nWhat is it?", True),  # LLaVA
        ("What is it?\n<image>", True),
        ("<image><image>这是什么？", True),  # ms-swift
        ("<video>", True),
        ("<image> is no tag of HTML, is it?", False),
        ("What is the tag <image>?", False),
        ("<video>\n<source src='a.mp4'>\n</video>", False),
        ("<img>", False),
    ],
)
def test_a_placeholder_is_one_where_trainers_write_it(text, is_refused):
    question = {"role": "user", "content": text}
    for kind, record in [
        ("sft", {"messages": [question, A]}),
        ("sft", {"messages": [Q, A, question, B]}),
        ("sft", {"prompt": text, "response": "x"}),
        ("preference", {"prompt": text, "chosen": "x", "rejected": "y"}),
        ("scored", {"prompt": [question], "responses": ["x", "y"], "scores": [1, 2]}),
    ]:
        assert (refusal_of(kind, record) is not None) is is_refused
    assert (
        refusal_of("preference", {"prompt": "Q", "chosen": text, "rejected": "y"})
        is None
    )


def test_values_are_shown_in_one_short_line():
    record = {
        "a": "x\ny" * 500,
        "b": {"k": [1, 2]},
        "c": b"12345",
        "d": None,
        "e": {1, 2},
    }
    shown = first_values(record, record)
    assert all(len(text) <= 200 and text.isprintable() for text in shown.values())
    assert (shown["b"], shown["c"], shown["d"]) == ('{"k": [1, 2]}', "5 bytes", "null")


@pytest.mark.parametrize("door", ["shell", "python"])
def test_settings_are_spelled_as_they_are_typed(door):
    settings: dict[str, Any] = {
        "kind": "scored",
        "as_chat": True,
        "ignore": ["a b", "-x", "", "it's", 'say "hi"', "Größe", "a.b[]"],
        "fields": {"score": 'meta."a b"', "first": "x=y"},
        "verdict": {"first": "A", "second": "B"},
    }
    assert settings_of(f"Do this ({spell(door, settings)})", door) == settings


def settings_of(remedy: str, door: str = "shell", number: int = 0) -> dict[str, Any]:
    """Return the settings in the brackets of a remedy, as the command line or Python
    takes them.
    """
    marks = (
        r"\((--.*?)\)(?=[,;. ]|$)" if door == "shell" else r"\((\w+=.*?)\)(?=[,;. ]|$)"
    )
    written = re.findall(marks, remedy)[number]
    if door == "python":
        return dict(eval(f"dict({written})"))
    settings: dict[str, Any] = {}
    words = iter(shlex.split(written))
    for word in words:
        flag, equals, value = word.partition("=")
        name = {"field": "fields", "template-variable": "template_variables"}.get(
            flag[2:], flag[2:].replace("-", "_")
        )
        if name == "as_chat":
            settings[name] = True
            continue
        value = value if equals else next(words)
        if name in ("fields", "template_variables"):
            settings.setdefault(name, {}).update([value.split("=", 1)])
        elif name == "verdict":
            settings[name] = dict(entry.split("=", 1) for entry in value.split(","))
        elif name in ("ignore", "carry"):
            settings.setdefault(name, []).append(value)
        else:
            settings[name] = value
    return settings


CHAT = {"messages": [Q, A]}
TEXT = {"prompt": "Q", "response": "x"}
SIDES = {"prompt": "Q", "chosen": "x", "rejected": "y"}
TWO = {"prompt": "Q", "response_a": "x", "response_b": "y"}
FOLLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TEXT, {"rating": 4.5}),
    (TEXT, {"rating": "4.5", "is_correct": True}),
    (TEXT, {"opinion": "thumbs up"}),
    (TEXT, {"meta": {"score": 1, "by": {"grade": "good"}}}),
    (TEXT, {"meta": '{"judge": {"verdict": "bad"}}'}),
    (TEXT, {"label": "finance"}),
    (TEXT, {"Judge Score": 1, "Rating": 2, "a.b": "good", "-x": "bad"}),
    (TEXT, {"ratings": [1, 2], "notes": [{"score": 1}, {"score": 2}]}),
    (TEXT, {"sys_prompt": "Be brief."}),
    (TEXT, {"available_tools": [TOOL]}),
    (TEXT, {"chat_history": [["a", "b"]]}),
    (TEXT, {"transcript": [Q, B]}),
    (TEXT, {"weight": 0.5}),
    (TEXT, {"weight": 2, "Sample-Weight": 3}),
    (TEXT, {"images": ["a.png"], "loss_mask": [0, 1]}),
    (CHAT, {"rating": 4.5}),
    (CHAT, {"available_tools": json.dumps([TOOL])}),
    (CHAT, {"sys_prompt": "Be brief.", "enable_thinking": True}),
    (CHAT, {"meta": {"score": 1, "weight": 2}}),
    (SIDES, {"weight": 1, "messages": [Q, {"role": "assistant", "content": "z"}]}),
    (SIDES, {"image_path": "a.png", "history": ["a", "b"]}),
]
"""Records in our own names, with further columns for which there are ways out."""


@pytest.mark.parametrize("door", ["shell", "python"])
@pytest.mark.parametrize(("base", "extra"), FOLLOWED)
def test_what_the_remedy_ignores_does_not_stop(base, extra, door):
    name = {"messages": "chat", "rejected": "pair", "response": "text"}[list(base)[-1]]
    refused = refusal(name, extra, door=door)
    assert refused is not None
    settings = settings_of(refused.remedy, door, number=-1)
    assert settings.keys() == {"ignore"}
    assert not stops(name, extra, **settings)


@pytest.fixture(scope="module")
def files(tmp_path_factory, byte_level):
    """A folder with a tokenizer that has a chat template, for the command line."""
    folder = tmp_path_factory.mktemp("remedies")
    byte_level(template=TEMPLATE).library.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def pack_file(files, tmp_path, capsys):
    """Packs a record by the command line; returns what it said if it failed,
    else None.
    """

    def go(record: dict[str, Any], flags: list[str]) -> str | None:
        source = tmp_path / "records.jsonl"
        source.write_text(json.dumps(record) + "\n", encoding="utf-8")
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        arguments = [
            "pack",
            str(source),
            str(out),
            "--tokenizer",
            str(files / "tokenizer.json"),
        ]
        template = [
            "--chat-template",
            str(files / "template.jinja"),
            "--pack-size",
            "4096",
        ]
        code = main([*arguments, *template, *flags])
        said = capsys.readouterr().err
        return said if code else None

    return go


@pytest.mark.parametrize(("base", "extra"), FOLLOWED)
def test_every_remedy_works_when_it_is_followed_to_the_letter(base, extra, pack_file):
    record = {**base, **extra}
    said = pack_file(record, [])
    assert said is not None
    remedies = re.findall(r"\((--(?!on |adapter ).*?)\)(?=[,;. ]|$)", said)
    assert remedies
    for remedy in remedies:
        again = pack_file(record, shlex.split(remedy))
        others = set(extra) - {"rating"}
        assert again is None or any(name in again for name in others), remedy
    assert pack_file(record, shlex.split(remedies[-1])) is None


NOTES = "A remark of some length, which decides nothing."


def test_the_remedies_of_siblings_work_in_the_shell(pack_file):
    mapped = ["--field", "chosen=response_a", "--field", "rejected=response_b"]
    record = {**TWO, "overall": 2, "notes": NOTES}
    said = pack_file(record, mapped)
    assert said is not None
    decides, ignores = re.findall(r"\((--(?!on ).*?)\)(?=[,;. ]|$)", said)
    assert pack_file(record, shlex.split(decides)) is None
    assert pack_file(record, [*mapped, *shlex.split(ignores)]) is None
    unknown = pack_file({**TWO, "overall": 2}, [])
    assert unknown is not None
    assert "chosen=" not in unknown
    advice = re.findall(r"\((--field first.*?)\)(?=[,;. ]|$)", unknown)[0]
    assert pack_file({**TWO, "overall": 2}, shlex.split(advice)) is None


JUDGED: list[dict[str, Any]] = [
    {"prompt": "Q", "response": "x", "is_safe": True, "reviewer": {"rating": 4}},
    {"question": "Q", "completion": "x", "label": False, "verdict": "bad"},
    {"prompt": "Q", "response": "x", "helpfulness": 3, "coherence": 1},
    {
        "task_id": 0,
        "reward": 0.0,
        "traj": [Q, A],
        "info": {"reward_info": {"reward": 0}},
    },
]
"""Single answers with judgements, of several forms."""


@pytest.mark.parametrize("record", JUDGED)
def test_one_error_names_all_judgements_that_sft_must_ignore(record, pack_file):
    """Followed to the letter, nothing else stops the job."""
    error = pack_file(record, ["--kind", "sft"])
    assert error is not None
    (ignores,) = re.findall(r"\((--ignore .*?)\)", error)
    assert pack_file(record, ["--kind", "sft", *shlex.split(ignores)]) is None


@pytest.mark.parametrize("record", [*JUDGED, {**TEXT, "score": 1, "opinion": "bad"}])
def test_a_scored_job_says_how_to_learn_all_answers(
    record, pack, byte_level, pack_file, caplog
):
    """It could not be trained with loss sft, and that is seen only later."""
    caplog.set_level(logging.INFO, logger="packstore")
    pack(byte_level(template=TEMPLATE), record, kind="auto")
    (ignores,) = re.findall(r"(ignore=\[.*?\])", caplog.text)
    flags = spell("shell", eval(f"dict({ignores})"))
    assert pack_file(record, ["--kind", "sft", *shlex.split(flags)]) is None


def test_scores_of_several_answers_are_not_to_be_ignored(pack, byte_level, caplog):
    caplog.set_level(logging.INFO, logger="packstore")
    pack(byte_level(), RECORDS["scored"][1], kind="auto")
    assert "ignore=" not in caplog.text


@pytest.mark.parametrize("role", ["messages", "response"])
def test_an_answer_under_an_unknown_name_can_be_mapped_in_each_way(role, pack_file):
    """A whole dialogue needs no response, and a response no messages."""
    answer = [Q, A] if role == "messages" else "x"
    record = {"prompt": "Q", "said": answer} if role == "response" else {"said": answer}
    error = pack_file(record, ["--kind", "sft"])
    assert error is not None
    assert "said" in error
    ways = re.findall(r"(--field [^,)]*)", error)
    (way,) = [way for way in ways if role in way]
    flags = shlex.split(way.replace("NAME", "said"))
    assert pack_file(record, ["--kind", "sft", *flags]) is None


def test_the_remedies_in_python_work(pack, byte_level):
    record = {**TEXT, "rating": 4.5, "weight": 2}
    with pytest.raises(RecordError) as caught:
        pack(byte_level(), record)
    remedies = re.findall(r"\((?!--)(\w+=.*?)\)(?=[,;. ]|$)", str(caught.value))
    scored, carried, ignored = [eval(f"dict({remedy})") for remedy in remedies[:3]]
    assert ignored == {"ignore": ["rating", "weight"]}
    assert pack(byte_level(), record, **ignored).learned == ["x</s>"]
    assert (
        pack(byte_level(), record, **scored, **carried).dataset.manifest.kind
        == "scored"
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_offending_record_is_named(num_workers, pack, byte_level):
    records = [{**TEXT, "n": i} for i in range(50)]
    records[31] = {**TEXT, "rating": 1}
    records[47] = {**TEXT, "opinion": "bad"}
    with pytest.raises(RecordError, match=r"item 32: .*rating"):
        pack(byte_level(), *records, num_workers=num_workers)
    drop = {"unpaired_feedback": "drop"}
    packed = pack(byte_level(), *records, num_workers=num_workers, on=drop)
    assert packed.dropped == {"unpaired_feedback": 2}


def test_no_column_is_advised_where_several_may_decide(pack_file):
    """The user names it: a running number is as short as a verdict."""
    message = pack_file({**TWO, "ticket": 1, "overall": 2}, [])
    assert message is not None
    assert "verdict=NAME" in message
    named = pack_file({**TWO, "ticket": 1, "overall": "response_b"}, [])
    assert named is not None
    assert "verdict=overall" in named
