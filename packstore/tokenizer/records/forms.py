"""The forms of values of fields, and whether a value is of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from packstore.tokenizer.chat.messages import ROLES, is_hh
from packstore.tokenizer.records.fields import is_score
from packstore.tokenizer.records.sequences import holds_ids


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
    return ROLES.get(named) if isinstance(named, str) else None


def _is_turns(value: object) -> bool:
    return isinstance(value, str) or _is_messages(value)


def _is_chat(value: object) -> bool:
    return role_at(value, 0) is not None


def _is_question(value: object) -> bool:
    return role_at(value, -1) in ("user", "tool")


def _is_answer(value: object) -> bool:
    first = [value] if isinstance(value, dict) else value
    return isinstance(value, str) or role_at(first, 0) in ("assistant", "call", "reasoning")


def _is_list(value: object) -> bool:
    return isinstance(value, list | np.ndarray)


FITS: Mapping[str, Callable[[Any], bool]] = {
    "text": is_text,
    "HH text": is_hh,
    "messages": _is_messages,
    "chat": _is_chat,
    "question": _is_question,
    "answer": _is_answer,
    "turns": _is_turns,
    "texts": _list_of(is_text),
    "dialogues": _list_of(_is_turns),
    "token ids": holds_ids,
    "lists of ids": _list_of(holds_ids),
    "numbers": _is_list,
    "score": is_score,
    "labels": _is_list,
    "lists of labels": _is_list,
}
"""Form -> whether a value is of it; reading it checks the rest, and the forms that are not here."""
