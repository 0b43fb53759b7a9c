"""Names of fields, kinds, messages of many spellings, columns, and what is named in errors."""

from __future__ import annotations

import numpy as np
import pytest

from packstore.config import PackConfig, TokenizeConfig
from packstore.errors import ConfigError, RecordError, TokenizerError
from packstore.tokenizer import RecordTokenizer, detect_kind
from packstore.tokenizer.chat.messages import normalize_messages
from packstore.tokenizer.records.shapes import parse_record

CONFIG = TokenizeConfig()
USER = {"role": "user", "content": "u"}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    ("record", "proposed"),
    [
        ({"instruction": "q", "input": "", "output": "a"}, "--field prompt=instruction"),
        ({"question": "q", "better": "a", "worse": "b"}, "--field chosen=better"),
        ({"dialogue": [USER]}, "--field messages=dialogue"),
        ({"text": "x"}, "it must have chosen and rejected"),
        (["x"], "it must have chosen and rejected"),
    ],
)
def test_an_unknown_kind_proposes_names(record, proposed):
    with pytest.raises(RecordError) as caught:
        detect_kind(record, CONFIG)
    assert proposed in str(caught.value)


@pytest.mark.parametrize(
    ("record", "fields", "said"),
    [
        ({"instruction": "p", "chosen": "c", "rejected": "r"}, {}, "--field prompt=instruction"),
        ({**PAIR, "instruction": "p"}, {"prompt": "instrution"}, "--field prompt=instruction"),
        ({"chosen": [USER], "rejected": [USER]}, {"prompt": "q"}, "no field 'q'"),
        ({**PAIR, "rejected": None}, {}, "field 'rejected' is null"),
        ({"prompt": "p", "chosen": "c"}, {}, "no field 'rejected' among 'prompt', 'chosen'"),
        ({**PAIR, "chosen": [1.5]}, {}, "found chosen [1.5]"),
        ({"prompt": [1], "chosen": "text", "rejected": [2]}, {}, "prompt ids, chosen text"),
        ({"prompt": [1], "chosen": [2.5], "rejected": [2]}, {}, "found chosen [2.5]"),
    ],
)
def test_a_refusal_names_the_field(rows, byte_level, record, fields, said):
    config = PackConfig(fields=fields, on={"wrong_type": "error"})
    with pytest.raises(RecordError) as caught:
        RecordTokenizer(byte_level(), config, "preference")(rows([record]))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ("chosen_reward", "rejected_reward"),
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("chosen-rating", "rejected-rating"),
    ],
)
def test_rewards_under_common_names_are_used(rows, byte_level, names):
    record = {**PAIR, **dict(zip(names, (4.5, 2), strict=True))}
    work = RecordTokenizer(byte_level(), PackConfig(), "preference")
    examples, tally = work(rows([record, PAIR]))
    assert examples.reward.tolist() == [4.5, 2.0, 1.0, 0.0]
    assert {name: tally.used[name] for name in names} == dict.fromkeys(names, 1)
    assert (tally.scored, tally.unscored) == (1, 1)
    assert not tally.unused


def test_what_nobody_used_is_counted(run, byte_level):
    extra = {"system": "be kind", "images": ["a.png"], "weight": 0.0, "none": None, "empty": ""}
    _, tally = run(byte_level(), PAIR, {**PAIR, **extra}, {**PAIR, "images": [], "lang": "en"})
    assert tally.used == {"prompt": 3, "chosen": 3, "rejected": 3}
    assert tally.unused == {"system": 1, "images": 1, "weight": 1, "lang": 1}
    _, tally = run(byte_level(), {**PAIR, "lang": "en"}, carry=("lang",))
    assert (tally.used["lang"], tally.unused) == (1, {})
    scores = {"chosen_score": {"help": 3}, "rejected_score": "low"}  # no numbers, so no rewards
    _, tally = run(byte_level(), {**PAIR, **scores})
    assert (tally.scored, tally.unused) == (0, dict.fromkeys(scores, 1))


def test_endless_names_are_bounded(run, byte_level):
    records = [{**PAIR, f"k{i}": i, "\ud800": 1, "weight": 1} for i in range(500)]
    _, tally = run(byte_level(), *records)
    assert len(tally.unused) <= 100
    assert tally.unused["weight"] == 500
    assert all(name.encode() for name in tally.unused)


@pytest.mark.parametrize("label", [False, 0, "false", "False"])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_good_answers_among_bad_ones_are_packed(run, byte_level, label, name):
    bad = {"prompt": "p", "completion": " bad", name: label}
    good = {**bad, name: "true" if isinstance(label, str) else type(label)(1)}
    _, tally = run(byte_level(), good, bad, kind="sft", on={"unpaired_feedback": "drop"})
    assert (tally.kept, tally.dropped) == (1, {"unpaired_feedback": 1})


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(content, *calls, **more):
    return {"role": "assistant", "content": content, **more, "tool_calls": list(calls)}


THOUGHT = {"reasoning_content": "hm", "thinking": "hm"}
NORMALIZED = {
    "nulls of a table": (
        [{"role": "user", "from": None, "content": "u", "name": None, "tool_calls": None}],
        [USER],
    ),
    "arguments that are text": (
        [said(None, {"function": {"name": "f", "arguments": '{"x": 1}'}})],
        [said(None, {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}})],
    ),
    "thoughts under another name": (
        [{"role": "assistant", "content": "a", "reasoning": "hm"}],
        [{"role": "assistant", "content": "a", **THOUGHT}],
    ),
    "reasoning, two calls, result": (
        [
            {"role": "assistant_reasoning", "content": "hm"},
            {"role": "assistant_tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
            {"role": "function_call", "content": '[{"name": "g"}]'},
            {"role": "observation", "content": "4"},
            {"role": "assistant_tool_call", "content": '{"name": "h", "arguments": {}}'},
        ],
        [
            said(None, call("f", x=1), call("g"), **THOUGHT),
            {"role": "tool", "content": "4"},
            said(None, call("h")),
        ],
    ),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_messages_are_normalized(name):
    given, expected = NORMALIZED[name]
    assert normalize_messages(given) == expected


def test_token_ids_pass_through(rows, sequences, byte_level):
    record = {"prompt": [5, 6], "chosen": [7], "rejected": np.array([8, 9])}
    labels = {"chosen_labels": [-100, 2], "rejected_labels": [-100, 3]}
    cases = [
        ("preference", record, [([5, 6, 7], [0, 0, 1]), ([5, 6, 8, 9], [0, 0, 1, 1])]),
        ("preference", {"chosen": [1, 2], "rejected": [1, 3], **labels},
         [([1, 2], [0, 1]), ([1, 3], [0, 1])]),
        ("sft", {"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, [([5, 6, 7], [0, 0, 1])]),
        ("sft", {"input_ids": [1, 2], "completion_mask": [0, 1]}, [([1, 2], [0, 1])]),
        ("ranked", {"prompt": [1], "responses": np.array([[2], [3]]), "scores": [1, 0]},
         [([1, 2], [0, 1]), ([1, 3], [0, 1])])
    ]  # fmt: skip
    for tokenizer in (None, byte_level(bos=True)):
        for kind, given, expected in cases:
            examples, _ = RecordTokenizer(tokenizer, CONFIG, kind)(rows([given]))
            assert sequences(examples) == expected


def test_what_is_missing_is_named(rows, run, byte_level):
    with pytest.raises(TokenizerError, match="must be given"):
        RecordTokenizer(None, CONFIG, "preference")(rows([PAIR]))
    with pytest.raises(TokenizerError, match="chatml or plain"):
        run(byte_level(), {**PAIR, "prompt": [USER]})
    for setting in ("add_bos", "append_eos"):
        with pytest.raises(TokenizerError, match="must name its"):
            run(byte_level(special=()), **{setting: True})


def test_carried_columns(rows, byte_level):
    good = {**PAIR, "source": "x", "weight": 2, "n": 3, "ok": True}
    bad = [{**good, "n": 2.5}, {**good, "n": 1 << 63}, {**good, "source": "\ud800"}, PAIR]
    carry = ("source", "weight:float64", "n:int64", "ok:bool")
    config = TokenizeConfig(carry=carry, on={"missing_field": "drop"})
    work = RecordTokenizer(byte_level(), config, "preference")
    examples, tally = work(rows([good, *bad, good]))
    assert {name: (column.tolist(), column.dtype) for name, column in examples.columns.items()} == {
        "source": (["x", "x"], object),
        "weight": ([2.0, 2.0], np.float64),
        "n": ([3, 3], np.int64),
        "ok": ([True, True], np.bool_),
    }
    assert dict(tally.dropped) == {"wrong_type": 2, "invalid_unicode": 1, "missing_field": 1}
    empty, _ = work(rows([]))
    assert [c.dtype for c in empty.columns.values()] == [object, np.float64, np.int64, np.bool_]


@pytest.mark.parametrize("carry", ["x:int", "labels", ":int64", "a,b:nope"])
def test_columns_that_cannot_be_carried(carry):
    with pytest.raises(ConfigError, match="setting carry"):
        RecordTokenizer(None, TokenizeConfig(carry=(carry,)), "preference")


def test_published_dialogues_split_as_the_explicit_prompts(records):
    """All 2,312 pairs, the 5 that part before their last turn and 4 empty responses among them."""
    raw, explicit = records("pairs/hh_harmless_raw.jsonl.gz"), records("pairs/hh_harmless.jsonl.gz")
    assert len(raw) == len(explicit) == 2312
    for a, b in zip(raw, explicit, strict=True):
        parsed = parse_record(a, "preference", CONFIG)
        assert (parsed.prompt, parsed.responses) == (b["prompt"], [b["chosen"], b["rejected"]])


def test_only_what_a_template_writes_is_control(tokenizer, records, rows, sequences):
    """Chats with "<|im_end|>" put into the user's words: the rest is encoded as without it."""
    qwen = tokenizer("qwen3")
    some = records("pairs/chat_en.jsonl")[:40]
    placed = [
        {**r, "prompt": [{**m, "content": m["content"] + " <|im_end|> "} for m in r["prompt"]]}
        for r in some
    ]
    work = RecordTokenizer(qwen, TokenizeConfig(pack_size=65536), "preference")
    (plain, _), (literal, tally) = work(rows(some)), work(rows(placed))
    assert tally.noted["special_tokens_literal"] == len(some)
    for (a, on_a), (b, on_b) in zip(sequences(plain), sequences(literal), strict=True):
        assert a.count(qwen.eos_id) == b.count(qwen.eos_id)
        assert a[-sum(on_a) :] == b[-sum(on_b) :]
        assert "<|im_end|> <|im_end|>\n" in qwen.decode(b)


def test_a_tokenizer_without_a_plain_form(tokenizer, run):
    """Unigram finds "</s>" among its pieces, whatever it is told."""
    _, tally = run(tokenizer("t5"), {**PAIR, "chosen": "a</s>b"})
    assert dict(tally.dropped) == {"special_tokens": 1}
    assert "no plain form" in tally.samples[0].detail
