"""Chat templates: Jinja in a sandbox, rendered as Hugging Face renders them; two of our own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.control import control_pattern, free_characters
from packstore.tokenizer.dialogue.sandbox import MAX_RENDERED, MAX_SOURCE, Sandbox, as_json
from packstore.tokenizer.refusals import Refused

TEMPLATE_DATE = "2024-07-26"
"""The current date for templates that use it: constant, so that the same input always gives the
same bytes. It is the fallback of Llama's own templates."""

Message = dict[str, Any]
Tools = list[Any] | None
Span = tuple[int, int]


_TAGS = re.compile(r"</?[\w:|-]+>|\[/?\w+\]")


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line)
            for name in ("generation_opens", "generation_closes")
        ]
        return nodes.Scope([marks[0], *body, marks[1]], lineno=line)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template."""

    source: str  # Jinja text
    variables: Mapping[str, Any]  # such as ``bos_token`` and ``enable_thinking``

    def __post_init__(self) -> None:
        _compile(self.source)

    @cached_property
    def marks_generation(self) -> bool:
        """True if the template marks the assistant's text by ``{% generation %}`` blocks."""
        tree = _compile(self.source).environment.parse(self.source)
        return any(name.name == "generation_opens" for name in tree.find_all(nodes.Name))

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """A pattern of the tags, such as ``</think>``, at which the template may cut contents.

        Each tag that it names, opening and closing: it may name one of them only.
        """
        opening = {tag.replace("/", "") for tag in _TAGS.findall(self.source)}
        closing = {f"{tag[0]}/{tag[1:]}" for tag in opening}
        return control_pattern(frozenset(opening | closing))

    @cached_property
    def written_prompt(self) -> str:
        """Generation prompt that the template always writes at the end; usually empty.

        Found by rendering dialogues of two turns; empty if the template refuses them.
        """
        words = free_characters(self.source, 4)
        roles = ("user", "assistant") * 2
        talk = [{"role": r, "content": c} for r, c in zip(roles, words, strict=True)]
        environment = _compile(self.source).environment
        tree = environment.parse(self.source)
        outputs = sum(1 for _ in tree.find_all(nodes.Output))
        marks = free_characters(self.source + "".join(words), outputs)
        _Marks(marks).visit(tree)
        try:
            before = self.render(talk[:3])
            if before != self.render(talk[:3], prompt=True):
                return ""
            whole = self.render(talk)
            with_marks = environment.from_string(tree)
            marked = self.render(talk, compiled=with_marks)
        except Refused:
            return ""
        text, end = written_last(marked, marks)
        header = whole.partition(words[3])[0]
        return end if text == whole and before.endswith(end) and header.endswith(end) else ""

    @cached_property
    def takes_null(self) -> bool:
        """True if the content of a turn with calls only should be null instead of "".

        Some templates render calls only if it is null, others refuse null or write "None".
        """
        null, empty = (
            max(self._grade_call(content, arguments) for arguments in ({"k": "v"}, '{"k": "v"}'))
            for content in (None, "")
        )
        return null >= empty

    def _grade_call(self, content: str | None, arguments: object) -> int:
        function = {"name": "probe_of_call", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        talk: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": "b"},
        ]
        grade = 0
        for messages in (talk[:2], talk):
            with suppress(Refused):
                text = self.render(messages)
                if "None" not in text or "None" in self.source:
                    grade += 1 + ("probe_of_call" in text.partition(talk[2]["content"])[0])
        return grade

    def render_spans(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """Renders a dialogue; returns the text and (start, end) of its generation blocks."""
        if not self.marks_generation:
            return self.render(messages, tools), []
        opens, closes = free_characters(self.source + as_json([messages, tools]), 2)
        marked = self.render(messages, tools, generation_opens=opens, generation_closes=closes)
        text, spans, start = "", [], 0
        for part in marked.split(opens):
            inside, closed, after = part.partition(closes)
            text += inside
            if closed:
                spans.append((start, len(text)))
            text += after
            start = len(text)
        return text, spans

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        prompt: bool = False,
        compiled: Template | None = None,
        **marks: str,
    ) -> str:
        """Renders a dialogue; with `prompt`, followed by the generation prompt.

        `compiled`: another form of the template; `marks`: what its generation blocks write.
        """
        given: dict[str, Any] = {"messages": list(messages), "tools": tools, "documents": None}
        given |= {"add_generation_prompt": prompt, **marks}
        parts, size = [], 0
        try:
            for part in (compiled or _compile(self.source)).generate({**self.variables, **given}):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise Refused("template_refused", f"more than {MAX_RENDERED} characters")
        except (Refused, MemoryError):  # no record's fate depends on memory
            raise
        except Exception as error:  # untrusted code on untrusted data may raise anything
            raise Refused("template_refused", f"{type(error).__name__}: {error}") from error
        return "".join(parts)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE:
        rule = f"it must have at most {MAX_SOURCE} characters"
        raise TokenizerError(sentence("chat template", rule, str(len(source))))
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    date = datetime.fromisoformat(TEMPLATE_DATE)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": date.strftime}
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"chat template, line {line}" if line else "chat template"
        raise TokenizerError(sentence(where, "it must be valid Jinja", str(error))) from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Marks(NodeTransformer):
    """Inserts a character before every output that is written directly to the text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._left = list(marks)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        node.nodes.insert(0, nodes.TemplateData(self._left.pop(), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Node) -> nodes.Node:
        return node  # captured text may be changed before it is written

    visit_CallBlock = visit_FilterBlock = visit_AssignBlock = visit_Macro


def written_last(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Returns the text without marks, and its end as written by outputs used only once."""
    if not marks:
        return text, ""
    _, *parts = re.split(f"(?=[{''.join(marks)}])", text)
    times = Counter(part[0] for part in parts)
    end = ""
    for part in reversed(parts):
        if times[part[0]] > 1:
            break
        end = part[1:] + end
    return text.translate(dict.fromkeys(map(ord, marks))), end


_SYSTEM = r"""{%- if messages and messages[0].role in ('system', 'developer') %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- if tools %}
    {%- set ns = namespace(text='You can call these functions:') %}
    {%- for tool in tools %}
        {%- set ns.text = ns.text + '\n' + (tool | tojson) %}
    {%- endfor %}
    {%- set system = (system + '\n\n' if system else '') + ns.text %}
{%- endif %}
{%- macro body(message) %}
    {%- if message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
        {%- set name, arguments = call.function.name | tojson, call.function.arguments %}
        {%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
        {{- '<tool_call>\n{"name": ' + name + ', "arguments": ' + (arguments or '{}') }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""

_CHATML = r"""{%- macro turn(role, text) %}
    {{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}
{%- endmacro %}
{%- if system %}{{ turn('system', system) }}{% endif %}
{%- for message in rest %}{{ turn(message.role, body(message)) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_PLAIN = r"""{%- if system %}{{ 'System: ' + system }}{% endif %}
{%- for message in rest %}
    {%- if system or not loop.first %}{{ '\n\n' }}{% endif %}
    {{- message.role | capitalize + ': ' + body(message) }}
    {%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if system or rest %}{{ '\n\n' }}{% endif %}
    {{- 'Assistant:' }}
{%- endif %}
"""

BUILTIN = {"chatml": _SYSTEM + _CHATML, "plain": _SYSTEM + _PLAIN}
"""Name -> template, for tokenizers without one. ``chatml`` marks turns; ``plain`` writes names and
ends answers with EOS."""
