"""Whatever a record says is in the rendering, or counted: turns, calls, tools, empty turns."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jinja2
import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from packstore.config import TokenizeConfig
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer
from packstore.tokenizer.chat.assistant_spans import left_out
from packstore.tokenizer.chat.template import ChatTemplate
from packstore.tokenizer.refusals import Refused

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"}
ANSWER = {"role": "assistant", "content": "It is 4."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

ONLY_NULL = (  # shows calls where there is no content at all, and joins arguments as text
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}[assistant]"
    "{% for c in m.tool_calls %}({{ c.type + ' ' + c.function.name + c.function.arguments }})"
    "{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SILENT = (  # knows neither calls nor tools
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
JSON = (  # shows all, arguments as JSON
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}){% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def skipping(role: str) -> str:
    """A template that leaves out the turns of a role."""
    return SILENT.replace("[{{ m.role }}]", f"{{% if m.role == '{role}' %}}{{% continue %}}"
                          "{% endif %}[{{ m.role }}]")  # fmt: skip


def test_an_answer_that_is_only_a_call_shows_the_call(run, byte_level):
    tokenizer = byte_level(template=ONLY_NULL)
    said = '(function f{"x":1})<|end|>'
    assert run(tokenizer, {"messages": [USER, CALLING]}, kind="sft")[0][0][1] == said
    pair = {"prompt": [USER], "chosen": [CALLING], "rejected": "no"}
    assert [s for _, s in run(tokenizer, pair)[0]] == [said, "no<|end|>"]


@pytest.mark.parametrize("opened", ["<think>\n", "<|think|>"])
def test_a_call_without_the_thoughts_that_the_prompt_opens(run, byte_level, opened):
    """DeepSeek's prompts for a next answer open a thought, their calls have none."""
    asks = "{% if add_generation_prompt %}[assistant]"
    template = ONLY_NULL.replace(asks, asks + opened).replace("({{ c", "<|call|>({{ c")
    texts, tally = run(byte_level(template=template), {"messages": [USER, CALLING]}, kind="sft")
    assert texts[0][1] == '<|call|>(function f{"x":1})<|end|>'
    assert not tally.noted
    talk = [USER, CALLING, RESULT, ANSWER]
    texts, _ = run(byte_level(template=template), {"messages": talk}, kind="sft")
    assert texts[0][1] == '<|call|>(function f{"x":1})<|end|>It is 4.<|end|>'


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_template_that_takes_no_null_gets_no_text(tokenizer, run, content):
    """Qwen's looks for tags in the content, so null would be an error."""
    calling = {"role": "assistant", **content, "tool_calls": [CALL]}
    texts, tally = run(tokenizer("qwen3"), {"messages": [USER, calling]}, kind="sft")
    assert texts[0][1].endswith(
        '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call><|im_end|>\n'
    )
    assert not tally.dropped


@pytest.mark.parametrize(
    ("template", "record", "detail"),
    [
        (SILENT, {"messages": [USER, CALLING]}, "the call of f in message 2"),
        (SILENT, {"messages": [USER, CALLING, RESULT, ANSWER]}, "the call of f in message 2"),
        (SILENT, {"messages": [USER, ANSWER], "tools": TOOLS}, "the tools"),
        (
            JSON.replace("c.function.arguments", "'x'"),
            {"messages": [USER, CALLING]},
            "the arguments of f in message 2"
        ),
        (
            "{% for m in messages %}{% if m.content %}[{{ m.role }}]{{ m.content }};{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
            {"messages": [USER, CALLING]},
            "the call of f in message 2"
        ),
        (skipping("tool"), {"messages": [USER, ANSWER, RESULT, ANSWER]}, "message 3"),
        (skipping("tool"), {"messages": [USER, {**ANSWER, "content": "t"}, {**RESULT, "content":
         "r"}, ANSWER]}, "message 3"),
        (skipping("system"), {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
         "message 1")
    ]
)  # fmt: skip
def test_what_the_template_leaves_out(run, byte_level, template, record, detail):
    tokenizer = byte_level(template=template)
    texts, tally = run(tokenizer, record, kind="sft")
    assert (texts, dict(tally.dropped)) == ([], {"unrendered": 1})
    assert detail in tally.samples[0].detail
    with pytest.raises(RecordError, match=detail):
        run(tokenizer, record, kind="sft", on={"unrendered": "error"})
    texts, tally = run(tokenizer, record, kind="sft", on={"unrendered": "keep"})
    if "<a>" in template:  # nothing of the answer is there
        assert dict(tally.dropped) == {"template_refused": 1}
        return
    assert len(texts) == 1
    assert dict(tally.noted) == {"unrendered": 1}


def test_tools_and_calls_that_no_side_shows(run, byte_level):
    calls = {"prompt": [USER], "chosen": "c", "rejected": [CALLING]}
    assert dict(run(byte_level(template=SILENT), calls)[1].dropped) == {"unrendered": 1}
    pair = {"prompt": [USER], "chosen": "c", "rejected": "r", "tools": json.dumps(TOOLS)}
    assert dict(run(byte_level(template=SILENT), pair)[1].dropped) == {"unrendered": 1}
    assert not run(byte_level(template=JSON), pair)[1].dropped


def test_arguments_that_the_template_quotes_are_counted(run, byte_level):
    tokenizer = byte_level(template=JSON)
    talk = {"messages": [USER, CALLING]}
    texts, tally = run(tokenizer, talk, kind="sft")
    assert texts[0][1] == '(f:"{\\"x\\":1}")<|end|>'
    assert dict(tally.noted) == {"arguments_quoted": 1}
    refusing = byte_level(template=JSON.replace("| tojson }})", "| items | list }})"))
    _, tally = run(refusing, talk, kind="sft")
    assert dict(tally.dropped) == {"template_refused": 1}
    assert "may have to be objects" in tally.samples[0].detail


@pytest.mark.parametrize("arguments", [{"x": 1, "y": ["é", None]}, '{"x":1}'])
def test_ids_of_tool_use_are_those_of_transformers(
    shared_data, tokenizer, rows, sequences, arguments
):
    qwen = transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizers/qwen3")
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    calling = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    talk = [USER, calling, RESULT, {**ANSWER, "reasoning_content": "So."}]
    work = RecordTokenizer(tokenizer("qwen3"), TokenizeConfig(), "sft")
    examples, tally = work(rows([{"messages": talk, "tools": TOOLS}]))
    [(ids, _)] = sequences(examples)
    assert ids == qwen.apply_chat_template(talk, TOOLS, return_dict=False)
    assert not tally.noted


TRL = importlib.util.find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL and TRL.origin else None


@pytest.mark.skipif(FOLDER is None, reason="trl brings the templates of many models")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")) if FOLDER else [])
def test_templates_in_use(path):
    """Rendered as transformers does; of plain chats nothing is taken for left out."""
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(
        re.sub(r"strftime_now\([^)]*\)", "'today'", path.read_text("utf-8")), variables
    )
    call = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    plain = [USER, {**ANSWER, "content": "<think>hm</think>It is 4."}, USER, ANSWER]
    for talk, tools in ((plain, None), ([USER, turn, RESULT, ANSWER], TOOLS)):
        try:
            [expected], _ = render_jinja_template(
                [talk], tools, chat_template=template.source, **variables
            )
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(Refused):
                template.render(talk, tools)
            continue
        assert template.render(talk, tools) == expected
        if tools is None:  # templates of models that see take lists of parts only
            blind = path.stem.partition("_")[0] in ("idefics3", "smolvlm")
            assert (left_out(template, talk, tools, expected) is not None) == blind
