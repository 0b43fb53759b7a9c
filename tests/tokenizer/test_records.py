"""What becomes of a record: its sequences with the supervised text in «», and events; or a reason.

The tokenizer has one token for each byte, but for control strings and the merges that a case names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packstore.config import REASONS, TokenizeConfig
from packstore.errors import ConfigError, RecordError, UnknownNameError


class Case(NamedTuple):
    """A record, and what it becomes: sequences and events, or the reason for a refusal."""

    record: Any
    expected: list[str] | str
    noted: tuple[str, ...]
    kind: str
    tokenizer: dict[str, Any]
    settings: dict[str, Any]


def case(
    record: Any, expected: Any, *noted: str, kind="preference", tokenizer=None, **settings: Any
) -> Case:
    return Case(record, expected, noted, kind, tokenizer or {}, settings)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def hh(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {t}" for i, t in enumerate(turns))


TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
BOS = "{{ bos_token }}" + TEMPLATE
GENERATION = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
REWRITING = TEMPLATE.replace(
    "[{{ m.role[0] }}]", "[{{ m.role[0] }}]{{ '(now)' if loop.last and m.role == 'assistant' }}"
).replace("m.content", "m.content | trim")
IN_LAST_USER_TURN = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if m == users[-1] }}"
    "{{ m.content }}[/I]{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
LENGTHS = "{% for m in messages %}{{ m.content | length }}{{ loop.length }};{% endfor %}"
AWKWARD = [
    user("first"),
    said(" one "),
    user("second [a] one "),
    said("two[a]three\n"),
]
P = {"prompt": "p", "chosen": "c", "rejected": "r"}
PLAIN = ["p«c</s>»", "p«r</s>»"]
CHAT = {"chosen": [user("p"), said("c")], "rejected": [user("p"), said("r")]}
TURNS = {"template": TEMPLATE}
CHATTED = ["[u]p<e>[a]«c<e>»", "[u]p<e>[a]«r<e>»"]
TWO = {"messages": [user("u"), said("a"), user("v"), said("b")]}
INJECTED = "a</s>b<s><e>"
UNKNOWN = {"role": "narrator", "content": "x"}
SFT: dict[str, Any] = {"kind": "sft", "tokenizer": TURNS}
RANKED = {"prompt": "p", "responses": ["a", "b", "a"], "scores": [0, 2.5, 0]}

CASES = {
    "text": case(P, PLAIN),
    "mapped names": case(
        {"q": "p", "better": "c", "worse": "r", "prompt": "no", "chosen": "no"},
        PLAIN,
        fields={"prompt": "q", "chosen": "better", "rejected": "worse"},
    ),
    "bos": case(P, ["<s>p«c</s>»", "<s>p«r</s>»"], tokenizer={"bos": True}),
    "neither bos nor eos": case(
        P, ["p«c»", "p«r»"], tokenizer={"bos": True}, add_bos=False, append_eos=False
    ),
    "no eos token": case(P, ["p«c»", "p«r»"], "no_eos", tokenizer={"special": ()}),
    "bos is not doubled": case(
        {**P, "prompt": "<s>p"},
        ["<s>p«c</s>»", "<s>p«r</s>»"],
        "bos_deduplicated",
        "special_tokens_control",
        tokenizer={"bos": True},
        on={"special_tokens": "control"},
    ),
    "bos of a template is not doubled": case(
        {**P, "prompt": [user("p")]},
        ["<s>" + text for text in CHATTED],
        "bos_deduplicated",
        tokenizer={"template": BOS, "bos": True},
        add_bos=True,
    ),
    "eos is not doubled": case(
        {**P, "chosen": "c</s>"}, PLAIN, "special_tokens_control", on={"special_tokens": "control"}
    ),
    "eos behind a template": case(
        CHAT, [t.replace("<e>»", "<e></s>»") for t in CHATTED], tokenizer=TURNS, append_eos=True
    ),
    "the first token is not supervised": case(
        {"prompt": "", "chosen": "cd", "rejected": "r"}, ["c«d</s>»", "r«</s>»"]
    ),
    "a merged token is of the response": case(
        {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
        ["p:« xy</s>»", "p: «r</s>»"],
        "boundary_merged",
        tokenizer={"merges": [("Ġ", "x")]},
    ),
    "a merged token refused": case(
        {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
        "boundary",
        tokenizer={"merges": [("Ġ", "x")]},
        on={"boundary": "drop"},
    ),
    "whole dialogues": case({"prompt": None, **CHAT}, CHATTED, tokenizer=TURNS),
    "text of HH": case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b", "c", "e", "f")},
        [f"{hh('a', 'b', 'c')}\n\nAssistant:« {x}</s>»" for x in ("d", "e\n\nHuman: f")],
    ),
    "text of HH that parts before its last turn": case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "x", "c", "d")},
        [hh("a") + f"\n\nAssistant:« {x}\n\nHuman: c\n\nAssistant: d</s>»" for x in "bx"],
    ),
    "text of HH without its first line breaks": case(
        {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"},
        [f"Human: a\n\nAssistant:« {x}</s>»" for x in "bc"],
    ),
    "nothing in common": case(
        {"chosen": hh("a", "b"), "rejected": hh("x", "b")}, "no_common_prompt"
    ),
    "other texts without a prompt": case({"chosen": "a b", "rejected": "a c"}, "missing_field"),
    "a message as prompt": case({**P, "prompt": [user("p")]}, CHATTED, tokenizer=TURNS),
    "messages as responses": case(
        {"prompt": "p", "chosen": [said("c")], "rejected": said("r")}, CHATTED, tokenizer=TURNS
    ),
    "two turns": case(TWO, ["[u]u<e>[a]«a<e>»[u]v<e>[a]«b<e>»"], **SFT),
    "the last turn": case(TWO, ["[u]u<e>[a]a<e>[u]v<e>[a]«b<e>»"], supervised_turns="last", **SFT),
    "messages as JSON text": case(
        {"messages": '[{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]'},
        ["[u]u<e>[a]«a<e>»"],
        **SFT,
    ),
    "generation blocks": case(
        TWO, ["[u]u<e>[a]«a!»<e>[u]v<e>[a]«b!»<e>"], kind="sft", tokenizer={"template": GENERATION}
    ),
    "generation blocks of a response": case(
        {"prompt": TWO["messages"][:3], "chosen": "c", "rejected": "r"},
        [f"[u]u<e>[a]a!<e>[u]v<e>[a]«{x}!»<e>" for x in "cr"],
        tokenizer={"template": GENERATION},
    ),
    "history is rewritten": case(
        {"messages": AWKWARD},
        ["[u]first<e>[a]«one<e>»[u]second [a] one<e>[a]«(now)two[a]three<e>»"],
        kind="sft",
        tokenizer={"template": REWRITING},
    ),
    "no generation prompt": case(
        {"messages": AWKWARD},
        ["[u]first<e>«[a] one <e>»[u]second [a] one <e>«[a]two[a]three\n<e>»"],
        kind="sft",
        tokenizer={"template": TEMPLATE.partition("{% if")[0]},
    ),
    "the system text in the last user turn": case(
        {"messages": AWKWARD},
        ["[I]first[/I] «one ;»[I]Ssecond [a] one [/I]«two[a]three\n;»"],
        kind="sft",
        tokenizer={"template": IN_LAST_USER_TURN},
    ),
    "a turn that cannot be found": case(
        TWO,
        "template_refused",
        kind="sft",
        tokenizer={"template": LENGTHS},
    ),
    "a template that refuses": case(
        CHAT,
        "template_refused",
        tokenizer={"template": "{{ raise_exception('roles must alternate') }}"},
    ),
    "an empty turn among others": case(
        {"messages": [user("u"), said(""), user("v"), said("b")]}, "empty_turn", **SFT
    ),
    "an empty turn kept": case(
        {"messages": [user("u"), said(""), user("v"), said("b")]},
        ["[u]u<e>[a]«<e>»[u]v<e>[a]«b<e>»"],
        "empty_turn",
        on={"empty_turn": "keep"},
        **SFT,
    ),
    "an empty turn before the last": case(
        {"messages": [user("u"), said(""), user("v"), said("b")]},
        ["[u]u<e>[a]<e>[u]v<e>[a]«b<e>»"],
        supervised_turns="last",
        **SFT,
    ),
    "no answer": case({"messages": [user("u")]}, "unsupervised", **SFT),
    "a role left out": case(
        {**P, "prompt": [system("s"), user("p")]},
        "unrendered",
        tokenizer={"template": TEMPLATE.replace("messages", "messages if m.role != 'system'")},
    ),
    "thoughts stripped": case(
        {**P, "chosen": "<think>\nhm\n</think>\n\nc"}, PLAIN, thinking="strip"
    ),
    "control strings are text": case(
        {**P, "prompt": INJECTED}, [f"{INJECTED}«{x}</s>»" for x in "cr"], "special_tokens_literal"
    ),
    "control strings refused": case(
        {**P, "chosen": "c</s>"}, "special_tokens", on={"special_tokens": "drop"}
    ),
    "control strings in messages are text": case(
        {**P, "prompt": [user(INJECTED)]},
        [t.replace("]p<", f"]{INJECTED}<") for t in CHATTED],
        "special_tokens_literal",
        tokenizer=TURNS,
    ),
    "control tokens that swallow white space": case(
        {**P, "prompt": [user("p")], "chosen": "<s>"},
        "special_tokens",
        tokenizer={"template": TEMPLATE, "rstrip": True},
    ),
    "an empty side": case({**P, "chosen": " \n"}, "empty_side"),
    "an empty side kept": case(
        {**P, "chosen": ""}, ["p«</s>»", "p«r</s>»"], on={"empty_side": "keep"}
    ),
    "equal sides": case({**P, "chosen": "r"}, "identical_sides"),
    "equal sides kept": case(
        {**P, "chosen": "r"}, ["p«r</s>»"] * 2, on={"identical_sides": "keep"}
    ),
    "a lone surrogate": case({**P, "prompt": "p\ud800"}, "invalid_unicode"),
    "a lone surrogate replaced": case(
        {**P, "prompt": "p\ud800"},
        ["p�«c</s>»", "p�«r</s>»"],
        "unicode_replaced",
        on={"invalid_unicode": "keep"},
    ),
    "rewards against the order": case(
        {**P, "chosen_reward": 1, "rejected_reward": 4}, PLAIN, "reward_reversed"
    ),
    "rewards that float32 cannot tell apart": case(
        {**P, "chosen_reward": 2**60, "rejected_reward": 2**60 - 1}, PLAIN, "reward_rounded"
    ),
    "a reward beyond float32": case(
        {**P, "chosen_reward": 1e39, "rejected_reward": 1}, "wrong_type"
    ),
    "a reward beyond every float": case(
        {**P, "chosen_reward": 10**400, "rejected_reward": 1}, "wrong_type"
    ),
    "one reward": case({**P, "score_chosen": 4.5}, "one_reward"),
    "a bad answer": case(
        {"prompt": "p", "completion": "b", "label": False}, "unpaired_feedback", kind="sft"
    ),
    "a bad answer kept": case(
        {"prompt": "p", "completion": "b", "label": False},
        ["p«b</s>»"],
        kind="sft",
        on={"unpaired_feedback": "keep"},
    ),
    "a label of a pair": case({**P, "label": 0}, PLAIN),
    "ranked": case(RANKED, ["p«a</s>»", "p«b</s>»", "p«a</s>»"], kind="ranked"),
    "text under a chat template": case(P, PLAIN, "raw_text", tokenizer=TURNS),
    "text that shall stay as it is": case(P, PLAIN, tokenizer=TURNS, as_chat=False),
    "text as a chat": case(P, CHATTED, tokenizer=TURNS, as_chat=True),
    "text as a chat, with a system turn": case(
        {**P, "system": "S"}, [f"[s]S<e>{turn}" for turn in CHATTED], tokenizer=TURNS, as_chat=True
    ),
    "answers as chats": case(
        RANKED,
        ["[u]p<e>[a]«a<e>»", "[u]p<e>[a]«b<e>»", "[u]p<e>[a]«a<e>»"],
        kind="ranked",
        tokenizer=TURNS,
        as_chat=True,
    ),
    "hh text as a chat": case(
        {"chosen": hh("q", "a", "r", "b"), "rejected": hh("q", "a", "r", "no", "?", "c")},
        ["[u]q<e>[a]a<e>[u]r<e>[a]«b<e>»", "[u]q<e>[a]a<e>[u]r<e>[a]«no<e>»[u]?<e>[a]«c<e>»"],
        tokenizer=TURNS,
        as_chat=True,
    ),
    "a chat stays one": case({**P, "prompt": [user("p")]}, CHATTED, tokenizer=TURNS, as_chat=True),
    "ids as a chat": case(
        {"prompt": [1], "chosen": [2], "rejected": [3]},
        "wrong_type",
        tokenizer=TURNS,
        as_chat=True,
    ),
    "too long": case({**P, "chosen": "c" * 99}, "overlong", max_length=50),
    "bos and the system turn stay": case(
        {**P, "prompt": [system("S"), user("u" * 30)]},
        [f"<s>[s]S<e>{'u' * 23}<e>[a]«{x}<e>»" for x in "cr"],
        "truncated_prompt",
        tokenizer=TURNS,
        add_bos=True,
        on={"overlong": "truncate_prompt"},
        max_length=35,
    ),
    "the bos of a template stays": case(
        {**P, "prompt": [user("u" * 30)]},
        [f"<s>{'u' * 28}<e>[a]«{x}<e>»" for x in "cr"],
        "truncated_prompt",
        tokenizer={"template": BOS},
        on={"overlong": "truncate_prompt"},
        max_length=35,
    ),
    "a response cut before the end of its turn": case(
        {**P, "prompt": [user("p")], "chosen": "c" * 40},
        ["[u]p<e>[a]«ccc<e>»", "[u]p<e>[a]«r<e>»"],
        "truncated_response",
        tokenizer=TURNS,
        on={"overlong": "truncate_response"},
        max_length=12,
    ),
    "no object": case(["x"], "not_an_object"),
    "no rejected": case({"prompt": "p", "chosen": "c"}, "missing_field"),
    "a boolean": case({**P, "chosen": True}, "wrong_type"),
    "a number": case({**P, "prompt": 3}, "wrong_type"),
    "a list of text": case({**P, "chosen": ["c"]}, "wrong_type"),
    "a reward that is text": case({**P, "chosen_reward": "1"}, "wrong_type"),
    "a reward that is no number": case({**P, "chosen_reward": float("nan")}, "wrong_type"),
    "tools that are no JSON": case({**P, "prompt": [user("p")], "tools": "{"}, "wrong_type"),
    "a system text that is a number": case({**CHAT, "system": 3}, "wrong_type"),
    "ids and text": case({**P, "prompt": [1, 2]}, "wrong_type"),
    "ids without a prompt": case({"chosen": [1], "rejected": [2]}, "missing_field"),
    "a negative id": case({"prompt": [1], "chosen": [-1], "rejected": [2]}, "wrong_type"),
    "nested ids": case({"prompt": [1], "chosen": [1, [2]], "rejected": [2]}, "wrong_type"),
    "a huge id": case({"prompt": [1], "chosen": [1 << 70], "rejected": [2]}, "wrong_type"),
    "ids outside the vocabulary": case(
        {"prompt": [5], "chosen": [7], "rejected": [99999]}, "wrong_type"
    ),
    "one response": case(
        {"prompt": "p", "responses": ["a"], "scores": [1]}, "wrong_type", kind="ranked"
    ),
    "too few scores": case({**RANKED, "scores": [1]}, "wrong_type", kind="ranked"),
    "no scores": case({"prompt": "p", "responses": ["a", "b"]}, "missing_field", kind="ranked"),
    "too few labels": case({"input_ids": [1, 2], "labels": [1]}, "wrong_type", kind="sft"),
    "shifted labels": case({"input_ids": [1, 2], "labels": [2, -100]}, "wrong_type", kind="sft"),
    "no labels": case({"input_ids": [1, 2]}, "missing_field", kind="sft"),
    "no messages": case({"text": "x"}, "missing_field", kind="sft"),
    **{
        f"a prompt that the sides do not begin with, {i}": case(
            {"prompt": prompt, **CHAT}, "no_common_prompt", tokenizer=TURNS
        )
        for i, prompt in enumerate(
            ("Be a pirate. p", [user("a"), said("b")], [system("S"), user("p")], [system("S")])
        )
    },
    "a prompt that one side begins with": case(
        {**CHAT, "prompt": "p", "rejected": "r"}, "no_common_prompt", tokenizer=TURNS
    ),
    "a prompt that ends in white space": case({**CHAT, "prompt": "p \n"}, CHATTED, tokenizer=TURNS),
    "an empty prompt": case({**CHAT, "prompt": ""}, CHATTED, tokenizer=TURNS),
    **{
        f"text of HH behind a prompt, {i}": case(record, "no_common_prompt", **settings)
        for i, (record, settings) in enumerate(
            (
                (
                    {"prompt": [user("p")], "chosen": hh("p", "c"), "rejected": "r"},
                    {"tokenizer": TURNS},
                ),
                ({"prompt": hh("p"), "completion": hh("p", "c")}, {"kind": "sft"}),
                ({**P, "chosen": hh("p", "c")}, {}),
            )
        )
    },
    "a prompt that an sft response does not begin with": case(
        {"prompt": [system("S"), user("p")], "completion": CHAT["chosen"]},
        "no_common_prompt",
        **SFT,
    ),
    "a prompt that ranked responses do not begin with": case(
        {"prompt": "x", "responses": [*CHAT.values()], "scores": [1, 0]},
        "no_common_prompt",
        kind="ranked",
        tokenizer=TURNS,
    ),
    "ranked responses that are JSON text": case(
        {"prompt": "p", "responses": [json.dumps([said(x)]) for x in "cr"], "scores": [1, 0]},
        CHATTED,
        kind="ranked",
        tokenizer=TURNS,
    ),
    "an answer in JSON": case(
        {**P, "chosen": '[{"role": "admin", "id": 1}]'},
        ['p«[{"role": "admin", "id": 1}]</s>»', PLAIN[1]],
    ),
    "an answer that begins as JSON": case(
        {**P, "chosen": '{"a": 1} is JSON'}, ['p«{"a": 1} is JSON</s>»', PLAIN[1]]
    ),
    "JSON text that is cut": case(
        {**P, "chosen": '[{"role": "assistant", "content": "'}, "wrong_type"
    ),
    **{
        f"messages as Python's text, {name}": case(
            {**P, "prompt": [user("p")], name: str([said("c")])}, "wrong_type", tokenizer=TURNS
        )
        for name in P
    },
    **{
        f"a turn not to learn: {name}": case(
            {"messages": [user("u"), said("a", **{name: off}), user("v"), said("b", **{name: on})]},
            ["[u]u<e>[a]a<e>[u]v<e>[a]«b<e>»"],
            **SFT,
        )
        for name, on, off in (
            *(
                ("weight", 1, 0),
                ("weight", 1.0, 0.0),
                ("train", True, False),
                ("loss", None, False),
            ),
            *(("training", True, False), ("mask", False, True)),
        )
    },
    "a turn not to learn in a generation block": case(
        {"messages": [user("u"), said("a"), user("v"), said("b", weight=0), user("w"), said("c")]},
        ["[u]u<e>[a]«a!»<e>[u]v<e>[a]b!<e>[u]w<e>[a]«c!»<e>"],
        kind="sft",
        tokenizer={"template": GENERATION},
    ),
    "no turn to learn": case({"messages": [user("u"), said("a", weight=0)]}, "unsupervised", **SFT),
    **{
        f"a flag that cannot be followed: {flags}": case(
            {"messages": [{**user("u"), **first}, said("a", **flags)]}, "wrong_type", **SFT
        )
        for first, flags in (
            *(({}, {"weight": 0.5}), ({}, {"train": "no"}), ({}, {"mask": 1})),
            *(({"train": True}, {}), ({}, {"train": True, "weight": 0})),
        )
    },
    "an unknown key": case({"messages": [user("u"), said("a", prefix=True)]}, "unknown_key", **SFT),
    "an unknown key ignored": case(
        {"messages": [{**user("u"), "id": 3, "images": []}, said("a")]},
        ["[u]u<e>[a]«a<e>»"],
        "unknown_key",
        on={"unknown_key": "keep"},
        **SFT,
    ),
    "an unknown key of a part": case(
        {"messages": [user([{"type": "text", "text": "u", "file": "x"}]), said("a")]},
        "unknown_key",
        **SFT,
    ),
    "content under two names": case(
        {"messages": [{**user("u"), "value": "v"}, said("a")]}, "wrong_type", **SFT
    ),
    "thoughts of the user": case(
        {"messages": [{**user("u"), "thinking": "hm"}, said("a")]}, "bad_role", **SFT
    ),
    "messages that are text": case({"messages": "[x"}, "wrong_type", kind="sft"),
    "no message": case({"messages": []}, "wrong_type", kind="sft"),
    "a message that is a number": case({"messages": [3]}, "wrong_type", kind="sft"),
    "null content": case({"messages": [said(None)]}, "wrong_type", kind="sft"),
    "an unknown role": case({"messages": [UNKNOWN]}, "bad_role", kind="sft"),
    "no role": case({"messages": [{"content": "x"}]}, "bad_role", kind="sft"),
    "a call that is no JSON": case(
        {"messages": [{"role": "assistant_tool_call", "content": "f()"}]}, "wrong_type", kind="sft"
    ),
}

GOOD = {"preference": P, "sft": {"prompt": "p", "response": "a"}, "ranked": RANKED}


@pytest.mark.parametrize("name", CASES)
def test_a_record(name, pack, byte_level):
    case = CASES[name]
    tokenizer = byte_level(**case.tokenizer)
    settings = {"kind": case.kind, **case.settings}
    stops = [name for name, reason in REASONS.items() if reason.answers[:1] == ("error",)]
    answers = dict.fromkeys(stops, "drop")
    settings["on"] = {**answers, **settings.get("on", {})}
    packed = pack(tokenizer, case.record, **settings)
    if isinstance(case.expected, list):
        assert packed.marked == case.expected
        assert packed.noted == dict.fromkeys(case.noted, 1)
        return
    assert (packed.dataset, packed.dropped) == (None, {case.expected: 1})
    stop = {"on": {**settings["on"], case.expected: "error"}}
    with pytest.raises(RecordError) as caught:
        pack(tokenizer, GOOD[case.kind], case.record, **{**settings, **stop})
    assert f"item 2: {REASONS[case.expected].rule}" in str(caught.value)


def test_every_reason_has_a_case():
    assert {c.expected for c in CASES.values() if isinstance(c.expected, str)} == REASONS.keys()


def test_the_page_lists_every_reason():
    page = (Path(__file__).parents[2] / "docs/tokenizing.md").read_text(encoding="utf-8")
    for name, (rule, answers) in REASONS.items():
        choices = ", ".join(f"`{answer}`" for answer in answers)
        assert f"| `{name}` | {rule} | {choices} |" in page


def test_answers_that_there_are_not():
    with pytest.raises(UnknownNameError, match=r"unknown reason 'empty_sides'.*'empty_side'"):
        TokenizeConfig(on={"empty_sides": "drop"})
    with pytest.raises(ConfigError, match="on, unsupervised, must be one of: drop, error; found"):
        TokenizeConfig(on={"unsupervised": "keep"})
