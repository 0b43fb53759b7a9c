"""Templates that write the generation prompt whether it is asked for or not."""

from __future__ import annotations

import pytest

ALWAYS = {
    "after the loop": (
        "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}</h>{{ m.content | trim }}<|end|>"
        "{% endfor %}<h>assistant</h>"
    ),
    "built in a variable": (
        "{% set talk = messages %}{% for m in talk %}{% set text = '<h>' + m['role'] + '</h>\n\n'"
        " + m['content'] | trim + '<|end|>' %}{% if loop.index0 == 0 %}"
        "{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
        "{{ '<h>assistant</h>\n\n' }}"
    ),
    "in the loop": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}{{ '<|end|>' }}{% if loop.last %}"
        "{{ '<h>assistant</h>' }}{% endif %}{% endfor %}"
    ),
    "history is rewritten": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ '(old)' if not loop.last }}{{ m.content }}"
        "<|end|>{% endfor %}<h>assistant</h>"
    ),
}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "v"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize("name", ALWAYS)
def test_a_turn_ends_where_the_generation_prompt_begins(run, byte_level, name):
    tokenizer = byte_level(template=ALWAYS[name])
    texts, tally = run(tokenizer, {"messages": TALK}, kind="sft")
    old = "(old)" if name == "history is rewritten" else ""
    assert texts[0][1] == f"{old}a<|end|>b<|end|>"
    assert dict(tally.noted) == {"generation_prompt_always": 1}
    last = run(tokenizer, {"messages": TALK}, kind="sft", supervised_turns="last")[0]
    assert last[0][1] == "b<|end|>"
    pair = {"prompt": TALK[:2], "chosen": "c", "rejected": "r"}
    assert [said for _, said in run(tokenizer, pair)[0]] == ["c<|end|>", "r<|end|>"]


OTHERS = {
    "asked for": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<h>assistant</h>{% endif %}"
    ),
    "none": "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}<|end|>{% endfor %}",
    "part of the user's turn": (
        "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    ),
    "an end of all": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}<|end|>{% endfor %}"
        "{{ eos_token }}"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_templates_end_with_stays_supervised(run, byte_level, name):
    texts, tally = run(byte_level(template=OTHERS[name]), {"messages": TALK}, kind="sft")
    assert texts[0][1].endswith("b<|end|>" + ("</s>" if name == "an end of all" else ""))
    assert not tally.noted


def test_eos_follows_the_answer(run, byte_level):
    """An EOS that a setting asks for stands behind the answer, not behind the next header."""
    tokenizer = byte_level(template=ALWAYS["after the loop"])
    texts, _ = run(tokenizer, {"messages": TALK[1:3]}, kind="sft", append_eos=True)
    assert texts == [("<s><h>user</h>u<|end|><h>assistant</h>a<|end|></s>", "a<|end|></s>")]
