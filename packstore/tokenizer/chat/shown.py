"""Finds parts of a dialogue that its rendering omits: a turn, a call or the tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packstore.tokenizer.chat.messages import map_strings, text_arguments
from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.chat.template import ChatTemplate, Message, Tools
from packstore.tokenizer.control import free_characters
from packstore.tokenizer.refusals import Refused

SHORT = 8
"""Texts up to this length may occur in a rendering by chance, as part of the template."""

_NOTHING: tuple[Any, ...] = (None, "", "{}", "null", {}, [])


def is_plain(template: ChatTemplate, messages: list[Message], text: str) -> bool:
    """Returns True if every turn is plain text, and `text` certainly contains them in order.

    Short texts that may occur by chance, as part of the template, are not certain.
    """
    at = 0
    for message in messages:
        words = message["content"]
        if len(message) != 2 or not words:
            return False
        found = text.find(words, at)
        if found < 0:
            words = words.strip()
            found = text.find(words, at)
            if found < 0 or not words:
                return False
        at = found + len(words)
        if _may_be_chance(template, words):
            return False
    return True


def _may_be_chance(template: ChatTemplate, words: str) -> bool:
    return len(words) <= SHORT and words.strip() in template.source


def left_out(
    template: ChatTemplate, messages: list[Message], tools: Tools, text: str
) -> str | None:
    """Names the first turn or call that is not in `text`; None if all are.

    A part is in the text if changing it changes the text: templates may render it in another form.

    Args:
        template: the chat template.
        messages: the dialogue.
        tools: tool descriptions.
        text: the rendering of the dialogue.
    """
    found = list(_changes(messages))
    marks = free_characters(template.source + text + as_json([messages, tools]), len(found))
    changes = [(*change, mark) for change, mark in zip(found, marks, strict=True)]
    changed = list(messages)
    for i, part, _, mark in changes:
        changed[i] = _marked(changed[i], part, mark)
    try:
        shown = set(template.render(changed, tools))
    except Refused:
        shown = set()
    for i, part, name, mark in changes:
        if mark in shown:
            continue
        alone = [*messages[:i], _marked(messages[i], part, mark), *messages[i + 1 :]]
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


def _changes(messages: list[Message]) -> Iterator[tuple[int, tuple[str, int], str]]:
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


def _marked(message: Message, part: tuple[str, int], mark: str) -> Message:
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
