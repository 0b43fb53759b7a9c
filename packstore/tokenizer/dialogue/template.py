"""Chat templates: Jinja, rendered as Hugging Face renders them, in a sandbox and within
limits.

Templates are untrusted code. Jinja's immutable sandbox protects the internals of Python
and the records; limits of time and memory protect the machine. Nothing in Python
interrupts a call like ``text.rfind(…)`` or bounds its memory, but the kernel does, by
ending the process: so templates are rendered in worker processes only, and the end of
one fails the job.

The file has four parts: limits, the sandbox, templates, and two templates of packstore.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.control import control_pattern, free_characters
from packstore.tokenizer.refusals import Refused

Message = dict[str, Any]
Tools = list[Any] | None
Span = tuple[int, int]

# Limits.

RENDER_SECONDS = 20.0
"""Maximum processor time to render a record, which mostly takes a millisecond."""

RENDER_MEMORY = 4 << 30
"""Maximum bytes that a process may map while it renders, beside its memory before."""

MAX_SOURCE = 1 << 18
"""Maximum characters of a template, ten times the longest in use."""

MAX_RENDERED = 1 << 26
"""Maximum characters of a rendered dialogue."""

TIMEOUT_SIGNAL: int | None = getattr(signal, "SIGVTALRM", None)
"""Signal that ends a process after its time; None: the system has no such limit."""


class NeedsWorkerProcess(Exception):
    """A record is to be rendered, or a partition made, in a process that may not be
    ended.
    """


_seconds = 0.0  # of a record in this process; 0: it may not render
_memory = 0


def allow_rendering(seconds: float, memory: int) -> None:
    """Let this process render from now on, and be ended if a record needs more."""
    global _seconds, _memory
    _seconds = seconds
    _memory = memory


def require_worker() -> None:
    """Raise :class:`NeedsWorkerProcess` in a process that may not be ended."""
    if not _seconds:
        raise NeedsWorkerProcess


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the code inside; :func:`restart_clock` begins the time of each record.

    Raises:
        TokenizerError: there was not enough memory.
    """
    require_worker()
    try:
        with _limit_memory(_memory):
            restart_clock()
            yield
    except MemoryError:
        rule = f"it must render a record in {_memory >> 20} MiB of memory"
        raise TokenizerError(sentence("chat template", rule, "no more of it")) from None
    finally:
        _end_process_after(0)


def restart_clock() -> None:
    """Give the next record its full time."""
    _end_process_after(_seconds)


def timeout_error() -> TokenizerError:
    """Return the error of a process that :data:`TIMEOUT_SIGNAL` ended."""
    rule = f"it must render a record within {RENDER_SECONDS:g} s of processor time"
    return TokenizerError(
        sentence("chat template", rule, "no end", "Correct its loops")
    )


def _end_process_after(seconds: float) -> None:
    """Let the kernel end this process after so much more processor time; 0: never."""
    if TIMEOUT_SIGNAL is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


@contextlib.contextmanager
def _limit_memory(memory: int) -> Iterator[None]:
    """Limit the memory that this process maps, where the system can."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([mapped + memory, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# The sandbox.

_SAFE_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}
"""Methods of text that take no time or memory beyond its length."""

_DICT_ATTRIBUTES = frozenset(dir(dict))
_JINJA_ARGUMENTS = {"_loop_vars", "_block_vars"}
"""Keyword arguments that Jinja adds to calls."""


class _Generator(CodeGenerator):
    """Reads fields of dicts without a call; leaves constant expressions to the
    rendering.

    ``'a' * 10**10`` would be computed here.
    """

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """Override Jinja's method: a third of the time of a rendering is to read
        messages.
        """
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        name = repr(node.attr)
        self.write(f"(of[{name}] if type(of := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {name} in of else environment.getattr(of, {name}))")

    def _output_child_to_const(self, node: nodes.Expr, *args: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, *args)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without random results, and with a short way for certainly safe
    code.
    """

    code_generator_class = _Generator

    def __init__(self, **settings: Any) -> None:
        super().__init__(optimized=False, **settings)
        del self.globals["lipsum"]
        del self.filters["random"]
        self.filters["tojson"] = as_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Override Jinja's method with a short way for the most common attributes."""
        kind = type(obj)
        if kind is str:
            if attribute in _SAFE_METHODS:
                return getattr(obj, attribute)
        elif kind in (LoopContext, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, obj)
            if isinstance(value, (str, int, type(None))):
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` if it is safe."""
        is_safe = (
            type(getattr(__obj, "__self__", None)) is str
            and __obj.__name__ in _SAFE_METHODS
        )
        if is_safe and kwargs.keys() <= _JINJA_ARGUMENTS:
            return __obj(*args)
        return super().call(__context, __obj, *args, **kwargs)


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text; as the filter ``tojson`` it escapes neither HTML nor non-ASCII
    letters.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens = _output_of_variable("generation_opens", line)
        closes = _output_of_variable("generation_closes", line)
        return nodes.Scope([opens, *body, closes], lineno=line)


def _output_of_variable(name: str, line: int) -> nodes.Output:
    return nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line)


class _MarkOutputs(NodeTransformer):
    """Inserts a character before every output that is written directly to the text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._remaining_marks = list(marks)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        mark = self._remaining_marks.pop()
        node.nodes.insert(0, nodes.TemplateData(mark, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Node) -> nodes.Node:
        return node  # captured text may be changed before it is written

    visit_CallBlock = visit_FilterBlock = visit_AssignBlock = visit_Macro


# Templates.

TEMPLATE_DATE = "2024-07-26"
"""The current date for templates that use it: constant, so that the same input always
gives the same bytes. It is the fallback of Llama's own templates.
"""

_TAGS = re.compile(r"</?[\w:|-]+>|\[/?\w+\]")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template."""

    source: str  # Jinja text
    variables: Mapping[str, Any]  # such as ``bos_token`` and ``enable_thinking``

    def __post_init__(self) -> None:
        _compile(self.source)

    @cached_property
    def marks_generation(self) -> bool:
        """True if the template marks the assistant's text by ``{% generation %}``
        blocks.
        """
        tree = _compile(self.source).environment.parse(self.source)
        return any(
            name.name == "generation_opens" for name in tree.find_all(nodes.Name)
        )

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """A pattern of the tags, such as ``</think>``, at which the template may cut
        contents.

        Each tag that it names, opening and closing: it may name one of them only.
        """
        opening = {tag.replace("/", "") for tag in _TAGS.findall(self.source)}
        closing = {f"{tag[0]}/{tag[1:]}" for tag in opening}
        return control_pattern(frozenset(opening | closing))

    @cached_property
    def written_prompt(self) -> str:
        """Generation prompt that the template always writes at the end; usually empty.

        Found by rendering dialogues of two rounds; empty if the template refuses them.
        """
        contents = free_characters(self.source, 4)
        dialogue = [
            {"role": "user", "content": contents[0]},
            {"role": "assistant", "content": contents[1]},
            {"role": "user", "content": contents[2]},
            {"role": "assistant", "content": contents[3]},
        ]
        try:
            question = self.render(dialogue[:3])
            if question != self.render(dialogue[:3], prompt=True):
                return ""
            text = self.render(dialogue)
            unmarked, end = self._last_output(dialogue, avoid="".join(contents))
        except Refused:
            return ""
        before_answer = text.partition(contents[3])[0]
        is_prompt = question.endswith(end) and before_answer.endswith(end)
        return end if is_prompt and text == unmarked else ""

    def _last_output(self, dialogue: list[Message], avoid: str) -> tuple[str, str]:
        """Render a dialogue; return the text, and the part at its end that is written
        after all turns: by outputs of the template that write only once.

        Args:
            dialogue: of several turns of each role.
            avoid: characters that do not serve as marks.
        """
        environment = _compile(self.source).environment
        tree = environment.parse(self.source)
        num_outputs = sum(1 for _ in tree.find_all(nodes.Output))
        marks = free_characters(self.source + avoid, num_outputs)
        _MarkOutputs(marks).visit(tree)
        marked = self.render(dialogue, compiled=environment.from_string(tree))
        return _split_last_output(marked, marks)

    @cached_property
    def takes_null(self) -> bool:
        """True if the content of a turn with calls only should be null instead of "".

        Some templates render calls only if it is null, others refuse null or write
        "None".
        """
        return self._grade_calls(content=None) >= self._grade_calls(content="")

    def _grade_calls(self, content: str | None) -> int:
        """Return how well a call with this content is rendered, with its arguments as
        an object or as text, whichever the template renders better.
        """
        as_object = self._grade_call(content, {"k": "v"})
        as_text = self._grade_call(content, '{"k": "v"}')
        return max(as_object, as_text)

    def _grade_call(self, content: str | None, arguments: object) -> int:
        """Return 0 to 4: for a dialogue that ends with the call, and one that ends with
        its result, a point if it is rendered, and one if the text has the call.
        """
        function = {"name": "probe_of_call", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        dialogue: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {
                "role": "tool",
                "name": function["name"],
                "tool_call_id": call["id"],
                "content": "b",
            },
        ]
        grade = 0
        for messages in (dialogue[:2], dialogue):
            with contextlib.suppress(Refused):
                text = self.render(messages)
                if "None" not in text or "None" in self.source:
                    before_result = text.partition(dialogue[2]["content"])[0]
                    grade += 1
                    if "probe_of_call" in before_result:
                        grade += 1
        return grade

    def render_spans(
        self, messages: Sequence[Message], tools: Tools
    ) -> tuple[str, list[Span]]:
        """Render a dialogue; return the text and (start, end) of its generation
        blocks.
        """
        if not self.marks_generation:
            return self.render(messages, tools), []
        opens, closes = free_characters(self.source + as_json([messages, tools]), 2)
        marked = self.render(
            messages, tools, generation_opens=opens, generation_closes=closes
        )
        text = ""
        spans = []
        for part in marked.split(opens):
            start = len(text)
            block, mark, after = part.partition(closes)
            text += block
            if mark:
                spans.append((start, len(text)))
            text += after
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
        """Render a dialogue; with `prompt`, followed by the generation prompt.

        Args:
            messages: the dialogue.
            tools: descriptions of tools.
            prompt: whether the generation prompt follows.
            compiled: template to render in place of this one, such as one with marks.
            marks: variables `generation_opens` and `generation_closes`: characters that
                generation blocks write at their start and end.

        Raises:
            Refused: the template raises, or its text is too long
                (``template_refused``).
        """
        template = compiled or _compile(self.source)
        context: dict[str, Any] = {
            **self.variables,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **marks,
        }
        parts = []
        size = 0
        try:
            for part in template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise Refused(
                        "template_refused", f"more than {MAX_RENDERED} characters"
                    )
        except (Refused, MemoryError):
            # A lack of memory ends the job: it must not decide which records are left
            # out.
            raise
        except Exception as error:
            # Untrusted code on untrusted data may raise anything.
            raise Refused(
                "template_refused", f"{type(error).__name__}: {error}"
            ) from error
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
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": date.strftime,
    }
    try:
        return environment.from_string(source)
    except (
        TemplateError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        line = getattr(error, "lineno", None)
        where = f"chat template, line {line}" if line else "chat template"
        raise TokenizerError(
            sentence(where, "it must be valid Jinja", str(error))
        ) from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _split_last_output(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Return a text without marks, and the part at its end that outputs wrote which
    write only once.

    Args:
        text: rendered, with the mark of an output before everything that it wrote.
        marks: one character for each output.
    """
    if not marks:
        return text, ""
    # Each part is a mark, and the text that its output wrote.
    parts = re.split(f"(?=[{''.join(marks)}])", text)[1:]
    uses = Counter(part[0] for part in parts)
    end = ""
    for part in reversed(parts):
        if uses[part[0]] > 1:
            break
        end = part[1:] + end
    unmarked = text.translate(dict.fromkeys([ord(mark) for mark in marks]))
    return unmarked, end


# Templates of packstore.

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
"""Name -> template, for tokenizers without one. ``chatml`` marks turns; ``plain``
writes names and ends answers with EOS.
"""
