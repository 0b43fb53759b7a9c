"""What becomes of a record: its sequences with the supervised text in «», and events;
or a reason.

The tokenizer has one token for each byte, but for control strings and the merges that a
case names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packstore.config import REASONS, TokenizeConfig
from packstore.errors import ConfigError, RecordError, UnknownNameError


class Case(NamedTuple):
    """A record that is learned: its sequences and events."""

    record: Any
    expected: list[str]
    noted: tuple[str, ...]
    settings: dict[str, Any]


def case(record: Any, expected: list[str], *noted: str, **settings: Any) -> Case:
    return Case(record, expected, noted, settings)


def kind_of(record: Any) -> str:
    if "responses" in record:
        return "scored"
    single = {"messages", "completion", "input_ids", "text"}.intersection(record)
    return "sft" if single else "preference"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def hh1(*turns: str) -> str:
    """The same with single line breaks."""
    return "\n".join(
        f"{('Human', 'Assistant')[i % 2]}: {t}" for i, t in enumerate(turns)
    )


def hh(*turns: str) -> str:
    return "".join(
        f"\n\n{('Human', 'Assistant')[i % 2]}: {t}" for i, t in enumerate(turns)
    )


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
TWO_BLOCKS = GENERATION.replace(
    "{% generation %}{{ m.content }}!",
    "{% generation %}({{ m.role }}){% endgeneration %}-{% generation %}{{ m.content }}!",
)
REWRITING = TEMPLATE.replace(
    "[{{ m.role[0] }}]",
    "[{{ m.role[0] }}]{{ '(now)' if loop.last and m.role == 'assistant' }}",
).replace("m.content", "m.content | trim")
IN_LAST_USER_TURN = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if m == users[-1] }}"
    "{{ m.content }}[/I]{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
LENGTHS = (
    "{% for m in messages %}{{ m.content | length }}{{ loop.length }};{% endfor %}"
)
AWKWARD = [
    user("first"),
    said(" one "),
    user("second [a] one "),
    said("two[a]three\n"),
]
P = {"prompt": "p", "chosen": "c", "rejected": "r"}
PLAIN = ["p«c</s>»", "p«r</s>»"]
CHAT = {"chosen": [user("p"), said("c")], "rejected": [user("p"), said("r")]}
TURNS: dict[str, Any] = {"tokenizer": {"template": TEMPLATE}}
CHATTED = ["[u]p<e>[a]«c<e>»", "[u]p<e>[a]«r<e>»"]
TWO = {"messages": [user("u"), said("a"), user("v"), said("b")]}
INJECTED = "a</s>b<s><e>"
WITHOUT_SYSTEM = "messages if m.role != 'system'"
BAD = {"prompt": "p", "completion": "b", "label": False}
EMPTY_TURN = {"messages": [user("u"), said(""), user("v"), said("b")]}
MERGED = {"merges": [("Ġ", "x")]}
SCORED = {"prompt": "p", "responses": ["a", "b", "a"], "scores": [0, 2.5, 0]}

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
        {**P, "chosen": "c</s>"},
        PLAIN,
        "special_tokens_control",
        on={"special_tokens": "control"},
    ),
    "eos behind a template": case(
        CHAT, [t.replace("<e>»", "<e></s>»") for t in CHATTED], append_eos=True, **TURNS
    ),
    "eos behind a turn not to learn": case(
        {"messages": [*TWO["messages"][:3], said("b", weight=0)]},
        ["[u]u<e>[a]«a<e>»[u]v<e>[a]b<e></s>"],
        append_eos=True,
        **TURNS,
    ),
    "the first token is not supervised": case(
        {"prompt": "", "chosen": "cd", "rejected": "r"},
        ["c«d</s>»", "r«</s>»"],
        "empty_prompt",
    ),
    "a merged token is of the response": case(
        {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
        ["p:« xy</s>»", "p: «r</s>»"],
        "boundary_merged",
        tokenizer=MERGED,
    ),
    "whole dialogues": case({"prompt": None, **CHAT}, CHATTED, **TURNS),
    "text of HH": case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b", "c", "e", "f")},
        [
            f"{hh('a', 'b', 'c')}\n\nAssistant:« {x}</s>»"
            for x in ("d", "e\n\nHuman: f")
        ],
    ),
    "text of HH that parts before its last turn": case(
        {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "x", "c", "d")},
        [
            hh("a") + f"\n\nAssistant:« {x}\n\nHuman: c\n\nAssistant: d</s>»"
            for x in "bx"
        ],
    ),
    "text of HH without its first line breaks": case(
        {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"},
        [f"Human: a\n\nAssistant:« {x}</s>»" for x in "bc"],
    ),
    "text of HH with single line breaks": case(
        {"chosen": hh1("a", "b", "c", "d"), "rejected": hh1("a", "b", "c", "e\nf")},
        [f"{hh1('a', 'b', 'c')}\nAssistant:« {x}</s>»" for x in ("d", "e\nf")],
    ),
    "text of HH with single line breaks, and blank lines between rounds": case(
        {"chosen": hh1("a", "b\n", "c", "d"), "rejected": hh1("a", "b\n", "c", "e")},
        [f"{hh1('a', 'b')}\n\nHuman: c\nAssistant:« {x}</s>»" for x in "de"],
    ),
    "text of HH, whose prompt has single line breaks": case(
        {"prompt": hh1("a", ""), "chosen": hh1("a", "b"), "rejected": hh1("a", "c")},
        [f"{hh1('a')}\nAssistant: «{x}</s>»" for x in "bc"],
    ),
    "text of HH, which quotes turns with single line breaks": case(
        {"chosen": hh("a", "b\nHuman: x\nAssistant: y"), "rejected": hh("a", "c")},
        [
            f"{hh('a')}\n\nAssistant:« {x}</s>»"
            for x in ("b\nHuman: x\nAssistant: y", "c")
        ],
    ),
    "answers that quote turns with single line breaks": case(
        {**P, "prompt": "quote: ", "chosen": hh1("a", "b"), "rejected": hh1("c", "d")},
        [f"quote: «{hh1(*pair)}</s>»" for pair in ("ab", "cd")],
    ),
    "a message as prompt": case({**P, "prompt": [user("p")]}, CHATTED, **TURNS),
    "messages as responses": case(
        {"prompt": "p", "chosen": [said("c")], "rejected": said("r")}, CHATTED, **TURNS
    ),
    "two turns": case(TWO, ["[u]u<e>[a]«a<e>»[u]v<e>[a]«b<e>»"], **TURNS),
    "the last turn": case(
        TWO, ["[u]u<e>[a]a<e>[u]v<e>[a]«b<e>»"], supervised_turns="last", **TURNS
    ),
    "messages as JSON text": case(
        {"messages": json.dumps([user("u"), said("a")])}, ["[u]u<e>[a]«a<e>»"], **TURNS
    ),
    "generation blocks": case(
        TWO, ["[u]u<e>[a]«a!»<e>[u]v<e>[a]«b!»<e>"], tokenizer={"template": GENERATION}
    ),
    "two generation blocks of one answer": case(
        {"messages": TWO["messages"][:2]},
        ["[u]u<e>[a]«(assistant)»-«a!»<e>"],
        tokenizer={"template": TWO_BLOCKS},
    ),
    "two generation blocks of each answer": case(
        TWO,
        ["[u]u<e>[a]«(assistant)»-«a!»<e>[u]v<e>[a]«(assistant)»-«b!»<e>"],
        tokenizer={"template": TWO_BLOCKS},
    ),
    "two generation blocks of the last answer": case(
        TWO,
        ["[u]u<e>[a](assistant)-a!<e>[u]v<e>[a]«(assistant)»-«b!»<e>"],
        supervised_turns="last",
        tokenizer={"template": TWO_BLOCKS},
    ),
    "two generation blocks of a response": case(
        {"prompt": TWO["messages"][:3], "chosen": "c", "rejected": "r"},
        [f"[u]u<e>[a](assistant)-a!<e>[u]v<e>[a]«(assistant)»-«{x}!»<e>" for x in "cr"],
        tokenizer={"template": TWO_BLOCKS},
    ),
    "generation blocks of a response": case(
        {"prompt": TWO["messages"][:3], "chosen": "c", "rejected": "r"},
        [f"[u]u<e>[a]a!<e>[u]v<e>[a]«{x}!»<e>" for x in "cr"],
        tokenizer={"template": GENERATION},
    ),
    "generation blocks of a response of two turns": case(
        {
            "prompt": TWO["messages"][:3],
            "chosen": [said("c"), user("w"), said("d")],
            "rejected": "r",
        },
        [
            "[u]u<e>[a]a!<e>[u]v<e>[a]«c!»<e>[u]w<e>[a]«d!»<e>",
            "[u]u<e>[a]a!<e>[u]v<e>[a]«r!»<e>",
        ],
        tokenizer={"template": GENERATION},
    ),
    "history is rewritten": case(
        {"messages": AWKWARD},
        ["[u]first<e>[a]«one<e>»[u]second [a] one<e>[a]«(now)two[a]three<e>»"],
        tokenizer={"template": REWRITING},
    ),
    "no generation prompt": case(
        {"messages": AWKWARD},
        ["[u]first<e>«[a] one <e>»[u]second [a] one <e>«[a]two[a]three\n<e>»"],
        tokenizer={"template": TEMPLATE.partition("{% if")[0]},
    ),
    "the system text in the last user turn": case(
        {"messages": AWKWARD},
        ["[I]first[/I] «one ;»[I]Ssecond [a] one [/I]«two[a]three\n;»"],
        tokenizer={"template": IN_LAST_USER_TURN},
    ),
    "an empty turn kept": case(
        EMPTY_TURN,
        ["[u]u<e>[a]«<e>»[u]v<e>[a]«b<e>»"],
        "empty_turn",
        on={"empty_turn": "keep"},
        **TURNS,
    ),
    "an empty turn before the last": case(
        EMPTY_TURN, ["[u]u<e>[a]<e>[u]v<e>[a]«b<e>»"], supervised_turns="last", **TURNS
    ),
    "thoughts stripped": case(
        {**P, "chosen": "<think>\nhm\n</think>\n\nc"}, PLAIN, thinking="strip"
    ),
    "control strings are text": case(
        {**P, "prompt": INJECTED},
        [f"{INJECTED}«{x}</s>»" for x in "cr"],
        "special_tokens_literal",
    ),
    "control strings in messages are text": case(
        {**P, "prompt": [user(INJECTED)]},
        [t.replace("]p<", f"]{INJECTED}<") for t in CHATTED],
        "special_tokens_literal",
        **TURNS,
    ),
    "an empty side kept": case(
        {**P, "chosen": ""}, ["p«</s>»", "p«r</s>»"], on={"empty_side": "keep"}
    ),
    "equal sides kept": case(
        {**P, "chosen": "r"}, ["p«r</s>»"] * 2, on={"identical_sides": "keep"}
    ),
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
        {**P, "chosen_reward": 2**60, "rejected_reward": 2**60 - 1},
        PLAIN,
        "reward_rounded",
    ),
    "a field that serves as two": case(
        {"chosen": "c", "rejected": "r"},
        ["c«c</s>»", "c«r</s>»"],
        fields={"prompt": "chosen"},
    ),
    "rewards reversed and alike as stored": case(
        {**P, "chosen_reward": 2**60 - 1, "rejected_reward": 2**60},
        PLAIN,
        *("reward_reversed", "reward_rounded"),
    ),
    "a label ignored": case(BAD, ["p«b</s>»"], ignore=("label",)),
    "a label beside a pair, which says itself which side is better": case(
        {**P, "label": 0}, PLAIN
    ),
    "scored": case(SCORED, ["p«a</s>»", "p«b</s>»", "p«a</s>»"]),
    "text under a chat template": case(P, PLAIN, "raw_text", **TURNS),
    "text that shall stay as it is": case(P, PLAIN, as_chat=False, **TURNS),
    "text as a chat": case(P, CHATTED, as_chat=True, **TURNS),
    "text as a chat, with a system turn": case(
        {**P, "system": "S"},
        [f"[s]S<e>{turn}" for turn in CHATTED],
        as_chat=True,
        **TURNS,
    ),
    "answers as chats": case(
        SCORED, [f"[u]p<e>[a]«{x}<e>»" for x in "aba"], as_chat=True, **TURNS
    ),
    "hh text as a chat": case(
        {
            "chosen": hh("q", "a", "r", "b"),
            "rejected": hh("q", "a", "r", "no", "?", "c"),
        },
        [
            "[u]q<e>[a]a<e>[u]r<e>[a]«b<e>»",
            "[u]q<e>[a]a<e>[u]r<e>[a]«no<e>»[u]?<e>[a]«c<e>»",
        ],
        as_chat=True,
        **TURNS,
    ),
    "hh text with single line breaks as a chat": case(
        {
            "chosen": hh1("q", "a", "r", "b"),
            "rejected": hh1("q", "a", "r", "no", "?", "c"),
        },
        [
            "[u]q<e>[a]a<e>[u]r<e>[a]«b<e>»",
            "[u]q<e>[a]a<e>[u]r<e>[a]«no<e>»[u]?<e>[a]«c<e>»",
        ],
        as_chat=True,
        **TURNS,
    ),
    "hh text after white space as a chat": case(
        {"chosen": " " + hh1("q", "a"), "rejected": " " + hh1("q", "b")},
        [f"[u]q<e>[a]«{x}<e>»" for x in "ab"],
        as_chat=True,
        **TURNS,
    ),
    "a chat stays one": case(
        {**P, "prompt": [user("p")]}, CHATTED, as_chat=True, **TURNS
    ),
    "bos and the system turn stay": case(
        {**P, "prompt": [system("S"), user("u" * 30)]},
        [f"<s>[s]S<e>{'u' * 23}<e>[a]«{x}<e>»" for x in "cr"],
        "truncated_prompt",
        add_bos=True,
        on={"overlong": "truncate_prompt"},
        max_length=35,
        **TURNS,
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
        on={"overlong": "truncate_response"},
        max_length=12,
        **TURNS,
    ),
    "a response cut before the end of its turn and the line break": case(
        {**P, "prompt": [user("p")], "chosen": "c" * 40},
        ["[u]p<e>\n[a]«ccc<e>\n»", "[u]p<e>\n[a]«r<e>\n»"],
        "truncated_response",
        on={"overlong": "truncate_response"},
        max_length=14,
        tokenizer={"template": TEMPLATE.replace("<e>", "<e>\n")},
    ),
    "a prompt that ends in white space": case(
        {**CHAT, "prompt": "p \n"}, CHATTED, **TURNS
    ),
    "an empty prompt": case({**CHAT, "prompt": ""}, CHATTED, **TURNS),
    "scored responses that are JSON text": case(
        {
            "prompt": "p",
            "responses": [json.dumps([said(x)]) for x in "cr"],
            "scores": [1, 0],
        },
        CHATTED,
        **TURNS,
    ),
    "an answer in JSON": case(
        {**P, "chosen": '[{"role": "admin", "id": 1}]'},
        ['p«[{"role": "admin", "id": 1}]</s>»', PLAIN[1]],
    ),
    "an answer that begins as JSON": case(
        {**P, "chosen": '{"a": 1} is JSON'}, ['p«{"a": 1} is JSON</s>»', PLAIN[1]]
    ),
    **{
        f"a turn not to learn: {name} {off}": case(
            {
                "messages": [
                    user("u"),
                    said("a", **{name: off}),
                    user("v"),
                    said("b", **{name: on}),
                ]
            },
            ["[u]u<e>[a]a<e>[u]v<e>[a]«b<e>»"],
            **TURNS,
        )
        for name, on, off in (
            *(("weight", 1, 0), ("weight", 1.0, 0.0), ("train", True, False)),
            *(("loss", None, False), ("training", True, False), ("mask", False, True)),
            *(
                ("loss_mask", 1, 0),
                ("loss_mask", True, False),
                ("trainable", True, False),
            ),
        )
    },
    "a turn not to learn in a generation block": case(
        {
            "messages": [
                user("u"),
                said("a"),
                user("v"),
                said("b", weight=0),
                user("w"),
                said("c"),
            ]
        },
        ["[u]u<e>[a]«a!»<e>[u]v<e>[a]b!<e>[u]w<e>[a]«c!»<e>"],
        tokenizer={"template": GENERATION},
    ),
    "keys that say nothing of a turn's text": case(
        {
            "messages": [
                {**user("u"), "id": 3, "timestamp": "2024-05-01", "country": "DE"},
                said(
                    [
                        {
                            "type": "text",
                            "text": "a",
                            "cache_control": {"type": "ephemeral"},
                        }
                    ]
                ),
            ]
        },
        ["[u]u<e>[a]«a<e>»"],
        **TURNS,
    ),
    "an unknown key ignored": case(
        {"messages": [{**user("u"), "mood": "calm", "images": []}, said("a")]},
        ["[u]u<e>[a]«a<e>»"],
        "unknown_key",
        on={"unknown_key": "keep"},
        **TURNS,
    ),
}

REFUSED: dict[str, list[Any]] = {
    "not_an_object": [["x"]],
    "missing_field": [
        {"prompt": "p", "chosen": "c"},
        {"chosen": "a b", "rejected": "a c"},
        {"chosen": [1], "rejected": [2]},
        {"prompt": "p", "responses": ["a", "b"]},
        {"input_ids": [1, 2]},
        {"title": "x"},
    ],
    "wrong_type": [
        {**P, "chosen": True},
        {**P, "prompt": 3},
        {**P, "chosen": ["c"]},
        {**P, "chosen_reward": "high", "rejected_reward": 1},
        {**P, "chosen_reward": float("nan"), "rejected_reward": 1},
        {**P, "chosen_reward": 1e39, "rejected_reward": 1},  # beyond float32
        {**P, "chosen_reward": 10**400, "rejected_reward": 1},
        {**P, "prompt": [user("p")], "tools": "{"},
        {**CHAT, "system": 3},
        {**P, "prompt": [1, 2]},
        {"prompt": [1], "chosen": [-1], "rejected": [2]},
        {"prompt": [1], "chosen": [1, [2]], "rejected": [2]},
        {"prompt": [1], "chosen": [1 << 70], "rejected": [2]},
        {"prompt": [5], "chosen": [7], "rejected": [99999]},  # outside the vocabulary
        ({"prompt": [1], "chosen": [2], "rejected": [3]}, {"as_chat": True}),
        ({**P, "system": 3}, {"as_chat": True}),
        {"prompt": "p", "responses": [], "scores": []},
        {**SCORED, "scores": [1]},
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [1, 2], "labels": [2, -100]},  # shifted
        {**P, "chosen": '[{"role": "assistant", "content": "'},
        *({**P, "prompt": [user("p")], name: str([said("c")])} for name in P),
        {"messages": [user("u"), said("a", weight=0.5)]},
        {"messages": [user("u"), said("a", train="no")]},
        {"messages": [user("u"), said("a", mask=1)]},
        {"messages": [{**user("u"), "train": True}, said("a")]},
        {"messages": [user("u"), said("a", train=True, weight=0)]},
        {"messages": [{**user("u"), "value": "v"}, said("a")]},
        *({"messages": value} for value in ("[x", [], [3], [said(None)])),
        {"messages": [{"role": "assistant_tool_call", "content": "f()"}]},
    ],
    "bad_role": [
        {"messages": [{**user("u"), "thinking": "hm"}, said("a")]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"content": "x"}]},
    ],
    "unknown_key": [
        {"messages": [user("u"), said("a", prefix=True)]},
        {"messages": [user("u"), said("a", score=0.1)]},
        {"messages": [user([{"type": "text", "text": "u", "file": "x"}]), said("a")]},
    ],
    "different_contexts": [
        # of LMArena: a later vote of a session, of which each model has its own answers
        {
            **{f"conversation_{x}": [user("p"), said(x)] for x in "ab"},
            "full_conversation": [
                {
                    "user": user("o"),
                    "model_side_a": said("y"),
                    "model_side_b": said("z"),
                }
            ],
            "winner": "model_a",
            "evaluation_order": 2,
        },
    ],
    "no_common_prompt": [
        {"chosen": hh("a", "b"), "rejected": hh("x", "b")},
        {"chosen": hh1("a", "b"), "rejected": hh1("x", "b")},
        {"chosen": hh("a", "b"), "rejected": hh1("a", "c")},
        {**P, "chosen": hh1("p", "c")},
        {"prompt": hh1("p", "")[:-1], "completion": hh1("p", "c")},
        {"prompt": "Be a pirate. p", **CHAT},
        {"prompt": [user("a"), said("b")], **CHAT},
        {"prompt": [system("S"), user("p")], **CHAT},
        {"prompt": [system("S")], **CHAT},
        {**CHAT, "prompt": "p", "rejected": "r"},
        {"prompt": [user("p")], "chosen": hh("p", "c"), "rejected": "r"},
        {"prompt": hh("p"), "completion": hh("p", "c")},
        {**P, "chosen": hh("p", "c")},
        {"prompt": [system("S"), user("p")], "completion": CHAT["chosen"]},
        {"prompt": "x", "responses": [*CHAT.values()], "scores": [1, 0]},
    ],
    "boundary": [
        (
            {"prompt": "p: ", "chosen": "xy", "rejected": "r"},
            {"tokenizer": MERGED, "on": {"boundary": "drop"}},
        )
    ],
    "template_refused": [
        (TWO, {"tokenizer": {"template": LENGTHS}}),  # a turn that cannot be found
        (
            CHAT,
            {
                "tokenizer": {
                    "template": "{{ raise_exception('roles must alternate') }}"
                }
            },
        ),
    ],
    "unrendered": [
        (
            {**P, "prompt": [system("s"), user("p")]},
            {"tokenizer": {"template": TEMPLATE.replace("messages", WITHOUT_SYSTEM)}},
        )
    ],
    "empty_turn": [
        EMPTY_TURN,
        {"messages": [user("u"), said(" \n"), user("v"), said("b")]},
    ],
    "unsupervised": [
        {"messages": [user("u")]},
        {"messages": [user("u"), said("a", weight=0)]},
    ],
    "special_tokens": [
        ({**P, "chosen": "c</s>"}, {"on": {"special_tokens": "drop"}}),
        (  # control tokens that swallow white space
            {**P, "prompt": [user("p")], "chosen": "<s>"},
            {"tokenizer": {"template": TEMPLATE, "rstrip": True}},
        ),
    ],
    "empty_side": [{**P, "chosen": " \n"}],
    "identical_sides": [{**P, "chosen": "r"}],
    "invalid_unicode": [{**P, "prompt": "p\ud800"}],
    "one_reward": [{**P, "score_chosen": 4.5}],
    "unpaired_feedback": [BAD],
    "tie": [
        {"prompt": "p", "response_1": "a", "response_2": "b", "preference_strength": 0},
        {"question": {"full_text": "p"}, "answer_0": "a", "answer_1": "b"}
        | {"score_0": 0.0, "score_1": 0},
    ],
    "unread_field": [
        {**P, "weight": 0},
        ({**P, "system": "s"}, {"as_chat": False}),
        {**SCORED, "weight": 0.5},
        {**P, "margin": 2, "chosen_reward": 2, "rejected_reward": 1},
    ],
    "overlong": [({**P, "chosen": "c" * 99}, {"max_length": 50})],
}
"""Reason -> records that are refused for it, some with settings."""

GOOD = {"preference": P, "sft": {"prompt": "p", "response": "a"}, "scored": SCORED}


STOPS = [name for name, reason in REASONS.items() if reason.answers[:1] == ("error",)]


def run(pack: Any, byte_level: Any, *records: Any, **settings: Any) -> Any:
    """Packs them; what would stop the job by default is dropped."""
    tokenizer = byte_level(**settings.pop("tokenizer", {}))
    answers = {**dict.fromkeys(STOPS, "drop"), **settings.pop("on", {})}
    settings = {"kind": kind_of(records[-1]), **settings}
    return pack(tokenizer, *records, on=answers, **settings)


@pytest.mark.parametrize("name", CASES)
def test_a_record_that_is_learned(name, pack, byte_level):
    record, expected, noted, settings = CASES[name]
    packed = run(pack, byte_level, record, **settings)
    assert packed.marked == expected
    assert packed.noted == dict.fromkeys(noted, 1)


@pytest.mark.parametrize(
    ("reason", "given"),
    [(reason, given) for reason, some in REFUSED.items() for given in some],
)
def test_a_record_that_is_refused(reason, given, pack, byte_level):
    record, more = given if isinstance(given, tuple) else (given, {})
    settings = {**TURNS, **more}
    packed = run(pack, byte_level, record, **settings)
    assert (packed.dataset, packed.dropped) == (None, {reason: 1})
    stop = {**settings.pop("on", {}), reason: "error"}
    with pytest.raises(RecordError) as caught:
        run(pack, byte_level, GOOD[kind_of(record)], record, on=stop, **settings)
    assert f"item 2: {REASONS[reason].rule}" in str(caught.value)


BESIDE = [
    P,
    {**P, "chosen": "[c", "note": None},
    *(
        {**P, "chosen": text}
        for text in ("c</s>", "", " \n", "r", hh("p", "c"), "c<é", '[{"role": "x"}]')
    ),
    *(
        {**P, "prompt": text}
        for text in ("", " ", "\n\nHuman: p", "p<s>", hh("p", "a"), 3, None)
    ),
    {**P, "chosen": json.dumps([said("c")]), "prompt": json.dumps([user("p")])},
    {**P, "chosen": '[{"role": "assistant", "content": }]'},
    {"chosen": hh("u", "c"), "rejected": hh("u", "r")},
    *(
        {**P, "chosen_reward": one, "rejected_reward": other}
        for one, other in (
            *(
                (2, 1),
                (1, 2),
                (1.5, 1.5),
                (1 + 1e-12, 1.0),
                (10**400, 1),
                (3e38, -3e38),
            ),
            *((3.5e38, 1.0), (float("nan"), 1.0), (True, 0.5), ("3", 1.0), (2.0, None)),
        )
    ),
    *({**P, "score_chosen": one, "score_rejected": "low"} for one in ("high", 2.0)),
    {"prompt": "p", "chosen": "c"},
    ["c"],
]
"""Pairs of which some are plain text, and some are only almost."""

SURROGATES = [{**P, "chosen": "c\ud800"}, {**P, "prompt": "p\udfff"}]


@pytest.mark.parametrize(
    "on",
    [
        {},
        {"special_tokens": "control", "empty_side": "keep", "identical_sides": "keep"},
        {"special_tokens": "drop", "invalid_unicode": "keep"},
    ],
)
def test_text_takes_a_short_way_to_the_same(on, pack, byte_level):
    """Where there is reasoning to strip, every record is parsed by itself; here there
    is none.
    """
    for records in (BESIDE, [*BESIDE, *SURROGATES, *BESIDE]):
        short, long = (
            run(
                pack,
                byte_level,
                *records,
                kind="preference",
                on=on,
                thinking=thinking,
                **TURNS,
            )
            for thinking in ("template", "strip")
        )
        assert (short.examples, short.rejects) == (long.examples, long.rejects)
        assert short.dataset.manifest.records == long.dataset.manifest.records


def test_every_reason_has_a_case():
    """Lines that are no JSON are tried in ``test_broken_lines.py``."""
    assert REFUSED.keys() | {"not_json"} == REASONS.keys()


def test_the_page_lists_every_reason():
    page = (Path(__file__).parents[2] / "docs/tokenizing.md").read_text(
        encoding="utf-8"
    )
    for name, (rule, answers) in REASONS.items():
        choices = ", ".join(f"`{answer}`" for answer in answers)
        assert f"| `{name}` | {rule} | {choices} |" in page


def test_answers_that_there_are_not():
    with pytest.raises(UnknownNameError, match="'empty_side'"):
        TokenizeConfig(on={"empty_sides": "drop"})
    with pytest.raises(ConfigError, match="unsupervised"):
        TokenizeConfig(on={"unsupervised": "keep"})
