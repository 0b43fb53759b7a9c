from __future__ import annotations

import pytest

from packstore.tokenizer.chat.messages import (
    normalize_messages,
    normalize_tools,
    strip_thinking,
    without_thinking,
)
from packstore.tokenizer.refusals import Refused

U = {"role": "user", "content": "u"}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


GOOD = {
    "share gpt": (
        [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        [U, {"role": "assistant", "content": "a"}],
    ),
    "nulls of a table": (
        [{"role": "user", "from": None, "content": "u", "name": None, "tool_calls": None}],
        [U],
    ),
    "one message": (U, [U]),
    "text parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}],
        [{"role": "user", "content": "ab"}],
    ),
    "kept fields": (
        [{"role": "tool", "content": "4", "tool_call_id": "x", "name": "f", "weight": 1}],
        [{"role": "tool", "content": "4", "tool_call_id": "x", "name": "f"}],
    ),
    "calls": (
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
            }
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            }
        ],
    ),
    "calls of a table": (
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "x", "type": None, "function": {"name": "f", "arguments": None}}
                ],
            }
        ],
        [{"role": "assistant", "content": "", "tool_calls": [{**call("f"), "id": "x"}]}],
    ),
    "thoughts under another name": (
        [{"role": "assistant", "content": "a", "reasoning": "r"}],
        [{"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}],
    ),
    "reasoning, two calls, result": (
        [
            U,
            {"role": "assistant_reasoning", "content": "hm"},
            {"role": "assistant_tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
            {"role": "function_call", "content": '[{"name": "g"}]'},
            {"role": "observation", "content": "4"},
            {"role": "assistant_tool_call", "content": '{"name": "h", "arguments": {}}'},
        ],
        [
            U,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "thinking": "hm",
                "tool_calls": [call("f", x=1), call("g")],
            },
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": None, "tool_calls": [call("h")]},
        ],
    ),
    "reasoning begins a new turn": (
        [
            {"role": "assistant_tool_call", "content": '{"name": "f"}'},
            {"role": "assistant_reasoning", "content": "hm"},
            {"role": "assistant_tool_call", "content": '{"name": "g"}'},
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [call("f")]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("g")],
                "reasoning_content": "hm",
                "thinking": "hm",
            },
        ],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_normalized(name):
    given, expected = GOOD[name]
    assert normalize_messages(given) == expected


BAD = {
    "nothing": ([], "wrong_type"),
    "text": ("hello", "wrong_type"),
    "a number": ([3], "wrong_type"),
    "content number": ([{"role": "user", "content": 3}], "wrong_type"),
    "content null": ([{"role": "assistant", "content": None}], "wrong_type"),
    "image": ([{"role": "user", "content": [{"type": "image", "url": ""}]}], "wrong_type"),
    "no role": ([{"content": "x"}], "bad_role"),
    "role number": ([{"role": 1, "content": "x"}], "bad_role"),
    "role": ([{"role": "narrator", "content": "x"}], "bad_role"),
    "call not JSON": ([{"role": "assistant_tool_call", "content": "f()"}], "wrong_type"),
    "call without name": ([{"role": "assistant_tool_call", "content": "{}"}], "wrong_type"),
    "reasoning at the end": ([{"role": "assistant_reasoning", "content": "x"}], "bad_role"),
    "reasoning of a user": ([{"role": "assistant_reasoning", "content": "x"}, U], "bad_role"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    given, reason = BAD[name]
    with pytest.raises(Refused) as caught:
        normalize_messages(given)
    assert caught.value.reason == reason


def test_tools():
    assert normalize_tools('[{"name": "f"}]') == normalize_tools([{"name": "f"}])
    assert [normalize_tools(v) for v in (None, "", "  ", [], "[]")] == [None] * 5
    for bad in ("{}x", '{"name": "f"}', 3, {"name": "f"}):
        with pytest.raises(Refused):
            normalize_tools(bad)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nhm\n</think>\n\nyes", "yes"),
        ("hm</think>yes", "yes"),
        ("a <think>x</think>b<think>y\n</think> c", "a bc"),
        ("no tags", "no tags"),
        ("<think>never closed", "<think>never closed"),
    ],
)
def test_strip_thinking(text, left):
    assert strip_thinking(text) == left


def test_without_thinking_leaves_other_roles_alone():
    talk = [
        {"role": "user", "content": "<think>u</think>"},
        {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": "r"},
    ]
    assert without_thinking(talk) == [talk[0], {"role": "assistant", "content": "b"}]
