from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packstore.tokenizer.chat.builtin_templates import BUILTIN
from packstore.tokenizer.chat.messages import normalize_messages, normalize_tools
from packstore.tokenizer.chat.template import ChatTemplate

TALK = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  Grüße, 世界 "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "x"},
]
TOOLS = [{"name": "f", "description": "<é>", "parameters": {"type": "object"}}]


def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None})


FEATURES = {
    "white space": "{% for m in messages %}\n  {% if true %}\n x\n  {% endif %}\n{% endfor %}\n",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ nothing }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% continue %}a{% endfor %}b",
    "namespace": "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}"
    "{% endfor %}{{ ns.a }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}-"
    "{% endfor %}",
    "scope": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "prompt": "{% if add_generation_prompt %}P{% else %}N{% endif %}",
    **BUILTIN,
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_as_hugging_face_does(rendered, name, prompt):
    for tools in (None, TOOLS):
        expected = rendered(FEATURES[name], TALK, tools, prompt)
        assert ours(FEATURES[name]).render(TALK, tools, prompt=prompt) == expected


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("pairs/chat_en.jsonl", "prompt"),
        ("pairs/chat_zh.jsonl", "prompt"),
        ("pairs/toolcall_zh.jsonl", "prompt"),
        ("ranked/oasst_k2_6.jsonl", "prompt"),
        ("sft/nemo_dummy.jsonl", "messages"),
        ("sft/reason_tool.jsonl", "messages"),
        ("sft/toolcall_en.jsonl", "messages"),
    ],
)
def test_real_dialogues_render_as_hugging_face_does(tokenizer, records, rendered, file, field):
    template = tokenizer("qwen3").template
    for record in records(file)[:30]:
        messages = normalize_messages(record[field])
        tools = normalize_tools(record.get("tools"))
        for prompt in (False, True):
            messages = [{**m, "content": m["content"] or ""} for m in messages]
            expected = rendered(template.source, messages, tools, prompt)
            assert template.render(messages, tools, prompt=prompt) == expected


def test_plain_and_chatml_texts():
    """Written out once, so that a change of our own templates is seen."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    talk = [
        *TALK[:2],
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "4"},
    ]
    assert ours(BUILTIN["plain"]).render(talk, TOOLS, prompt=True) == (
        "System: Be <b>brief</b> & kind.\n\nYou can call these functions:\n"
        '{"name": "f", "description": "<é>", "parameters": {"type": "object"}}\n\n'
        "User:   Grüße, 世界 \n\nAssistant: <think>\nhm\n</think>\n\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call></s>\n\nTool: 4\n\nAssistant:'
    )
    assert ours(BUILTIN["chatml"]).render(talk[1:], prompt=True) == (
        "<|im_start|>user\n  Grüße, 世界 <|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>"
        '\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_date_never_changes():
    assert ours("{{ strftime_now('%d %b %Y') }}").render(TALK) == "26 Jul 2024"


@pytest.mark.parametrize(
    "expression",
    [
        "m.content", "m.role ~ m.keys()|list|length", "m.items()|list|length", "m.get('content')",
        "m.nothing is defined", "m.pop is defined", "m._x is defined", "m.__class__ is defined",
        "m['keys']", "m.none is none", "m.content.strip().startswith('a', 1)",
        "m.content.split('b', maxsplit=1)[-1]", "m.content.split()|join('-')",
        "'{0}{1}'.format(m.role, 1)", "m.content.replace('a', 'aa', 1)",
        "m.content.encode is defined",
        "m.count - 10**9 + 2**40 - 1", "m.count + 0.5", "m.flag + 1", "loop.first ~ loop.index0",
        "loop.last ~ loop.length ~ loop.cycle('x', 'y')", "loop.previtem is defined", "ns.n + 1",
        "loop.nextitem is defined", "loop.nothing is defined", "ns.nothing is defined",
        "loop._length is defined", "ns.__init__ is defined", "ns.m.role", "'%s' % m.role"
    ]
)  # fmt: skip
def test_short_ways_give_what_jinja_gives(expression):
    """Frequent attributes are looked up in a quicker way than Jinja's, with the same result."""
    source = (
        "{% set ns = namespace(n=1, m=messages[0]) %}"
        f"{{% for m in messages %}}{{{{ {expression} }}}}{{% endfor %}}"
    )
    m = {"role": "r", "content": " abcb ", "keys": "k", "none": None, "count": 7, "flag": True}
    messages = [m, {**m, "content": "b"}]
    plain = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)
    if expression == "m.content.encode is defined":
        plain = "FalseFalse"  # stricter than Jinja
    assert ours(source).render(messages) == plain
