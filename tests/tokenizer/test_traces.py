"""Dialogues that are rendered along a trace of their template: as Jinja renders them, or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.config import PackConfig, TokenizeConfig
from packstore.errors import WrongEngineError
from packstore.tokenizer import EngineWatch, RecordTokenizer, Tokenizer, detect_kind
from packstore.tokenizer.chat.builtin_templates import BUILTIN
from packstore.tokenizer.chat.template import ChatTemplate
from packstore.tokenizer.chat.trace import MAX_PATHS, MAX_SIZE, Trace
from packstore.tokenizer.chat.traced_text import LONGEST, MAX_TESTS, Text, Untraceable
from packstore.tokenizer.chat.traced_text import Path as TracedPath
from packstore.tokenizer.records.shapes import parse_record
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.rendered import check_responses, draft_record

REAL = Path(trl.__file__).parent / "chat_templates"
WRITTEN = {
    **BUILTIN,
    "system in the last user turn": (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if m == users[-1] }}"
        "{{ m.content }}[/I]{% else %}{{ m.content }};{% endif %}{% endfor %}"
    ),
    "history is rewritten": (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}(now)"
        "{% endif %}{{ m.content | trim }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "thoughts of the past are cut": (
        "{% for m in messages %}[{{ m.role }}]{% if '</t>' in m.content and not loop.last %}"
        "{{ m.content.split('</t>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]<t>\n{% endif %}"
    ),
    "a mark in the last user turn": (
        "{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S' if loop.revindex < 3 }}"
        "{{ m.content }}[/I]"
        "{% else %}[A]{{ m.content }};{% endif %}{% endfor %}{{ '[A]' if add_generation_prompt }}"
    ),
    "a generation prompt at the end": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ m.content }}<|end|>{% endfor %}"
        "<h>assistant</h>"
    ),
    "a generation prompt always": (
        "{% for m in messages %}<h>{{ m.role }}</h>{{ '(old)' if not loop.last }}{{ m.content }}"
        "<|end|>{% endfor %}<h>assistant</h>"
    ),
    "a macro and a block": (
        "{% macro say(text) %}<{{ text | trim }}>{% endmacro %}{% for m in messages %}"
        "{% set said %}{{ m.role }}: {{ say(m.content) }}{% endset %}{{ said ~ '%s%%' }}"
        "{% endfor %}{{ 'A: <' if add_generation_prompt }}"
    ),
    "generation blocks": (
        "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %};"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
}
TAKEN = ["deepseekv3", "gemma3", "gptoss", "llama3", "phi3", "qwen3", "qwen2_5_training", "gemma4"]
TEMPLATES = [*WRITTEN, *TAKEN]

HOSTILE = [
    "", " ", "\n", "\x1c\u2028 ", "a", "plain words", " lead", "trail \n\n", "None", "user",
    "{{ x }}{% raw %}", "%s %d %% {0}", "<|im_end|>", "<|im_start|>assistant\n", "[assistant]",
    "<think>\n\n</think>\n\nhi", "<think>hm</think> a", "a</think>b</think>c", "</t> x </t> y",
    "<tool_response>x</tool_response>", "\U00100000\U00100001", "x\U00100000", "\ud800", "é世",
    "<h>assistant</h>", "[/I]", "/no_think",
]  # fmt: skip
contents = st.sampled_from(HOSTILE) | st.text("ab \n<>/", max_size=9) | st.text(max_size=4)
choices = st.fixed_dictionaries(
    {
        "supervised_turns": st.sampled_from(["all", "last"]),
        "thinking": st.sampled_from(["template", "strip"]),
        "special_tokens": st.sampled_from(["literal", "control", "drop"]),
        "overlong": st.sampled_from(["drop", "truncate_prompt"]),
        "unrendered": st.sampled_from(["drop", "keep"]),
        "empty_turn": st.sampled_from(["drop", "keep"]),
        "empty_thinking": st.sampled_from(["unsupervised", "supervised"]),
    }
)
shapes = st.sampled_from(["uauaua", "suaua", "ua", "uaaua", "uAua", "aua"])
NAMES = {"u": "user", "a": "assistant", "A": "assistant", "s": "system"}


@st.composite
def dialogues(draw: st.DrawFn) -> list[list[dict[str, str]]]:
    """Dialogues of one shape, so that traces of the first ones are used for the others."""
    shape, talks = draw(shapes), []
    for _ in range(draw(st.integers(3, 6))):
        talk = [{"role": NAMES[role], "content": draw(contents)} for role in shape]
        for message, role in zip(talk, shape, strict=True):
            if role == "A":
                message["reasoning_content"] = draw(contents)
        talks.append(talk)
    return talks


Both = tuple[Tokenizer, Tokenizer]


@pytest.fixture(scope="module")
def both(tokenizer: Callable[..., Tokenizer]) -> Callable[[str], Both]:
    """A tokenizer that traces a template, and one that does not."""

    def load(name: str) -> Both:
        source = WRITTEN.get(name) or (REAL / f"{name}.jinja").read_text(encoding="utf-8")
        fast = replace(tokenizer("qwen3"), chat_template=source, bos_token="<|endoftext|>")
        fast.__dict__["engine"] = tokenizer("qwen3").engine
        return fast, fast.with_engine("tokenizers", tokenizer("qwen3", engine="tokenizers").engine)

    return load


def drafted(tokenizer: Tokenizer, record: object, kind: str, config: TokenizeConfig) -> object:
    try:
        return draft_record(
            check_responses(parse_record(record, kind, config), config), tokenizer, config
        )
    except Refused as refused:
        return refused.reason, refused.detail


@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_dialogues_are_rendered_as_by_jinja(both: Callable[[str], Both], name: str) -> None:
    fast, plain = both(name)

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(dialogues(), choices)
    def check(talks: list[list[dict[str, str]]], choice: dict[str, Any]) -> None:
        config = TokenizeConfig(**choice)
        for talk in talks:
            record = {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": "no"}
            for kind, value in (("sft", {"messages": talk}), ("preference", record)):
                assert drafted(fast, value, kind, config) == drafted(plain, value, kind, config)

    check()


ANSWERS = [
    "", " \n", "words", "\n lead", "trail \n", "<t>\nx", "a</t> b", "<think>\nx", "(now)", "(old)x",
    "<think>\n\n</think>\n\nhi", "<think>h</think> a", "x\U00100000", "<h>assistant</h>",
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_two_answers_are_found_as_by_the_finder(
    both: Callable[[str], Both], name: str
) -> None:
    fast, plain = both(name)
    config = TokenizeConfig(empty_turn="keep", unrendered="keep", empty_thinking="supervised")
    for one, two in itertools.product(ANSWERS[2:] + ANSWERS, ANSWERS):
        words = ("u", one, " v ", two)
        roles = ("user", "assistant") * 2
        talk = [{"role": r, "content": c} for r, c in zip(roles, words, strict=True)]
        expected = drafted(plain, {"messages": talk}, "sft", config)
        assert drafted(fast, {"messages": talk}, "sft", config) == expected


CONFIG = TokenizeConfig(pack_size=8192)
FILES = ["pairs/chat_en.jsonl", "pairs/toolcall_zh.jsonl", "ranked/oasst_k2_6.jsonl",
         "pairs/hh_harmless_messages.jsonl.gz", "sft/reason_tool.jsonl", "sft/toolcall_en.jsonl",
         "sft/nemo_dummy.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", ["chatml", "deepseekv3", "gemma3", "llama3", "qwen3"])
def test_real_dialogues_are_rendered_as_by_jinja(
    both: Callable[[str], Both], records: Any, name: str
) -> None:
    fast, plain = both(name)
    for file in FILES:
        some = records(file)[:40]
        kind = detect_kind(some[0], CONFIG)
        for record in some:
            assert drafted(fast, record, kind, CONFIG) == drafted(plain, record, kind, CONFIG)


@pytest.mark.parametrize("name", ["chatml", "plain", "gemma3", "llama3", "phi3", "qwen3"])
def test_most_dialogues_need_no_jinja(
    both: Callable[[str], Both], records: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fast, _ = both(name)
    some = records("pairs/chat_en.jsonl")[:40]
    talk = [{"role": role, "content": f"some {role} words"} for role in ("user", "assistant") * 3]
    some += [{"messages": talk}] * 3

    def run() -> None:
        for record in some:
            drafted(fast, record, detect_kind(record, CONFIG), CONFIG)

    run()
    calls: list[object] = []
    monkeypatch.setattr(ChatTemplate, "_by_jinja", lambda *given: calls.append(given))
    run()
    assert not calls


OBSERVED = [
    "m.content | length", "m.content[0]", "m.content[1:]", "m.content[::-1]", "m.content | first",
    "m.content | upper", "m.content.upper()", "m.content | capitalize", "m.content.title()",
    "m.content | replace('a', 'bb')", "m.content.replace('a', '')", "m.content | tojson",
    "m | tojson", "m", "m.values() | list", "'%s' % m.content", "'%s' | format(m.content)",
    "'{}'.format(m.content)", "m.content * 2", "m.content | int", "m.content | float",
    "m.content | list", "m.content | sort", "m.content | reverse", "m.content | unique | list",
    "[m.content, 'b'] | max", "{'a': 1}[m.content]", "{'a': 1}.get(m.content, 2)",
    "m[m.content]", "['x', 'y'][m.content | length]", "m.content > 'b'", "m.content is lower",
    "m.content | e", "m.content | safe | length", "m.content | indent", "m.content | wordcount",
    "m.content | attr('isalpha')()", "m.content.isspace()", "m.content.find('a')",
    "m.content | trim | length > 0", "m.content | length == 0", "m.content | length != 0",
    "m.content | length > 1", "m.content | length >= 0", "0 < m.content | length",
    "'y' if m.content | count", "m.content | length is number", "m.content | length + 1",
    "m.content | length is integer", "m.content.strip() | length == m.content | length",
    "(m.content ~ 'ab') | length > 0", "'ab' in m.content + 'b'", "(m.content ~ 'b') is eq 'ab'",
    "(m.content ~ m.role ~ m.content).strip('ab')", "(m.content + ' ').split(' ')[0]",
    "m.content.count('a')", "m.content | string | length", "(m.content ~ '')[0]",
    "' '.join([m.content, 'x'])", "[m.content, 'x'] | join('-')", "['x', 'y'] | join(m.content)",
    "messages | map(attribute='content') | join", "messages | map(attribute='content') | list",
    "messages | groupby('content') | length", "messages | sum(attribute='content', start='')",
    "messages | selectattr('content') | list | length", "m.content in 'abc'", "'a' in m.content",
    "m.content in ['a', 'b']", "m.content == 'a'", "m.content != messages[0].content",
    "messages.index(m)", "m.content is string", "m.content is sequence", "m.content is iterable",
    "m.content is mapping", "m.content is none", "m.content.text is defined", "m.content.upper is "
    "defined", "m.content['text'] is defined", "m.content is sameas m.content", "m.content or 'x'",
    "'y' if m.content else 'n'", "not m.content", "m.content.strip() == 'a'",
    "m.content | trim('a')",
    "m.content.strip('a').split('b') | length", "m.content.split('')", "m.content.split()",
    "m.content.split('a', 1)[0]", "m.content.split('b')[-1].split('c')[0]", "m.content.rstrip('b')",
    "m.content | default('x', true)", "m.content.startswith('a')", "m.content.startswith('a', 1)",
    "m.content.startswith(('a', 'b'))", "m.content.endswith(m.content)",
    "namespace(x=m.content).x", "dict(x=m.content).x", "[m.content][0]", "m.content + 1",
    "(m.content + 'x').startswith('a')", "(m.content + 'x') | trim", "range(3)[m.content]",
    "loop.changed(m.content)", "loop.cycle(m.content, 'b')", "raise_exception(m.content)",
    "m.content is eq 'a'", "m.content is in ['a']", "m.content.x.y",
    "m.get('content')", "m.content | map('upper') | join", "strftime_now(m.content)",
    "m.content is filter", "-m.content", "m.content == none", "m.content == 1", "m | length",
]  # fmt: skip


@pytest.mark.parametrize("expression", OBSERVED)
def test_no_use_of_a_content_is_missed(expression: str) -> None:
    """Each expression is traced with some contents, and gives with others what Jinja gives."""
    source = f"{{% for m in messages %}}<{{{{ {expression} }}}}>{{% endfor %}}"
    words = ["a", "ab", "b", "", " ab ", "content", "1", "bcab", "role", "%d", "A"]
    for order in (words, words[::-1]):
        traced, plain = (ChatTemplate(source, {}, traced=on) for on in (True, False))
        for pair in itertools.product(order, order):
            talk = [{"role": "user", "content": content} for content in pair]
            assert outcome(traced, talk) == outcome(plain, talk)


def outcome(template: ChatTemplate, talk: list[dict[str, Any]]) -> str:
    try:
        return template.render(talk)
    except Refused as refused:
        return refused.detail


def test_only_known_methods_of_strings_are_there() -> None:
    text = Text(TracedPath(["a"]), (0, ()))
    known = {"strip", "lstrip", "rstrip", "split", "startswith", "endswith"}
    for name in {n for n in dir(str) if n[:1] != "_"} - known:
        with pytest.raises(Untraceable):
            getattr(text, name)
    for use in (str, repr, hash, iter, len, int, float, list, reversed, format, bool.__and__):
        with pytest.raises((Untraceable, TypeError)):
            use(text)  # type: ignore[operator]


def test_long_contents_meet_the_limits_of_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    """A content that the budget refuses is refused with a trace, too."""
    source = "{% for i in range(N) %}{{ messages[0].content }}{% endfor %}"
    for times, size in itertools.product((1000, 1500, 3000), (1, 30_000, LONGEST, LONGEST + 3000)):
        traced, plain = (ChatTemplate(source, {}, {"N": times}, on) for on in (True, False))
        for content in ("b", "bb", "a" * size):
            talk = [{"role": "user", "content": content}]
            assert outcome(traced, talk) == outcome(plain, talk)


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{% for i in range(5000) %}{{ 'x' if i ~ '' in messages[0].content }}{% endfor %}", 1),
        ("{{ 'constant' * 999999 }}{{ messages[0].content }}", 1),
        ("{{ messages[0].role * 9999 }}{{ messages[0].content }}", 600),
    ],
)
def test_traces_take_little_memory(source: str, roles: int) -> None:
    template = ChatTemplate(source, {}, traced=True)
    known = template._traces._known
    for role, content in itertools.product(range(roles), "aab"):
        template.render([{"role": str(role), "content": content}])
        assert known._size <= 1.2 * MAX_SIZE
        for trace in itertools.chain(*known._known.values()):
            assert len(trace.tests) <= MAX_TESTS
            assert len(trace.format) <= trace.size <= MAX_SIZE // MAX_PATHS


def test_thoughts_under_two_names_may_differ() -> None:
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    traced, plain = (ChatTemplate(source, {}, traced=on) for on in (True, False))
    for one, two in ("aa", "bb", "ab", "ba"):
        talk = [{"role": "user", "content": "", "reasoning_content": one, "thinking": two}]
        assert outcome(traced, talk) == outcome(plain, talk)


def test_a_wrong_trace_is_found_by_the_watch(
    both: Callable[[str], Both], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, plain = both("chatml")
    assert (fast.template.traced, plain.template.traced) == (True, False)  # type: ignore[union-attr]
    config = PackConfig(pack_size=4096)
    values = rows([{"prompt": [{"role": "user", "content": str(i)}], "chosen": "c", "rejected": "r"}
                   for i in range(9)])  # fmt: skip
    stage, watch = (
        RecordTokenizer(fast, config, "preference"),
        EngineWatch(fast, config, "preference", 0, 1),
    )
    watch(values, stage(values)[0])
    render = Trace.values
    monkeypatch.setattr(Trace, "values", lambda *given: tuple(v + "!" for v in render(*given)))
    with pytest.raises(WrongEngineError, match="of the reference"):
        watch(values, stage(values)[0])
