"""Compares a rendered dialogue with its messages: the assistant's turns, and parts left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from packstore.tokenizer.chat.messages import map_strings, text_arguments
from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.chat.template import ChatTemplate, Message, Span, Tools
from packstore.tokenizer.control import free_characters, shared_characters
from packstore.tokenizer.refusals import Refused

SHORT = 8
"""Texts up to this length may occur in a rendering by chance, as part of the template."""

_NOTHING: tuple[Any, ...] = (None, "", "{}", "null", {}, [])

_EMPTY_THINKING = re.compile(r"\n*(<think>)?\n*</think>\n{0,2}")
_OPEN_MARKER = re.compile("<[^<>]*$")
"""An incomplete marker at the end."""


def render_turns(
    template: ChatTemplate,
    messages: list[Message],
    first: int,
    tools: Tools,
    *,
    learned: Sequence[int],
    prompts: dict[int, str] | None = None,
) -> tuple[str, list[Span]]:
    """Renders a dialogue, and finds the spans of the turns that are `learned`, in order."""
    if not learned:
        raise Refused("unsupervised", "no turn of the assistant to learn")
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    others = [i for i in turns if i not in learned]
    if template.marks_generation:
        text, spans = template.render_spans(messages, tools)
        finder = TurnFinder(template, messages, tools, text, prompts)
        begin = finder.start(first, 0) if first else 0
        spans = [(max(a, begin), b) for a, b in spans if b > begin]
        if others == turns[:-1]:
            spans = spans[-1:]
        else:
            for start, end in finder.spans(others):
                spans = [(a, b) for a, b in spans if b <= start or a >= end]
    else:
        text = template.render(messages, tools)
        spans = TurnFinder(template, messages, tools, text, prompts).spans(learned)
    if not spans:
        raise Refused("unsupervised", "the template marks no words of the assistant")
    return text, spans


def after_empty_thinking(text: str, span: Span) -> Span:
    """Returns the span without an empty thinking block at its start.

    Templates write it before answers without reasoning; its opening tag may be in the prompt.
    """
    start, end = span
    block = _EMPTY_THINKING.match(text, start, end)
    if block and (block[1] or text[:start].rstrip("\n").endswith("<think>")):
        return block.end(), end
    return span


class TurnFinder:
    """Finds turns in the text of a dialogue by rendering parts of it."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: Tools,
        text: str,
        prompts: dict[int, str] | None,
    ) -> None:
        self._template = template
        self._messages = messages
        self._tools = tools
        self._text = text
        self._prompts = {} if prompts is None else prompts

    def spans(self, turns: Sequence[int]) -> list[Span]:
        """Returns the span of each turn."""
        spans: list[Span] = []
        for i in turns:
            start = self.start(i, spans[-1][1] if spans else 0)
            spans.append((start, max(start, self._end(i))))
        return spans

    def start(self, i: int, low: int) -> int:
        """Returns the start of message `i`: after the generation prompt, and at least `low`."""
        header = before = ""
        try:
            prompt = self._prompt(i)
            if self._text.startswith(prompt):
                return len(prompt)
            before = self._before(i)
            header = prompt.removeprefix(before)
        except Refused:
            if i > 0:  # a dialogue that starts with the assistant has no prompt to render
                raise
        begin, end = self._content(i)
        at = self._text.rfind(header, low, end if begin is None else begin) if header else -1
        if at >= 0:
            return at + len(header)
        if begin is not None:
            return begin
        # A prompt may open a thinking block that a call lacks: the header is their common prefix.
        shared = ""
        if self._text.startswith(before):
            size = shared_characters(header, self._text[len(before) :])
            shared = _OPEN_MARKER.sub("", header[:size])
        if not shared:
            raise _turn_not_found(i)
        return len(before) + len(shared)

    def _before(self, i: int) -> str:
        """Renders the first `i` messages, without a generation prompt."""
        text = self._template.render(self._messages[:i], self._tools)
        return text.removesuffix(self._template.written_prompt)

    def _prompt(self, i: int) -> str:
        """Renders the first `i` messages, with the generation prompt."""
        if i not in self._prompts:
            text = self._template.render(self._messages[:i], self._tools, prompt=True)
            self._prompts[i] = text
        return self._prompts[i]

    def _end(self, i: int) -> int:
        """The end of message `i`, including its end-of-turn text."""
        if i == len(self._messages) - 1:
            return len(self._text.removesuffix(self._template.written_prompt))
        alone = self._before(i + 1)
        if self._text.startswith(alone):
            return len(alone)
        end = self._content(i)[1]
        opens, closes = self._marks[i]
        last = _mark_content(self._messages[i], opens, closes)
        alone = self._template.render([*self._messages[:i], last], self._tools)
        tail = alone.rpartition(closes)[2].removesuffix(self._template.written_prompt)
        return end + shared_characters(tail, self._text[end:])

    @cached_property
    def _marks(self) -> list[tuple[str, str]]:
        """Two characters per message that do not occur in the dialogue."""
        known = self._template.source + as_json([self._messages, self._tools])
        marks = free_characters(known, 2 * len(self._messages))
        return list(zip(marks[::2], marks[1::2], strict=True))

    @cached_property
    def _contents(self) -> dict[int, tuple[int | None, int]]:
        """Start and end of each assistant message's content, found by marks around it.

        The start is None if the template drops the mark there, or writes something before it.
        """
        marked = [
            _mark_content(message, *marks) if message["role"] == "assistant" else message
            for message, marks in zip(self._messages, self._marks, strict=True)
        ]
        text = self._template.render(marked, self._tools)
        bare, *parts = re.split("([" + "".join(itertools.chain(*self._marks)) + "])", text)
        places = {}
        for mark, after in zip(parts[::2], parts[1::2], strict=True):
            places[mark] = len(bare)
            bare += after
        if bare != self._text or 2 * len(places) != len(parts):
            raise Refused("template_refused", "the text of a turn depends on its content")
        contents: dict[int, tuple[int | None, int]] = {}
        for i, (opens, closes) in enumerate(self._marks):
            if closes in places:
                message = self._messages[i]
                plain = (message["content"] or "").strip() and not message.get("reasoning_content")
                contents[i] = (places.get(opens) if plain else None, places[closes])
        return contents

    def _content(self, i: int) -> tuple[int | None, int]:
        if i not in self._contents:
            raise _turn_not_found(i)
        return self._contents[i]


def _mark_content(message: Message, opens: str, closes: str) -> Message:
    """Puts marks around a message's content, or around the name of its last function call."""
    content = message["content"] or ""
    core = content.strip()
    if core:
        lead, _, trail = content.partition(core)
        return {**message, "content": lead + opens + core + closes + trail}
    if not message.get("tool_calls"):
        return message
    *calls, last = message["tool_calls"]
    function = last["function"]
    name = opens + function["name"] + closes
    return {**message, "tool_calls": [*calls, {**last, "function": {**function, "name": name}}]}


def _turn_not_found(i: int) -> Refused:
    return Refused("template_refused", f"message {i + 1} cannot be found in the rendered text")


def is_plain(template: ChatTemplate, messages: list[Message], text: str) -> bool:
    """Returns True if every turn is plain text, and `text` certainly contains them in order.

    Short texts that may occur by chance, as part of the template, are not certain.
    """
    end = 0
    for message in messages:
        words = message["content"]
        if len(message) != 2 or not words:
            return False
        start = text.find(words, end)
        if start < 0:
            words = words.strip()
            start = text.find(words, end)
            if start < 0 or not words:
                return False
        end = start + len(words)
        if len(words) <= SHORT and words.strip() in template.source:
            return False
    return True


def find_missing_part(
    template: ChatTemplate, messages: list[Message], tools: Tools, text: str
) -> str | None:
    """Names the first turn or call that is not in `text`; None if all are.

    A part is in the text, the rendering of the dialogue, if changing it changes the text: templates
    may render it in another form.
    """
    parts = list(_parts_to_render(messages))
    marks = free_characters(template.source + text + as_json([messages, tools]), len(parts))
    changes = [(*change, mark) for change, mark in zip(parts, marks, strict=True)]
    changed = list(messages)
    for i, part, _, mark in changes:
        changed[i] = _mark_part(changed[i], part, mark)
    try:
        shown = set(template.render(changed, tools))
    except Refused:
        shown = set()
    for i, part, name, mark in changes:
        if mark in shown:
            continue
        alone = [*messages[:i], _mark_part(messages[i], part, mark), *messages[i + 1 :]]
        try:
            if template.render(alone, tools) == text:
                return name
        except Refused:  # the template reads what it refuses
            continue
    return None


def shows_tools(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> bool:
    """Returns True if `text`, the rendering of the messages, would change without `tools`."""
    try:
        return not tools or template.render(messages, None) != text
    except Refused:
        return True


def quotes_arguments(messages: list[Message], text: str) -> bool:
    """Returns True if arguments that are JSON text occur in `text` as a quoted string."""
    return any(as_json(arguments) in text for arguments in text_arguments(messages))


def _parts_to_render(messages: list[Message]) -> Iterator[tuple[int, tuple[str, int], str]]:
    """Yields each part that must be rendered: message, part and number of the call, name."""
    for i, message in enumerate(messages):
        where = f"message {i + 1}, of role {message['role']}"
        if (message["content"] or "").strip():
            yield i, ("content", 0), where
        for n, call in enumerate(message.get("tool_calls", ())):
            name = call["function"]["name"]
            yield i, ("name", n), f"the call of {name} in message {i + 1}"
            if call["function"]["arguments"] not in _NOTHING:
                yield i, ("arguments", n), f"the arguments of {name} in message {i + 1}"


def _mark_part(message: Message, part: tuple[str, int], mark: str) -> Message:
    kind, n = part
    if kind == "content":
        core = message["content"].rstrip()
        return {**message, "content": core + mark + message["content"][len(core) :]}
    calls = list(message["tool_calls"])
    function = calls[n]["function"]
    value: Any = map_strings(function[kind], lambda text: text + mark)
    if value == function[kind]:  # neither text nor keys
        value = mark
    calls[n] = {**calls[n], "function": {**function, kind: value}}
    return {**message, "tool_calls": calls}
