"""Stand-ins for the contents of messages, which record how a template uses them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from packstore.tokenizer.chat.sandbox import Budget

LONGEST = 1 << 16
"""Maximum characters of a content in a trace. Traces are made as if all contents were that long, so
that dialogues rendered by them are within the limits of a rendering."""
MAX_TESTS = 1 << 10
"""Maximum tests of contents in a trace."""

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
        return sum(map(most, self._parts))

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


def most(part: str | Hole) -> int:
    """Returns the maximum length of a part."""
    if isinstance(part, str):
        return len(part)
    return LONGEST if isinstance(part[0], int) else sum(map(most, part[0]))


class Length:
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


class Output:
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
