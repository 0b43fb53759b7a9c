"""Whatever a record says is in the rendering, or counted: turns, calls, tools, empty
turns.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jinja2
import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from packstore.errors import RecordError

USER = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": '{"x":1}'},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"}
ANSWER = {"role": "assistant", "content": "It is 4."}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
]

# shows calls where there is no content at all, and joins arguments as text
ONLY_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none "
    "%}[assistant]"
    "{% for c in m.tool_calls %}({{ c.type + ' ' + c.function.name + "
    "c.function.arguments }})"
    "{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SILENT = (  # knows neither calls nor tools
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
JSON = (  # shows all, arguments as JSON
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}){% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_WORDS = (  # shows turns with words alone
    "{% for m in messages %}{% if m.content %}[{{ m.role }}]{{ m.content }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def skipping(role: str) -> str:
    """A template that leaves out the turns of a role."""
    return SILENT.replace("[{{ m.role }}]", f"{{% if m.role == '{role}' %}}{{% "
                                            f"continue %}}"
                          "{% endif %}[{{ m.role }}]")  # fmt: skip


def test_an_answer_that_is_only_a_call_shows_the_call(pack, byte_level):
    said = '(function f{"x":1})<e>'
    pair = {"prompt": [USER], "chosen": [CALLING], "rejected": "no"}
    assert pack(byte_level(template=ONLY_NULL), pair).learned == [said, "no<e>"]


@pytest.mark.parametrize("opened", ["<think>\n", "<|think|>"])
def test_a_call_without_the_thoughts_that_the_prompt_opens(pack, byte_level, opened):
    """DeepSeek's prompts for a next answer open a thought, their calls have none."""
    asks = "{% if add_generation_prompt %}[assistant]"
    template = ONLY_NULL.replace(asks, asks + opened).replace("({{ c", "<|call|>({{ c")
    talks = [USER, CALLING], [USER, CALLING, RESULT, ANSWER]
    packed = pack(
        byte_level(template=template), *({"messages": talk} for talk in talks)
    )
    said = '<|call|>(function f{"x":1})<e>'
    assert packed.learned == [said, f"{said}It is 4.<e>"]
    assert not packed.noted


def test_a_template_that_takes_no_null_gets_no_text(pack, tokenizer):
    """Qwen's looks for tags in the content, so null would be an error."""
    turns = [{"role": "assistant", **c, "tool_calls": [CALL]} for c in
             ({}, {"content": None}, {"content": ""})]  # fmt: skip
    packed = pack(
        tokenizer("few_merges"), *({"messages": [USER, turn]} for turn in turns)
    )
    said = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call><|im_end|>\n'
    assert [text.endswith(said) for text in packed.learned] == [True] * 3


@pytest.mark.parametrize(
    ("template", "record", "detail"),
    [
        (SILENT, {"messages": [USER, CALLING]}, "the call of f in message 2"),
        (SILENT, {"messages": [USER, CALLING, RESULT, ANSWER]}, "the call of f in "
                                                                "message 2"),
        (SILENT, {"messages": [USER, ANSWER], "tools": TOOLS}, "the tools"),
        (
            JSON.replace("c.function.arguments", "'x'"),
            {"messages": [USER, CALLING]},
            "the arguments of f in message 2"
        ),
        (WITH_WORDS, {"messages": [USER, CALLING]}, "the call of f in message 2"),
        (skipping("tool"), {"messages": [USER, ANSWER, RESULT, ANSWER]}, "message 3"),
        (skipping("tool"), {"messages": [USER, {**ANSWER, "content": "t"}, {**RESULT, "content":
         "r"}, ANSWER]}, "message 3"),
        (skipping("system"), {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
         "message 1")
    ]
)  # fmt: skip
def test_what_the_template_leaves_out(pack, byte_level, template, record, detail):
    tokenizer = byte_level(template=template)
    (reject,) = pack(tokenizer, record).rejects
    assert reject["reason"] == "unrendered"
    assert detail in reject["detail"]
    with pytest.raises(RecordError, match=detail):
        pack(tokenizer, record, on={"unrendered": "error"})
    packed = pack(tokenizer, record, on={"unrendered": "keep"})
    if template == WITH_WORDS:  # nothing of the answer is there
        assert packed.dropped == {"template_refused": 1}
    else:
        assert (len(packed.examples), packed.noted) == (1, {"unrendered": 1})


def test_tools_and_calls_that_no_side_shows(pack, byte_level):
    calls = {"prompt": [USER], "chosen": "c", "rejected": [CALLING]}
    pair = {
        "prompt": [USER],
        "chosen": "c",
        "rejected": "r",
        "tools": json.dumps(TOOLS),
    }
    assert pack(byte_level(template=SILENT), calls, pair).dropped == {"unrendered": 2}
    shows_tools = byte_level(template="{{ tools | tojson }}" + SILENT)
    assert pack(shows_tools, {**calls, "tools": TOOLS}).dropped == {"unrendered": 1}
    assert not pack(byte_level(template=JSON), pair).dropped


def test_arguments_that_the_template_quotes_are_counted(pack, byte_level):
    talk = {"messages": [USER, CALLING]}
    packed = pack(byte_level(template=JSON), talk)
    assert packed.learned == ['(f:"{\\"x\\":1}")<e>']
    assert packed.noted == {"arguments_quoted": 1}
    refusing = byte_level(template=JSON.replace("| tojson }})", "| items | list }})"))
    (reject,) = pack(refusing, talk).rejects
    assert reject["reason"] == "template_refused"
    assert "may have to be objects" in reject["detail"]


def test_ids_of_tool_use_are_those_of_transformers(pack, tokenizer):
    qwen = transformers.AutoTokenizer.from_pretrained(tokenizer("few_merges").file)
    talks = []
    for arguments in ({"x": 1, "y": ["é", None]}, '{"x":1}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        calling = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
        talks.append([USER, calling, RESULT, {**ANSWER, "reasoning_content": "So."}])
    packed = pack(
        tokenizer("few_merges"), *({"messages": talk, "tools": TOOLS} for talk in talks)
    )
    expected = [
        qwen.apply_chat_template(talk, TOOLS, return_dict=False) for talk in talks
    ]
    assert [ids for ids, _ in packed.sequences] == expected
    assert not packed.noted


TRL = importlib.util.find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL and TRL.origin else None


@pytest.mark.skipif(FOLDER is None, reason="trl brings the templates of many models")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")) if FOLDER else [])
def test_templates_in_use(pack, byte_level, path):
    """Rendered as transformers does; of plain chats nothing but thoughts is left out,
    and noted.
    """
    source = re.sub(r"strftime_now\([^)]*\)", "'today'", path.read_text("utf-8"))
    tokenizer = byte_level(template=source)
    call = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    plain = [USER, {**ANSWER, "content": "<think>hm</think>It is 4."}, USER, ANSWER]
    talks = (plain, None), ([USER, turn, RESULT, ANSWER], TOOLS)
    packed = pack(
        tokenizer, *({"messages": talk, "tools": tools} for talk, tools in talks)
    )
    texts = dict(zip(packed.examples, packed.texts, strict=True))
    reasons = (reject["reason"] for reject in packed.rejects)
    blind = path.stem.partition("_")[0] in (
        "idefics3",
        "smolvlm",
    )  # take lists of parts only
    for number, (talk, tools) in enumerate(talks):
        found = texts[number] if number in texts else next(reasons)
        try:
            variables = {"bos_token": "<s>", "eos_token": "</s>"}
            (expected,), _ = render_jinja_template(
                [talk], tools, chat_template=source, **variables
            )
        except (jinja2.TemplateError, TypeError):
            expected = "template_refused"
        if found == "unrendered" and (tools or blind):
            expected = "unrendered"
        assert found == expected
    thoughts_left_out = 0 in texts and "hm" not in texts[0]
    assert ("reasoning_unrendered" in packed.noted) == thoughts_left_out
    assert "text_unrendered" not in packed.noted
