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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from jinja2 import Template, pass_context, pass_environment
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter

from packstore.tokenizer.chat.sandbox import HERE, MAX_RENDERED, Budget, Sandbox

LONGEST = 1 << 16
"""Maximum characters of a content in a trace. Traces are made as if all contents were that long, so
that dialogues rendered by them are within the limits of a rendering."""
MAX_MESSAGES = 64
"""Maximum messages of a dialogue that is rendered by a trace."""
MAX_SHAPES = 1 << 10
"""Maximum sequences of roles with traces, per template."""
MAX_PATHS = 8
"""Maximum traces of a sequence of roles."""
MAX_TESTS = 1 << 10
"""Maximum tests of contents in a trace."""
MAX_SIZE = 1 << 24
"""Maximum characters of all traces of a template, approximately; beyond it, they are dropped."""

Messages = Sequence[dict[str, Any]]
T = TypeVar("T", bound="_OnPaths")

_FIELDS = ("role", "content")
_WITH_THOUGHTS = (*_FIELDS, "reasoning_content", "thinking")
_OF_TYPES = {"boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable"}
_OF_TYPES |= {"mapping", "none", "number", "sequence", "string", "true", "undefined"}
_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}

Step = tuple[Callable[..., str], tuple[Any, ...]]
Hole = tuple[int | tuple[Any, ...], tuple[Step, ...]]
"""Index of a content, or a tuple of constants and holes that are joined; and functions applied to
it in turn, each with its further arguments. No function makes a text longer."""
Test = tuple[Callable[..., Any], Hole, str | Hole]
"""A function of a content, and of a constant or another content."""


class Untraceable(BaseException):
    """A template learns more about a content than a trace records.

    Not an ``Exception``, as Jinja suppresses some of those.
    """


def _unknown(*_: object) -> NoReturn:
    raise Untraceable


class Text:
    """A string whose parts are constants and contents of messages.

    Has the operations of strings whose outcome is recorded, or is another such text. All others
    raise an error.
    """

    __slots__ = ("_parts", "_path")

    def __init__(self, path: Path, *parts: str | Hole) -> None:
        self._path, self._parts = path, parts

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return str

    def strip(self, characters: str | None = None) -> Text:
        """Strips the content, in the rendering."""
        return self._changed(str.strip, characters)

    def lstrip(self, characters: str | None = None) -> Text:
        """Strips the content, in the rendering."""
        return self._changed(str.lstrip, characters)

    def rstrip(self, characters: str | None = None) -> Text:
        """Strips the content, in the rendering."""
        return self._changed(str.rstrip, characters)

    def split(self, separator: str) -> list[Text]:
        """Splits the content, in the rendering; records the number of separators."""
        number = self._tested(str.count, separator) if separator else _unknown()
        return [self._changed(_piece, separator, i) for i in range(number + 1)]

    def startswith(self, start: str) -> bool:
        """Records the test."""
        return bool(self._tested(str.startswith, start))

    def endswith(self, end: str) -> bool:
        """Records the test."""
        return bool(self._tested(str.endswith, end))

    def __contains__(self, part: str) -> bool:
        return bool(self._tested(operator.contains, part))

    def __bool__(self) -> bool:
        sure = any(part and type(part) is str for part in self._parts)
        return sure or bool(self._path.test(str.__ne__, self._hole(), ""))

    def __eq__(self, other: object) -> bool:
        if type(other) is Text:
            return bool(self._path.test(str.__eq__, self._hole(), other._hole()))
        return bool(self._tested(str.__eq__, other)) if type(other) is str else NotImplemented

    def __add__(self, other: object) -> Text:
        return joined([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Text:
        return joined([other, self]) if isinstance(other, str) else NotImplemented

    def __len__(self) -> int:
        if not self._path.budget.measuring:
            raise Untraceable
        return sum(map(_most, self._parts))

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable

    # What every object has, and what Jinja uses where it suppresses a TypeError.
    __format__ = __hash__ = __repr__ = __str__ = _unknown
    __float__ = __getitem__ = __index__ = __int__ = __iter__ = _unknown

    def _hole(self) -> Hole:
        if len(self._parts) == 1 and not isinstance(self._parts[0], str):
            return self._parts[0]
        return self._parts, ()

    def _changed(self, function: Callable[..., str], *arguments: object) -> Text:
        at, steps = self._hole()
        if not {type(argument) for argument in arguments} <= {str, int, type(None)}:
            raise Untraceable
        return Text(self._path, (at, (*steps, (function, arguments))))

    def _tested(self, function: Callable[..., Any], constant: object) -> Any:
        if type(constant) is not str:
            raise Untraceable
        return self._path.test(function, self._hole(), constant)


def _most(part: str | Hole) -> int:
    """Returns the maximum length of a part."""
    if isinstance(part, str):
        return len(part)
    return LONGEST if isinstance(part[0], int) else sum(map(_most, part[0]))


class _Length:
    """The length of a text, for tests whether it is empty."""

    __slots__ = ("_text",)

    def __init__(self, text: Text) -> None:
        self._text = text

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return int

    def __bool__(self) -> bool:
        return bool(self._text)

    def __gt__(self, other: object) -> bool:
        return bool(self) if type(other) is int and other == 0 else _unknown()

    def __eq__(self, other: object) -> bool:
        return not self if type(other) is int and other == 0 else _unknown()

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable

    __format__ = __hash__ = __repr__ = __str__ = _unknown
    __float__ = __index__ = __int__ = __lt__ = __le__ = __ge__ = _unknown


def _piece(text: str, separator: str, i: int) -> str:
    return text.split(separator)[i]


class _Shown(str):
    """A text in the output of a template, which consists of strings.

    Its own characters are no valid output: a trace that loses the text is found by them.
    """

    __slots__ = ("text",)
    text: Text


class _Output:
    """Becomes :class:`_Shown` by ``str``."""

    def __init__(self, text: Text) -> None:
        self._shown = _Shown("\ud800")
        self._shown.text = text

    def __str__(self) -> str:
        return self._shown


def joined(items: Iterable[object], between: str = "") -> Any:
    """Joins strings and texts: a text if there is one among them."""
    parts: list[str | Hole] = []
    path = None
    for i, item in enumerate(items):
        if i and between:
            parts.append(between)
        if type(item) is _Shown:
            item = item.text
        if type(item) is Text:
            path = item._path
            parts += item._parts
        else:
            parts.append(str(item))
    return "".join(parts) if path is None else Text(path, *parts)  # type: ignore[arg-type]


class _Budget(Budget):
    """A budget to which every content has the maximum length."""

    __slots__ = ("measuring",)

    def __init__(self) -> None:
        super().__init__()
        self.measuring = False

    def size(self, value: object) -> int:
        self.measuring = True
        try:
            return super().size(value)
        finally:
            self.measuring = False


class Path:
    """The tests of contents in a rendering, with their outcomes.

    Attributes:
        budget: the budget of the rendering.
        tests: the tests.

    Args:
        contents: the contents.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self.budget = _Budget()
        self.tests: dict[Test, Any] = {}
        self._contents = contents

    def test(self, function: Callable[..., Any], hole: Hole, other: str | Hole) -> Any:
        """Returns the outcome for a content and a constant or another content; records it."""
        found = function(filled(hole, self._contents), filled(other, self._contents))
        if len(self.tests) >= MAX_TESTS:
            raise Untraceable
        self.tests[function, hole, other] = found
        return found


def filled(part: str | Hole, contents: Sequence[str]) -> str:
    """Returns a constant as it is, and a content after its functions."""
    if isinstance(part, str):
        return part
    at = part[0]
    text = contents[at] if isinstance(at, int) else "".join([filled(p, contents) for p in at])
    for function, arguments in part[1]:
        text = function(text, *arguments)
    return text


def is_taken(tests: Mapping[Test, Any], contents: Sequence[str]) -> bool:
    """Returns True if all tests have these outcomes for `contents`."""
    for (function, hole, other), outcome in tests.items():
        if function(filled(hole, contents), filled(other, contents)) != outcome:
            return False
    return True


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
    """What is known about dialogues by their shape, such as their roles, and by their path.

    It is found out when a shape occurs the second time.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[T]] = {}
        self._size = 0

    def find(
        self, shape: object, contents: Sequence[str], make: Callable[..., T], *arguments: object
    ) -> T | None:
        """Returns what is known, or else makes it; None if the shape or its path is too rare."""
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
        limits = sum(map(_most, parts)) <= MAX_RENDERED and trace.size <= MAX_SIZE // MAX_PATHS
        if limits and trace.render(dialogue.contents) == text:
            return trace
        return Trace(path.tests, None)


class TracingSandbox(Sandbox):
    """A sandbox whose templates also take :class:`Text` for strings."""

    concat = staticmethod(joined)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finalize = pass_context(lambda _, value: _output(HERE.budget.count(value)))
        for name in ("string", "trim"):
            self.filters[name] = _text_filter(self.filters[name], name)
        self.filters["length"] = self.filters["count"] = _length_filter(self.filters["length"])
        self.filters["join"] = self.filters["packstore join"] = _join
        for name in _OF_TYPES:
            self.tests[name] = _type_test(self.tests[name])

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Looks up an attribute; of a text only known methods, and names that no string has."""
        if type(obj) is not Text:
            return super().getattr(obj, attribute)
        if attribute in _METHODS:
            return getattr(obj, attribute)
        if hasattr(str, attribute):
            raise Untraceable
        return super().getattr("", attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Looks up an item, but not of or by a text."""
        if Text in (type(obj), type(argument)):
            raise Untraceable
        return super().getitem(obj, argument)


def _output(value: object) -> object:
    return _Output(value) if type(value) is Text else value


def _text_filter(usual: Callable[..., Any], name: str) -> Callable[..., Any]:
    def apply(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is not Text:
            return usual(value, *args, **kwargs)
        return value.strip(*args, **kwargs) if name == "trim" else value

    return apply


def _length_filter(usual: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: _Length(value) if type(value) is Text else usual(value)


def _type_test(usual: Any) -> Callable[..., Any]:
    return lambda value, *args: usual("" if type(value) is Text else value, *args)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: Any = None) -> Any:
    if type(d) is not str:
        raise Untraceable
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined(HERE.budget.listed(value, d), d)
