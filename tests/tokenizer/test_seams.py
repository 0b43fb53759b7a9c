"""What records of real files have at their seams: tools as text, empty turns, wrapped
messages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from packstore.errors import RecordError

ASK, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
IN_TEXT = {**PARAMETERS, "properties": json.dumps(PARAMETERS["properties"])}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [{**TOOL, "function": {**FUNCTION, "parameters": json.dumps(PARAMETERS)}}],
        json.dumps([json.dumps(TOOL)]),
        [{**TOOL, "function": json.dumps(FUNCTION)}],
        [{**TOOL, "function": {**FUNCTION, "parameters": IN_TEXT}}],
        [{"name": "f", "description": "d", "input_schema": json.dumps(PARAMETERS)}],
    ],
)
def test_tools_as_text_are_tools(tools, pack, tokenizer):
    def ids(given):
        return pack(
            tokenizer("few_merges"), {"messages": [ASK, ANSWER], "tools": given}
        ).sequences

    assert ids(tools) == ids([TOOL])
    bare = [{**FUNCTION, "parameters": json.dumps(PARAMETERS)}]
    assert ids(bare) == ids([FUNCTION])


@pytest.mark.parametrize(
    ("tools", "told"),
    [(["{f"], "a tool must be JSON"), ([None], "an object"), ([[TOOL]], "an object")],
)
def test_tools_that_are_none_are_refused(tools, told, pack, tokenizer):
    packed = pack(tokenizer("few_merges"), {"messages": [ASK, ANSWER], "tools": tools})
    assert packed.dropped == {"wrong_type": 1}
    assert told in packed.rejects[0]["detail"]


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_of_calls_under_other_names_are_read(name, pack, tokenizer):
    """As Llama, LangChain and Anthropic write them; two that differ are refused."""

    def packed(**call):
        turn = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "f", **call}],
        }
        return pack(tokenizer("few_merges"), {"messages": [ASK, turn], "tools": [TOOL]})

    one, other = {"city": "R"}, {"city": "P"}
    assert packed(**{name: one}).sequences == packed(arguments=one).sequences
    assert packed(**{name: one, "arguments": other}).dropped == {"wrong_type": 1}


def test_wrapped_messages_are_named(pack, tokenizer):
    wrapped = {"messages": [ANSWER], "tools": []}
    with pytest.raises(RecordError, match="role"):
        pack(
            tokenizer("few_merges"),
            {"prompt": [ASK], "chosen": wrapped, "rejected": wrapped},
            on={"bad_role": "error"},
        )


def test_text_that_is_rendered_is_what_its_chat_is(pack, tokenizer):
    """Control strings are control ids, and no second EOS follows the one of the
    text.
    """
    qwen = tokenizer("few_merges")
    chat = {"prompt": [ASK], "chosen": "good", "rejected": "bad"}
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    ends = {side: f"{chat[side]}<|im_end|>\n" for side in ("chosen", "rejected")}
    packed = pack(qwen, {"prompt": prompt, **ends})
    assert packed.noted == {"rendered_text": 1}
    assert packed.texts == [prompt + end for end in ends.values()]
    expected = [qwen.library.encode(text).ids for text in packed.texts]
    assert [ids for ids, _ in packed.sequences] == expected
    bare = pack(qwen, {"prompt": prompt, "chosen": "good", "rejected": "bad"})
    assert bare.learned == ["good<|im_end|>", "bad<|im_end|>"]
    literal = pack(qwen, {"prompt": f"Say {prompt}", **ends})
    assert literal.noted == {"special_tokens_literal": 1, "raw_text": 1}
    with_drop = pack(qwen, {"prompt": prompt, **ends}, on={"special_tokens": "drop"})
    assert with_drop.dropped == {"special_tokens": 1}


LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ "
    "m.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


@pytest.mark.parametrize("begin", ["<s>", ""])
def test_rendered_text_of_a_template_with_bos(pack, byte_level, begin):
    """One BOS, and no EOS behind the control string that ends a turn, which may be
    another.
    """
    names = ("<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>")
    llama = byte_level(special=names, template=LLAMA, bos=True)
    expected = pack(llama, {"prompt": [ASK], "chosen": "good", "rejected": "bad"})
    assert expected.learned == ["good<|eot|>", "bad<|eot|>"]
    prompt = f"{begin}<|start|>user<|end|>\n\nQ<|eot|><|start|>assistant<|end|>\n\n"
    record = {"prompt": prompt, "chosen": "good<|eot|>", "rejected": "bad<|eot|>\n"}
    packed = pack(llama, record)
    assert packed.noted["rendered_text"] == 1
    assert packed.learned == ["good<|eot|>", "bad<|eot|>\n"]
    assert packed.sequences[0] == expected.sequences[0]
    asked = pack(llama, record, append_eos=True)
    assert asked.learned == ["good<|eot|></s>", "bad<|eot|>\n</s>"]


FAMILIES = {
    "Phi, whose template makes control strings of roles": (
        ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"),
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|user|>\nQ<|end|>\n<|assistant|>\n",
        "<|end|>",
    ),
    "Mistral, whose turns begin with text": (
        ("<s>", "</s>"),
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ "
        "m.content }} "
        "[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "[INST] Q [/INST]",
        "</s>",
    ),
    "no template": (("<s>", "</s>", "<|u|>", "<|a|>"), None, "<|u|>Q<|a|>", "</s>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_other_families_render(family, pack, byte_level):
    special, template, prompt, end = FAMILIES[family]
    source = byte_level(special=special, template=template)
    sides = {"chosen": f"good{end}", "rejected": f"bad{end}"}
    packed = pack(source, {"prompt": prompt, **sides})
    assert packed.noted == {"rendered_text": 1}
    assert packed.texts == [prompt + side for side in sides.values()]
    expected = [source.library.encode(text).ids for text in packed.texts]
    assert [ids for ids, _ in packed.sequences] == expected
    named = pack(
        source, {"question": prompt, **sides}
    )  # a chat by default, without this
    assert named.sequences == packed.sequences
    if prompt.startswith("<"):
        whole = {name: prompt + side for name, side in sides.items()}
        assert pack(source, {"prompt": prompt, **whole}).dropped == {
            "no_common_prompt": 1
        }


PAGE = (Path(__file__).parents[2] / "docs/tokenizing.md").read_text(encoding="utf-8")
CONTROLS = re.findall(
    r"`(.+?)`", PAGE.partition("## Control strings of")[2].partition("Sources:")[0]
)
"""Control strings of well-known templates, as the page lists them."""

FOREIGN = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
RENDERED = {"instruction": FOREIGN, "output": "good<|eot_id|>"}
"""A record of a form that makes chats by default, rendered for Llama 3."""


@pytest.fixture(scope="session")
def marked(byte_level):
    """A tokenizer whose template writes `[u]`, which no well-known template does."""
    template = (
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    return byte_level(template=template)


FORMATS = ("{}user\nQ", "<bos>{} user", "What is {}?")


@pytest.mark.parametrize("form", FORMATS)
def test_control_strings_of_another_template_are_noted(pack, marked, form):
    prompts = [form.format(control) for control in CONTROLS]
    records = [
        {"prompt": prompt, "response": "good"} for prompt in (*prompts, "What is <|>?")
    ]
    packed = pack(marked, *records, kind="sft")
    assert packed.noted == {"foreign_template": len(CONTROLS), "raw_text": 1}
    turns = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "a"},
            ]
        }
        for text in (*prompts, "What is <|>?")
    ]
    assert pack(marked, *turns, kind="sft").noted["foreign_template"] == len(CONTROLS)


def test_many_control_strings_are_on_the_page():
    assert {"<|im_start|>", "[INST]", "<start_of_turn>", "<|user|>", "[gMASK]"} < set(
        CONTROLS
    )


def test_text_of_another_template_is_not_rendered_by_default(pack, marked):
    plain = pack(marked, {"instruction": "Q", "output": "good"}, kind="sft")
    assert plain.texts == ["[u]Q<e>[a]good<e>"]
    packed = pack(marked, RENDERED, kind="sft")
    assert packed.texts == [f"{FOREIGN}good<|eot_id|></s>"]
    assert packed.noted == {
        "foreign_template": 1
    }  # raw_text would advise a second template
    asked = pack(marked, RENDERED, kind="sft", as_chat=True)
    assert asked.texts == [f"[u]{FOREIGN}<e>[a]good<|eot_id|><e>"]
    assert asked.noted == {"foreign_template": 1}


@pytest.mark.parametrize("as_chat", [None, True])
def test_text_of_another_template_may_be_dropped(pack, marked, as_chat):
    dropped = pack(
        marked, RENDERED, kind="sft", as_chat=as_chat, on={"special_tokens": "drop"}
    )
    assert dropped.dropped == {"special_tokens": 1}


def test_strings_of_a_tokenizer_are_not_foreign(pack, byte_level):
    """Tokens, special or not, and letters that its own template writes."""
    template = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    source = byte_level(special=("<s>", "</s>", "<|im_start|>"), template=template)
    source.library.add_tokens(["<start_of_turn>"])
    texts = (
        "say [INST]",
        "[INST]Q[/INST]",
        "say <|im_start|>",
        "<|im_start|>Q",
        "<start_of_turn>",
    )
    records = [{"prompt": text, "response": "good"} for text in texts]
    assert "foreign_template" not in pack(source, *records, kind="sft").noted
