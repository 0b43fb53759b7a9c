"""Named templates, variables of templates, and the empty thinking block."""

from __future__ import annotations

import json

import pytest
import transformers

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError
from packstore.tokenizer import RecordTokenizer, load_tokenizer

TALK = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NAMED = {"default": "D" + BODY, "tool_use": "T{{ tools | tojson }}" + BODY, "rag": "R" + BODY}


@pytest.fixture(params=["config", "folder"])
def named(request, tmp_path, shared_data):
    """A tokenizer with templates of several names, as either form of folder stores them."""
    source = shared_data / "tokenizers/small_bpe/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if request.param == "config":
        config["chat_template"] = [{"name": n, "template": t} for n, t in NAMED.items()]
    else:
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            path = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            path.write_text(NAMED[name])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_records_with_tools_take_the_template_for_tools(named, rows, sequences):
    ours, theirs = load_tokenizer(named), transformers.AutoTokenizer.from_pretrained(named)
    work = RecordTokenizer(ours, TokenizeConfig(), "sft")
    found = sequences(work(rows([{"messages": TALK, "tools": TOOLS}, {"messages": TALK}]))[0])
    for (ids, _), tools in zip(found, (TOOLS, None), strict=True):
        assert ids == theirs.apply_chat_template(TALK, tools, return_dict=False)
    told = ours.provenance()
    assert (told["chat_template"], told["tool_use_template"]) == (
        NAMED["default"],
        NAMED["tool_use"],
    )


def test_a_template_that_is_asked_for_serves_all_records(named, run):
    record = {"messages": TALK, "tools": TOOLS}
    for name, first in (("default", "D"), ("rag", "R"), ("chatml", "<|im_start|>system")):
        tokenizer = load_tokenizer(named, chat_template=name)
        texts, _ = run(tokenizer, record, kind="sft", on={"unrendered": "keep"})
        assert texts[0][0].startswith(first)
        assert tokenizer.provenance()["tool_use_template"] is None


VARIABLES = (
    "{{ date_string | default('none') }}|{{ effort | default('none') }}|" + BODY
)  # fmt: skip


def test_variables_of_the_job_and_of_a_record(run, byte_level):
    tokenizer = byte_level(template=VARIABLES)
    records = [
        {"messages": TALK},
        {"messages": TALK, "chat_template_kwargs": {"effort": "low", "date_string": None}},
        {"messages": TALK, "chat_template_kwargs": '{"effort": "high"}'},
        {"messages": TALK, "chat_template_kwargs": None},
    ]
    texts, _ = run(tokenizer, *records, kind="sft", template_variables={"date_string": "today"})
    heads = [text.split("[")[0] for text, _ in texts]
    assert heads == ["today|none|", "today|low|", "today|high|", "today|none|"]
    pair = {"prompt": TALK[:1], "chosen": "c", "rejected": "r"}
    texts, _ = run(tokenizer, {**pair, "chat_template_kwargs": {"effort": 3}})
    assert [text for text, _ in texts] == [f"none|3|[user]u;[assistant]{x};" for x in "cr"]
    texts, _ = run(tokenizer, {**pair, "extra": {"effort": 3}}, fields={"chat_template_kwargs":
                   "extra"})  # fmt: skip
    assert texts[0][0].startswith("none|3|")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_that_are_not_for_users(run, byte_level, name):
    with pytest.raises(ConfigError, match=name):
        TokenizeConfig(template_variables={name: 1})
    values = ({name: 1}, "{oops", "[1]", 3, [1])
    records = [{"messages": TALK, "chat_template_kwargs": value} for value in values]
    _, tally = run(byte_level(template=VARIABLES), *records, kind="sft")
    assert dict(tally.dropped) == {"wrong_type": len(values)}


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_the_empty_thinking_block_is_not_supervised(tokenizer, run, variables):
    record = {"messages": TALK, "chat_template_kwargs": variables}
    texts, tally = run(tokenizer("qwen3"), record, kind="sft")
    assert texts[0][0].endswith(f"assistant\n{EMPTY}a<|im_end|>\n")
    assert texts[0][1] == "a<|im_end|>\n"
    in_prompt = variables.get("enable_thinking") is False
    assert dict(tally.noted) == ({} if in_prompt else {"empty_thinking": 1})


def test_ids_with_variables_are_those_of_transformers(shared_data, tokenizer, rows, sequences):
    qwen = transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizers/qwen3")
    work = RecordTokenizer(
        tokenizer("qwen3"), TokenizeConfig(template_variables={"enable_thinking": False}), "sft"
    )
    [(ids, on)] = sequences(work(rows([{"messages": TALK}]))[0])
    assert ids == qwen.apply_chat_template(TALK, enable_thinking=False, return_dict=False)
    prompt = qwen.apply_chat_template(
        TALK[:1], enable_thinking=False, add_generation_prompt=True, return_dict=False
    )
    assert on == [i >= len(prompt) for i in range(len(ids))]


def test_thoughts_and_blocks_that_stand_elsewhere_stay_supervised(tokenizer, run, byte_level):
    talk = [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}]
    assert run(tokenizer("qwen3"), {"messages": talk}, kind="sft")[0][0][1].startswith("<think>")
    talk[1]["content"] = "a " + EMPTY + "b"
    assert run(byte_level(template=BODY), {"messages": talk}, kind="sft")[0][0][1] == (
        f"a {EMPTY}b;"
    )
    opened = BODY.replace("[assistant]", "[assistant]<think>\n").replace(
        "[{{ m.role }}]", "[{{ m.role }}]{{ '<think>\n' if m.role == 'assistant' }}"
    )
    short = BODY.replace("{{ m.content }}", "\n<think></think>\n{{ m.content }}")
    talk[1]["content"] = "b"
    assert run(byte_level(template=short), {"messages": talk}, kind="sft")[0][0][1] == "b;"
    talk[1]["content"] = "\n</think>\n\n  b"
    texts, tally = run(byte_level(template=opened), {"messages": talk}, kind="sft")
    assert texts[0][1] == "  b;"
    assert dict(tally.noted) == {"empty_thinking": 1}
