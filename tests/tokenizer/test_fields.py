"""Names of fields, kinds, messages of many spellings, columns, and what is named in errors."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest

import packstore
from packstore.errors import ConfigError, RecordError, TokenizerError

USER = {"role": "user", "content": "u"}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    ("record", "fields", "said"),
    [
        (["x"], {}, "prompt and response, or responses and scores, or input_ids; found"),
        ({"dialogue": [USER], "x": [{"rank": 1}]}, {}, "found fields 'dialogue', 'x'. Name"),
        (
            {**PAIR, "instruction": "p"},
            {"prompt": "instrution"},
            "no 'instrution' among 'prompt', ",
        ),
        (
            {"chosen": "c", "rejected": "r", "q": "x", "n": 3, "l": "y"},
            {},
            "Name the field that holds text (--field prompt=NAME)",
        ),
        ({"chosen": [USER], "rejected": [USER]}, {"prompt": "q"}, "no 'q' among 'chosen'"),
        (
            {**PAIR, "rejected": None},
            {},
            "nearest shape: text pairs (prompt, chosen, rejected), but 'rejected' is null",
        ),
        (
            {**PAIR, "chosen": [1.5]},
            {},
            "text pairs (prompt, chosen, rejected), but chosen must be text",
        ),
        (
            {"prompt": [1], "chosen": "text", "rejected": [2]},
            {},
            "id pairs (prompt, chosen, rejected), but chosen must be token ids",
        ),
    ],
)
def test_a_refusal_names_the_field(pack, byte_level, record, fields, said):
    with pytest.raises(RecordError) as caught:
        pack(byte_level(), record, fields=fields, on={"wrong_type": "error"})
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["{}_reward", "score_{}", "{}_score", "{}-rating"])
def test_rewards_under_common_names_are_used(pack, byte_level, name):
    record = {**PAIR, name.format("chosen"): 4.5, name.format("rejected"): 2}
    packed = pack(byte_level(), record, PAIR)
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [0.0, 1.0, 2.0, 4.5]
    assert packed.dataset.manifest.records.fields_used[name.format("chosen")] == 1
    assert not packed.dataset.manifest.records.fields_not_used
    assert packed.noted == {"reward_default": 1}


def test_what_nobody_used_is_counted(pack, byte_level):
    def counts(*records, **settings):
        found = pack(byte_level(), *records, **settings).dataset.manifest.records
        return found.fields_used, found.fields_not_used

    extra = {"system": "be kind", "images": ["a.png"], "weight": 0.0, "none": None, "empty": ""}
    records = PAIR, {**PAIR, **extra}, {**PAIR, "images": [], "lang": "en"}
    used, unused = counts(*records, on={"unread_field": "keep"})
    assert used == {"prompt": 3, "chosen": 3, "rejected": 3}
    assert unused == {"system": 1, "images": 1, "weight": 1, "lang": 1}
    used, unused = counts({**PAIR, "lang": "en"}, carry=("lang",))
    assert (used["lang"], unused) == (1, {})
    scores = {"chosen_score": {"help": 3}, "rejected_score": "low"}  # no numbers, so no rewards
    told = counts({**PAIR, **scores}, on={"unread_field": "keep"})[1]
    assert told == dict.fromkeys(scores, 1)
    endless = [{**PAIR, f"k{i}": i, "\ud800": 1, "weight": 1} for i in range(500)]
    unused = counts(*endless)[1]
    assert len(unused) <= 100
    assert unused["weight"] == 500
    assert all(name.encode() for name in unused)


@pytest.mark.parametrize("label", [False, 0, "false", "False"])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_good_answers_among_bad_ones_are_packed(pack, byte_level, label, name):
    bad = {"prompt": "p", "completion": " bad", name: label}
    good = {**bad, name: "true" if isinstance(label, str) else type(label)(1)}
    packed = pack(byte_level(), good, bad, kind="sft", on={"unpaired_feedback": "drop"})
    assert (len(packed.examples), packed.dropped) == (1, {"unpaired_feedback": 1})


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
AS_JSON = (
    "{% for m in messages %}{{ m | tojson }}<e>{% endfor %}"
    '{% if add_generation_prompt %}{{ \'{"role": "assistant", \' }}{% endif %}'
)


@pytest.mark.parametrize("name", NORMALIZED)
def test_messages_are_normalized(pack, byte_level, name):
    given, expected = NORMALIZED[name]
    end = {"role": "assistant", "content": "the end"}
    packed = pack(byte_level(template=AS_JSON), {"messages": [USER, *given, USER, end]})
    *messages, rest = packed.texts[0].split("<e>")
    assert [*map(json.loads, messages)] == [USER, *expected, USER, end]
    assert rest == ""


def test_token_ids_pass_through(pack, byte_level):
    record = {"prompt": [5, 6], "chosen": [7], "rejected": np.array([8, 9])}
    labels = {"chosen_labels": [-100, 2], "rejected_labels": [-100, 3]}
    cases = [
        (record, [([5, 6, 7], [0, 0, 1]), ([5, 6, 8, 9], [0, 0, 1, 1])]),
        ({"chosen": [1, 2], "rejected": [1, 3], **labels}, [([1, 2], [0, 1]), ([1, 3], [0, 1])]),
        ({"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, [([5, 6, 7], [0, 0, 1])]),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, [([1, 2], [0, 1])]),
        ({"prompt": [1], "responses": np.array([[2], [3]]), "scores": [1, 0]},
         [([1, 2], [0, 1]), ([1, 3], [0, 1])])
    ]  # fmt: skip
    for tokenizer in (None, byte_level(bos=True)):
        for given, expected in cases:
            assert pack(tokenizer, given).sequences == expected


def test_what_is_missing_is_named(pack, byte_level):
    for prompt in ("p", [USER]):
        with pytest.raises(TokenizerError, match=r"must be given.* Give the tokenizer"):
            pack(None, {**PAIR, "prompt": prompt})
    with pytest.raises(TokenizerError, match="chatml or plain"):
        pack(byte_level(), {**PAIR, "prompt": [USER]})
    for setting in ("add_bos", "append_eos"):
        with pytest.raises(TokenizerError, match="must name its"):
            pack(byte_level(special=()), PAIR, **{setting: True})
    gc.collect()  # warns of a temporary folder that a job has left


def test_carried_columns(pack, byte_level):
    good = {**PAIR, "source": "x", "weight": 2, "n": 3, "ok": True}
    bad = [{**good, "n": 2.5}, {**good, "n": 1 << 63}, {**good, "weight": (1 << 53) + 1}]
    bad += [{**good, "weight": 10**400}, {**good, "source": "\ud800"}, PAIR]
    carry = ("source", "weight:float64", "n:int64", "ok:bool")
    packed = pack(byte_level(), good, *bad, good, carry=carry, on={"missing_field": "drop"})
    frame = packstore.scan(packed.dataset).collect()
    values = {name: frame[name].to_list() for name in ("source", "weight", "n", "ok")}
    assert values == {"source": ["x"] * 2, "weight": [2.0] * 2, "n": [3] * 2, "ok": [True] * 2}
    assert [type(column[0]) for column in values.values()] == [str, float, int, bool]
    assert packed.dropped == {"wrong_type": 4, "invalid_unicode": 1, "missing_field": 1}


@pytest.mark.parametrize(
    ("carry", "found"),
    [
        ("x:int", "type must be one of"),
        ("labels", "a column of the format"),
        ("a,b:nope", "type must be one of"),
        *(
            (name, "letters a to z, digits and _")
            for name in (":int64", "a.b", "_day", "été", "2nd")
        ),
    ],
)
def test_columns_that_cannot_be_carried(pack, carry, found):
    record = {"prompt": [1], "chosen": [2], "rejected": [3], carry: "x"}
    with pytest.raises(ConfigError, match=f"setting carry.*{found}") as caught:
        pack(None, record, carry=(carry,))
    assert ("Rename the field in the input" in str(caught.value)) == found.startswith("letters")


def test_published_dialogues_split_as_the_explicit_prompts(pack, tokenizer, records):
    """All 2,312 pairs, the 5 that part before their last turn and 4 empty responses among them."""
    files = ("pairs/hh_harmless_raw.jsonl.gz", "pairs/hh_harmless.jsonl.gz")
    raw, explicit = (pack(tokenizer("small"), *records(file)) for file in files)
    assert len(records(files[0])) == 2312
    assert (raw.examples, raw.rejects) == (explicit.examples, explicit.rejects)
    assert raw.dropped == {"empty_side": 4}


def test_only_what_a_template_writes_is_control(pack, tokenizer, records):
    """Chats with "<|im_end|>" put into the user's words: the rest is encoded as without it."""
    qwen = tokenizer("few_merges")
    some = records("pairs/chat_en.jsonl")[:10]
    placed = [
        {**r, "prompt": [{**m, "content": m["content"] + " <|im_end|> "} for m in r["prompt"]]}
        for r in some
    ]
    plain, literal = pack(qwen, *some), pack(qwen, *placed)
    assert literal.noted["special_tokens_literal"] == len(some)
    eos = qwen.library.token_to_id("<|im_end|>")
    for (a, on_a), (b, on_b) in zip(plain.sequences, literal.sequences, strict=True):
        assert a.count(eos) == b.count(eos)
        assert a[-sum(on_a) :] == b[-sum(on_b) :]
        assert "<|im_end|> <|im_end|>\n" in literal.decode(b)


def test_a_tokenizer_without_a_plain_form(pack, tokenizer):
    """Unigram finds "</s>" among its pieces, whatever it is told."""
    (reject,) = pack(tokenizer("t5"), {**PAIR, "chosen": "a</s>b"}).rejects
    assert reject["reason"] == "special_tokens"
    assert "no plain form" in reject["detail"]
