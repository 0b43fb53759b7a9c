"""What becomes of a record: its sequences with the supervised text in «», and events; or a reason.

The tokenizer has one token for each byte, but for control strings and the merges that a case names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packstore.config import REASONS, TokenizeConfig
from packstore.errors import ConfigError, RecordError, UnknownNameError


class Case(NamedTuple):
    """A record, and what it becomes: sequences and events, or the reason for a refusal."""

    record: Any
    expected: list[str] | str
    noted: tuple[str, ...] = ()
    kind: str = "preference"
    tokenizer: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def on(**answers: str) -> dict[str, Any]:
    return {"on": answers}


def hh(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {t}" for i, t in enumerate(turns))


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS = "{{ bos_token }}" + TEMPLATE
GENERATION = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
REWRITING = TEMPLATE.replace(
    "[{{ m.role }}]", "[{{ m.role }}]{{ '(now)' if loop.last and m.role == 'assistant' }}"
).replace("m.content", "m.content | trim")
IN_LAST_USER_TURN = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if m == users[-1] }}"
    "{{ m.content }}[/I]{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
AWKWARD = [
    user("first"),
    said(" one "),
    user("second [assistant] one "),
    said("two[assistant]three\n"),
]
P = {"prompt": "p", "chosen": "c", "rejected": "r"}
PLAIN = ["p«c</s>»", "p«r</s>»"]
CHAT = {"chosen": [user("p"), said("c")], "rejected": [user("p"), said("r")]}
TURNS = {"template": TEMPLATE}
CHATTED = ["[user]p<|end|>[assistant]«c<|end|>»", "[user]p<|end|>[assistant]«r<|end|>»"]
TWO = {"messages": [user("u"), said("a"), user("v"), said("b")]}
INJECTED = "a</s>b<s><|end|>"
UNKNOWN = {"role": "narrator", "content": "x"}
SFT: dict[str, Any] = {"kind": "sft", "tokenizer": TURNS}
RANKED = {"prompt": "p", "responses": ["a", "b", "a"], "scores": [0, 2.5, 0]}

CASES = {
    # Pairs of text, BOS and EOS.
    "text": Case(P, PLAIN),
    "mapped names": Case(
        {"q": "p", "better": "c", "worse": "r", "prompt": "no", "chosen": "no"},
        PLAIN,
        settings={"fields": {"prompt": "q", "chosen": "better", "rejected": "worse"}},
    ),
    "bos": Case(P, ["<s>p«c</s>»", "<s>p«r</s>»"], tokenizer={"bos": True}),
    "neither bos nor eos": Case(
        P,
        ["p«c»", "p«r»"],
        tokenizer={"bos": True},
        settings={"add_bos": False, "append_eos": False},
    ),
    "no eos token": Case(P, ["p«c»", "p«r»"], ("no_eos",), tokenizer={"special": ()}),
    "bos is not doubled": Case(
        {**P, "prompt": "<s>p"},
        ["<s>p«c</s>»", "<s>p«r</s>»"],
        ("bos_deduplicated", "special_tokens_control"),
        tokenizer={"bos": True},
        settings=on(special_tokens="control"),
    ),
    "bos of a template is not doubled": Case(
        {**P, "prompt": [user("p")]},
        ["<s>" + text for text in CHATTED],
        ("bos_deduplicated",),
        tokenizer={"template": BOS, "bos": True},
        settings={"add_bos": True},
    ),
    "eos is not doubled": Case(
        {**P, "chosen": "c</s>"},
        PLAIN,
        ("special_tokens_control",),
        settings=on(special_tokens="control"),
    ),
    "eos behind a template": Case(
        CHAT,
        [t.replace("<|end|>»", "<|end|></s>»") for t in CHATTED],
        tokenizer=TURNS,
        settings={"append_eos": True},
    ),
    "the first token is not supervised": Case(
        {"prompt": "", "chosen": "cd", "rejected": "r"}, ["c«d</s>»", "r«</s>»"]
    ),
    # Boundaries.
    "a merged token is of the response": Case(
        {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
        ["p:« xy</s>»", "p: «r</s>»"],
        ("boundary_merged",),
        tokenizer={"merges": [("Ġ", "x")]},
    ),
    "a merged token refused": Case(
        {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
        "boundary",
        tokenizer={"merges": [("Ġ", "x")]},
        settings=on(boundary="drop"),
    ),
    # Implied prompts.
    "whole dialogues": Case({"prompt": None, **CHAT}, CHATTED, tokenizer=TURNS),
    "whole dialogues and their prompt": Case({"prompt": "p", **CHAT}, CHATTED, tokenizer=TURNS),
    "text of HH": Case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b", "c", "e", "f")},
        [f"{hh('a', 'b', 'c')}\n\nAssistant:« {x}</s>»" for x in ("d", "e\n\nHuman: f")],
    ),
    "text of HH that parts before its last turn": Case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "x", "c", "d")},
        [hh("a") + f"\n\nAssistant:« {x}\n\nHuman: c\n\nAssistant: d</s>»" for x in "bx"],
    ),
    "text of HH without its first line breaks": Case(
        {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"},
        [f"Human: a\n\nAssistant:« {x}</s>»" for x in "bc"],
    ),
    "nothing in common": Case(
        {"chosen": hh("a", "b"), "rejected": hh("x", "b")}, "no_common_prompt"
    ),
    "other texts without a prompt": Case({"chosen": "a b", "rejected": "a c"}, "missing_field"),
    # Messages.
    "a message as prompt": Case({**P, "prompt": [user("p")]}, CHATTED, tokenizer=TURNS),
    "messages as responses": Case(
        {"prompt": "p", "chosen": [said("c")], "rejected": said("r")}, CHATTED, tokenizer=TURNS
    ),
    "a system text": Case(
        {**P, "prompt": [user("p")], "system": "S"},
        ["[system]S<|end|>" + text for text in CHATTED],
        tokenizer=TURNS,
    ),
    "text parts": Case(
        {**P, "prompt": [{"role": "user", "content": [{"type": "text", "text": "p"}]}]},
        CHATTED,
        tokenizer=TURNS,
    ),
    "two turns": Case(
        TWO, ["[user]u<|end|>[assistant]«a<|end|>»[user]v<|end|>[assistant]«b<|end|>»"], **SFT
    ),
    "the last turn": Case(
        TWO,
        ["[user]u<|end|>[assistant]a<|end|>[user]v<|end|>[assistant]«b<|end|>»"],
        settings={"supervised_turns": "last"},
        **SFT,
    ),
    "ShareGPT": Case(
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        ["[user]u<|end|>[assistant]«a<|end|>»"],
        **SFT,
    ),
    "messages as JSON text": Case(
        {"messages": '[{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]'},
        ["[user]u<|end|>[assistant]«a<|end|>»"],
        **SFT,
    ),
    "prompt and completion": Case({"prompt": "p", "completion": "a"}, ["p«a</s>»"], kind="sft"),
    "generation blocks": Case(
        TWO,
        ["[user]u<|end|>[assistant]«a!»<|end|>[user]v<|end|>[assistant]«b!»<|end|>"],
        kind="sft",
        tokenizer={"template": GENERATION},
    ),
    "generation blocks of a response": Case(
        {"prompt": TWO["messages"][:3], "chosen": "c", "rejected": "r"},
        [f"[user]u<|end|>[assistant]a!<|end|>[user]v<|end|>[assistant]«{x}!»<|end|>" for x in "cr"],
        tokenizer={"template": GENERATION},
    ),
    "history is rewritten": Case(
        {"messages": AWKWARD},
        [
            "[user]first<|end|>[assistant]«one<|end|>»[user]second [assistant] one<|end|>"
            "[assistant]«(now)two[assistant]three<|end|>»"
        ],
        kind="sft",
        tokenizer={"template": REWRITING},
    ),
    "no generation prompt": Case(
        {"messages": AWKWARD},
        [
            "[user]first<|end|>«[assistant] one <|end|>»[user]second [assistant] one <|end|>"
            "«[assistant]two[assistant]three\n<|end|>»"
        ],
        kind="sft",
        tokenizer={"template": TEMPLATE.partition("{% if")[0]},
    ),
    "the system text in the last user turn": Case(
        {"messages": AWKWARD},
        ["[I]first[/I] «one ;»[I]Ssecond [assistant] one [/I]«two[assistant]three\n;»"],
        kind="sft",
        tokenizer={"template": IN_LAST_USER_TURN},
    ),
    "a turn that cannot be found": Case(
        TWO,
        "template_refused",
        kind="sft",
        tokenizer={
            "template": "{% for m in messages %}{{ m.content | length }}{{ loop.length }};"
            "{% endfor %}"
        },
    ),
    "a template that refuses": Case(
        CHAT,
        "template_refused",
        tokenizer={"template": "{{ raise_exception('roles must alternate') }}"},
    ),
    "an empty turn among others": Case(
        {"messages": [user("u"), said(""), user("v"), said("b")]}, "empty_turn", **SFT
    ),
    "an empty turn kept": Case(
        {"messages": [user("u"), said(""), user("v"), said("b")]},
        ["[user]u<|end|>[assistant]«<|end|>»[user]v<|end|>[assistant]«b<|end|>»"],
        ("empty_turn",),
        settings=on(empty_turn="keep"),
        **SFT,
    ),
    "an empty turn before the last": Case(
        {"messages": [user("u"), said(""), user("v"), said("b")]},
        ["[user]u<|end|>[assistant]<|end|>[user]v<|end|>[assistant]«b<|end|>»"],
        settings={"supervised_turns": "last"},
        **SFT,
    ),
    "no answer": Case({"messages": [user("u")]}, "unsupervised", **SFT),
    "a role left out": Case(
        {**P, "prompt": [system("s"), user("p")]},
        "unrendered",
        tokenizer={"template": TEMPLATE.replace("messages", "messages if m.role != 'system'")},
    ),
    "thoughts stripped": Case(
        {**P, "chosen": "<think>\nhm\n</think>\n\nc"}, PLAIN, settings={"thinking": "strip"}
    ),
    # Control strings.
    "control strings are text": Case(
        {**P, "prompt": INJECTED},
        [f"{INJECTED}«{x}</s>»" for x in "cr"],
        ("special_tokens_literal",),
    ),
    "control strings refused": Case(
        {**P, "chosen": "c</s>"}, "special_tokens", settings=on(special_tokens="drop")
    ),
    "control strings in messages are text": Case(
        {**P, "prompt": [user(INJECTED)]},
        [t.replace("]p<", f"]{INJECTED}<") for t in CHATTED],
        ("special_tokens_literal",),
        tokenizer=TURNS,
    ),
    "control tokens that swallow white space": Case(
        {**P, "prompt": [user("p")], "chosen": "<s>"},
        "special_tokens",
        tokenizer={"template": TEMPLATE, "rstrip": True},
    ),
    # Empty, equal and broken records.
    "an empty side": Case({**P, "chosen": " \n"}, "empty_side"),
    "an empty side kept": Case(
        {**P, "chosen": ""}, ["p«</s>»", "p«r</s>»"], settings=on(empty_side="keep")
    ),
    "equal sides": Case({**P, "chosen": "r"}, "identical_sides"),
    "equal sides kept": Case(
        {**P, "chosen": "r"}, ["p«r</s>»"] * 2, settings=on(identical_sides="keep")
    ),
    "a lone surrogate": Case({**P, "prompt": "p\ud800"}, "invalid_unicode"),
    "a lone surrogate replaced": Case(
        {**P, "prompt": "p\ud800"},
        ["p�«c</s>»", "p�«r</s>»"],
        ("unicode_replaced",),
        settings=on(invalid_unicode="keep"),
    ),
    "rewards against the order": Case(
        {**P, "chosen_reward": 1, "rejected_reward": 4}, PLAIN, ("reward_reversed",)
    ),
    "one reward": Case({**P, "score_chosen": 4.5}, "one_reward"),
    "a bad answer": Case(
        {"prompt": "p", "completion": "b", "label": False}, "unpaired_feedback", kind="sft"
    ),
    "a bad answer kept": Case(
        {"prompt": "p", "completion": "b", "label": False},
        ["p«b</s>»"],
        kind="sft",
        settings=on(unpaired_feedback="keep"),
    ),
    "a label of a pair": Case({**P, "label": 0}, PLAIN),
    "ranked": Case(RANKED, ["p«a</s>»", "p«b</s>»", "p«a</s>»"], kind="ranked"),
    "too long": Case({**P, "chosen": "c" * 99}, "overlong", settings={"max_length": 50}),
    "bos and the system turn stay": Case(
        {**P, "prompt": [system("S"), user("u" * 30)]},
        [f"<s>[system]S<|end|>{'u' * 10}<|end|>[assistant]«{x}<|end|>»" for x in "cr"],
        ("truncated_prompt",),
        tokenizer=TURNS,
        settings={"add_bos": True, "overlong": "truncate_prompt", "max_length": 35},
    ),
    "the bos of a template stays": Case(
        {**P, "prompt": [user("u" * 30)]},
        [f"<s>{'u' * 20}<|end|>[assistant]«{x}<|end|>»" for x in "cr"],
        ("truncated_prompt",),
        tokenizer={"template": BOS},
        settings={"overlong": "truncate_prompt", "max_length": 35},
    ),
    "no object": Case(["x"], "not_an_object"),
    "no rejected": Case({"prompt": "p", "chosen": "c"}, "missing_field"),
    "a boolean": Case({**P, "chosen": True}, "wrong_type"),
    "a number": Case({**P, "prompt": 3}, "wrong_type"),
    "a list of text": Case({**P, "chosen": ["c"]}, "wrong_type"),
    "a reward that is text": Case({**P, "chosen_reward": "1"}, "wrong_type"),
    "a reward that is no number": Case({**P, "chosen_reward": float("nan")}, "wrong_type"),
    "tools that are no JSON": Case({**P, "prompt": [user("p")], "tools": "{"}, "wrong_type"),
    "a system text that is a number": Case({**CHAT, "system": 3}, "wrong_type"),
    "ids and text": Case({**P, "prompt": [1, 2]}, "wrong_type"),
    "ids without a prompt": Case({"chosen": [1], "rejected": [2]}, "missing_field"),
    "a negative id": Case({"prompt": [1], "chosen": [-1], "rejected": [2]}, "wrong_type"),
    "nested ids": Case({"prompt": [1], "chosen": [1, [2]], "rejected": [2]}, "wrong_type"),
    "a huge id": Case({"prompt": [1], "chosen": [1 << 70], "rejected": [2]}, "wrong_type"),
    "ids outside the vocabulary": Case(
        {"prompt": [5], "chosen": [7], "rejected": [99_999]}, "wrong_type"
    ),
    "one response": Case(
        {"prompt": "p", "responses": ["a"], "scores": [1]}, "wrong_type", kind="ranked"
    ),
    "too few scores": Case({**RANKED, "scores": [1]}, "wrong_type", kind="ranked"),
    "no scores": Case({"prompt": "p", "responses": ["a", "b"]}, "missing_field", kind="ranked"),
    "too few labels": Case({"input_ids": [1, 2], "labels": [1]}, "wrong_type", kind="sft"),
    "shifted labels": Case({"input_ids": [1, 2], "labels": [2, -100]}, "wrong_type", kind="sft"),
    "no labels": Case({"input_ids": [1, 2]}, "missing_field", kind="sft"),
    "no messages": Case({"text": "x"}, "missing_field", kind="sft"),
    "messages that are text": Case({"messages": "[x"}, "wrong_type", kind="sft"),
    "no message": Case({"messages": []}, "wrong_type", kind="sft"),
    "a message that is a number": Case({"messages": [3]}, "wrong_type", kind="sft"),
    "an image": Case({"messages": [user([{"type": "image"}])]}, "wrong_type", kind="sft"),
    "null content": Case({"messages": [said(None)]}, "wrong_type", kind="sft"),
    "an unknown role": Case({"messages": [UNKNOWN]}, "bad_role", kind="sft"),
    "no role": Case({"messages": [{"content": "x"}]}, "bad_role", kind="sft"),
    "a call that is no JSON": Case(
        {"messages": [{"role": "assistant_tool_call", "content": "f()"}]}, "wrong_type", kind="sft"
    ),
}

GOOD = {"preference": P, "sft": {"prompt": "p", "response": "a"}, "ranked": RANKED}


@pytest.mark.parametrize("name", CASES)
def test_a_record(name, pack, byte_level):
    case = CASES[name]
    tokenizer = byte_level(**(case.tokenizer or {}))
    settings = {"kind": case.kind, **(case.settings or {})}
    answers = {"missing_field": "drop", "one_reward": "drop", "unpaired_feedback": "drop"}
    settings["on"] = {**answers, **settings.get("on", {})}
    packed = pack(tokenizer, case.record, **settings)
    if isinstance(case.expected, list):
        assert packed.marked == case.expected
        assert packed.noted == dict.fromkeys(case.noted, 1)
        return
    assert (packed.dataset, packed.dropped) == (None, {case.expected: 1})
    stop: dict[str, Any] = {"overlong": "error"}
    if case.expected != "overlong":
        stop = {"on": {**settings["on"], case.expected: "error"}}
    with pytest.raises(RecordError) as caught:
        pack(tokenizer, GOOD[case.kind], case.record, **{**settings, **stop})
    assert f"item 2: {REASONS[case.expected].rule}" in str(caught.value)


def test_every_reason_has_a_case():
    assert {c.expected for c in CASES.values() if isinstance(c.expected, str)} == REASONS.keys()


def test_the_page_lists_every_reason():
    page = (Path(__file__).parents[2] / "docs/tokenizing.md").read_text(encoding="utf-8")
    for name, (rule, answers) in REASONS.items():
        choices = ", ".join(f"`{answer}`" for answer in answers) or "the setting `overlong`"
        assert f"| `{name}` | {rule} | {choices} |" in page


def test_answers_that_there_are_not():
    with pytest.raises(UnknownNameError, match=r"unknown reason 'empty_sides'.*'empty_side'"):
        TokenizeConfig(on={"empty_sides": "drop"})
    with pytest.raises(ConfigError, match="on, unsupervised, must be one of: drop, error; found"):
        TokenizeConfig(on={"unsupervised": "keep"})
