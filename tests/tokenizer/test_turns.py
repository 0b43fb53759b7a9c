"""Supervision in dialogues: the words of the assistant."""

from __future__ import annotations

import pytest

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "u"}


def test_a_template_that_refuses(run, byte_level):
    template = "{{ raise_exception('roles must alternate') if messages[1] else '' }}x"
    record = {"prompt": [USER], "chosen": "c", "rejected": "r"}
    _, tally = run(byte_level(template=template), record)
    assert dict(tally.dropped) == {"template_refused": 1}
    assert "roles must alternate" in tally.samples[0].detail


THOUGHT = "<think>\nhm\n</think>\n\nyes"


def test_thinking_of_qwen(tokenizer, run, byte_level):
    """Thoughts stay or go; the empty block that the template writes is not supervised."""
    record = {"prompt": [USER], "chosen": THOUGHT, "rejected": "no"}
    texts, _ = run(tokenizer("qwen3"), record)
    assert [said for _, said in texts] == [
        THOUGHT + "<|im_end|>\n",
        "no<|im_end|>\n",
    ]
    texts, _ = run(tokenizer("qwen3"), record, thinking="strip")
    assert texts[0][1] == "yes<|im_end|>\n"
    texts, _ = run(byte_level(), {**record, "prompt": "p"}, thinking="strip")
    assert texts[0] == ("pyes</s>", "yes</s>")


def test_supervised_turns_of_a_response(run, byte_level):
    said = [{"role": "assistant", "content": c} for c in "abc"]
    record = {"prompt": [USER, said[0], USER], "chosen": [said[1], USER, said[2]], "rejected": "r"}
    tokenizer = byte_level(template=BOS_TEMPLATE)
    assert [s for _, s in run(tokenizer, record)[0]] == ["b<|end|>c<|end|>", "r<|end|>"]
    last = run(tokenizer, record, supervised_turns="last")[0]
    assert [s for _, s in last] == ["c<|end|>", "r<|end|>"]


GENERATION = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_generation_blocks_decide(run, byte_level):
    said = [{"role": "assistant", "content": c} for c in "ab"]
    tokenizer = byte_level(template=GENERATION)
    talk = {"messages": [USER, said[0], USER, said[1]]}
    assert run(tokenizer, talk, kind="sft")[0][0][1] == "a!b!"
    assert run(tokenizer, talk, kind="sft", supervised_turns="last")[0][0][1] == "b!"
    pair = {"prompt": talk["messages"][:3], "chosen": "c", "rejected": "r"}
    assert [s for _, s in run(tokenizer, pair)[0]] == ["c!", "r!"]


AWKWARD = {
    "no generation prompt": "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}",
    "history is rewritten": (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}(now)"
        "{% endif %}{{ m.content | trim }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "system in the last user turn": (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if m == users[-1] }}"
        "{{ m.content }}[/I]{% else %}{{ m.content }};{% endif %}{% endfor %}"
    ),
}
SAID = {
    "no generation prompt": "[assistant] one ;[assistant]two[assistant]three\n;",
    "history is rewritten": "one;(now)two[assistant]three;",
    "system in the last user turn": "one ;two[assistant]three\n;",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_turns_in_awkward_templates(run, name, byte_level):
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": " one "},
        {"role": "user", "content": "second [assistant] one "},
        {"role": "assistant", "content": "two[assistant]three\n"},
    ]
    texts, _ = run(byte_level(template=AWKWARD[name]), {"messages": talk}, kind="sft")
    assert texts[0][1] == SAID[name]


def test_a_turn_that_cannot_be_found_is_refused(run, byte_level):
    template = "{% for m in messages %}{{ m.content | length }}{{ loop.length }};{% endfor %}"
    talk = [
        USER,
        {"role": "assistant", "content": "a"},
        USER,
        {"role": "assistant", "content": "b"},
    ]
    _, tally = run(byte_level(template=template), {"messages": talk}, kind="sft")
    assert dict(tally.dropped) == {"template_refused": 1}


def test_a_template_that_says_things_twice_is_refused(run, byte_level):
    """The place of a turn would be a guess, where it cannot be found by its prompt alone."""
    template = AWKWARD["history is rewritten"].replace("| trim }};", "| trim }}={{ m.content }};")
    talk = [
        USER,
        {"role": "assistant", "content": "a"},
        USER,
        {"role": "assistant", "content": "b"},
    ]
    _, tally = run(byte_level(template=template), {"messages": talk}, kind="sft")
    assert dict(tally.dropped) == {"template_refused": 1}


def test_a_turn_without_words_is_found_by_its_prompt(run, byte_level):
    talk = [USER, {"role": "assistant", "content": ""}, USER, {"role": "assistant", "content": "b"}]
    tokenizer = byte_level(template=BOS_TEMPLATE)
    texts, _ = run(tokenizer, {"messages": talk}, kind="sft", on={"empty_turn": "keep"})
    assert texts[0][1] == "<|end|>b<|end|>"


def test_sft_without_an_answer(run, byte_level):
    _, tally = run(byte_level(template=BOS_TEMPLATE), {"messages": [USER]}, kind="sft")
    assert dict(tally.dropped) == {"unsupervised": 1}
