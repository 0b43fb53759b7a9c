"""Paths into nested records: names, ``.``, ``[]`` for each item of a list, and quoted names.

Not JMESPath: its projections leave out null, so that the scores of a list would move to other
answers, and it does not say which part was missing.
"""

from __future__ import annotations

import functools
import json
import re
from contextlib import suppress
from typing import Any

from packstore.errors import ConfigError, quote, sentence

_PART = re.compile(r'(\[\])|(?:^|(?<=.)\.)(?:("(?:[^"\\]|\\.)+")|([^."\[\]]+))')

EACH = None
"""The part ``[]``."""

Path = tuple[str | None, ...]


@functools.cache
def parse_path(text: str) -> Path:
    """Returns the parts of a path, e.g. of ``completions[].response``."""
    parts: list[str | None] = []
    at = 0
    while match := _PART.match(text, at):
        each, quoted, name = match.groups()
        parts.append(EACH if each else json.loads(quoted) if quoted else name)
        at = match.end()
    if at < len(text) or not parts or parts[0] is EACH:
        rule = 'it must be names, with . between them, [] behind lists, and "" around odd names'
        raise ConfigError(sentence(f"path {quote(text)}", rule, quote(text[at:])))
    return tuple(parts)


def follow(value: Any, path: Path) -> Any:
    """Returns what is at a path; None if a part is missing or null, in any item of a list."""
    for i, part in enumerate(path):
        if part is EACH:
            if not isinstance(value, list):
                return None
            found = [follow(item, path[i + 1 :]) for item in value]
            return None if any(item is None for item in found) else found
        value = parse_json_text(value)
        if not isinstance(value, dict) or (value := value.get(part)) is None:
            return None
    return value


def missing(value: Any, path: Path, at: str = "") -> str:
    """Returns which part of a path is missing, and what is there; empty: none."""
    for i, part in enumerate(path):
        if part is EACH:
            if not isinstance(value, list):
                return f"{at} is no list: {quote(value)}"
            told = (missing(v, path[i + 1 :], f"{at}[{n}]") for n, v in enumerate(value))
            return next(filter(None, told), "")
        value = parse_json_text(value)
        if not isinstance(value, dict):
            return f"no {part!r} in {at}: {quote(value)}"
        if value.get(part) is None:
            there = ", ".join(map(repr, value)) or "nothing"
            what = f"{part!r} is null" if part in value else f"no {part!r} among {there}"
            return what + (f" in {at}" if at else "")
        value, at = value[part], f"{at}.{part}" if at else part
    return ""


def parse_json_text(value: Any) -> Any:
    """Returns JSON text of an object or a list as this, and any other value as it is."""
    if type(value) is str and value[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def is_path(name: str) -> bool:
    """Returns True for what the setting `fields` maps to that is more than a name."""
    return any(mark in name for mark in '.["')
