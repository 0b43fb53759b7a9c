"""Templates: rendered as Hugging Face renders them; named ones, variables, generation
prompts.
"""

from __future__ import annotations

import json

import pytest
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packstore.errors import ConfigError

TALK = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  Grüße, 世界 "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "x"},
]
TOOLS = [{"name": "f", "description": "<é>", "parameters": {"type": "object"}}]
BODY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FEATURES = {
    "white space": "{% for m in messages %}\n  {% if true %}\n x\n  {% endif %}\n{% "
    "endfor %}\n",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ nothing }}",
    "json": "{{ messages | map(attribute='role') | list | tojson }}{{ tools | "
    "tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% "
    "endif %}"
    "{% continue %}a{% endfor %}b",
    "namespace": "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = "
    "ns.a + 1 %}"
    "{% endfor %}{{ ns.a }}",
    "scope": "{% set a = 1 %}{% for m in messages if m.role == 'assistant' %}{% "
    "generation %}"
    "{% set a = 2 %}{{ a }}{{ m.content }}{% endgeneration %}{{ a }}{% endfor %}",
    "prompt": "{% if add_generation_prompt %}P{% else %}N{% endif %}",
}


@pytest.mark.parametrize("name", FEATURES)
def test_renders_as_hugging_face_does(rendered, pack, byte_level, name):
    template = FEATURES[name] + BODY
    for tools in (None, TOOLS):
        record = {"messages": TALK, "tools": tools}
        (text,) = pack(
            byte_level(template=template), record, on={"unrendered": "keep"}
        ).texts
        assert text == rendered(template, TALK, tools)


def test_plain_and_chatml_texts(pack, byte_level):
    """Written out once, so that a change of our own templates is seen."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    talk = [
        *TALK[:2],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "4"},
    ]
    pair = {"prompt": talk, "chosen": "yes", "rejected": "no", "tools": TOOLS}
    assert pack(byte_level(template="plain"), pair).marked[0] == (
        "System: Be <b>brief</b> & kind.\n\nYou can call these functions:\n"
        '{"name": "f", "description": "<é>", "parameters": {"type": "object"}}\n\n'
        "User:   Grüße, 世界 \n\nAssistant: <think>\nhm\n</think>\n\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call></s>\n\nTool: 4\n\n'
        "Assistant:« yes</s>»"
    )
    chatml = byte_level(template="chatml", special=("<|im_start|>", "<|im_end|>"))
    assert pack(chatml, {**pair, "prompt": talk[1:], "tools": None}).marked[1] == (
        "<|im_start|>user\n  Grüße, 世界 <|im_end|>\n<|im_start|>assistant\n<think>\nhm\n"
        "</think>"
        '\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>\n»"
    )


def test_the_date_never_changes(pack, byte_level):
    template = "{{ strftime_now('%d %b %Y') }}" + BODY
    assert (
        pack(byte_level(template=template), {"messages": TALK})
        .texts[0]
        .startswith("26 Jul 202")
    )


def test_short_ways_give_what_jinja_gives(pack, byte_level):
    """Frequent attributes are looked up in a quicker way than Jinja's, with the same
    result.
    """
    expressions = [
        "m.content", "m.role ~ m.keys()|list|length", "m.items()|list|length", "m.get('content')",
        "m.nothing is defined", "m.pop is defined", "m._x is defined", "m.__class__ is "
                                                                       "defined",
        "m['keys']", "m.none is none", "m.content.strip().startswith('a', 1)",
        "m.content.split('b', maxsplit=1)[-1]", "m.content.split()|join('-')",
        "'{0}{1}'.format(m.role, 1)", "m.content.replace('a', 'aa', 1)",
        "m.count - 10**9 + 2**40 - 1", "m.count + 0.5", "m.flag + 1", "loop.first ~ "
                                                                      "loop.index0",
        "loop.last ~ loop.length ~ loop.cycle('x', 'y')", "loop.previtem is "
                                                          "defined", "ns.n + 1",
        "loop.nextitem is defined", "loop.nothing is defined", "ns.nothing is defined",
        "loop._length is defined", "ns.__init__ is defined", "ns.m.role", "'%s' % m.role",
        "m.content.encode is defined", "m.content | center(9)", "(7 / 3) | round(1)"
    ]  # fmt: skip
    m = {
        "role": "r",
        "content": " abcb ",
        "keys": "k",
        "none": None,
        "count": 7,
        "flag": True,
    }
    rows = [m, {**m, "content": "b"}]
    written = "|".join(f"{{{{ {expression} }}}}" for expression in expressions)
    source = (
        f"{{% set ns = namespace(n=1, m=rows[0]) %}}{{% for m in rows %}}{written};"
    )
    source += "{% endfor %}"
    tokenizer = byte_level(template=source + BODY)
    packed = pack(tokenizer, {"messages": TALK}, template_variables={"rows": rows})
    expected = ImmutableSandboxedEnvironment().from_string(source).render(rows=rows)
    assert packed.texts[0].partition("[system]")[0] == expected


CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
NAMED = {
    "default": "D" + BODY,
    "tool_use": "T{{ tools | tojson }}" + BODY,
    "rag": "R" + BODY,
}


@pytest.mark.parametrize("form", ["config", "folder"])
def test_named_templates(pack, byte_level, tmp_path, form):
    """Templates of several names, as either form of folder stores them."""
    source = byte_level()
    source.file.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if form == "config":
        config["chat_template"] = [{"name": n, "template": t} for n, t in NAMED.items()]
    else:
        (tmp_path / "chat_template.jinja").write_text(
            NAMED["default"], encoding="utf-8"
        )
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            path = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            path.write_text(NAMED[name], encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config), encoding="utf-8"
    )
    with_tools = {"messages": CHAT, "tools": TOOLS}
    packed = pack(source._replace(file=tmp_path), with_tools, {"messages": CHAT})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for (ids, _), tools in zip(packed.sequences, (TOOLS, None), strict=True):
        assert ids == theirs.apply_chat_template(CHAT, tools, return_dict=False)
    recorded = packed.dataset.manifest.provenance["tokenizer"]
    assert recorded["chat_template"] == NAMED["default"]
    assert recorded["tool_use_template"] == NAMED["tool_use"]
    for name, first in (
        ("default", "D"),
        ("rag", "R"),
        ("chatml", "<|im_start|>system"),
    ):
        asked = source._replace(file=tmp_path, template=name)
        packed = pack(asked, with_tools, on={"unrendered": "keep"})
        assert packed.texts[0].startswith(first)
        assert (
            packed.dataset.manifest.provenance["tokenizer"]["tool_use_template"] is None
        )


VARIABLES = "{{ date_string | default('none') }}|{{ effort | default('none') }}|" + BODY


def test_variables_of_the_job_and_of_a_record(pack, byte_level):
    tokenizer = byte_level(template=VARIABLES)
    given = [{"effort": "low", "date_string": None}, '{"effort": "high"}', None]
    records = [
        {"messages": CHAT},
        *({"messages": CHAT, "chat_template_kwargs": v} for v in given),
    ]
    packed = pack(tokenizer, *records, template_variables={"date_string": "today"})
    heads = [text.split("[")[0] for text in packed.texts]
    assert heads == ["today|none|", "today|low|", "today|high|", "today|none|"]
    pair = {"prompt": CHAT[:1], "chosen": "c", "rejected": "r"}
    packed = pack(tokenizer, {**pair, "chat_template_kwargs": {"effort": 3}})
    assert packed.marked == [f"none|3|[user]u<e>[assistant]«{x}<e>»" for x in "cr"]
    fields = {"chat_template_kwargs": "extra"}
    packed = pack(tokenizer, {**pair, "extra": {"effort": 3}}, fields=fields)
    assert packed.texts[0].startswith("none|3|")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_that_are_not_for_users(pack, byte_level, name):
    tokenizer = byte_level(template=VARIABLES)
    with pytest.raises(ConfigError, match=name):
        pack(tokenizer, {"messages": CHAT}, template_variables={name: 1})
    values = ({name: 1}, "{oops", "[1]", 3, [1])
    packed = pack(
        tokenizer, *({"messages": CHAT, "chat_template_kwargs": v} for v in values)
    )
    assert packed.dropped == {"wrong_type": len(values)}


EMPTY = "<think>\n\n</think>\n\n"


def test_the_empty_thinking_block_is_not_supervised(pack, tokenizer):
    variables = ({}, {"enable_thinking": False}, {"enable_thinking": True})
    records = [{"messages": CHAT, "chat_template_kwargs": given} for given in variables]
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}
    packed = pack(tokenizer("few_merges"), *records, {"messages": [CHAT[0], thought]})
    *empty, thinking = packed.marked
    assert all(text.endswith(f"assistant\n{EMPTY}«a<|im_end|>\n»") for text in empty)
    assert thinking.endswith("«<think>\nhm\n</think>\n\na<|im_end|>\n»")
    assert packed.noted == {
        "empty_thinking": 2
    }  # without thinking, the block is in the prompt
    qwen = transformers.AutoTokenizer.from_pretrained(tokenizer("few_merges").file)
    ids, on = packed.sequences[1]
    off = {"enable_thinking": False, "return_dict": False}
    assert ids == qwen.apply_chat_template(CHAT, **off)
    prompt = qwen.apply_chat_template(CHAT[:1], add_generation_prompt=True, **off)
    assert on == [i >= len(prompt) for i in range(len(ids))]


OPENED = BODY.replace("[assistant]", "[assistant]<think>\n").replace(
    "[{{ m.role }}]", "[{{ m.role }}]{{ '<think>\n' if m.role == 'assistant' }}"
)
SHORT = BODY.replace("{{ m.content }}", "\n<think></think>\n{{ m.content }}")


@pytest.mark.parametrize(
    ("template", "content", "learned", "noted"),
    [
        (BODY, f"a {EMPTY}b", f"a {EMPTY}b<e>", {}),
        (SHORT, "b", "b<e>", {"empty_thinking": 1}),
        (OPENED, "\n</think>\n\n  b", "  b<e>", {"empty_thinking": 1}),
    ],
)
def test_blocks_in_other_places(pack, byte_level, template, content, learned, noted):
    talk = [CHAT[0], {"role": "assistant", "content": content}]
    packed = pack(byte_level(template=template), {"messages": talk})
    assert (packed.learned, packed.noted) == ([learned], noted)


ALWAYS = {
    "after the loop": (
        "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}</h>{{ m.content | trim "
        "}}<e>"
        "{% endfor %}<h>assistant</h>"
    ),
    "built in a variable": (
        "{% set talk = messages %}{% for m in talk %}{% set text = '<h>' + m['role'] + "
        "'</h>\n\n'"
        " + m['content'] | trim + '<e>' %}{% if loop.index0 == 0 %}"
        "{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
        "{{ '<h>assistant</h>\n\n' }}"
    ),
    "in the loop": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}{{ '<e>' }}{% if "
        "loop.last %}"
        "{{ '<h>assistant</h>' }}{% endif %}{% endfor %}"
    ),
    "history is rewritten": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ '(old)' if not loop.last }}{{ "
        "m.content }}"
        "<e>{% endfor %}<h>assistant</h>"
    ),
}
TURNS = [
    {"role": role, "content": text}
    for role, text in zip(("system", *("user", "assistant") * 2), "suavb", strict=True)
]


@pytest.mark.parametrize("name", ALWAYS)
def test_a_turn_ends_where_a_generation_prompt_that_is_always_written_begins(
    pack, byte_level, name
):
    tokenizer = byte_level(template=ALWAYS[name])
    packed = pack(tokenizer, {"messages": TURNS})
    old = "(old)" if name == "history is rewritten" else ""
    assert packed.learned == [f"{old}a<e>b<e>"]
    assert packed.noted == {"generation_prompt_always": 1}
    assert pack(tokenizer, {"messages": TURNS}, supervised_turns="last").learned == [
        "b<e>"
    ]
    pair = {"prompt": TURNS[:2], "chosen": "c", "rejected": "r"}
    assert pack(tokenizer, pair).learned == ["c<e>", "r<e>"]


LOOP = "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}<e>{% endfor %}"
OTHERS = {
    "asked for": LOOP + "{% if add_generation_prompt %}<h>assistant</h>{% endif %}",
    "none": LOOP,
    "part of the user's turn": (
        "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]"
        "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    ),
    "an end of all": LOOP + "{{ eos_token }}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_templates_end_with_stays_supervised(pack, byte_level, name):
    packed = pack(byte_level(template=OTHERS[name]), {"messages": TURNS})
    end = "</s>" if name == "an end of all" else ""
    assert packed.learned[0].endswith("b<e>" + end)
    assert not packed.noted


def test_eos_follows_the_answer(pack, byte_level):
    """An EOS that a setting asks for stands behind the answer, not behind the next
    header.
    """
    tokenizer = byte_level(template=ALWAYS["after the loop"])
    packed = pack(tokenizer, {"messages": TURNS[1:3]}, append_eos=True)
    assert packed.marked == ["<s><h>user</h>u<e><h>assistant</h>«a<e></s>»"]


RESULT = "<tool_response>\n{}\n</tool_response>"


@pytest.mark.parametrize("role", ["tool", "user"])
def test_what_stands_in_the_tags_of_its_role_is_written_in_them_once(
    role, pack, tokenizer
):
    """As the results of calls in sets for Hermes do, where Qwen3's template writes the
    tags.
    """
    two = RESULT.format(1) + "\n" + RESULT.format(2)
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "call"}]
    end = {"role": "assistant", "content": "x"}
    qwen = tokenizer("few_merges")
    for content in (RESULT.format(1), two, f" {two}\n"):
        packed = pack(
            qwen, {"messages": [*talk, {"role": role, "content": content}, end]}
        )
        assert packed.texts[0].count(content.strip()) == 1
        assert packed.texts[0].count("<tool_response>") == content.count(
            "<tool_response>"
        )
        assert packed.noted.get("tags_once", 0) == (role == "tool")
    plain, tagged = (
        pack(
            qwen, {"messages": [*talk, {"role": "tool", "content": content}, end]}
        ).sequences
        for content in ("1", RESULT.format(1))
    )
    assert plain == tagged


def test_tags_of_an_instruction_are_written_once(pack, byte_level):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    )
    tokenizer = byte_level(
        special=("<s>", "</s>", "<e>", "[INST]", "[/INST]"), template=template
    )
    for side in ("Q", "[INST] Q [/INST]"):
        pair = {
            "prompt": [{"role": "user", "content": side}],
            "chosen": "x",
            "rejected": "<b>y</b>",
        }
        packed = pack(tokenizer, pair)
        assert packed.marked == [
            "[INST] Q [/INST]«x<e>»",
            "[INST] Q [/INST]«<b>y</b><e>»",
        ]
        assert packed.noted.get("tags_once", 0) == (side != "Q")
