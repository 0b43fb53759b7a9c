"""The traps of tokenization, and what the settings make of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, RecordError, TokenizerError
from packstore.testing import assert_examples_equal
from packstore.tokenizer import RecordTokenizer

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "u"}


def test_bos_and_eos_of_plain_text(run, byte_level):
    record = {"prompt": "p", "chosen": "c", "rejected": "r"}
    both = byte_level(bos=True)
    texts, tally = run(both, record)
    assert texts == [("<s>pc</s>", "c</s>"), ("<s>pr</s>", "r</s>")]
    assert not tally.noted
    texts, _ = run(both, record, add_bos=False, append_eos=False)
    assert texts == [("pc", "c"), ("pr", "r")]
    texts, _ = run(byte_level(), record)
    assert texts == [("pc</s>", "c</s>"), ("pr</s>", "r</s>")]


def test_bos_is_never_doubled(run, byte_level):
    """By a template that writes BOS, and by text that holds it."""
    tokenizer = byte_level(template=BOS_TEMPLATE, bos=True)
    record = {"prompt": [USER], "chosen": "c", "rejected": "r"}
    once = "<s>[user]u<|end|>[assistant]c<|end|>"
    texts, tally = run(tokenizer, record)
    assert texts[0] == (once, "c<|end|>")
    assert not tally.noted
    texts, tally = run(tokenizer, record, add_bos=True)
    assert texts[0][0] == once
    assert tally.noted == {"bos_deduplicated": 1}
    text = {"prompt": "<s>p", "chosen": "c", "rejected": "r"}
    texts, tally = run(tokenizer, text, on={"special_tokens": "control"})
    assert texts[0][0] == "<s>pc</s>"
    assert tally.noted == {"bos_deduplicated": 1, "special_tokens_control": 1}


def test_eos_is_never_doubled(run, byte_level):
    tokenizer = byte_level(template=BOS_TEMPLATE.replace("<|end|>", "</s>\n"))
    text = {"prompt": "p", "chosen": "c</s>", "rejected": "r"}
    texts, _ = run(tokenizer, text, on={"special_tokens": "control"})
    assert [t for t, _ in texts] == ["pc</s>", "pr</s>"]
    chat = {"prompt": [USER], "chosen": "c", "rejected": "r"}
    texts, _ = run(tokenizer, chat, append_eos=True)
    assert texts[0] == ("<s>[user]u</s>\n[assistant]c</s>\n", "c</s>\n")
    texts, _ = run(byte_level(template=BOS_TEMPLATE), chat, append_eos=True)
    assert texts[0] == ("<s>[user]u<|end|>[assistant]c<|end|></s>", "c<|end|></s>")


def test_without_an_eos_token(run, byte_level):
    tokenizer = byte_level(special=())
    texts, tally = run(tokenizer, {"prompt": "p", "chosen": "c", "rejected": "r"})
    assert texts == [("pc", "c"), ("pr", "r")]
    assert tally.noted == {"no_eos": 1}
    for setting in ("add_bos", "append_eos"):
        with pytest.raises(TokenizerError, match="must name its"):
            run(tokenizer, **{setting: True})


MERGING = {"prompt": "p: ", "chosen": "xy", "rejected": "r"}


def test_a_merged_token_belongs_to_the_response(run, byte_level):
    tokenizer = byte_level(merges=[("Ġ", "x")])
    texts, tally = run(tokenizer, MERGING)
    assert texts == [("p: xy</s>", " xy</s>"), ("p: r</s>", "r</s>")]
    assert tally.noted == {"boundary_merged": 1}
    texts, tally = run(tokenizer, MERGING, on={"boundary": "drop"})
    assert (texts, dict(tally.dropped)) == ([], {"boundary": 1})
    with pytest.raises(RecordError, match=r"data.jsonl, line 1: no token may join"):
        run(tokenizer, MERGING, on={"boundary": "error"})


def test_the_first_token_is_never_supervised(run, byte_level):
    record = {"prompt": "", "chosen": "cd", "rejected": "r"}
    texts, _ = run(byte_level(), record)
    assert texts == [("cd</s>", "d</s>"), ("r</s>", "</s>")]
    texts, _ = run(byte_level(bos=True), record)
    assert texts[0] == ("<s>cd</s>", "cd</s>")
    texts, tally = run(byte_level(), record, append_eos=False)
    assert dict(tally.dropped) == {"unsupervised": 1}
    with pytest.raises(RecordError, match="supervised token"):
        run(byte_level(), record, append_eos=False, on={"unsupervised": "error"})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "p\ud800", "chosen": "c", "rejected": "r"},
        {"prompt": [{"role": "user", "content": "p\ud800"}], "chosen": "c", "rejected": "r"},
    ],
)
def test_lone_surrogates(run, record, byte_level):
    tokenizer = byte_level(template=BOS_TEMPLATE)
    good = {"prompt": "p", "chosen": "c", "rejected": "r"}
    texts, tally = run(tokenizer, good, record, good)
    assert (tally.read, tally.kept, dict(tally.dropped)) == (3, 2, {"invalid_unicode": 1})
    assert tally.samples[0].where == "data.jsonl, line 2"
    texts, tally = run(tokenizer, record, on={"invalid_unicode": "keep"})
    assert "p�" in texts[0][0]
    assert tally.noted == {"unicode_replaced": 1}
    with pytest.raises(RecordError, match="line 1: text must be valid Unicode"):
        run(tokenizer, record, on={"invalid_unicode": "error"})


def test_empty_and_identical_sides(run, byte_level):
    tokenizer = byte_level(template=BOS_TEMPLATE)
    empty = {"prompt": "p", "chosen": " \n", "rejected": "r"}
    same = {"prompt": [USER], "chosen": "c", "rejected": [{"role": "assistant", "content": "c"}]}
    _, tally = run(tokenizer, empty, same)
    assert dict(tally.dropped) == {"empty_side": 1, "identical_sides": 1}
    _, tally = run(tokenizer, empty, same, on={"empty_side": "keep", "identical_sides": "keep"})
    assert tally.kept == 2
    for setting, record in (("empty_side", empty), ("identical_sides", same)):
        with pytest.raises(RecordError):
            run(tokenizer, record, on={setting: "error"})


def test_missing_and_wrong_fields(run, byte_level):
    tokenizer = byte_level()
    with pytest.raises(RecordError, match=r"line 1: .*no field 'rejected'.*missing_field"):
        run(tokenizer, {"prompt": "p", "chosen": "c"})
    wrong = {"prompt": "p", "chosen": True, "rejected": "r"}
    values = [{"prompt": "p", "chosen": "c"}, wrong, "text"]
    _, tally = run(tokenizer, *values, on={"missing_field": "drop"})
    assert dict(tally.dropped) == {"missing_field": 1, "wrong_type": 1, "not_an_object": 1}
    with pytest.raises(RecordError, match="found chosen True"):
        run(tokenizer, wrong, on={"wrong_type": "error"})


def test_messages_without_a_template(run, byte_level):
    with pytest.raises(TokenizerError, match="chatml or plain"):
        run(byte_level(), {"prompt": [USER], "chosen": "c", "rejected": "r"})


def test_bos_that_a_setting_adds_is_kept_with_the_system_turn(run, byte_level):
    template = BOS_TEMPLATE.replace("{{ bos_token }}", "")
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "u" * 30}]
    record = {"prompt": talk, "chosen": "c", "rejected": "r"}
    texts, tally = run(
        byte_level(template=template),
        record,
        add_bos=True,
        overlong="truncate_prompt",
        max_length=35,
    )
    assert texts[0][0] == "<s>[system]S<|end|>" + "u" * 10 + "<|end|>[assistant]c<|end|>"
    assert tally.noted == {"truncated_prompt": 1}


def test_merging_system_and_user_is_no_boundary_merge(run, byte_level):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]
    record = {"prompt": talk, "chosen": "c", "rejected": "r"}
    tokenizer = byte_level(merges=[("S", "u")], template=template)
    _, tally = run(tokenizer, record, overlong="truncate_prompt")
    assert (tally.kept, dict(tally.noted)) == (1, {})


def test_token_ids_pass_through(rows, sequences, byte_level):
    record = {"prompt": [5, 6], "chosen": [7], "rejected": [8, 9]}
    record |= {"chosen_reward": 1, "rejected_reward": -1.5}
    for tokenizer in (None, byte_level(bos=True)):
        examples, _ = RecordTokenizer(tokenizer, TokenizeConfig(), "preference")(rows([record]))
        assert sequences(examples) == [
            ([5, 6, 7], [False, False, True]),
            ([5, 6, 8, 9], [False, False, True, True]),
        ]
        assert examples.reward.tolist() == [1.0, -1.5]
    sft = {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, -100]}
    examples, _ = RecordTokenizer(None, TokenizeConfig(), "sft")(rows([sft]))
    assert sequences(examples) == [([5, 6, 7, 8], [False, False, True, False])]


def test_token_ids_outside_the_vocabulary(rows, byte_level):
    record = {"prompt": [5], "chosen": [7], "rejected": [100_000]}
    _, tally = RecordTokenizer(byte_level(), TokenizeConfig(), "preference")(rows([record]))
    assert dict(tally.dropped) == {"wrong_type": 1}


def test_text_without_a_tokenizer(rows):
    record = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with pytest.raises(TokenizerError, match="must be given"):
        RecordTokenizer(None, TokenizeConfig(), "preference")(rows([record]))


def test_ranked_keeps_every_response(run, byte_level):
    record = {"prompt": "p", "responses": ["a", "b", "a"], "scores": [1, 0.5, 1]}
    texts, _ = run(byte_level(), record, kind="ranked")
    assert [said for _, said in texts] == ["a</s>", "b</s>", "a</s>"]


def test_carried_columns(rows, byte_level):
    base = {"prompt": "p", "chosen": "c", "rejected": "r"}
    good = {**base, "source": "x", "weight": 2, "n": 3, "ok": True}
    bad = [{**good, "n": 2.5}, {**good, "n": 1 << 63}, {**good, "source": "\ud800"}, base]
    config = TokenizeConfig(
        carry=("source", "weight:float64", "n:int64", "ok:bool"), on={"missing_field": "drop"}
    )
    examples, tally = RecordTokenizer(byte_level(), config, "preference")(rows([good, *bad, good]))
    columns = examples.columns
    assert {name: column.tolist() for name, column in columns.items()} == {
        "source": ["x", "x"],
        "weight": [2.0, 2.0],
        "n": [3, 3],
        "ok": [True, True],
    }
    types = [columns[n].dtype for n in ("source", "weight", "n", "ok")]
    assert types == [object, np.float64, np.int64, np.bool_]
    assert dict(tally.dropped) == {"wrong_type": 2, "invalid_unicode": 1, "missing_field": 1}
    empty, _ = RecordTokenizer(byte_level(), config, "preference")(rows([]))
    assert {n: c.dtype for n, c in empty.columns.items()} == {
        n: c.dtype for n, c in columns.items()
    }


@pytest.mark.parametrize("carry", ["x:int", "labels", ":int64", "a,b:nope"])
def test_columns_that_cannot_be_carried(carry):
    with pytest.raises(ConfigError, match="setting carry"):
        RecordTokenizer(None, TokenizeConfig(carry=(carry,)), "preference")


def test_any_split_into_blocks_gives_the_same(tokenizer, records, rows):
    """And a pickled copy the same as the original."""
    some = records("pairs/hh_harmless_messages.jsonl.gz")[80:100]
    work = RecordTokenizer(tokenizer("small"), TokenizeConfig(), "preference")
    whole, tally = work(rows(some))
    copy = pickle.loads(pickle.dumps(work))
    parts = [copy(rows([record])) for record in some]
    joined = type(whole).concat([examples for examples, _ in parts])
    np.testing.assert_array_equal(joined.input_ids, whole.input_ids)
    np.testing.assert_array_equal(joined.supervised, whole.supervised)
    assert sum(t.kept for _, t in parts) == tally.kept
    assert_examples_equal(copy(rows(some))[0], whole)
