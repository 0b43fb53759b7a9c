"""Copies: columns that only repeat fields that are read, such as `messages` beside
`chosen`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from packstore.tokenizer.dialogue.messages import (
    CALLS,
    REASONING,
    ROLES,
    normalize_messages,
    normalize_tools,
)
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.records.values import (
    CONTENT_KEYS,
    ROLE_KEYS,
    is_message,
    is_messages,
    parse_json,
)
from packstore.tokenizer.refusals import Refused


class Turn(NamedTuple):
    """A turn of a dialogue, for comparison: roles by packstore's names, text without
    its ends.
    """

    role: str
    text: str
    thoughts: Any = None
    calls: Any = None


class Dialogues:
    """The dialogues of a record, each from its first turn to an answer; none of token
    ids.
    """

    def __init__(self, parsed: Parsed) -> None:
        self._tools = parsed.tools
        self._dialogues = []
        if not parsed.is_ids:
            before = to_turns(parsed.prompt, "user")
            for response in parsed.responses:
                self._dialogues.append([*before, *to_turns(response, "assistant")])

    @property
    def has_system(self) -> bool:
        """True if a dialogue has a system prompt."""
        return any(turn.role == "system" for turns in self._dialogues for turn in turns)

    def hold_messages(self, value: Any, role: str = "user") -> bool:
        """Return True if a dialogue has text or messages, as turns one after another.

        Args:
            value: text, messages or their JSON text.
            role: role of the turn that a text is compared with.
        """
        part = to_turns(value, role)
        return bool(part) and any(_holds(turns, part) for turns in self._dialogues)

    def hold_rounds(self, value: Any) -> bool:
        """Return True if a dialogue has all texts of a list of rounds, as turns one
        after another.
        """
        part = [*_texts_in(parse_json(value))]
        return any(
            _holds([turn.text for turn in turns], part) for turns in self._dialogues
        )

    def hold_tools(self, value: Any) -> bool:
        """Return True if tool schemas are those that are read."""
        parsed = parse_json(value)
        try:
            tools = normalize_tools(parsed if isinstance(parsed, list) else [parsed])
        except Refused:
            return False
        return tools == self._tools


def to_turns(value: Any, role: str) -> list[Turn]:
    """Return text, messages, or their JSON text as turns.

    Args:
        value: anything; values of other types have no turns.
        role: role of the turn that a text becomes.
    """
    messages = parse_json(value)
    if is_message(messages):
        messages = [messages]
    if not is_messages(messages):
        return [Turn(role, value.strip())] if isinstance(value, str) else []
    turns = [parse_json(message) for message in messages]
    # Messages that packstore refuses, such as ones with unknown roles, are compared as
    # they are.
    with contextlib.suppress(Refused):
        turns = normalize_messages(turns, set())
    return [_to_turn(turn) for turn in turns]


def _to_turn(message: dict[str, Any]) -> Turn:
    role = str(_first_of(message, ROLE_KEYS)).lower()
    return Turn(
        role=ROLES.get(role, role),
        text=_text_of(_first_of(message, CONTENT_KEYS)),
        thoughts=_first_of(message, REASONING),
        calls=_first_of(message, CALLS),
    )


def _first_of(message: dict[str, Any], keys: Sequence[str]) -> Any:
    """Return the value of the first key that has one, else None."""
    for key in keys:
        if message.get(key):
            return message[key]
    return None


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content.strip()
    return "".join(_texts_in(content)) if isinstance(content, list) else ""


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in lists and objects, in order, without the types of parts."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "type":
                yield from _texts_in(item)


def _holds(sequence: Sequence[Any], part: Sequence[Any]) -> bool:
    """Return True if `part` stands in `sequence` without a gap."""
    size = len(part)
    starts = range(len(sequence) - size + 1)
    return any(sequence[start : start + size] == part for start in starts)
