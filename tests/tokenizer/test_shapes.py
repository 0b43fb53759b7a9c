"""Records as public sets and trainers write them, one of each: what is learned, or the refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packstore.config.record_shapes import FORMS, SHAPES, SPELLINGS
from packstore.errors import RecordError

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role[0] }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    "!{{ c.function.name }}{{ a if a is string else a | tojson }}{% endfor %}"
    "<e>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def turns(*texts: str, names: tuple[str, str] = ("role", "content"), roles=("user", "assistant")):
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
PAIR = {"prompt": "Q", "chosen": "A", "rejected": "B"}
CHATS = {"chosen": turns("Q", "A"), "rejected": turns("Q", "B")}
HH = "\n\nHuman: Q\n\nAssistant: "

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    # Preference
    "TRL, text": (PAIR, ["Q«A</s>»", "Q«B</s>»"]),
    "TRL, implicit prompt of chats": (CHATS, ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"]),
    "TRL, chats": (
        {"prompt": [asked("Q")], "chosen": [said("A")], "rejected": [said("B")]},
        ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"],
    ),
    "TRL, tokenized": (
        {**PAIR, "prompt_input_ids": [1], "chosen_input_ids": [2], "rejected_input_ids": [3]},
        ["Q«A</s>»", "Q«B</s>»"],
    ),
    "UltraFeedback, binarized": (
        {
            **CHATS,
            "prompt": "Q",
            "messages": turns("Q", "A"),
            "prompt_id": "f0",
            "score_chosen": 8.5,
            "score_rejected": 6.0,
        },
        ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"],
    ),
    "UltraFeedback, raw": (
        {
            "instruction": "Q",
            "models": ["m"],
            "completions": [{"response": "A", "overall_score": 7.5}],
        },
        "text 'instruction' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "UltraFeedback, argilla": (
        {
            **CHATS,
            "instruction": "Q",
            "chosen-rating": 5.0,
            "rejected-rating": 2.0,
            "chosen-model": "m",
        },
        ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"],
    ),
    "HH": (
        {"chosen": HH + "A", "rejected": HH + "B"},
        ["\n\nHuman: Q\n\nAssistant:« A</s>»", "\n\nHuman: Q\n\nAssistant:« B</s>»"],
    ),
    "HH with its prompt": (
        {"prompt": HH.rstrip(" "), "chosen": HH + "A", "rejected": HH + "B"},
        ["\n\nHuman: Q\n\nAssistant:« A</s>»", "\n\nHuman: Q\n\nAssistant:« B</s>»"],
    ),
    "HH with another prompt": (
        {"prompt": "\n\nHuman: X", "chosen": HH + "A", "rejected": HH + "B"},
        "what follows the prompt does not begin with it … Leave the prompt out",
    ),
    "HH, explicit prompt": (
        {"prompt": HH.rstrip(" "), "chosen": " A", "rejected": " B"},
        ["\n\nHuman: Q\n\nAssistant:« A</s>»", "\n\nHuman: Q\n\nAssistant:« B</s>»"],
    ),
    "Orca": (
        {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
        "no field 'prompt' among 'system', … (--field prompt=question)",
    ),
    "Orca, chats with a system turn": (
        {
            "prompt": "Q",
            "chosen": [system("S"), *turns("Q", "A")],
            "rejected": [system("S"), *turns("Q", "B")],
        },
        ["[s]S<e>[u]Q<e>[a]«A<e>»", "[s]S<e>[u]Q<e>[a]«B<e>»"],
    ),
    "a persona in the prompt alone": (
        {**CHATS, "prompt": [system("Be a pirate"), asked("Q")]},
        "what follows the prompt does not begin with it … Leave the prompt out",
    ),
    "Nectar": (
        {"prompt": "Q", "answers": [{"answer": "A", "rank": 1.0}, {"answer": "B", "rank": 2.0}]},
        "fields 'prompt', 'answers' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "HelpSteer 2": (
        {"prompt": "Q", "response": "A", "helpfulness": 3, "correctness": 4},
        "helpfulness 3 … Pair good and bad answers by their prompt (kind",
    ),
    "HelpSteer 3": (
        {"context": turns("Q"), "response1": "A", "response2": "B", "overall_preference": -2},
        "text 'response1', 'response2'; messages 'context' … (--field chosen=NAME --field",
    ),
    "arena": (
        {"conversation_a": turns("Q", "A"), "conversation_b": turns("Q", "B"), "winner": "model_a"},
        "messages 'conversation_a', 'conversation_b' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "OpenAI's preference format": (
        {
            "input": {"messages": turns("Q"), "tools": []},
            "preferred_output": [said("A")],
            "non_preferred_output": [said("B")],
        },
        "messages 'preferred_output', … (--field chosen=NAME --field rejected=NAME)",
    ),
    "LLaMA-Factory, alpaca pairs": (
        {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
        "no field 'prompt' among 'instruction', … (--field prompt=instruction)",
    ),
    "LLaMA-Factory, ShareGPT pairs": (
        {
            "conversations": sharegpt("Q"),
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        "answers without a prompt … (--field prompt=conversations)",
    ),
    "ms-swift, pairs": (
        {"messages": turns("Q", "A"), "rejected_response": "B"},
        "no field 'prompt' among 'messages', … (--field prompt=NAME)",
    ),
    "axolotl, pairs in chat_template.default": (
        {"messages": turns("Q"), "chosen": said("A"), "rejected": said("B")},
        "answers without a prompt … Name the turns before the answers (--field prompt=messages)",
    ),
    "NeMo-Aligner": (
        {
            "prompt": "Q",
            "chosen_response": "A",
            "rejected_response": "B",
            "chosen_reward": 2,
            "rejected_reward": 1,
        },
        ["Q«A</s>»", "Q«B</s>»"],
    ),
    "SHP": (
        {"history": "Q", "human_ref_A": "A", "human_ref_B": "B", "labels": 1},
        "text 'history', 'human_ref_A', 'human_ref_B' … (--field chosen=NAME",
    ),
    "PKU": (
        {"prompt": "Q", "response_0": "A", "response_1": "B", "better_response_id": 0},
        "text 'response_0', 'response_1' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "Capybara pairs": (
        {
            "chosen": turns("Q", "A", "R", "S"),
            "rejected": turns("Q", "A", "R", "T"),
            "rating_chosen": 5,
            "rating_rejected": 4,
        },
        ["[u]Q<e>[a]A<e>[u]R<e>[a]«S<e>»", "[u]Q<e>[a]A<e>[u]R<e>[a]«T<e>»"],
    ),
    "pairs as JSON text": (
        {
            "prompt": json.dumps(turns("Q")),
            "chosen": json.dumps([said("A")]),
            "rejected": json.dumps([said("B")]),
        },
        ["[u]Q<e>[a]«A<e>»", "[u]Q<e>[a]«B<e>»"],
    ),
    "pairs as Python's text": (
        {name: str(value) for name, value in CHATS.items()},
        "messages are Python text, found … Write messages to a column by json.dumps",
    ),
    "pairs with a number for a prompt": ({**CHATS, "prompt": 3}, "prompt must be text or messages"),
    # Ranked
    "ranked": (
        {"prompt": "Q", "responses": ["A", "B"], "scores": [2, 1]},
        ["Q«A</s>»", "Q«B</s>»"],
    ),
    "ranked chats": (
        {
            "prompt": turns("Q"),
            "responses": [[said("A")], [said("B")]],
            "scores": [2, 1],
            "system": "S",
        },
        ["[s]S<e>[u]Q<e>[a]«A<e>»", "[s]S<e>[u]Q<e>[a]«B<e>»"],
    ),
    "ranks": (
        {"prompt": "Q", "responses": ["A", "B"], "ranks": [1, 2]},
        "no field 'scores' among 'prompt', … (--field scores=NAME)",
    ),
    "OpenRLHF, scored": (
        {"prompt": "Q", "responses": ["A", "B"], "rewards": [0.5, 0.1]},
        "no field 'scores' among 'prompt', … (--field scores=NAME)",
    ),
    # Single answers
    "TRL, messages": ({"messages": turns("Q", "A")}, ["[u]Q<e>[a]«A<e>»"]),
    "TRL, prompt and completion": ({"prompt": "Q", "completion": "A"}, ["Q«A</s>»"]),
    "TRL, prompt and completion as chats": (
        {"prompt": turns("Q"), "completion": [said("A")]},
        ["[u]Q<e>[a]«A<e>»"],
    ),
    "UltraChat": (
        {"prompt": "Q", "prompt_id": "f0", "messages": turns("Q", "A", "R", "S")},
        ["[u]Q<e>[a]«A<e>»[u]R<e>[a]«S<e>»"],
    ),
    "a prompt that messages do not begin with": (
        {"prompt": "Be a pirate", "messages": turns("Q", "A")},
        "what follows the prompt does not begin with it … Leave the prompt out",
    ),
    "messages and a response": (
        {"messages": turns("Q"), "response": "A"},
        "'response' beside 'messages' … Leave one of them out",
    ),
    "alpaca": (
        {"instruction": "Q", "input": "", "output": "A"},
        "text 'instruction', 'output' … (--field prompt=NAME --field response=NAME)",
    ),
    "Dolly": (
        {"instruction": "Q", "context": "", "response": "A", "category": "open_qa"},
        "no field 'prompt' among 'instruction', … (--field prompt=NAME)",
    ),
    "ShareGPT": ({"id": "x", "conversations": sharegpt("Q", "A")}, ["[u]Q<e>[a]«A<e>»"]),
    "ShareGPT with a system text": (
        {"system": "S", "conversations": sharegpt("Q", "A")},
        ["[s]S<e>[u]Q<e>[a]«A<e>»"],
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
        ["[u]Q<e>[a]A<e>[u]R<e>[a]«B<e>»"],
    ),
    "ShareGPT, column-wise": (
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
        "messages must be a list of objects, found an object of lists",
    ),
    "WildChat": (
        {"conversation": [{**turn, "toxic": False} for turn in turns("Q", "A")]},
        "messages 'conversation' … (--field messages=conversation)",
    ),
    "WildChat, mapped by hand": (
        {"messages": [{**turn, "toxic": False} for turn in turns("Q", "A")]},
        "messages with 'toxic' … Remove it",
    ),
    "OASST": (
        {"message_id": "a", "parent_id": None, "text": "Q", "role": "prompter", "rank": None},
        "text 'message_id', 'text', 'role' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "OpenAI's fine-tuning format": (
        {"messages": [system("S"), *turns("Q", "A"), asked("R"), said("B", weight=1)]},
        ["[s]S<e>[u]Q<e>[a]«A<e>»[u]R<e>[a]«B<e>»"],
    ),
    "OpenAI, a turn of weight 0": (
        {"messages": [asked("Q"), said("A", weight=0), asked("R"), said("B", weight=1)]},
        ["[u]Q<e>[a]A<e>[u]R<e>[a]«B<e>»"],
    ),
    "axolotl, a turn not trained": (
        {"messages": [asked("Q"), said("A", train=False), asked("R"), said("B", train=True)]},
        ["[u]Q<e>[a]A<e>[u]R<e>[a]«B<e>»"],
    ),
    "axolotl, parts of a turn": (
        {"messages": [asked("Q"), said("A", train_detail=[{"begin_offset": 0}])]},
        "messages with 'train_detail' … Remove it",
    ),
    "ms-swift, a turn without loss": (
        {"messages": [asked("Q"), said("A", loss=False), asked("R"), said("B", loss=True)]},
        ["[u]Q<e>[a]A<e>[u]R<e>[a]«B<e>»"],
    ),
    "Gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "Q"}]}]},
        "messages 'contents' … (--field messages=contents)",
    ),
    "LLaMA-Factory, history": (
        {"instruction": "Q", "output": "A", "history": [["a", "b"]]},
        "text 'instruction', 'output' … (--field prompt=NAME --field response=NAME)",
    ),
    "raw text": (
        {"text": "Once"},
        "text 'text' … (--field chosen=NAME --field rejected=NAME)",
    ),
    "KTO": (
        {"prompt": "Q", "completion": "A", "label": False},
        "label False … Pair good and bad answers by their prompt (kind",
    ),
    "KTO, words": (
        {"prompt": "Q", "completion": "A", "label": "good"},
        "label 'good' … Pair good and bad answers by their prompt (kind",
    ),
    "KTO, plus and minus one": (
        {"prompt": "Q", "completion": "A", "label": -1.0},
        "label -1.0 … Pair good and bad answers by their prompt (kind",
    ),
    "KTO of LLaMA-Factory": (
        {"messages": turns("Q", "A"), "kto_tag": False},
        "kto_tag False … Pair good and bad answers by their prompt (kind",
    ),
    "KTO, thumbs": (
        {"prompt": "Q", "completion": "A", "feedback": "thumbs_down"},
        "feedback 'thumbs_down' … Pair good and bad answers by their prompt (kind",
    ),
    "a rating of one": (
        {"prompt": "Q", "response": "A", "rating": 1},
        "rating 1 … Pair good and bad answers by their prompt (kind",
    ),
    "token ids and labels": ({"input_ids": [81, 65], "labels": [-100, 65]}, ["r«b»"]),
    "a good answer": ({"prompt": "Q", "completion": "A", "label": True}, ["Q«A</s>»"]),
    # Calls, reasoning, images
    "OpenAI's calls": (
        {
            "messages": [
                asked("Q"),
                said(None, tool_calls=[{"id": "c1", **function("add", '{"x": 1}')}]),
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                said("A"),
            ],
            "tools": [TOOL],
        },
        ['add;[u]Q<e>[a]«!add{"x": 1}<e>»[t]2<e>[a]«A<e>»'],
    ),
    "OpenAI's first calls": (
        {
            "messages": [
                asked("Q"),
                said(None, function_call={"name": "add", "arguments": '{"x": 1}'}),
                {"role": "function", "name": "add", "content": "2"},
                said("A"),
            ]
        },
        ['[u]Q<e>[a]«!add{"x": 1}<e>»[t]2<e>[a]«A<e>»'],
    ),
    "Mistral's calls": (
        {
            "messages": [
                asked("Q"),
                said(
                    "",
                    tool_calls=[
                        {"id": "123456789", "function": {"name": "add", "arguments": {"x": 1}}}
                    ],
                ),
                {"role": "tool", "name": "add", "content": "2", "tool_call_id": "123456789"},
                said("A"),
            ],
            "tools": json.dumps([TOOL]),
        },
        ['add;[u]Q<e>[a]«!add{"x": 1}<e>»[t]2<e>[a]«A<e>»'],
    ),
    "LLaMA-Factory's calls": (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "A"},
            ]
        },
        ['[u]Q<e>[a]«!add{"x": 1}<e>»[t]2<e>[a]«A<e>»'],
    ),
    "Anthropic's calls": (
        {
            "messages": [
                asked("Q"),
                said(
                    [
                        {"type": "text", "text": "A"},
                        {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}},
                    ]
                ),
            ]
        },
        "a part must be text, found {'type':",
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
        {"messages": [{**asked("Q"), "tool_calls": [ADD]}, said("A")]},
        "only the assistant has reasoning and",
    ),
    "DeepSeek's reasoning": (
        {"messages": [asked("Q"), said("A", reasoning_content="hm")]},
        ["[u]Q<e>[a]«(hm)A<e>»"],
    ),
    "gpt-oss's thinking": (
        {"messages": [asked("Q"), said("A", thinking="hm", tool_calls=None)]},
        ["[u]Q<e>[a]«(hm)A<e>»"],
    ),
    "reasoning in text": (
        {"prompt": "Q", "completion": "<think>hm</think>A"},
        ["Q«<think>hm</think>A</s>»"],
    ),
    "reasoning in two fields that differ": (
        {"messages": [asked("Q"), said("A", thinking="hm", reasoning="ah")]},
        "a message must have one of",
    ),
    "text parts": (
        {
            "messages": [
                asked([{"type": "text", "text": "Q", "image_url": None}]),
                said([{"text": "A"}]),
            ]
        },
        ["[u]Q<e>[a]«A<e>»"],
    ),
    "OpenAI's image": (
        {
            "messages": [
                asked(
                    [
                        {"type": "text", "text": "Q"},
                        {"type": "image_url", "image_url": {"url": "x"}},
                    ]
                ),
                said("A"),
            ]
        },
        "a part must be text, found {'type':",
    ),
    "TRL's image": (
        {
            "messages": [
                asked([{"type": "image", "text": ""}, {"type": "text", "text": "Q"}]),
                said("A"),
            ],
            "images": ["x"],
        },
        "a part must be of type text, found",
    ),
    "ms-swift's image in a message": (
        {"messages": [{**asked("Q"), "images": ["x"]}, said("A")]},
        "messages with 'images' … Remove it",
    ),
    "LLaVA's image": (
        {"conversations": sharegpt("<image>Q", "A"), "image": "x.jpg"},
        ["[u]<image>Q<e>[a]«A<e>»"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shape(name, pack, byte_level):
    record, expected = CASES[name]
    tokenizer = byte_level(template=TEMPLATE)
    if isinstance(expected, list):
        packed = pack(tokenizer, record)
        assert packed.marked == expected
        return
    stop = {"wrong_type": "error", "no_common_prompt": "error", "bad_role": "error"}
    with pytest.raises(RecordError) as caught:
        pack(tokenizer, record, on=stop)
    assert all(part in str(caught.value) for part in expected.split(" … "))


def test_the_page_prints_the_table():
    """Each shape with its fields, the forms of their values, and what becomes of them."""
    rows = ["| kind | fields | optional | becomes |", "|---|---|---|---|"]
    for shape in SHAPES:
        needs = ", ".join(f"`{name}` {form}" for name, form in shape.needs.items())
        takes = ", ".join(f"`{name}`" for name in shape.takes)
        rows.append(f"| {shape.kind} | {needs} | {takes} | {shape.becomes} |")
    rows += ["", "| form | value |", "|---|---|"]
    rows += [f"| {form} | {value} |" for form, value in FORMS.items() if form != value]
    rows += ["", "| field | also read under the names |", "|---|---|"]
    for name, (_, *others) in SPELLINGS.items():
        if others or SPELLINGS[name] != (name,):
            names = ", ".join(f"`{n}`" for n in SPELLINGS[name] if n != name)
            rows.append(f"| `{name}` | {names} |")
    page = (Path(__file__).parents[2] / "docs/records.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)
