"""A dialogue, rendered once: its text, the spans to learn, and parts that the template
left out.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from packstore.config import TokenizeConfig
from packstore.tokenizer.control import free_characters
from packstore.tokenizer.dialogue.messages import (
    SKIPPED,
    has_content,
    map_strings,
    text_arguments,
)
from packstore.tokenizer.dialogue.template import (
    ChatTemplate,
    Message,
    Span,
    Tools,
    as_json,
)
from packstore.tokenizer.refusals import Refused

SHORT = 8
"""Texts up to this length may occur in a rendering by chance, as part of the template.
"""

_NOTHING: tuple[Any, ...] = (None, "", "{}", "null", {}, [])
"""Arguments of a call that need not be rendered."""

_EMPTY_THINKING = re.compile(r"\n*(<think>)?\n*</think>\n{0,2}")
_THOUGHT_ENDS = re.compile(r"</think(ing)?>|\[/think(ing)?\]", re.IGNORECASE)
_CUT_TAG = re.compile("<[^<>]*$")
"""A tag that is cut off at the end of a text, such as ``<thi``."""

ValuePath = tuple[int | str, ...]
"""Keys and indices of a value inside nested lists and objects."""


class Content(NamedTuple):
    """The place of a message's content in the rendered text.

    Attributes:
        start: None if the turn may begin before its content, such as with reasoning.
    """

    start: int | None
    end: int


class Part(NamedTuple):
    """A part of the messages that must be rendered."""

    path: ValuePath
    name: str  # for error messages


class Stretch(NamedTuple):
    """Words of a message's content without tags in them, such as ``</think>``.

    Attributes:
        is_thought: True if a tag that ends a thinking block follows.
    """

    start: int
    end: int
    is_thought: bool


class Dialogue:
    """A prompt and a response of messages, rendered once.

    A learned turn is supervised from the end of the prompt that asks for it through its
    end-of-turn text. Both are found by rendering the messages before the turn, and the
    messages through the turn. Some templates render a turn in another form once others
    follow, such as without its reasoning; then marks around the content show its place.

    Args:
        first_side: the first side of the record, which has the same prompt and tools.

    Attributes:
        text: the rendered messages, without a generation prompt at the end if EOS
            follows.
        spans: the supervised characters of `text`, (start, end), in order.
        events: the events to note.

    Raises:
        Refused: the template refuses the messages, hides a turn or leaves a part out;
            no turn is learned; a learned turn is empty.
    """

    def __init__(
        self,
        template: ChatTemplate,
        prompt: list[Message],
        response: list[Message],
        tools: Tools,
        config: TokenizeConfig,
        first_side: Dialogue | None = None,
    ) -> None:
        self._template = template
        self._tools = tools
        self._config = config
        self._first_side = first_side
        self._prompt_length = len(prompt)
        self._messages = _messages_for(template, [*prompt, *response])
        # Indices of messages: the assistant's in the response, and those to supervise.
        self._answers = [
            i
            for i in range(len(prompt), len(self._messages))
            if self._messages[i]["role"] == "assistant"
        ]
        self._learned = self._learned_turns(response)
        self.events: list[str] = []
        spans = self._find_spans()
        self.spans = [self._after_empty_thinking(span) for span in spans]
        if self.spans != spans:
            self.events.append("empty_thinking")
        self._check_parts()
        self.text = self._text_before_eos()

    @cached_property
    def _text(self) -> str:
        """The rendered messages, as the template writes them."""
        return self._rendered[0]

    @cached_property
    def _rendered(self) -> tuple[str, list[Span]]:
        """The rendered messages, and the spans of the template's generation blocks."""
        return self._template.render_spans(self._messages, self._tools)

    def _learned_turns(self, response: list[Message]) -> list[int]:
        answers = self._answers
        if self._config.supervised_turns == "last":
            answers = answers[-1:]
        # `response` and not `_messages`, which have lost the key.
        return [i for i in answers if SKIPPED not in response[i - self._prompt_length]]

    def _text_before_eos(self) -> str:
        """Return the text, without a generation prompt after the last turn if EOS
        follows.

        Some templates write a generation prompt even if it is not requested; note it.
        """
        prompt = self._template.written_prompt
        if not prompt or not self._text.endswith(prompt):
            return self._text
        self.events.append("generation_prompt_always")
        if not self._config.append_eos:
            return self._text
        return self._text.removesuffix(prompt)

    @property
    def system_end(self) -> int:
        """The end of a leading system turn in `text` if truncation keeps it, else 0."""
        keeps_system = self._config.on["overlong"] == "truncate_prompt"
        if not keeps_system or self._messages[0]["role"] not in ("system", "developer"):
            return 0
        try:
            system = self._render(self._messages[:1])
        except Refused:  # many templates raise for a dialogue without a user turn
            return 0
        return len(system) if self.text.startswith(system) else 0

    # Rendering.

    def _render(self, messages: list[Message]) -> str:
        """Render messages, without a generation prompt."""
        text = self._template.render(messages, self._tools)
        return text.removesuffix(self._template.written_prompt)

    def _render_prompt(self, i: int) -> str:
        """Render the first `i` messages, with a generation prompt."""
        if i == self._prompt_length:
            return self._rendered_prompt
        return self._template.render(self._messages[:i], self._tools, prompt=True)

    @cached_property
    def _rendered_prompt(self) -> str:
        """The rendered prompt of the record, which its sides share."""
        if self._first_side is not None:
            return self._first_side._rendered_prompt
        prompt = self._messages[: self._prompt_length]
        return self._template.render(prompt, self._tools, prompt=True)

    def _free_characters(self, count: int) -> list[str]:
        """Return characters that occur neither in the dialogue nor in its rendering."""
        dialogue = as_json([self._messages, self._tools])
        return free_characters(self._template.source + self._text + dialogue, count)

    @cached_property
    def _marks(self) -> list[tuple[str, str]]:
        """Two characters per message that do not occur in the dialogue."""
        marks = self._free_characters(2 * len(self._messages))
        return list(zip(marks[::2], marks[1::2], strict=True))

    # Spans of the learned turns.

    def _find_spans(self) -> list[Span]:
        """Return the span of each learned turn.

        Raises:
            Refused: with its cause, if a turn is not found because it was not rendered.
        """
        try:
            return self._spans_without_empty_turns()
        except Refused as error:
            raise self._with_cause(error) from None

    def _spans_without_empty_turns(self) -> list[Span]:
        """Return the span of each learned turn; refuse empty turns, or note them."""
        empty_turns = [i for i in self._learned if not has_content(self._messages[i])]
        has_answer = any(has_content(self._messages[i]) for i in self._answers)
        if not empty_turns or not has_answer:
            # If all turns are empty, the policy `empty_side` has decided.
            return self._learned_spans()
        if self._config.on["empty_turn"] != "keep":
            raise Refused("empty_turn", f"message {empty_turns[0] + 1} is empty")
        self.events.append("empty_turn")
        try:
            return self._learned_spans()
        except Refused:
            # The place of a turn without words may not show: do not supervise it.
            self._learned = [i for i in self._learned if i not in empty_turns]
            return self._learned_spans()

    def _learned_spans(self) -> list[Span]:
        """Return the spans of the learned turns, by the template's own blocks if it has
        some.
        """
        if not self._learned:
            raise Refused("unsupervised", "no turn of the assistant to learn")
        blocks = self._rendered[1]
        if self._template.marks_generation:
            return self._learned_blocks(blocks)
        return self._turn_spans(self._learned)

    def _learned_blocks(self, blocks: list[Span]) -> list[Span]:
        """Return the generation blocks that belong to the learned turns."""
        prompt_end = 0
        if self._prompt_length > 0:
            prompt_end = self._start(self._prompt_length, low=0)
        blocks = [
            (max(start, prompt_end), end) for start, end in blocks if end > prompt_end
        ]
        skipped = [i for i in self._answers if i not in self._learned]
        if skipped and skipped == self._answers[:-1]:
            # Only the last answer is learned. It may have several blocks, such as one
            # for its reasoning and one for its content.
            start = self._start(self._answers[-1], low=0)
            blocks = [block for block in blocks if block[1] > start]
        else:
            for turn in self._turn_spans(skipped):
                blocks = [block for block in blocks if not _overlap(block, turn)]
        if not blocks:
            raise Refused(
                "unsupervised", "the template marks no words of the assistant"
            )
        return blocks

    def _turn_spans(self, turns: Sequence[int]) -> list[Span]:
        """Return the span of each turn."""
        spans: list[Span] = []
        low = 0
        for i in turns:
            start = self._start(i, low)
            end = max(start, self._end(i))
            spans.append((start, end))
            low = end
        return spans

    def _start(self, i: int, low: int) -> int:
        """Return the start of message `i`: after the generation prompt, and at least
        `low`.
        """
        before = ""
        header = ""
        try:
            prompt = self._render_prompt(i)
            if self._text.startswith(prompt):
                return len(prompt)
            before = self._render(self._messages[:i])
            header = prompt.removeprefix(before)
        except Refused:
            # Before a first message of the assistant there is no prompt to render.
            if i > 0:
                raise

        # The template renders the messages before in another form once this one
        # follows: look for the header of the turn before its content.
        content = self._content(i)
        high = content.end if content.start is None else content.start
        place = self._text.rfind(header, low, high) if header else -1
        if place >= 0:
            return place + len(header)
        if content.start is not None:
            return content.start
        return self._start_after_shared_header(i, before, header)

    def _start_after_shared_header(self, i: int, before: str, header: str) -> int:
        """Return the end of the header that the prompt and message `i` have in common.

        The generation prompt may open a thinking block, which a turn of calls lacks.
        """
        if not self._text.startswith(before):
            raise _turn_not_found(i)
        shared = _common_prefix(header, self._text[len(before) :])
        shared = _CUT_TAG.sub("", shared)
        if not shared:
            raise _turn_not_found(i)
        return len(before) + len(shared)

    def _end(self, i: int) -> int:
        """Return the end of message `i`, including its end-of-turn text."""
        if i == len(self._messages) - 1:
            return len(self._text.removesuffix(self._template.written_prompt))
        through_turn = self._render(self._messages[: i + 1])
        if self._text.startswith(through_turn):
            return len(through_turn)

        # After the content, the end-of-turn text is as far as this text agrees with a
        # rendering in which the turn is the last one.
        end = self._content(i).end
        opens, closes = self._marks[i]
        marked = [*self._messages[:i], _mark_content(self._messages[i], opens, closes)]
        after_content = self._render(marked).rpartition(closes)[2]
        return end + len(_common_prefix(after_content, self._text[end:]))

    def _content(self, i: int) -> Content:
        if i not in self._contents:
            raise _turn_not_found(i)
        return self._contents[i]

    @cached_property
    def _contents(self) -> dict[int, Content]:
        """The place of each assistant message's content, found by marks around it."""
        marked = [
            _mark_content(message, *marks)
            if message["role"] == "assistant"
            else message
            for message, marks in zip(self._messages, self._marks, strict=True)
        ]
        marked_text = self._template.render(marked, self._tools)
        text, places = _remove_marks(marked_text, self._marks)
        if text != self._text:
            raise _content_not_copied()
        contents = {}
        for i, (opens, closes) in enumerate(self._marks):
            if closes not in places:
                continue
            start = None
            if _begins_with_content(self._messages[i]):
                start = places.get(opens)
            contents[i] = Content(start, places[closes])
        return contents

    def _after_empty_thinking(self, span: Span) -> Span:
        """Return the span without an empty thinking block at its start.

        Templates write it before answers without reasoning; its opening tag may be in
        the prompt.
        """
        start, end = span
        block = _EMPTY_THINKING.match(self._text, start, end)
        if block is None:
            return span
        opening_tag = block[1]
        if opening_tag or self._text[:start].rstrip("\n").endswith("<think>"):
            return block.end(), end
        return span

    def _with_cause(self, error: Refused) -> Refused:
        """Return a refusal that names its cause.

        A turn may not be found because the template left a part out.
        """
        if error.reason != "template_refused":
            return error
        try:
            part_name = self._unrendered_part()
        except Refused:
            if any(text_arguments(self._messages)):
                hint = "arguments that are JSON text may have to be objects"
                return Refused(error.reason, f"{error.detail}; {hint}")
            return error
        if part_name and self._refuses_unrendered:
            return _unrendered(part_name)
        return error

    # Parts that the rendering leaves out.

    @property
    def _refuses_unrendered(self) -> bool:
        return self._config.on["unrendered"] != "keep"

    def _check_parts(self) -> None:
        """Note parts of the messages and tools that are not in the text as they should
        be.

        Raises:
            Refused: a part is not in the text, and the job does not keep such records.
        """
        tools = None if self._first_side else self._tools  # checked with that side
        if not tools and self._is_plainly_rendered():
            return
        part_name = self._unrendered_part()
        if part_name is None and tools and not self._shows_tools():
            part_name = "the tools"
        if part_name is not None and self._refuses_unrendered:
            raise _unrendered(part_name)
        if part_name is not None:
            self.events.append("unrendered")
        if self._has_quoted_arguments():
            self.events.append("arguments_quoted")
        if self._has_unrendered_reasoning():
            self.events.append("reasoning_unrendered")
        if part_name is None:
            self.events += self._unrendered_stretches()

    def _has_quoted_arguments(self) -> bool:
        """Return True if the template quotes arguments that are JSON text."""
        return any(
            as_json(arguments) in self._text
            for arguments in text_arguments(self._messages)
        )

    def _has_unrendered_reasoning(self) -> bool:
        for message in self._messages:
            thought = message.get("reasoning_content") or ""
            if thought.strip() not in self._text:
                return True
        return False

    def _is_plainly_rendered(self) -> bool:
        """Return True if every turn is words alone, and all certainly are in the text,
        in order.
        """
        if not all(_is_role_and_content(message) for message in self._messages):
            return False
        contents = [(message["content"] or "").strip() for message in self._messages]
        return all(contents) and self._stand_in_order(contents)

    def _stand_in_order(self, contents: list[str]) -> bool:
        """Return True if the contents certainly are in the text, one after the other.

        Short texts that may occur by chance, as part of the template, are not certain.
        """
        end = 0
        for words in contents:
            start = self._text.find(words, end)
            if start < 0:
                return False
            if len(words) <= SHORT and words in self._template.source:
                return False
            end = start + len(words)
        return True

    def _unrendered_part(self) -> str | None:
        """Return the name of the first turn or call that is not in the text; None if
        all are.

        A part is in the text if changing it changes the text: templates may render it
        in another form.
        """
        text = self._text
        parts = list(_parts_to_render(self._messages))
        marks = self._free_characters(len(parts))
        marked_parts = list(zip(parts, marks, strict=True))

        # One rendering with all marks shows most parts.
        messages = self._messages
        for part, mark in marked_parts:
            messages = _mark_part(messages, part, mark)
        marked_text = self._render_if_possible(messages) or ""

        # The others are changed one by one. If the template refuses a change, it reads
        # the part.
        for part, mark in marked_parts:
            if mark in marked_text:
                continue
            changed = self._render_if_possible(_mark_part(self._messages, part, mark))
            if changed == text:
                return part.name
        return None

    def _render_if_possible(self, messages: list[Message]) -> str | None:
        """Render marked messages; return None if the template refuses them."""
        try:
            return self._template.render(messages, self._tools)
        except Refused:
            return None

    def _unrendered_stretches(self) -> list[str]:
        """Return an event for each kind of stretch that the template leaves out of a
        message.

        Templates may drop the words before a tag that they know, such as ``</think>``,
        or the words at the end. A stretch is in the text if the marks at both of its
        ends are.
        """
        messages = self._messages
        tags = self._template.tags
        stretches_of = [
            list(_stretches(message["content"] or "", tags)) for message in messages
        ]
        if self._stand_in_order(_words_of(messages, stretches_of)):
            return []

        marked = []
        for i, message in enumerate(messages):
            marked.append(_mark_stretches(message, stretches_of[i], *self._marks[i]))
        # If the template refuses the marks, nothing shows that the words are there.
        num_rendered = Counter(self._render_if_possible(marked) or "")

        events = set()
        for i, (text_mark, thought_mark) in enumerate(self._marks):
            num_thoughts = sum(stretch.is_thought for stretch in stretches_of[i])
            num_texts = len(stretches_of[i]) - num_thoughts
            if num_rendered[text_mark] < 2 * num_texts:
                events.add("text_unrendered")
            if num_rendered[thought_mark] < 2 * num_thoughts:
                events.add("reasoning_unrendered")
        return sorted(events)

    def _shows_tools(self) -> bool:
        """Return True if the text would change without the tools."""
        try:
            return self._template.render(self._messages) != self._text
        except Refused:
            return True


def _messages_for(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Return messages without the key `SKIPPED`, and with empty text for null if the
    template does not take null.
    """
    if all(_is_role_and_content(message) for message in messages):
        return messages
    messages = [_without_key(message, SKIPPED) for message in messages]
    has_calls = any("tool_calls" in message for message in messages)
    if has_calls and not template.takes_null:
        for message in messages:
            message["content"] = message["content"] or ""
    return messages


def _is_role_and_content(message: Message) -> bool:
    """Return True for a message without calls, reasoning or other keys."""
    return len(message) == 2


def _without_key(message: Message, removed_key: str) -> Message:
    return {key: value for key, value in message.items() if key != removed_key}


def _turn_not_found(i: int) -> Refused:
    return Refused(
        "template_refused", f"message {i + 1} cannot be found in the rendered text"
    )


def _content_not_copied() -> Refused:
    return Refused(
        "template_refused", "the template changes or repeats the content of a turn"
    )


def _unrendered(name: str) -> Refused:
    return Refused("unrendered", f"{name} cannot be found in the rendered text")


def _overlap(span: Span, other_span: Span) -> bool:
    return span[1] > other_span[0] and span[0] < other_span[1]


def _common_prefix(text: str, other_text: str) -> str:
    return os.path.commonprefix([text, other_text])  # noqa: RUF071  (of characters)


# Marks: characters put into messages, to be looked for in their rendering.


def _begins_with_content(message: Message) -> bool:
    """Return True if a turn should begin with the words of its content."""
    return bool((message["content"] or "").strip()) and not message.get(
        "reasoning_content"
    )


def _mark_content(message: Message, opens: str, closes: str) -> Message:
    """Put marks around a message's content, or around the name of its last function
    call.
    """
    content = message["content"] or ""
    words = content.strip()
    if words:
        lead, _, trail = content.partition(words)
        return {**message, "content": lead + opens + words + closes + trail}
    if not message.get("tool_calls"):
        return message
    path = ("tool_calls", -1, "function", "name")
    name = _value_at(message, path)
    marked: Message = _replace_at(message, path, opens + name + closes)
    return marked


def _remove_marks(
    text: str, marks: list[tuple[str, str]]
) -> tuple[str, dict[str, int]]:
    """Return a text without its marks, and the place of each in the returned text.

    Raises:
        Refused: a mark occurs more than once.
    """
    characters = "".join(itertools.chain.from_iterable(marks))
    parts = re.split(f"([{characters}])", text)
    unmarked = parts[0]
    places = {}
    for mark, after in zip(parts[1::2], parts[2::2], strict=True):
        if mark in places:
            raise _content_not_copied()
        places[mark] = len(unmarked)
        unmarked += after
    return unmarked, places


def _stretches(content: str, tags: re.Pattern[str]) -> Iterator[Stretch]:
    """Yield the stretches of a content that have words."""
    matches = list(tags.finditer(content))
    starts = [0] + [match.end() for match in matches]
    ends = [match.start() for match in matches] + [len(content)]
    for start, end in zip(starts, ends, strict=True):
        words = content[start:end].strip()
        if words:
            first = content.index(words, start)
            is_thought = _THOUGHT_ENDS.match(content, end) is not None
            yield Stretch(first, first + len(words), is_thought)


def _words_of(messages: list[Message], stretches_of: list[list[Stretch]]) -> list[str]:
    """Return the words of the stretches of each message, in order."""
    words = []
    for message, stretches in zip(messages, stretches_of, strict=True):
        for stretch in stretches:
            words.append(message["content"][stretch.start : stretch.end])
    return words


def _mark_stretches(
    message: Message, stretches: list[Stretch], text_mark: str, thought_mark: str
) -> Message:
    """Put a mark at both ends of each stretch: one for text, another for thoughts."""
    if not stretches:
        return message
    content = message["content"]
    text = ""
    end = 0
    for stretch in stretches:
        mark = thought_mark if stretch.is_thought else text_mark
        words = content[stretch.start : stretch.end]
        text += content[end : stretch.start] + mark + words + mark
        end = stretch.end
    return {**message, "content": text + content[end:]}


def _parts_to_render(messages: list[Message]) -> Iterator[Part]:
    """Yield each part that must be rendered."""
    for i, message in enumerate(messages):
        if (message["content"] or "").strip():
            yield Part((i, "content"), f"message {i + 1}, of role {message['role']}")
        for n, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            path = (i, "tool_calls", n, "function")
            label = f"{function['name']} in message {i + 1}"
            yield Part((*path, "name"), f"the call of {label}")
            if function["arguments"] not in _NOTHING:
                yield Part((*path, "arguments"), f"the arguments of {label}")


def _mark_part(messages: list[Message], part: Part, mark: str) -> list[Message]:
    """Return messages with a mark after the words of a part, or in each of its
    strings.
    """
    value = _value_at(messages, part.path)
    if isinstance(value, str):
        words = value.rstrip()
        marked: Any = words + mark + value[len(words) :]
    else:

        def add_mark(text: str) -> str:
            return text + mark

        marked = map_strings(value, add_mark)
        if marked == value:  # it holds no string, such as a number
            marked = mark
    changed: list[Message] = _replace_at(messages, part.path, marked)
    return changed


def _value_at(value: Any, path: ValuePath) -> Any:
    """Return the value at a path in nested lists and objects."""
    for key in path:
        value = value[key]
    return value


def _replace_at(value: Any, path: ValuePath, new_value: Any) -> Any:
    """Return a copy of nested lists and objects with another value at a path."""
    if not path:
        return new_value
    key = path[0]
    copy = value.copy()
    copy[key] = _replace_at(value[key], path[1:], new_value)
    return copy
