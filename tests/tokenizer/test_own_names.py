"""Names of fields, kinds, messages of many spellings, columns, and what is named in
errors.
"""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest

import packstore
from packstore.errors import ConfigError, RecordError, TokenizerError
from tests.tokenizer.conftest import TEMPLATE

USER = {"role": "user", "content": "u"}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    ("record", "settings", "mentioned"),
    [
        (["x"], {}, "object"),
        ({"dialogue": [USER], "x": [{"rank": 1}]}, {}, "'dialogue', 'x'"),
        (
            {**PAIR, "instruction": "p"},
            {"fields": {"prompt": "instrution"}},
            "instrution",
        ),
        ({"chosen": "c", "rejected": "r", "q": "x"}, {}, '"prompt": "NAME"'),
        ({"chosen": [USER], "rejected": [USER]}, {"fields": {"prompt": "q"}}, "'q'"),
        ({**PAIR, "rejected": None}, {}, '"rejected": "NAME"'),
        ({**PAIR, "chosen": [1.5]}, {}, "1.5"),
        ({"prompt": [1], "chosen": "text", "rejected": [2]}, {}, "'text'"),
        ({"prompt": "p", "responses": ["a", "b"]}, {}, '"scores": "NAME"'),
        ({"prompt": "p", "chosen": "c"}, {"kind": "sft"}, "preference"),
        ({"prompt": "p", "response": "r"}, {"kind": "scored"}, "sft"),
    ],
)
def test_a_refusal_names_the_field(pack, byte_level, record, settings, mentioned):
    with pytest.raises(RecordError) as caught:
        pack(byte_level(), record, on={"wrong_type": "error"}, **settings)
    assert mentioned in str(caught.value)


@pytest.mark.parametrize("name", ["{}_reward", "score_{}", "{}_score", "{}-rating"])
def test_rewards_under_common_names_are_used(pack, byte_level, name):
    record = {**PAIR, name.format("chosen"): 4.5, name.format("rejected"): 2}
    packed = pack(byte_level(), record, PAIR)
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [0.0, 1.0, 2.0, 4.5]
    assert packed.dataset.manifest.records.fields_used[name.format("chosen")] == 1
    assert not packed.dataset.manifest.records.fields_not_used
    assert packed.noted == {"reward_default": 1}


def rewards_of(packed):
    """Return the rewards of each example, in the order of the input."""
    return (
        packstore.scan(packed.dataset).collect().sort("example_id")["rewards"].to_list()
    )


@pytest.mark.parametrize(
    ("record", "rewards"),
    [
        ({**PAIR, "chosen_reward": "4.5", "rejected_reward": " 2 "}, [4.5, 2]),
        ({**PAIR, "chosen_reward": "1e1", "rejected_reward": 2}, [10, 2]),
        ({**PAIR, "margin": "0.5"}, [0.5, 0]),
        ({"prompt": "p", "responses": ["a", "b"], "scores": ["0.5", "-1"]}, [0.5, -1]),
        ({"prompt": "p", "response": "a", "score": "0.9"}, [0.9]),
        ({"prompt": "p", "response": "a", "label": "1"}, [1]),
        ({"prompt": "p", "response": "a", "label": "Good"}, [1]),
        ({"prompt": "p", "response": "a", "label": "false"}, [0]),
    ],
)
def test_numbers_may_stand_as_text(pack, byte_level, record, rewards):
    assert rewards_of(pack(byte_level(), record)) == [pytest.approx(rewards)]


@pytest.mark.parametrize(
    "value", ["high", "", "nan", "inf", "1e999", "0/60 points", [1], {"a": 1}]
)
def test_a_score_that_is_no_number_is_of_a_wrong_type(pack, byte_level, value):
    good = {"prompt": "p", "response": "a", "score": 1}
    packed = pack(byte_level(), good, {**good, "score": value})
    assert packed.dropped == {"wrong_type": 1}
    group = {"prompt": "p", "responses": ["a", "b"], "scores": [1, value]}
    assert pack(byte_level(), group).dropped == {"wrong_type": 1}


@pytest.mark.parametrize("end", [[], [{"role": "user", "content": "and now?"}]])
def test_a_judged_dialogue_may_end_with_the_user(pack, byte_level, end):
    """Its last answer is what was judged."""
    answer = {"role": "assistant", "content": "a"}
    record = {
        "messages": [USER, answer, USER, {**answer, "content": "b"}, *end],
        "score": 0.5,
    }
    packed = pack(byte_level(template=TEMPLATE), record)
    assert packed.marked == ["[u]u<e>[a]a<e>[u]u<e>[a]«b<e>»"]
    assert packed.noted == ({"question_without_answer": 1} if end else {})
    assert rewards_of(packed) == [[0.5]]


def test_columns_that_nothing_reads_are_counted(pack, byte_level):
    def counts(*records, **settings):
        found = pack(byte_level(), *records, **settings).dataset.manifest.records
        return found.fields_used, found.fields_not_used

    extra = {"style": "brief", "votes": 3, "none": None, "empty": ""}
    records = PAIR, {**PAIR, **extra}, {**PAIR, "style": [], "lang": "en"}
    used, unused = counts(*records)
    assert used == {"prompt": 3, "chosen": 3, "rejected": 3}
    assert unused == {"style": 1, "votes": 1, "lang": 1}
    used, unused = counts({**PAIR, "lang": "en"}, carry=("lang",))
    assert (used["lang"], unused) == (1, {})
    scores = {
        "chosen_score": {"help": 3},
        "rejected_score": "low",
    }  # no numbers, so no rewards
    assert counts({**PAIR, **scores})[1] == dict.fromkeys(scores, 1)
    endless = [{**PAIR, f"k{i}": i, "\ud800": 1, "votes": 1} for i in range(500)]
    unused = counts(*endless)[1]
    assert len(unused) <= 100
    assert unused["votes"] == 500
    assert all(name.encode() for name in unused)


def test_what_is_logged_can_be_written_to_a_file(pack, byte_level, caplog):
    caplog.set_level("INFO")
    pack(byte_level(), {**PAIR, "\ud800": 1, "style": "\udfff"})
    assert "style" in caplog.text
    assert caplog.text.encode()


CHAT = {"messages": [USER, {"role": "assistant", "content": "x"}]}
ANSWER = {"prompt": "Q", "completion": "x", "note": "S", "meta": {"src": 3}}
RATED = {**PAIR, "chosen_score": 2, "rejected_score": 1}


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (ANSWER, {"chosen_reward": "meta.src"}),
        ({**ANSWER, "score": 1}, {"chosen_reward": "meta.src"}),
        (ANSWER, {"system": "note"}),
        ({"messages": [{"role": "system", "content": "T"}, *CHAT["messages"]], "note": "S"},
         {"system": "note"}),
        ({**RATED, "n": 3}, {"score": "n"}),
        ({**RATED, "n": [1, 0]}, {"scores": "n"}),
    ],
)  # fmt: skip
def test_a_mapped_column_is_read_or_its_record_refused(
    pack, byte_level, record, fields
):
    tokenizer = byte_level(template=TEMPLATE) if "messages" in record else byte_level()
    with pytest.raises(RecordError):
        pack(tokenizer, record, fields=fields)


@pytest.mark.parametrize(
    ("record", "fields", "kind"),
    [
        ({"prompt": "Q", "label": "good"}, {"response": "label"}, "sft"),
        ({"prompt": "Q", "score": "5", "label": True}, {"response": "score"}, "scored"),
        (
            {"q": "Q", "chosen": "x", "rejected": "y", "reward": "z"},
            {"prompt": "q"},
            "preference",
        ),
        ({"score": "Q", "completion": "x"}, {"prompt": "score"}, "sft"),
    ],
)
def test_a_mapped_column_is_not_read_under_its_own_name_too(
    pack, byte_level, record, fields, kind
):
    packed = pack(byte_level(), record, fields=fields)
    assert packed.dataset.manifest.kind == kind
    assert rewards_of(packed) == [[1, 0] if kind == "preference" else [1]]


def test_a_mapped_column_may_be_absent_or_empty(pack, byte_level):
    tokenizer, fields = byte_level(template=TEMPLATE), {"system": "a"}
    text, chat = {"prompt": "Q", "completion": "x"}, {**CHAT, "a": "S"}
    empty = [text | {"a": value} for value in (None, "", [], float("nan"))]
    packed = pack(tokenizer, chat, text, *empty, fields=fields, as_chat=False)
    assert packed.dataset.manifest.records.packed == 6
    with pytest.raises(RecordError, match="item 3"):
        pack(
            tokenizer,
            chat,
            text | {"a": ""},
            text | {"a": "S"},
            fields=fields,
            as_chat=False,
        )


PATHS = [
    (
        {"in": {"q": "Q"}, "out": [{"a": "x", "s": 2}, {"a": "y", "s": 1}]},
        {"prompt": "in.q", "responses": "out[].a", "scores": "out[].s"},
    ),
    (
        {"in": {"q.1": "Q"}, "out": {"a b": ["x", "y"]}, "scores": [2, 1]},
        {"prompt": 'in."q.1"', "responses": "out.a b"},
    ),
    ({"in.q": "Q", "responses": ["x", "y"], "scores": [2, 1]}, {"prompt": "in.q"}),
    (
        {"in": '{"q": "Q"}', "responses": ["x", "y"], "scores": [2, 1]},
        {"prompt": "in.q"},
    ),
    (
        {"prompt": "Q", "out": '[{"a": "x", "s": 2}, {"a": "y", "s": 1}]'},
        {"responses": "out[].a", "scores": "out[].s"},
    ),
]


@pytest.mark.parametrize(("record", "fields"), PATHS)
def test_paths(pack, byte_level, record, fields):
    packed = pack(byte_level(), record, fields=fields)
    assert packed.marked == ["Q«x</s>»", "Q«y</s>»"]
    assert not packed.dataset.manifest.records.fields_not_used


@pytest.mark.parametrize(
    ("path", "mentioned"),
    [("out[].b", "'b'"), ("in.x", "'x'"), ("in[].q", "in"), ("nothing.q", "'nothing'")],
)
def test_a_path_without_a_value_names_the_missing_part(
    pack, byte_level, path, mentioned
):
    record = {"in": {"q": "Q"}, "out": [{"a": "x", "b": "z"}, {"a": "y"}]}
    with pytest.raises(RecordError) as caught:
        pack(
            byte_level(),
            record,
            fields={"prompt": "in.q", "chosen": path, "rejected": "out"},
        )
    assert mentioned in str(caught.value)


@pytest.mark.parametrize("path", ["a..b", "[].a", "a[0]", ".a", 'a."b', r'a."\q"'])
def test_a_path_that_is_malformed(pack, byte_level, path):
    with pytest.raises(ConfigError, match="path"):
        pack(
            byte_level(), {"a": "Q", "c": "x"}, fields={"prompt": path, "response": "c"}
        )


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(content, *calls, **more):
    return {"role": "assistant", "content": content, **more, "tool_calls": list(calls)}


THOUGHT = {"reasoning_content": "hm", "thinking": "hm"}
NORMALIZED = {
    "nulls of a table": (
        [
            {
                "role": "user",
                "from": None,
                "content": "u",
                "name": None,
                "tool_calls": None,
            }
        ],
        [USER],
    ),
    "arguments that are text": (
        [said(None, {"function": {"name": "f", "arguments": '{"x": 1}'}})],
        [
            said(
                None,
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                },
            )
        ],
    ),
    "thoughts under another name": (
        [{"role": "assistant", "content": "a", "reasoning": "hm"}],
        [{"role": "assistant", "content": "a", **THOUGHT}],
    ),
    "reasoning, two calls, result": (
        [
            {"role": "assistant_reasoning", "content": "hm"},
            {
                "role": "assistant_tool_call",
                "content": '{"name": "f", "arguments": {"x": 1}}',
            },
            {"role": "function_call", "content": '[{"name": "g"}]'},
            {"role": "observation", "content": "4"},
            {
                "role": "assistant_tool_call",
                "content": '{"name": "h", "arguments": {}}',
            },
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
        with pytest.raises(TokenizerError, match="tokenizer="):
            pack(None, {**PAIR, "prompt": prompt})
    with pytest.raises(TokenizerError, match="chatml"):
        pack(byte_level(), {**PAIR, "prompt": [USER]})
    for setting in ("add_bos", "append_eos"):
        with pytest.raises(TokenizerError, match=setting.partition("_")[2].upper()):
            pack(byte_level(special=()), PAIR, **{setting: True})
    gc.collect()  # warns of a temporary folder that a job has left


def test_carried_columns(pack, byte_level):
    good = {**PAIR, "source": "x", "weight": 2, "n": 3, "ok": True}
    bad = [
        {**good, "n": 2.5},
        {**good, "n": 1 << 63},
        {**good, "weight": (1 << 53) + 1},
    ]
    bad += [{**good, "weight": 10**400}, {**good, "source": "\ud800"}, PAIR]
    carry = ("source", "weight:float64", "n:int64", "ok:bool")
    packed = pack(
        byte_level(), good, *bad, good, carry=carry, on={"missing_field": "drop"}
    )
    frame = packstore.scan(packed.dataset).collect()
    values = {name: frame[name].to_list() for name in ("source", "weight", "n", "ok")}
    assert values == {
        "source": ["x"] * 2,
        "weight": [2.0] * 2,
        "n": [3] * 2,
        "ok": [True] * 2,
    }
    assert [type(column[0]) for column in values.values()] == [str, float, int, bool]
    assert packed.dropped == {"wrong_type": 4, "invalid_unicode": 1, "missing_field": 1}


@pytest.mark.parametrize(
    ("carry", "should_rename"),
    [
        ("x:int", False),
        ("labels", False),
        ("a,b:nope", False),
        *((name, True) for name in (":int64", "a.b", "_day", "été", "2nd")),
    ],
)
def test_columns_that_cannot_be_carried(pack, carry, should_rename):
    record = {"prompt": [1], "chosen": [2], "rejected": [3], carry: "x"}
    with pytest.raises(ConfigError, match="carry") as caught:
        pack(None, record, carry=(carry,))
    assert ("Rename" in str(caught.value)) == should_rename


def test_published_dialogues_split_as_the_explicit_prompts(pack, tokenizer, records):
    """All 2,312 pairs, the 5 that part before their last turn and 4 empty responses
    among them.
    """
    files = ("pairs/hh_harmless_raw.jsonl.gz", "pairs/hh_harmless.jsonl.gz")
    raw, explicit = (pack(tokenizer("small"), *records(file)) for file in files)
    assert len(records(files[0])) == 2312
    assert (raw.examples, raw.rejects) == (explicit.examples, explicit.rejects)
    assert raw.dropped == {"empty_side": 4}


def test_only_what_a_template_writes_is_control(pack, tokenizer, records):
    """Chats with "<|im_end|>" put into the user's words: the rest is encoded as without
    it.
    """
    qwen = tokenizer("few_merges")
    some = records("pairs/chat_en.jsonl")[:10]
    placed = [
        {
            **r,
            "prompt": [
                {**m, "content": m["content"] + " <|im_end|> "} for m in r["prompt"]
            ],
        }
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
