"""Paths into nested records: names, ``.``, ``[]`` for each item of a list, and quoted
names.

Not JMESPath: its projections leave out null, so that later items of a list would shift,
and a score would go with the wrong completion. Nor does it name the part that was
missing.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from packstore.errors import ConfigError, quote, sentence

_PART = re.compile(
    r"""
    (\[\])                       # 1: each item of a list
    |
    (?: ^ | (?<=.)\. )           # a name begins the path, or follows a dot in it
    (?:
        ("(?: [^"\\] | \\. )*")  # 2: a quoted name, with escapes as in JSON
        |
        ([^."\[\]]+)             # 3: a plain name
    )
    """,
    re.VERBOSE,
)
"""One part of a path."""

EACH = None
"""The part ``[]``, which stands for each item of a list."""

Path = tuple[str | None, ...]
"""Parts of a path: names, and `EACH`."""


@functools.cache
def parse_path(text: str) -> Path:
    """Return the parts of a path: ``completions[].response`` gives ``("completions",
    EACH, "response")``.

    Raises:
        ConfigError: it is no path.
    """
    parts: list[str | None] = []
    end = 0
    match = _PART.match(text)
    while match:
        try:
            parts.append(_part_of(match))
        except json.JSONDecodeError:  # an escape that JSON does not have
            raise _malformed(text, match[2]) from None
        end = match.end()
        match = _PART.match(text, end)
    if end < len(text) or not parts or parts[0] is EACH:
        raise _malformed(text, text[end:])
    return tuple(parts)


def _malformed(text: str, part: str) -> ConfigError:
    rule = (
        'it must be names, with . between them, [] behind lists, and "" around '
        "odd names"
    )
    return ConfigError(sentence(f"path {quote(text)}", rule, quote(part)))


def _part_of(match: re.Match[str]) -> str | None:
    brackets, quoted_name, plain_name = match.groups()
    if brackets:
        return EACH
    if quoted_name:
        return str(json.loads(quoted_name))
    return str(plain_name)


def follow(value: Any, path: Path) -> Any:
    """Return the value at a path; None if a part is missing or null, in any item of a
    list.
    """
    for i, part in enumerate(path):
        if part is EACH:
            return _follow_each(value, path[i + 1 :])
        value = parse_json_text(value)
        if not isinstance(value, dict):
            return None
        value = value.get(part)
        if value is None:
            return None
    return value


def _follow_each(items: Any, path: Path) -> list[Any] | None:
    items = parse_json_text(items)
    if not isinstance(items, list):
        return None
    values = [follow(item, path) for item in items]
    return None if any(value is None for value in values) else values


def describe_missing(value: Any, path: Path, before: str = "") -> str:
    """Return a description of the first part of a path that is missing, and of its
    surroundings.

    Args:
        value: the record, or a value inside it.
        path: parts of the path, from `value` on.
        before: path of `value` in the record, for the description.

    Returns:
        An empty text if every part is there.
    """
    for i, part in enumerate(path):
        if part is EACH:
            return _missing_in_items(value, path[i + 1 :], before)
        value = parse_json_text(value)
        if not isinstance(value, dict):
            return f"no {part!r} in {before}: {quote(value)}"
        if value.get(part) is None:
            return _missing_name(value, part, before)
        value = value[part]
        before = f"{before}.{part}" if before else str(part)
    return ""


def _missing_in_items(items: Any, path: Path, before: str) -> str:
    items = parse_json_text(items)
    if not isinstance(items, list):
        return f"{before} is no list: {quote(items)}"
    for number, item in enumerate(items):
        description = describe_missing(item, path, f"{before}[{number}]")
        if description:
            return description
    return ""


def _missing_name(value: dict[str, Any], name: str, before: str) -> str:
    inside = f" in {before}" if before else ""
    if name in value:
        return f"{name!r} is null{inside}"
    names = ", ".join(repr(key) for key in value) or "nothing"
    return f"no {name!r} among {names}{inside}"


def parse_json_text(value: Any) -> Any:
    """Return JSON text of an object or a list parsed, and any other value as it is."""
    if type(value) is not str or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def is_path(name: str) -> bool:
    """Return True if a name in the setting `fields` is a path, not only a column."""
    return any(mark in name for mark in '.["')
