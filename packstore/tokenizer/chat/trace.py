"""Renders most dialogues without Jinja: along the path of an earlier dialogue with the same roles.

To trace a template, a dialogue is rendered once with :class:`Text` objects in place of its
contents. They record every test of a content with its outcome (``'</think>' in content``: False)
and the places where contents are written. The template learns nothing else about the contents: any
other use, such as their length, raises an error that ends the trace. So a dialogue with the same
roles for which all tests have the same outcomes takes the same path, and its rendering is the
constant parts of that path around its own contents.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from jinja2 import Template

from packstore.tokenizer.chat.sandbox import HERE, MAX_RENDERED
from packstore.tokenizer.chat.traced_text import (
    LONGEST,
    Hole,
    Path,
    Test,
    Text,
    Untraceable,
    filled,
    is_taken,
    joined,
    most,
)

MAX_MESSAGES = 64
"""Maximum messages of a dialogue that is rendered by a trace."""
MAX_SHAPES = 1 << 10
"""Maximum sequences of roles with traces, per template."""
MAX_PATHS = 8
"""Maximum traces of a sequence of roles."""
MAX_SIZE = 1 << 24
"""Maximum characters of all traces of a template, approximately; beyond it, they are dropped."""

Messages = Sequence[dict[str, Any]]
T = TypeVar("T", bound="_OnPaths")

_FIELDS = ("role", "content")
_WITH_THOUGHTS = (*_FIELDS, "reasoning_content", "thinking")


class Trace:
    """A path through a template.

    Attributes:
        tests: tests with their outcomes; the path is taken where all are the same.
        parts: the rendered text; None if only Jinja can render it.
        format: its constant parts, with ``%s`` for the contents.
        size: memory in characters, approximately.
    """

    def __init__(self, tests: dict[Test, Any], parts: Sequence[str | Hole] | None) -> None:
        self.tests, self.parts = tests, parts
        holes = [part for part in parts or () if not isinstance(part, str)]
        self._changed = list(dict.fromkeys(hole for hole in holes if hole[1]))
        last = {hole: i - len(self._changed) for i, hole in enumerate(self._changed)}
        # Texts of several parts are changed; otherwise their parts are among these.
        self._order = [last[hole] if hole in last else cast(int, hole[0]) for hole in holes]
        self._pick = operator.itemgetter(*self._order) if len(holes) > 1 else None
        self.format = "".join(
            part.replace("%", "%%") if isinstance(part, str) else "%s" for part in parts or ()
        )
        self.size = 2 * len(self.format) + 64 * (len(parts or ()) + 4 * len(tests))

    def values(self, contents: list[str]) -> tuple[str, ...]:
        """Returns the contents as rendered."""
        if self._changed:
            contents = contents + [filled(hole, contents) for hole in self._changed]
        return self._pick(contents) if self._pick else tuple(contents[i] for i in self._order)

    def render(self, contents: list[str]) -> str:
        """Returns the rendered text."""
        return self.format % self.values(contents)


class Dialogue:
    """A dialogue of messages with a role and text only, reasoning included.

    Attributes:
        roles: the roles; None before a message with reasoning.
        contents: the texts, in order; reasoning precedes the content of its message.
    """

    __slots__ = ("contents", "roles")

    def __init__(self, roles: tuple[str | None, ...], contents: list[str]) -> None:
        self.roles, self.contents = roles, contents

    @classmethod
    def of(cls, messages: Messages) -> Dialogue | None:
        """Returns None if the messages have anything else, or are too many or too long."""
        roles: list[str | None] = []
        contents: list[str] = []
        for message in messages:
            fields = tuple(message)
            if fields == _WITH_THOUGHTS and message["thinking"] == message["reasoning_content"]:
                contents.append(message["thinking"])
                roles.append(None)
            elif fields != _FIELDS:
                return None
            contents.append(message["content"])
            roles.append(message["role"])
        if not 0 < len(contents) <= MAX_MESSAGES or set(map(type, contents)) != {str}:
            return None
        return None if max(map(len, contents)) > LONGEST else cls(tuple(roles), contents)

    def stand_ins(self, path: Path) -> list[dict[str, Any]]:
        """Returns the messages with texts in place of their contents."""
        messages: list[dict[str, Any]] = []
        thoughts = None
        for n, role in enumerate(self.roles):
            text = Text(path, (n, ()))
            if role is None:
                thoughts = text
                continue
            messages.append({"role": role, "content": text})
            if thoughts is not None:
                messages[-1] |= {"reasoning_content": thoughts, "thinking": thoughts}
                thoughts = None
        return messages


class _OnPaths(Protocol):
    tests: dict[Test, Any]
    size: int


class Paths(Generic[T]):
    """Traces or plans of dialogues, by their shape, such as their roles, and by their path.

    One is made when a shape occurs the second time.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[T]] = {}
        self._size = 0

    def find(
        self, shape: object, contents: Sequence[str], make: Callable[..., T], *arguments: object
    ) -> T | None:
        """Returns the one that fits, or makes it; None if the shape or its path is too rare."""
        known = self._known.get(shape)
        if known is None:
            if len(self._known) >= MAX_SHAPES or self._size > MAX_SIZE:
                self._known.clear()
                self._size = 0
            self._known[shape] = []
            return None
        for one in known:
            if is_taken(one.tests, contents):
                return one
        if len(known) >= MAX_PATHS:
            return None
        made = make(*arguments)
        known.append(made)
        self._size += made.size
        return made


class Traces:
    """The traces of a template.

    Args:
        template: the template, compiled in a :class:`TracingSandbox`.
        variables: variables of every rendering.
        by_jinja: renders messages, with or without the generation prompt.
    """

    def __init__(
        self,
        template: Template,
        variables: Mapping[str, Any],
        by_jinja: Callable[[Messages, bool], str],
    ) -> None:
        self._template, self._variables, self._by_jinja = template, variables, by_jinja
        self._known: Paths[Trace] = Paths()

    def render(self, messages: Messages, prompt: bool) -> str:
        """Renders a dialogue without tools."""
        dialogue = Dialogue.of(messages)
        if dialogue is not None:
            shape, contents = (prompt, dialogue.roles), dialogue.contents
            trace = self._known.find(shape, contents, self._trace, dialogue, messages, prompt)
            if trace is not None and trace.parts is not None:
                return trace.render(contents)
        return self._by_jinja(messages, prompt)

    def trace(self, messages: Messages, prompt: bool) -> Trace:
        """Returns the trace of a dialogue for which :meth:`Dialogue.of` returns one.

        Raises:
            Refused: the template refuses the dialogue.
        """
        dialogue = Dialogue.of(messages)
        assert dialogue is not None
        return self._trace(dialogue, messages, prompt)

    def _trace(self, dialogue: Dialogue, messages: Messages, prompt: bool) -> Trace:
        text = self._by_jinja(messages, prompt)
        path = Path(dialogue.contents)
        variables = {**self._variables, "tools": None, "add_generation_prompt": prompt}
        variables["messages"] = dialogue.stand_ins(path)
        HERE.budget = path.budget
        try:
            whole = joined(self._template.generate(variables))
        except (Untraceable, Exception):
            return Trace(path.tests, None)
        parts = whole._parts if type(whole) is Text else (whole,)
        trace = Trace(path.tests, parts)
        limits = sum(map(most, parts)) <= MAX_RENDERED and trace.size <= MAX_SIZE // MAX_PATHS
        if limits and trace.render(dialogue.contents) == text:
            return trace
        return Trace(path.tests, None)
