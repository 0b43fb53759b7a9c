"""Types of fields: the description of each, the test of a value, and its conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from packstore.tokenizer.dialogue.messages import ROLES, is_hh, parsed_json
from packstore.tokenizer.records.judgements import (
    BAD_WORDS,
    GOOD_WORDS,
    fold_word,
    spellings,
)
from packstore.tokenizer.records.paths import parse_json_text
from packstore.tokenizer.records.sequences import holds_ids

LABEL_SCORES: Mapping[str, float] = {
    **dict.fromkeys(spellings(GOOD_WORDS), 1.0),
    **dict.fromkeys(("true", "yes", "pos", "positive", "up"), 1.0),
    **dict.fromkeys(spellings(BAD_WORDS), 0.0),
    **dict.fromkeys(("false", "no", "neg", "negative", "down"), 0.0),
}
"""A label in small letters -> 1 if it calls an answer good, 0 if it calls it bad."""

_NUMERAL = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


class FieldType(NamedTuple):
    """A type of a field.

    Attributes:
        description: completes "must be ...".
        fits: returns whether a converted value is of the type. It is quick: of a list
            it may look at the first item only.
        convert: returns a value that may be JSON text in its parsed form; None: values
            are not converted.
    """

    description: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] | None = None


def is_text(value: object) -> bool:
    """Return True for text."""
    return isinstance(value, str)


def is_number(value: object) -> bool:
    """Return True for a whole or floating number, not for a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_messages(value: object) -> bool:
    """Return True for a message, or for a list that begins with an object."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def role_at(messages: object, index: int) -> str | None:
    """Return packstore's name for the role of the message at `index`; None if it is no
    message.
    """
    if not isinstance(messages, list) or not messages:
        return None
    message = messages[index]
    if not isinstance(message, dict):
        return None
    role = message.get("role") or message.get("from")
    return ROLES.get(role.lower()) if isinstance(role, str) else None


def _is_chat(value: object) -> bool:
    return role_at(value, 0) is not None


def _is_question(value: object) -> bool:
    return role_at(value, -1) in ("user", "tool")


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or _is_question(value)


def _is_turns(value: object) -> bool:
    return isinstance(value, str) or is_messages(value)


def _is_answer(value: object) -> bool:
    if isinstance(value, str):
        return True
    turns = [value] if isinstance(value, dict) else value
    return role_at(turns, 0) in ("assistant", "call", "reasoning")


def _is_numeral(value: object) -> bool:
    if isinstance(value, str):
        return _NUMERAL.fullmatch(value.strip()) is not None
    return is_number(value)


def is_score(value: object) -> bool:
    """Return True for a number or its text, a boolean, and a word for a good or bad
    answer.
    """
    if isinstance(value, str) and fold_word(value) in LABEL_SCORES:
        return True
    return isinstance(value, bool) or _is_numeral(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list | np.ndarray)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_list_of_them(value: object) -> bool:
        return (
            isinstance(value, list)
            and bool(value)
            and all(fits(item) for item in value)
        )

    return is_list_of_them


def _parse_items(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [parsed_json(item) for item in value]


def _without_switch(value: Any) -> Any:
    """Return None for "on", "off" and booleans: some sets say by these whether a model
    should think, in a column in which others have its thoughts.
    """
    is_switch = isinstance(value, str) and value.lower() in ("on", "off")
    return None if is_switch or isinstance(value, bool) else value


def _is_anything(value: object) -> bool:
    return True


text = FieldType("text", is_text)
thoughts = FieldType("text of thoughts", is_text, _without_switch)
hh_text = FieldType("text of turns that begin with Human: and Assistant:", is_hh)
texts = FieldType("a list of texts", _is_list_of(is_text))
messages = FieldType("a list of messages, or its JSON text", is_messages, parsed_json)
chat = FieldType("a list of messages with roles", _is_chat, parsed_json)
question = FieldType(
    "a list of messages that ends with a question", _is_question, parsed_json
)
answer = FieldType(
    "text, or messages that begin with an answer", _is_answer, parsed_json
)
prompt = FieldType(
    "text, or messages that end with a question", _is_prompt, parsed_json
)
rounds = FieldType("a list of rounds, or its JSON text", _is_list, parse_json_text)
turns = FieldType("text or messages", _is_turns, parsed_json)
dialogues = FieldType(
    "a list of texts or lists of messages", _is_list_of(_is_turns), _parse_items
)
token_ids = FieldType("token ids", holds_ids)
number = FieldType("a number", is_number)
numeral = FieldType("a number, or its text", _is_numeral)
score = FieldType("a number, true or false, or a word such as good or bad", is_score)
numbers = FieldType("a list of numbers", _is_list)
labels = FieldType("a list of numbers", _is_list)
anything = FieldType("anything", _is_anything)
