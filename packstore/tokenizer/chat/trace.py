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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

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

_FIELDS = ("role", "content")
_WITH_THOUGHTS = (*_FIELDS, "reasoning_content", "thinking")
_OF_TYPES = {"boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable"}
_OF_TYPES |= {"mapping", "none", "number", "sequence", "string", "true", "undefined"}
_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}

Step = tuple[Callable[..., str], tuple[Any, ...]]
Hole = tuple[int, tuple[Step, ...]]
"""Index of a content, and functions applied to it in turn, each with its further arguments. No
function makes a content longer."""


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

    @property
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
        return sum(len(part) if type(part) is str else LONGEST for part in self._parts)

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable

    # What every object has, and what Jinja uses where it suppresses a TypeError.
    __format__ = __hash__ = __repr__ = __str__ = _unknown  # type: ignore[assignment]
    __float__ = __getitem__ = __index__ = __int__ = __iter__ = _unknown

    def _hole(self) -> Hole:
        [part] = self._parts if len(self._parts) == 1 else [""]
        if isinstance(part, str):
            raise Untraceable
        return part

    def _changed(self, function: Callable[..., str], *arguments: object) -> Text:
        at, steps = self._hole()
        if not {type(argument) for argument in arguments} <= {str, int, type(None)}:
            raise Untraceable
        return Text(self._path, (at, (*steps, (function, arguments))))

    def _tested(self, function: Callable[..., Any], constant: object) -> Any:
        if type(constant) is not str:
            raise Untraceable
        return self._path.test(function, self._hole(), constant)


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

    Args:
        contents: the contents.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self.budget = _Budget()
        self.tests: dict[tuple[Callable[..., Any], Hole, str | Hole], Any] = {}
        self._contents = contents

    def test(self, function: Callable[..., Any], hole: Hole, other: str | Hole) -> Any:
        """Returns the outcome for a content and a constant or another content; records it."""
        found = function(_filled(hole, self._contents), _filled(other, self._contents))
        self.tests[function, hole, other] = found
        return found


def _filled(part: str | Hole, contents: Sequence[str]) -> str:
    if isinstance(part, str):
        return part
    text = contents[part[0]]
    for function, arguments in part[1]:
        text = function(text, *arguments)
    return text


class Trace:
    """A path through a template.

    Args:
        path: its tests.
        parts: the rendered text; None if only Jinja can render it.
    """

    def __init__(self, path: Path, parts: Sequence[str | Hole] | None) -> None:
        self._tests = [(*test, outcome) for test, outcome in path.tests.items()]
        self._parts = parts

    def is_taken(self, contents: Sequence[str]) -> bool:
        """Returns True if the template takes this path for `contents`."""
        for function, hole, other, outcome in self._tests:
            if function(_filled(hole, contents), _filled(other, contents)) != outcome:
                return False
        return True

    def render(self, contents: Sequence[str]) -> str | None:
        """Returns the rendered text; None if only Jinja can render it."""
        if self._parts is None:
            return None
        return "".join([_filled(part, contents) for part in self._parts])


class Traces:
    """The traces of a template. A sequence of roles is traced when it occurs a second time.

    Args:
        template: the template, compiled in a :class:`TracingSandbox`.
        variables: variables of every rendering.
    """

    def __init__(self, template: Template, variables: Mapping[str, Any]) -> None:
        self._template, self._variables = template, variables
        self._known: dict[tuple[object, ...], list[Trace]] = {}

    def render(
        self, messages: Sequence[dict[str, Any]], prompt: bool, by_jinja: Callable[[], str]
    ) -> str:
        """Renders a dialogue without tools; see :meth:`ChatTemplate.render`."""
        contents: list[str] = []
        shape: list[object] = [prompt]
        for message in messages:
            fields = tuple(message)
            shape.append(message.get("role"))
            contents.append(message.get("content"))
            if fields != _FIELDS:
                thoughts = message.get("thinking")
                if fields != _WITH_THOUGHTS or message["reasoning_content"] != thoughts:
                    return by_jinja()
                shape.append(len(contents))
                contents.append(thoughts)
        for content in contents:
            if type(content) is not str or len(content) > LONGEST:
                return by_jinja()
        traces = self._known.get(key := tuple(shape))
        if traces is None:
            if len(messages) <= MAX_MESSAGES:
                if len(self._known) >= MAX_SHAPES:
                    self._known.clear()
                self._known[key] = []
            return by_jinja()
        for trace in traces:
            if trace.is_taken(contents):
                text = trace.render(contents)
                return by_jinja() if text is None else text
        text = by_jinja()
        if len(traces) < MAX_PATHS:
            traces.append(self._trace(messages, contents, prompt, text))
        return text

    def _trace(
        self, messages: Sequence[dict[str, Any]], contents: Sequence[str], prompt: bool, text: str
    ) -> Trace:
        """Traces a dialogue, whose rendering is `text`."""
        path = Path(contents)
        variables = {**self._variables, "tools": None, "add_generation_prompt": prompt}
        variables["messages"] = list(_stand_ins(messages, path))
        HERE.budget = path.budget
        try:
            whole = joined(self._template.generate(variables))
        except (Untraceable, Exception):
            return Trace(path, None)
        parts = whole._parts if type(whole) is Text else (whole,)
        most = sum(len(part) if type(part) is str else LONGEST for part in parts)
        trace = Trace(path, parts)
        if most > MAX_RENDERED or trace.render(contents) != text:
            return Trace(path, None)
        return trace


def _stand_ins(messages: Sequence[dict[str, Any]], path: Path) -> Iterator[dict[str, Any]]:
    n = 0
    for message in messages:
        own = {"role": message["role"], "content": Text(path, (n, ()))}
        n += 1
        if len(message) > len(own):
            own["reasoning_content"] = own["thinking"] = Text(path, (n, ()))
            n += 1
        yield own


class TracingSandbox(Sandbox):
    """A sandbox whose templates also take :class:`Text` for strings."""

    concat = staticmethod(joined)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finalize = pass_context(lambda _, value: _output(HERE.budget.count(value)))
        for name in ("string", "trim"):
            self.filters[name] = _text_filter(self.filters[name], name)
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


def _type_test(usual: Callable[..., bool]) -> Callable[..., bool]:
    return lambda value, *args: usual("" if type(value) is Text else value, *args)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: Any = None) -> Any:
    if type(d) is not str:
        raise Untraceable
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined(HERE.budget.listed(value, d), d)
