"""Tests of values in columns that are not read: messages, tool schemas, weights, masks,
and JSON text that may hold them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from packstore.tokenizer.dialogue.messages import is_empty

ROLE_KEYS = ("role", "from", "speaker", "sender")
CONTENT_KEYS = ("content", "value", "text", "parts", "tool_calls")
"""Keys of a message by any writer; ``dialogue/messages.py`` has those that are read."""

SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")
"""Keys of a tool that hold the JSON schema of its arguments."""


def begins_json(value: Any) -> bool:
    """Return True for text that may be a JSON object or list; looks at the first
    character.
    """
    return type(value) is str and len(value) > 2 and value[0] in "[{"


def parse_json(value: Any) -> Any:
    """Return JSON text of an object or a list as this, and any other value as it is."""
    if not begins_json(value):
        return value
    try:
        return orjson.loads(value)
    except ValueError:
        pass
    try:
        return json.loads(value)  # with NaN, and long integers
    except (ValueError, RecursionError):
        return value


def is_absent(value: Any) -> bool:
    """Return True for null and empty values, also NaN, which pandas writes for null."""
    is_nan = isinstance(value, float) and value != value
    return is_empty(value) or is_nan


def is_message(value: Any) -> bool:
    """Return True for an object, or its JSON text, with a role and a content."""
    item = parse_json(value)
    if not isinstance(item, dict):
        return False
    has_role = not item.keys().isdisjoint(ROLE_KEYS)
    return has_role and not item.keys().isdisjoint(CONTENT_KEYS)


def is_messages(value: Any) -> bool:
    """Return True for a list of messages that is not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(is_message(item) for item in value)
    )


def is_tools(value: Any) -> bool:
    """Return True for a schema or a call of a tool, or a list of them."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(_is_tool(item) for item in items)


def _is_tool(value: Any) -> bool:
    item = parse_json(value)
    if not isinstance(item, dict):
        return False
    if item.get("type") == "function":
        return True
    schemas = [item[key] for key in SCHEMA_KEYS if item.get(key) is not None]
    return "name" in item and bool(schemas) and _is_schema(schemas[0])


def _is_schema(value: Any) -> bool:
    """Return True for a JSON schema or its text, False for settings such as a
    temperature.
    """
    schema = parse_json(value)
    if not isinstance(schema, dict):
        return isinstance(schema, list)
    return (
        not schema
        or "type" in schema
        or any(isinstance(x, dict) for x in schema.values())
    )


def is_numeric(value: Any) -> bool:
    """Return True for a number, its text, and a list of numbers."""
    match value:
        case str():
            return _is_number_text(value)
        case list():
            return bool(value) and is_numeric(value[0])
        case _:
            return isinstance(value, int | float | np.ndarray)


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_rounds(value: Any) -> bool:
    """Return True for a list of texts, lists or objects, or its JSON text."""
    items = parse_json(value)
    return (
        isinstance(items, list)
        and bool(items)
        and isinstance(items[0], str | list | dict)
    )


def has_other_than_ones(mask: Any) -> bool:
    """Return True for a list of numbers, or of such lists, that are not all 1."""
    if not isinstance(mask, list | np.ndarray):
        return False
    items = mask.tolist() if isinstance(mask, np.ndarray) else mask
    if not items or isinstance(items[0], str | dict):
        return False
    return any(
        has_other_than_ones(item) if isinstance(item, list) else item not in (1, True)
        for item in items
    )


def is_one_sequence(places: Any) -> bool:
    """Return True for the length of one sequence, or the positions in one."""
    items = [*places]
    if len(items) == 1:
        return True
    return len(items) > 2 and items == [*range(len(items))]
