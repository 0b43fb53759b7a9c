"""Records as public sets and trainers write them, in names that packstore reads: what
is learned.

Structures with names of their own are forms, tried in ``test_forms.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from packstore.config import REASONS
from packstore.errors import RecordError
from tests.tokenizer.conftest import TEMPLATE


def turns(
    *texts: str,
    names: tuple[str, str] = ("role", "content"),
    roles=("user", "assistant"),
):
    return [{names[0]: roles[i % 2], names[1]: text} for i, text in enumerate(texts)]


def sharegpt(*texts: str) -> list[dict[str, Any]]:
    return turns(*texts, names=("from", "value"), roles=("human", "gpt"))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def asked(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def function(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ADD = function("add", {"x": 1})
ASK, A, B = asked("Q"), said("A"), said("B")
PAIR = {"prompt": "Q", "chosen": "A", "rejected": "B"}
CHATS = {"chosen": turns("Q", "A"), "rejected": turns("Q", "B")}
ONE = {"prompt": "Q", "completion": "A"}
SCORED = {"prompt": "Q", "responses": ["A", "B"]}
HH = "\n\nHuman: Q\n\nAssistant: "
TWO_OF_HH = {"chosen": HH + "A", "rejected": HH + "B"}

# What is learned of these, in «»
TEXTS = ["Q«A</s>»", "Q«B</s>»"]
HH_TEXTS = [f"\n\nHuman: Q\n\nAssistant:« {x}</s>»" for x in "AB"]
ANSWERS = ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"]
AFTER_SYSTEM = [f"[s]S<e>{text}" for text in ANSWERS]
THE_SECOND = ["[u]Q<e>[a]A<e>[u]R<e>[a]«B<e>»"]
CALLED = ['[u]Q<e>[a]«!add{"x": 1}<e>»[t]2<e>[a]«A<e>»']


def dialogue(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    # Preference
    "TRL, tokenized": (
        {
            **PAIR,
            "prompt_input_ids": [1],
            "chosen_input_ids": [2],
            "rejected_input_ids": [3],
        },
        TEXTS,
    ),
    "UltraFeedback, binarized": (
        {**CHATS, "prompt": "Q", "messages": [ASK, A], "prompt_id": "f0"}
        | {"score_chosen": 8.5, "score_rejected": 6.0},
        ANSWERS,
    ),
    "UltraFeedback, argilla": (
        {**CHATS, "instruction": "Q", "chosen-rating": 5.0, "rejected-rating": 2.0}
        | {"chosen-model": "m"},
        ANSWERS,
    ),
    "HH with a margin": ({**TWO_OF_HH, "margin": 1.0}, HH_TEXTS),
    "HH with its prompt": ({**TWO_OF_HH, "prompt": HH.rstrip(" ")}, HH_TEXTS),
    "Tülu 3, the last question as the prompt": (
        {
            "prompt": "R",
            "chosen": turns("Q", "A", "R", "B"),
            "rejected": turns("Q", "A", "R", "C"),
        },
        [*THE_SECOND, "[u]Q<e>[a]A<e>[u]R<e>[a]«C<e>»"],
    ),
    "Dolci": ({**CHATS, "preference_type": "delta_learning"}, ANSWERS),
    "Dolci, tools": (
        dialogue(
            ASK,
            said(None, tool_calls=[ADD]),
            {"role": "environment", "content": "2"},
            A,
        ),
        CALLED,
    ),
    "SmolTalk 2, instructions that the template does not read": (
        dialogue(ASK, A)
        | {"chat_template_kwargs": {"custom_instructions": "Be a pirate"}},
        ("unread_field", "custom_instructions"),
    ),
    "OpenHermes 2.5": (
        {
            "conversations": sharegpt("Q", "A"),
            "system_prompt": "S",
            "skip_prompt_formatting": True,
        },
        AFTER_SYSTEM[:1],
    ),
    "HH with another prompt": (
        {**TWO_OF_HH, "prompt": "\n\nHuman: X"},
        ("no_common_prompt", ""),
    ),
    "HH, explicit prompt": (
        {"prompt": HH.rstrip(" "), "chosen": " A", "rejected": " B"},
        HH_TEXTS,
    ),
    "Orca, chats with a system turn": (
        {"prompt": "Q"} | {side: [system("S"), *chat] for side, chat in CHATS.items()},
        AFTER_SYSTEM,
    ),
    "a persona in the prompt alone": (
        {**CHATS, "prompt": [system("Be a pirate"), ASK]},
        ("no_common_prompt", ""),
    ),
    "ms-swift, pairs of dialogues": (
        dialogue(ASK, A) | {"rejected_messages": [ASK, B], "margin": 0.5},
        ANSWERS,
    ),
    "Amazon Nova, pairs": (
        dialogue(
            ASK,
            {
                "role": "assistant",
                "candidates": [
                    {"content": [{"text": text}], "preferenceLabel": label}
                    for text, label in (("A", "preferred"), ("B", "non-preferred"))
                ],
            },
        ),
        ("wrong_type", "candidates"),
    ),
    "NeMo-Aligner": (
        {"prompt": "Q", "chosen_response": "A", "rejected_response": "B"}
        | {"chosen_reward": 2, "rejected_reward": 1},
        TEXTS,
    ),
    "Capybara pairs": (
        {"chosen": turns("Q", "A", "R", "S"), "rejected": turns("Q", "A", "R", "T")}
        | {"rating_chosen": 5, "rating_rejected": 4},
        [f"[u]Q<e>[a]A<e>[u]R<e>[a]«{x}<e>»" for x in "ST"],
    ),
    "pairs as JSON text": (
        {
            "prompt": json.dumps([ASK]),
            "chosen": json.dumps([A]),
            "rejected": json.dumps([B]),
        },
        ANSWERS,
    ),
    "pairs as Python's text": (
        {name: str(value) for name, value in CHATS.items()},
        ("wrong_type", "json.dumps"),
    ),
    "pairs with a number for a prompt": ({**CHATS, "prompt": 3}, ("wrong_type", "3")),
    # Scored
    "scored chats": (
        {"prompt": [ASK], "responses": [[A], [B]], "scores": [2, 1], "system": "S"},
        AFTER_SYSTEM,
    ),
    "ranks": (
        {**SCORED, "ranks": [1, 2]},
        ("missing_field", "scores"),
    ),
    # Single answers
    "UltraChat": (
        {"prompt": "Q", "prompt_id": "f0", "messages": turns("Q", "A", "R", "S")},
        ["[u]Q<e>[a]«A<e>»[u]R<e>[a]«S<e>»"],
    ),
    "a prompt that messages do not begin with": (
        {"prompt": "Be a pirate", "messages": [ASK, A]},
        ("no_common_prompt", ""),
    ),
    "messages and a response": (
        dialogue(ASK) | {"response": "A"},
        ("missing_field", "prompt"),
    ),
    "ShareGPT": ({"id": "x", "conversations": sharegpt("Q", "A")}, ANSWERS[:1]),
    "ShareGPT with a system text": (
        {"system": "S", "conversations": sharegpt("Q", "A")},
        AFTER_SYSTEM[:1],
    ),
    "OpenHermes, weights": (
        {
            "conversations": [
                {"from": "human", "value": "Q", "weight": None},
                {"from": "gpt", "value": "A", "weight": 0},
                {"from": "human", "value": "R"},
                {"from": "gpt", "value": "B", "weight": 1},
            ]
        },
        THE_SECOND,
    ),
    "ShareGPT, column-wise": (
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
        ("wrong_type", "list"),
    ),
    "WildChat": (
        {
            "conversation": [
                {**turn, "toxic": False, "hashed_ip": "x"} for turn in (ASK, A)
            ]
        },
        ANSWERS[:1],
    ),
    "WildChat, mapped by hand": (
        {"messages": [{**turn, "toxic": False} for turn in (ASK, A)]},
        ("unknown_key", "toxic"),
    ),
    "OpenAI's fine-tuning format": (
        dialogue(system("S"), ASK, A, asked("R"), said("B", weight=1)),
        ["[s]S<e>[u]Q<e>[a]«A<e>»[u]R<e>[a]«B<e>»"],
    ),
    "axolotl, parts of a turn": (
        dialogue(ASK, said("A", train_detail=[{"begin_offset": 0}])),
        ("unknown_key", "train_detail"),
    ),
    "Gemini": (
        {
            "contents": [
                {"role": "user", "parts": [{"text": "Q"}]},
                {
                    "role": "model",
                    "parts": [{"functionCall": {"name": "add", "args": {"x": 1}}}],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"name": "add", "response": {"sum": 2}}}
                    ],
                },
                {"role": "model", "parts": [{"text": "A"}]},
            ]
        },
        ['[u]Q<e>[a]«!add{"x": 1}<e>»[t]{"sum": 2}<e>[a]«A<e>»'],
    ),
    "KTO, words": ({**ONE, "label": "good"}, TEXTS[:1]),
    "KTO, plus and minus one": ({**ONE, "label": -1.0}, TEXTS[:1]),
    "KTO of LLaMA-Factory": (
        dialogue(ASK, B, ASK, A) | {"kto_tag": False},
        ["[u]Q<e>[a]B<e>[u]Q<e>[a]«A<e>»"],
    ),
    "KTO, a question at the end": (
        dialogue(ASK, A, ASK) | {"label": True},
        ANSWERS[:1],
    ),
    "KTO, thumbs": (
        {**ONE, "feedback": "thumbs_down"},
        ("unpaired_feedback", "feedback"),
    ),
    "a rating of one": (
        {"prompt": "Q", "response": "A", "rating": 1},
        ("unpaired_feedback", "rating"),
    ),
    # Calls, reasoning, images
    "OpenAI's calls": (
        dialogue(
            ASK,
            said(None, tool_calls=[{"id": "c1", **function("add", '{"x": 1}')}]),
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            A,
        )
        | {"tools": [TOOL]},
        [f"add;{CALLED[0]}"],
    ),
    "OpenAI's first calls": (
        dialogue(
            ASK,
            said(None, function_call={"name": "add", "arguments": '{"x": 1}'}),
            {"role": "function", "name": "add", "content": "2"},
            A,
        ),
        CALLED,
    ),
    "Mistral's calls": (
        dialogue(
            ASK,
            said("", tool_calls=[{"id": "123456789", "function": ADD["function"]}]),
            {
                "role": "tool",
                "name": "add",
                "content": "2",
                "tool_call_id": "123456789",
            },
            A,
        )
        | {"tools": json.dumps([TOOL])},
        [f"add;{CALLED[0]}"],
    ),
    "LLaMA-Factory's calls": (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {
                    "from": "function_call",
                    "value": '{"name": "add", "arguments": {"x": 1}}',
                },
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "A"},
            ]
        },
        CALLED,
    ),
    "Anthropic's calls": (
        dialogue(
            ASK,
            said(
                [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "A"},
                    {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}},
                ]
            ),
            asked([{"type": "tool_result", "tool_use_id": "t", "content": "2"}]),
            said([{"type": "text", "text": "B"}]),
        )
        | {"tools": [{"name": "add", "description": "d", "input_schema": {}}]},
        ['add;[u]Q<e>[a]«(hm)A!add{"x": 1}<e>»[t]2<e>[a]«B<e>»'],
    ),
    "Bedrock's calls": (
        dialogue(
            asked([{"text": "Q"}]),
            said([{"toolUse": {"toolUseId": "t", "name": "add", "input": {"x": 1}}}]),
            asked([{"toolResult": {"toolUseId": "t", "content": [{"text": "2"}]}}]),
            said([{"text": "A"}]),
        ),
        CALLED,
    ),
    "LLaMA-Factory's parts": (
        dialogue(
            asked([{"type": "text", "value": "Q"}]) | {"loss_weight": 0.0},
            said(
                [
                    {"type": "reasoning", "value": "hm"},
                    {
                        "type": "tool_call",
                        "value": '{"name": "add", "arguments": {"x": 1}}',
                    },
                ],
                loss_weight=0.0,
            ),
            {
                "role": "tool",
                "content": [{"type": "text", "value": "2"}],
                "loss_weight": 0.0,
            },
            said([{"type": "text", "value": "A"}], loss_weight=1.0),
        ),
        ['[u]Q<e>[a](hm)!add{"x": 1}<e>[t]2<e>[a]«A<e>»'],
    ),
    "Mistral's thinking": (
        dialogue(
            ASK,
            said(
                [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "A"},
                ]
            ),
        ),
        ["[u]Q<e>[a]«(hm)A<e>»"],
    ),
    "thoughts of the user": (
        dialogue(asked([{"type": "thinking", "thinking": "hm"}]), A),
        ("bad_role", "reasoning"),
    ),
    "NeMo's chat": (
        {"mask": "User", "system": "S"}
        | {
            "conversations": [
                {"from": "User", "value": "Q"},
                {"from": "Assistant", "value": "A"},
            ]
        },
        AFTER_SYSTEM[:1],
    ),
    "Hermes's calls in text": (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "gpt", "value": '<tool_call>{"name": "add"}</tool_call>'},
                {"from": "tool", "value": "2"},
                {"from": "gpt", "value": "A"},
            ]
        },
        ['[u]Q<e>[a]«<tool_call>{"name": "add"}</tool_call><e>»[t]2<e>[a]«A<e>»'],
    ),
    "calls of the user": (
        dialogue({**ASK, "tool_calls": [ADD]}, A),
        ("bad_role", "calls"),
    ),
    "DeepSeek's reasoning": (
        dialogue(ASK, said("A", reasoning_content="hm")),
        ["[u]Q<e>[a]«(hm)A<e>»"],
    ),
    "gpt-oss's thinking": (
        dialogue(ASK, said("A", thinking="hm", tool_calls=None)),
        ["[u]Q<e>[a]«(hm)A<e>»"],
    ),
    "reasoning in text": (
        {"prompt": "Q", "completion": "<think>hm</think>A"},
        ["Q«<think>hm</think>A</s>»"],
    ),
    "reasoning in two fields that differ": (
        dialogue(ASK, said("A", thinking="hm", reasoning="ah")),
        ("wrong_type", "thinking"),
    ),
    "one message, not a list": (
        {"messages": A, "rejected_response": "B"},
        ("missing_field", "prompt"),
    ),
    "text parts": (
        dialogue(
            asked([{"type": "text", "text": "Q", "image_url": None}]),
            said([{"text": "A"}]),
        ),
        ANSWERS[:1],
    ),
    "OpenAI's image": (
        dialogue(
            asked(
                [
                    {"type": "text", "text": "Q"},
                    {"type": "image_url", "image_url": {"url": "x"}},
                ]
            ),
            A,
        ),
        ("wrong_type", "image_url"),
    ),
    "TRL's image": (
        dialogue(
            asked([{"type": "image", "text": ""}, {"type": "text", "text": "Q"}]), A
        )
        | {"images": ["x"]},
        ("wrong_type", "image"),
    ),
    "ms-swift's image in a message": (
        dialogue({**ASK, "images": ["x"]}, A),
        ("unknown_key", "images"),
    ),
    "LLaVA's image": (
        {"conversations": sharegpt("<image>Q", "A"), "image": "x.jpg"},
        ("unread_field", "image"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_record(name, pack, byte_level):
    record, expected = CASES[name]
    tokenizer = byte_level(template=TEMPLATE)
    if isinstance(expected, list):
        packed = pack(tokenizer, record)
        assert packed.marked == expected
        return
    reason, mentioned = expected
    with pytest.raises(RecordError) as caught:
        pack(tokenizer, record, on={reason: "error"})
    assert REASONS[reason].rule in str(caught.value)
    assert mentioned in str(caught.value)
