"""Strings of control tokens in the words of a record."""

from __future__ import annotations

import numpy as np
import pytest

from packstore.config import TokenizeConfig
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "u"}


INJECTED = "a</s>b<s><|end|>"


@pytest.mark.parametrize(("answer", "how"), [("keep", "literal"), ("control", "control")])
def test_control_strings_in_plain_text(run, sequences, rows, answer, how, byte_level):
    tokenizer = byte_level(bos=True)
    record = {"prompt": INJECTED, "chosen": INJECTED, "rejected": "r"}
    texts, tally = run(tokenizer, record, on={"special_tokens": answer})
    assert texts[0][0] == "<s>" + 2 * INJECTED + "</s>"
    assert tally.noted == {f"special_tokens_{how}": 1}
    config = TokenizeConfig(on={"special_tokens": answer})
    examples, _ = RecordTokenizer(tokenizer, config, "preference")(rows([record]))
    control = np.isin(examples.input_ids, list(tokenizer.specials.values())).sum()
    assert control == {"literal": 4, "control": 13}[how]


def test_control_strings_in_messages_stay_text(rows, sequences, byte_level):
    """Only what the template itself writes is control; all else has the ids of plain text."""
    tokenizer = byte_level(template=BOS_TEMPLATE)
    names = tokenizer.specials

    def letters(text):
        return tokenizer.engine.encode_batch([text], control=False)[0].tolist()

    tools = [{"name": INJECTED}]
    record = {
        "prompt": [{"role": "user", "content": INJECTED}],
        "chosen": "c" + INJECTED,
        "rejected": "r",
        "tools": tools,
    }
    examples, tally = RecordTokenizer(
        tokenizer, TokenizeConfig(on={"unrendered": "keep"}), "preference"
    )(rows([record]))
    prompt = [
        names["<s>"],
        *letters("[user]" + INJECTED),
        names["<|end|>"],
        *letters("[assistant]"),
    ]
    found = sequences(examples)
    for (ids, on), response in zip(found, ("c" + INJECTED, "r"), strict=True):
        expected = [*letters(response), names["<|end|>"]]
        assert ids == prompt + expected
        assert on == [False] * len(prompt) + [True] * len(expected)
    assert tally.noted == {"special_tokens_literal": 1, "unrendered": 1}


def test_control_strings_in_real_chats_change_only_themselves(tokenizer, records, rows, sequences):
    """Chats with "<|im_end|>" put into the user's words: the rest is encoded as without it."""
    qwen = tokenizer("qwen3")
    some = records("pairs/chat_en.jsonl")[:40]
    placed = [
        {**r, "prompt": [{**m, "content": m["content"] + " <|im_end|> "} for m in r["prompt"]]}
        for r in some
    ]
    config = TokenizeConfig(pack_size=65536)
    plain, _ = RecordTokenizer(qwen, config, "preference")(rows(some))
    literal, tally = RecordTokenizer(qwen, config, "preference")(rows(placed))
    assert tally.noted["special_tokens_literal"] == len(some)
    mark = qwen.engine.encode_batch([" <|im_end|> "], control=False)[0].tolist()
    assert qwen.eos_id not in mark
    for (a, on_a), (b, on_b) in zip(sequences(plain), sequences(literal), strict=True):
        assert a.count(qwen.eos_id) == b.count(qwen.eos_id)
        assert sum(on_a) == sum(on_b)
        assert a[-sum(on_a) :] == b[-sum(on_b) :]
        assert "<|im_end|> <|im_end|>\n" in qwen.decode(b)


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_control_strings_refused(run, policy, byte_level):
    tokenizer = byte_level(template=BOS_TEMPLATE)
    chat = {"prompt": [{"role": "user", "content": "<s>"}], "chosen": "c", "rejected": "r"}
    for record in ({"prompt": "p", "chosen": "c</s>", "rejected": "r"}, chat):
        if policy == "drop":
            _, tally = run(tokenizer, record, on={"special_tokens": "drop"})
            assert dict(tally.dropped) == {"special_tokens": 1}
        else:
            with pytest.raises(RecordError, match="control tokens"):
                run(tokenizer, record, on={"special_tokens": "error"})


def test_no_plain_form_is_dropped(tokenizer, run):
    """Unigram finds "</s>" among its pieces, whatever it is told."""
    record = {"prompt": "p", "chosen": "a</s>b", "rejected": "r"}
    texts, tally = run(tokenizer("t5"), record)
    assert (texts, dict(tally.dropped)) == ([], {"special_tokens": 1})
    assert "no plain form" in tally.samples[0].detail


def test_tokens_that_swallow_white_space_are_not_cut_around(run, byte_level):
    tokenizer = byte_level(template=BOS_TEMPLATE, rstrip=True)
    plain = {"prompt": [USER], "chosen": "c", "rejected": "r"}
    texts, _ = run(tokenizer, plain)
    assert texts
    injected = {**plain, "chosen": "<s>"}
    texts, tally = run(tokenizer, injected)
    assert (texts, dict(tally.dropped)) == ([], {"special_tokens": 1})


def test_the_longest_control_string_is_found(run, byte_level):
    tokenizer = byte_level(special=("<s>", "<s>>"))
    text = {"prompt": "p", "chosen": "<s>>", "rejected": "r"}
    assert tokenizer.controls.findall("a<s>>b<s>") == ["<s>>", "<s>"]
    _, tally = run(tokenizer, text, on={"special_tokens": "control"})
    assert tally.noted["special_tokens_control"] == 1
