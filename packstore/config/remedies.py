"""Spells settings in the remedies of errors as the user would type them.

The same job may come from a command line or from a Python call: its door. A remedy is
``Give --kind scored`` for the one, and ``Give kind="scored"`` for the other.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

Door: TypeAlias = Literal["shell", "python"]
"""Syntax of a job: a command line, or a Python call."""

_doors: list[Door] = ["python"]
"""Stack of the current doors; see :func:`from_shell`."""


def current_door() -> Door:
    """Return the shell inside :func:`from_shell`, else Python."""
    return _doors[-1]


@contextlib.contextmanager
def from_shell() -> Iterator[None]:
    """Spell the remedies of jobs that start in this context as flags."""
    _doors.append("shell")
    try:
        yield
    finally:
        _doors.pop()


_FLAGS = {"fields": "field", "roles": "role", "template_variables": "template-variable"}
"""Setting -> its flag, where the names differ."""


def spell(door: Door, settings: Mapping[str, Any]) -> str:
    """Spell settings of :func:`packstore.pack`, as ``--kind scored`` for the shell.

    Args:
        door: the syntax.
        settings: name -> text, number, boolean, list of texts or mapping of texts.
    """
    if door == "python":
        return ", ".join(f"{name}={_python(value)}" for name, value in settings.items())
    return " ".join(_flags(name, value) for name, value in settings.items())


def _python(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        entries = [f"{_python(key)}: {_python(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_python(entry) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _flags(name: str, value: Any) -> str:
    flag = "--" + _FLAGS.get(name, name).replace("_", "-")
    if value is True:
        return flag
    if isinstance(value, Mapping):
        entries = [f"{key}={item}" for key, item in value.items()]
        if name == "verdict":
            entries = [",".join(entries)]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        entries = list(value)
    else:
        entries = [str(value)]
    return " ".join(_flag(flag, entry) for entry in entries)


def _flag(flag: str, entry: str) -> str:
    """Return a flag with its value."""
    # argparse reads a value that begins with a dash as the next flag.
    separator = "=" if entry.startswith("-") else " "
    return flag + separator + shlex.quote(entry)
