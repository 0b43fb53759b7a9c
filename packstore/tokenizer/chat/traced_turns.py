"""Finds the assistant's turns of a traced dialogue by adding lengths.

A plan holds for all dialogues on the same paths through a template. It does what
:class:`.assistant_spans.Finder` does with the texts of these dialogues, where that follows from the
constant parts and the places of the contents. It leaves to the finder all other dialogues.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from packstore.tokenizer.chat.trace import Dialogue, Messages, Paths, Trace, Traces
from packstore.tokenizer.chat.traced_text import Hole, Test, filled
from packstore.tokenizer.control import FIRST_FREE, shared_characters
from packstore.tokenizer.refusals import Refused


class Turns(NamedTuple):
    """A rendered dialogue.

    Attributes:
        text: the text.
        spans: start and end of turns of the assistant, in order.
        complete: True if every message certainly is in the text; see :func:`.shown.is_plain`.
    """

    text: str
    spans: list[tuple[int, int]]
    complete: bool = False


class Place(NamedTuple):
    """A position in a rendering: after `chars` constant characters and `holes` contents."""

    chars: int
    holes: int


class _UnplannedError(Exception):
    """Only the finder can find a turn."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A rendering: constants, with a content between each two.

    Attributes:
        constants: the constants, `[n + 1]`; some are empty.
        holes: the contents, `[n]`.
    """

    constants: tuple[str, ...]
    holes: tuple[Hole, ...]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Returns the form of a traced rendering."""
        constants, holes = [""], []
        for part in trace.parts or ():
            if isinstance(part, str):
                constants[-1] += part
            else:
                holes.append(part)
                constants.append("")
        return cls(tuple(constants), tuple(holes))

    def without(self, end: str) -> Self:
        """Removes a suffix, if it is there.

        Raises:
            _UnplannedError: that depends on the last content.
        """
        *constants, last = self.constants
        if not last.endswith(end) and end.endswith(last):
            raise _UnplannedError
        return type(self)((*constants, last.removesuffix(end)), self.holes)

    def chars(self, hole: int) -> int:
        """Returns the number of constant characters before a content."""
        return sum(map(len, self.constants[: hole + 1]))

    @property
    def contents(self) -> tuple[Hole, ...]:
        """The contents.

        Raises:
            _UnplannedError: several of them are changed together.
        """
        if not all(isinstance(at, int) for at, _ in self.holes):
            raise _UnplannedError
        return self.holes

    @property
    def end(self) -> Place:
        """The end of the text."""
        return Place(self.chars(len(self.holes)), len(self.holes))

    def after(self, start: _Form) -> str:
        """Returns what follows `start`.

        Raises:
            _UnplannedError: the text does not start so for all contents, or contents follow.
        """
        mine, theirs = self.constants[-1], start.constants[-1]
        same = self.holes == start.holes and self.constants[:-1] == start.constants[:-1]
        if not same or not mine.startswith(theirs):
            raise _UnplannedError
        return mine.removeprefix(theirs)

    def follow(self, start: _Form, unless: list[tuple[Place, str]]) -> Place | None:
        """Returns where `start` ends, if this text starts with it for all contents, or for none.

        Args:
            start: the text that may be the start of this one.
            unless: gets a text and its place: only if this text has it there, it may start with
                `start` nevertheless.

        Raises:
            _UnplannedError: it depends on the contents in another way.
        """
        last = len(start.holes)
        for i, theirs in enumerate(start.constants):
            place = Place(self.chars(i - 1) if i else 0, i)
            ours = self.constants[i]
            if ours.startswith(theirs) and i == last:
                return Place(place.chars + len(theirs), i)
            if ours != theirs:
                if theirs.startswith(ours):
                    if i < len(self.holes):
                        unless.append((Place(place.chars + len(ours), i), theirs[len(ours) :]))
                    return None
                if ours.startswith(theirs):
                    raise _UnplannedError
                return None
            if i == len(self.holes):  # more follows there
                raise _UnplannedError
            if self.holes[i] != start.holes[i]:
                raise _UnplannedError
        raise AssertionError


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn, whose ends are places or depend on its content.

    Attributes:
        start: the start; None: after the last `header` before the content, or else the content.
        end: the end; None: as much of `tail` as follows the content.
        hole: number of the content.
        chars: number of constant characters before the content.
        header: the generation prompt.
        tail: the content, and what would follow if it were the last.
    """

    start: Place | None
    end: Place | None
    hole: int
    chars: int
    header: str
    tail: tuple[Hole, str]


_NO_TAIL: tuple[Hole, str] = ((0, ()), "")


class TurnPlan:
    """The turns of dialogues on the same paths through a template.

    Attributes:
        tests: the tests on these paths, with their outcomes.
        size: memory in characters, approximately.

    Args:
        dialogue: one of the dialogues.
        first: number of messages in the prompt.
        written: generation prompt that the template always writes.
        trace: returns the trace of the first n messages, with or without the generation prompt.
    """

    def __init__(
        self, dialogue: Dialogue, first: int, written: str, trace: Callable[[int, bool], Trace]
    ) -> None:
        self.tests: dict[Test, Any] = {}
        self._written, self._trace = written, trace
        self._unless: list[tuple[Place, str]] = []
        self._said: list[int] = []
        self._turns: list[_Turn] | None = None
        roles = dialogue.roles
        self._at = [at for at, role in enumerate(roles) if role is not None]
        self._reasons = {at + 1 for at, role in enumerate(roles) if role is None}
        answers = [i for i, at in enumerate(self._at) if roles[at] == "assistant"]
        self._answers = [self._at[i] for i in answers]
        try:
            self._whole = self._traced(len(self._at), False)
            self._form = _Form.of(self._whole)
            self._turns = [self._plan(i) for i in answers if i >= first]
        except (_UnplannedError, Refused):
            self._turns = None
        self.size = 256 * (len(self.tests) + len(self._turns or ()))
        self.size += 0 if self._turns is None else self._whole.size

    def find(self, contents: list[str]) -> Turns | None:
        """Returns the text and its turns; None if only the finder can find them."""
        if self._turns is None:
            return None
        for at in self._said:
            if not contents[at] or contents[at].isspace():
                return None
        values = self._whole.values(contents)
        text = self._whole.format % values
        before = [0, *itertools.accumulate(map(len, values))]
        for place, other in self._unless:
            if text.startswith(other, place.chars + before[place.holes]):
                return None
        spans: list[tuple[int, int]] = []
        for turn in self._turns:
            if turn.start is not None:
                start = turn.start.chars + before[turn.start.holes]
            else:
                begin = turn.chars + before[turn.hole + 1] - len(values[turn.hole].lstrip())
                low = spans[-1][1] if spans else 0
                at = text.rfind(turn.header, low, begin) if turn.header else -1
                start = begin if at < 0 else at + len(turn.header)
            if turn.end is not None:
                end = turn.end.chars + before[turn.end.holes]
            else:
                end = turn.chars + before[turn.hole] + len(values[turn.hole].rstrip())
                alone = filled(turn.tail[0], contents)
                tail = (alone[len(alone.rstrip()) :] + turn.tail[1]).removesuffix(self._written)
                end += shared_characters(tail, text[end : end + len(tail)])
            spans.append((start, max(start, end)))
        return Turns(text, spans, not self._reasons and values == tuple(contents))

    def _traced(self, n: int, prompt: bool) -> Trace:
        trace = self._trace(n, prompt)
        self.tests.update(trace.tests)
        if trace.parts is None:
            raise _UnplannedError
        return trace

    def _plan(self, i: int) -> _Turn:
        """Plans the turn of message `i`, as the finder finds it."""
        if i == 0:
            raise _UnplannedError
        at, header, tail, hole = self._at[i], "", _NO_TAIL, 0
        end: Place | None
        prompt = _Form.of(self._traced(i, True))
        start = self._form.follow(prompt, self._unless)
        if start is None:
            if at in self._reasons:
                raise _UnplannedError
            before = _Form.of(self._traced(i, False)).without(self._written)
            header = prompt.after(before)
            hole = self._content(at)
        if i == len(self._at) - 1:
            end = self._form.without(self._written).end
        else:
            alone = self._traced(i + 1, False)
            form = _Form.of(alone)
            end = self._form.follow(form.without(self._written), self._unless)
            if end is None:
                hole = self._content(at)
                own = [content for content in form.contents if content[0] == at]
                if own != [form.holes[-1]] or not _keeps_marks(alone.tests, own, {at}):
                    raise _UnplannedError
                tail = own[0], form.constants[-1]
        return _Turn(start, end, hole, self._form.chars(hole), header, tail)

    def _content(self, at: int) -> int:
        """Returns the number of a content of the assistant, which the finder finds by marks.

        Raises:
            _UnplannedError: marks around the assistant's contents may change the rendering.
        """
        if not self._said:
            own = [hole for hole in self._form.contents if hole[0] in self._answers]
            once = sorted(hole[0] for hole in own) == self._answers
            clear = all(map(_is_clear, self._form.constants))
            if not (once and clear and _keeps_marks(self._whole.tests, own, self._answers)):
                raise _UnplannedError
            self._said = self._answers
        return [hole[0] for hole in self._form.holes].index(at)


def _keeps_marks(tests: Mapping[Test, Any], holes: Sequence[Hole], marked: Collection[int]) -> bool:
    """Returns True if marks around the words of contents change neither the path nor the words.

    A mark is a private character, before the first or after the last that is not white space.

    Args:
        tests: the tests on the path, with their outcomes.
        holes: the rendered contents with marks.
        marked: the contents with marks, none of them white space only.
    """
    if not all(map(_only_strips, holes)):
        return False
    for (function, hole, other), outcome in tests.items():
        for one in (hole, other):
            if isinstance(one, tuple) and not isinstance(one[0], int):
                return False
        against = None if isinstance(other, str) else other[0]
        if hole[0] not in marked and against not in marked:
            continue
        if not _only_strips(hole):
            return False
        if function in (operator.contains, str.count):
            # What starts and ends with other characters than white space is within the words.
            if not isinstance(other, str) or not other or other != other.strip():
                return False
        elif function is str.__ne__:
            if other != "":
                return False
        elif outcome is not False:  # equal to, starts with, ends with
            return False
        if isinstance(other, str) and not _is_clear(other):
            return False
    return True


def _only_strips(hole: Hole) -> bool:
    """Returns True if a content is changed by stripping white space only."""
    return all(
        function in (str.strip, str.lstrip, str.rstrip)
        and (characters[0] is None or characters[0].isspace())
        for function, characters in hole[1]
    )


def _is_clear(text: str) -> bool:
    """Returns True if no character of `text` may be a mark."""
    return text.isascii() or max(text) < FIRST_FREE


class TurnPlans:
    """The plans of a template.

    Args:
        traces: its traces.
        written: generation prompt that it always writes.
    """

    def __init__(self, traces: Traces, written: str) -> None:
        self._traces, self._written = traces, written
        self._known: Paths[TurnPlan] = Paths()

    def find(self, messages: Messages, first: int) -> Turns | None:
        """Returns the text and its turns; None if only the finder can find them."""
        dialogue = Dialogue.of(messages)
        if dialogue is None:
            return None
        shape, contents = (first, dialogue.roles), dialogue.contents
        plan = self._known.find(shape, contents, self._plan, dialogue, messages, first)
        return None if plan is None else plan.find(contents)

    def _plan(self, dialogue: Dialogue, messages: Messages, first: int) -> TurnPlan:
        def trace(n: int, prompt: bool) -> Trace:
            return self._traces.trace(messages[:n], prompt)

        return TurnPlan(dialogue, first, self._written, trace)
