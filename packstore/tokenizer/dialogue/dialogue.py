"""A dialogue, rendered once: its text, the spans of the turns to learn, and what it leaves out."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from packstore.config import TokenizeConfig
from packstore.tokenizer.control import free_characters
from packstore.tokenizer.dialogue.messages import SKIPPED, has_content, map_strings, text_arguments
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.dialogue.template import ChatTemplate, Message, Span, Tools
from packstore.tokenizer.refusals import Refused

SHORT = 8
"""Texts up to this length may occur in a rendering by chance, as part of the template."""

_NOTHING: tuple[Any, ...] = (None, "", "{}", "null", {}, [])

_EMPTY_THINKING = re.compile(r"\n*(<think>)?\n*</think>\n{0,2}")
_THOUGHT_ENDS = re.compile(r"</think(ing)?>|\[/think(ing)?\]", re.IGNORECASE)
_OPEN_MARKER = re.compile("<[^<>]*$")
"""An incomplete marker at the end."""


class Dialogue:
    """A prompt and a response of messages, rendered once.

    A learned turn is supervised from the end of the prompt that asks for it through its end-of-turn
    text. Both are found by rendering the messages before and through the turn; where a template
    rewrites earlier turns, by marks around their content.

    Attributes:
        spans: the supervised characters of `text`, (start, end), in order.
        events: what is to be noted of the dialogue.

    Raises:
        Refused: the template refuses the messages, hides a turn or leaves a part out; no turn is
            learned; a learned turn is empty.
    """

    def __init__(
        self,
        template: ChatTemplate,
        prompt: list[Message],
        response: list[Message],
        tools: Tools,
        config: TokenizeConfig,
        beside: Dialogue | None = None,  # the first side of the record, which checked the tools
    ) -> None:
        self._template, self._tools, self._config = template, tools, config
        self._first = len(prompt)
        self._shared: dict[int, str] = beside._shared if beside else {}  # the rendered prompt
        self._messages = _messages_for(template, [*prompt, *response])
        answers = range(len(prompt), len(self._messages))
        self._turns = [i for i in answers if self._messages[i]["role"] == "assistant"]
        self._learned = self._learned_turns(response)
        self.events: list[str] = []
        try:
            spans = self._find_learned()
        except Refused as refused:
            raise self._with_cause(refused) from None
        self.spans = [self._after_empty_thinking(span) for span in spans]
        if self.spans != spans:
            self.events.append("empty_thinking")
        self._check_parts(None if beside else tools)
        if template.written_prompt and self.text.endswith(template.written_prompt):
            self.events.append("generation_prompt_always")
            if config.append_eos:  # it follows the answer
                self.text = self.text.removesuffix(template.written_prompt)

    @cached_property
    def text(self) -> str:
        """The rendered messages."""
        return self._rendered[0]

    @cached_property
    def _rendered(self) -> tuple[str, list[Span]]:
        """The rendered messages, and the spans of the template's generation blocks."""
        return self._template.render_spans(self._messages, self._tools)

    def _learned_turns(self, response: list[Message]) -> list[int]:
        learned = self._turns[-1:] if self._config.supervised_turns == "last" else self._turns
        return [i for i in learned if SKIPPED not in response[i - self._first]]

    @property
    def _is_empty(self) -> bool:
        return not any(has_content(self._messages[i]) for i in self._turns)

    def _find_learned(self) -> list[Span]:
        """Returns the span of each turn to learn; refuses or notes those that are empty."""
        empty = [i for i in self._learned if not has_content(self._messages[i])]
        if not empty or self._is_empty:
            return self._learned_spans()
        if self._config.on["empty_turn"] != "keep":
            raise Refused("empty_turn", f"message {empty[0] + 1} is empty")
        self.events.append("empty_turn")
        try:
            return self._learned_spans()
        except Refused:  # a template may hide where a turn without words is: it is only read
            self._learned = [i for i in self._learned if i not in empty]
            return self._learned_spans()

    def _learned_spans(self) -> list[Span]:
        """Returns the spans of the learned turns, by the template's own blocks if it has some."""
        if not self._learned:
            raise Refused("unsupervised", "no turn of the assistant to learn")
        _, spans = self._rendered
        if not self._template.marks_generation:
            return self._turn_spans(self._learned)
        begin = self._start(self._first, 0) if self._first else 0
        spans = [(max(a, begin), b) for a, b in spans if b > begin]
        others = [i for i in self._turns if i not in self._learned]
        if others == self._turns[:-1]:
            spans = spans[-1:]
        else:
            for start, end in self._turn_spans(others):
                spans = [(a, b) for a, b in spans if b <= start or a >= end]
        if not spans:
            raise Refused("unsupervised", "the template marks no words of the assistant")
        return spans

    def _with_cause(self, refused: Refused) -> Refused:
        """Names the cause of a refusal: a turn that is not found may not have been rendered."""
        if refused.reason != "template_refused":
            return refused
        try:
            missing = self._missing_part()
        except Refused:
            if any(text_arguments(self._messages)):
                detail = f"{refused.detail}; arguments that are JSON text may have to be objects"
                return Refused(refused.reason, detail)
            return refused
        return _unrendered(missing) if missing and self._is_strict else refused

    def _after_empty_thinking(self, span: Span) -> Span:
        """Returns the span without an empty thinking block at its start.

        Templates write it before answers without reasoning; its opening tag may be in the prompt.
        """
        start, end = span
        block = _EMPTY_THINKING.match(self.text, start, end)
        if block and (block[1] or self.text[:start].rstrip("\n").endswith("<think>")):
            return block.end(), end
        return span

    def _turn_spans(self, turns: Sequence[int]) -> list[Span]:
        """Returns the span of each turn."""
        spans: list[Span] = []
        for i in turns:
            start = self._start(i, spans[-1][1] if spans else 0)
            spans.append((start, max(start, self._end(i))))
        return spans

    def _start(self, i: int, low: int) -> int:
        """Returns the start of message `i`: after the generation prompt, and at least `low`."""
        header = before = ""
        try:
            prompt = self._prompt(i)
            if self.text.startswith(prompt):
                return len(prompt)
            before = self._render(self._messages[:i])
            header = prompt.removeprefix(before)
        except Refused:
            if i > 0:  # a dialogue that starts with the assistant has no prompt to render
                raise
        begin, end = self._content(i)
        at = self.text.rfind(header, low, end if begin is None else begin) if header else -1
        if at >= 0:
            return at + len(header)
        if begin is not None:
            return begin
        # A prompt may open a thinking block that a call lacks: the header is their common prefix.
        shared = ""
        if self.text.startswith(before):
            shared = os.path.commonprefix([header, self.text[len(before) :]])  # noqa: RUF071
            shared = _OPEN_MARKER.sub("", shared)
        if not shared:
            raise _turn_not_found(i)
        return len(before) + len(shared)

    def _prompt(self, i: int) -> str:
        """Renders the first `i` messages, with the generation prompt."""
        known = self._shared if i == self._first else {}
        if i not in known:
            known[i] = self._template.render(self._messages[:i], self._tools, prompt=True)
        return known[i]

    def _render(self, messages: list[Message]) -> str:
        """Renders messages, without a generation prompt."""
        text = self._template.render(messages, self._tools)
        return text.removesuffix(self._template.written_prompt)

    def _end(self, i: int) -> int:
        """The end of message `i`, including its end-of-turn text."""
        if i == len(self._messages) - 1:
            return len(self.text.removesuffix(self._template.written_prompt))
        alone = self._render(self._messages[: i + 1])
        if self.text.startswith(alone):
            return len(alone)
        end = self._content(i)[1]
        opens, closes = self._marks[i]
        marked = [*self._messages[:i], _mark_content(self._messages[i], opens, closes)]
        tail = self._render(marked).rpartition(closes)[2]
        return end + len(os.path.commonprefix([tail, self.text[end:]]))  # noqa: RUF071

    def _free(self, count: int) -> list[str]:
        """Returns characters that occur neither in the dialogue nor in its rendering."""
        known = as_json([self._messages, self._tools])
        return free_characters(self._template.source + self.text + known, count)

    @cached_property
    def _marks(self) -> list[tuple[str, str]]:
        """Two characters per message that do not occur in the dialogue."""
        marks = self._free(2 * len(self._messages))
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
        if bare != self.text or 2 * len(places) != len(parts):
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

    @property
    def _is_strict(self) -> bool:
        return self._config.on["unrendered"] != "keep"

    def _check_parts(self, tools: Tools) -> None:
        """Refuses or notes what of the messages and `tools` is not in the text as it should be."""
        if not tools and self._is_plain():
            return
        missing = self._missing_part()
        if missing is None and tools and not self._shows_tools():
            missing = "the tools"
        if missing is not None:
            if self._is_strict:
                raise _unrendered(missing)
            self.events.append("unrendered")
        if any(as_json(arguments) in self.text for arguments in text_arguments(self._messages)):
            self.events.append("arguments_quoted")
        thoughts = [message.get("reasoning_content") or "" for message in self._messages]
        if any(thought.strip() not in self.text for thought in thoughts):
            self.events.append("reasoning_unrendered")
        if missing is None:
            self.events += self._missing_stretches()

    def _is_plain(self) -> bool:
        """Returns True if every turn is plain text, and all certainly are in the text, in order."""
        if any(len(message) != 2 for message in self._messages):
            return False
        contents = [(message["content"] or "").strip() for message in self._messages]
        return all(contents) and self._stand_in_order(contents)

    def _stand_in_order(self, contents: list[str]) -> bool:
        """Return True if the contents certainly are in the text, one after the other.

        Short texts that may occur by chance, as part of the template, are not certain.
        """
        end = 0
        for words in contents:
            start = self.text.find(words, end)
            if start < 0 or (len(words) <= SHORT and words in self._template.source):
                return False
            end = start + len(words)
        return True

    def _missing_part(self) -> str | None:
        """Names the first turn or call that is not in the text; None if all are.

        A part is in the text if changing it changes the text: templates may render it in another
        form.
        """
        text, parts = self.text, [*_parts_to_render(self._messages)]
        changes = [*zip(parts, self._free(len(parts)), strict=True)]
        changed = self._messages
        for (path, _), mark in changes:
            changed = _change(changed, path, partial(_mark, mark=mark))
        try:
            shown = set(self._template.render(changed, self._tools))
        except Refused:
            shown = set()
        for (path, name), mark in changes:
            if mark in shown:
                continue
            alone = _change(self._messages, path, partial(_mark, mark=mark))
            try:
                if self._template.render(alone, self._tools) == text:
                    return name
            except Refused:  # the template reads what it refuses
                continue
        return None

    def _missing_stretches(self) -> list[str]:
        """Return an event for each kind of stretch that the template leaves out of a message.

        Templates may drop the words before a tag that they know, such as ``</think>``, or an end of
        the content. A stretch is in the text if the marks at both of its ends are.
        """
        tags = self._template.tags
        stretches = [list(_stretches(m["content"] or "", tags)) for m in self._messages]
        words = [
            message["content"][stretch.start : stretch.end]
            for message, parts in zip(self._messages, stretches, strict=True)
            for stretch in parts
        ]
        if self._stand_in_order(words):
            return []
        marked = [
            _mark_stretches(message, parts, marks)
            for message, parts, marks in zip(self._messages, stretches, self._marks, strict=True)
        ]
        try:
            shown = Counter(self._template.render(marked, self._tools))
        except Refused:  # it refuses the marks: nothing shows that the words are there
            shown = Counter()
        missing = set()
        for parts, (text_mark, thought_mark) in zip(stretches, self._marks, strict=True):
            num_thoughts = sum(stretch.is_thought for stretch in parts)
            if shown[text_mark] < 2 * (len(parts) - num_thoughts):
                missing.add("text_unrendered")
            if shown[thought_mark] < 2 * num_thoughts:
                missing.add("reasoning_unrendered")
        return sorted(missing)

    def _shows_tools(self) -> bool:
        """Returns True if the text would change without the tools."""
        try:
            return self._template.render(self._messages) != self.text
        except Refused:
            return True

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


def _messages_for(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Removes packstore's own marks, and replaces null content if the template needs text."""
    if all(len(message) == 2 for message in messages):
        return messages
    messages = [{k: v for k, v in m.items() if k != SKIPPED} for m in messages]
    if not any("tool_calls" in message for message in messages) or template.takes_null:
        return messages
    return [{**m, "content": ""} if m["content"] is None else m for m in messages]


def _turn_not_found(i: int) -> Refused:
    return Refused("template_refused", f"message {i + 1} cannot be found in the rendered text")


def _unrendered(name: str) -> Refused:
    return Refused("unrendered", f"{name} cannot be found in the rendered text")


def _mark_content(message: Message, opens: str, closes: str) -> Message:
    """Puts marks around a message's content, or around the name of its last function call."""
    content = message["content"] or ""
    core = content.strip()
    if core:
        lead, _, trail = content.partition(core)
        return {**message, "content": lead + opens + core + closes + trail}
    if not message.get("tool_calls"):
        return message
    path = ("tool_calls", -1, "function", "name")
    marked: Message = _change(message, path, lambda name: opens + name + closes)
    return marked


class _Stretch(NamedTuple):
    """Words of a content between the tags that the template names."""

    start: int
    end: int
    is_thought: bool


def _stretches(content: str, tags: re.Pattern[str]) -> Iterator[_Stretch]:
    """Yield the stretches of a content that have words."""
    places = itertools.chain.from_iterable(match.span() for match in tags.finditer(content))
    edges = [0, *places, len(content)]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        words = content[start:end].strip()
        if words:
            first = content.index(words, start)
            is_thought = _THOUGHT_ENDS.match(content, end) is not None
            yield _Stretch(first, first + len(words), is_thought)


def _mark_stretches(message: Message, parts: list[_Stretch], marks: tuple[str, str]) -> Message:
    """Put a mark at both ends of each stretch; `marks`: of text, and of thoughts."""
    if not parts:
        return message
    text_mark, thought_mark = marks
    content = message["content"]
    text = ""
    end = 0
    for stretch in parts:
        mark = thought_mark if stretch.is_thought else text_mark
        text += content[end : stretch.start] + mark + content[stretch.start : stretch.end] + mark
        end = stretch.end
    return {**message, "content": text + content[end:]}


def _parts_to_render(messages: list[Message]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yields each part that must be rendered: its path in the messages, and a name."""
    for i, message in enumerate(messages):
        if (message["content"] or "").strip():
            yield (i, "content"), f"message {i + 1}, of role {message['role']}"
        for n, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            where = f"{function['name']} in message {i + 1}"
            path = (i, "tool_calls", n, "function")
            yield (*path, "name"), f"the call of {where}"
            if function["arguments"] not in _NOTHING:
                yield (*path, "arguments"), f"the arguments of {where}"


def _change(value: Any, path: Sequence[int | str], change: Callable[[Any], Any]) -> Any:
    """Returns a copy of nested lists and objects in which what is at `path` is changed."""
    if not path:
        return change(value)
    first, *rest = path
    copy = value.copy()
    copy[first] = _change(value[first], rest, change)
    return copy


def _mark(value: Any, mark: str) -> Any:
    """Returns a text with a mark after its words, any other value with one in each string."""
    if isinstance(value, str):
        core = value.rstrip()
        return core + mark + value[len(core) :]
    changed = map_strings(value, lambda text: text + mark)
    return mark if changed == value else changed  # neither text nor keys
