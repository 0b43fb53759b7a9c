"""The forms of values of fields: what each is called, and whether a value is of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from packstore.tokenizer.dialogue.messages import ROLES, is_hh
from packstore.tokenizer.records.fields import is_number, is_score
from packstore.tokenizer.records.sequences import holds_ids


class Form(NamedTuple):
    """A form: a value must be `described`; `fits` tells, as far as reading it does not."""

    described: str
    fits: Callable[[Any], bool] = lambda value: True


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(fits, value))


def is_text(value: object) -> bool:
    """Returns True for text."""
    return isinstance(value, str)


def _is_messages(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and type((*value, 0)[0]) is dict)


def role_at(messages: Any, i: int) -> str | None:
    """Returns the role of a message, our name of it, if this is a message."""
    message: Any = messages[i] if isinstance(messages, list) and messages else None
    named = isinstance(message, dict) and (message.get("role") or message.get("from"))
    return ROLES.get(named.lower()) if isinstance(named, str) else None


def _is_turns(value: object) -> bool:
    return isinstance(value, str) or _is_messages(value)


def _is_answer(value: object) -> bool:
    first = [value] if isinstance(value, dict) else value
    return isinstance(value, str) or role_at(first, 0) in ("assistant", "call", "reasoning")


def _is_numeral(value: object) -> bool:
    return is_text(value) and str(value).replace(".", "", 1).isdecimal()


def _is_list(value: object) -> bool:
    return isinstance(value, list | np.ndarray)


FORMS: Mapping[str, Form] = {
    "text": Form("text", is_text),
    "HH text": Form("text of turns that begin with Human: and Assistant:", is_hh),
    "messages": Form("a list of messages, or its JSON text", _is_messages),
    "chat": Form("a list of messages with roles", lambda value: role_at(value, 0) is not None),
    "question": Form(
        "a list of messages that ends with a question",
        lambda value: role_at(value, -1) in ("user", "tool"),
    ),
    "answer": Form("text, or messages that begin with an answer", _is_answer),
    "turns": Form("text or messages", _is_turns),
    "texts": Form("a list of texts", _list_of(is_text)),
    "dialogues": Form("a list of texts or lists of messages", _list_of(_is_turns)),
    "token ids": Form("token ids", holds_ids),
    "lists of ids": Form("a list of lists of token ids", _list_of(holds_ids)),
    "number": Form("a number", is_number),
    "numeral": Form("a number, or its text", lambda v: is_number(v) or _is_numeral(v)),
    "reward": Form("a number"),
    "score": Form("a number, or true or false, which are 1 and 0", is_score),
    "numbers": Form("a list of numbers, higher for better responses", _is_list),
    "labels": Form("a list of numbers, one for each id", _is_list),
    "lists of labels": Form("a list of lists of labels", _is_list),
    "tools": Form("a list, or its JSON text"),
    "variables": Form("an object, or its JSON text"),
    "any": Form("anything"),
}
"""Form -> what it is."""
