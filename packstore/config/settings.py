"""The base of every class of settings.

A class of settings is a frozen dataclass with a field for each setting, made by
:func:`setting`. Types, ranges and names of settings are checked here; flags of the
command line, and their help, are derived from the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import msgspec

from packstore.errors import (
    ConfigError,
    UnknownNameError,
    display,
    is_mistyped,
    quote,
    sentence,
    to_unicode,
)
from packstore.registry import suggest


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Make a field of a class of settings.

    Args:
        default: the default; ``...``: the setting is required; a callable, such as
            ``dict``, is called for each object.
        help: one line.
        metadata: further facts, all optional. Of a number: `low` and `high`, its
            bounds, and `below`, a bound that it must not reach. For the command line:
            `flag` and `metavar`, names of the flag and of its value; `splits`, an
            argument may have several items with commas between them. Of a text:
            `secret`, it is neither shown nor recorded; `place`, it is a path or URL,
            recorded without its login; `local`, it is a path on this machine, not a
            URL; `path`, it is a path of any other kind.
    """
    metadata["help"] = help
    if default is ...:
        return field(metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings with their defaults; an object is checked when it is made.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    LISTED_BY = "help()"
    """Command or call that lists all settings, for errors."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.names()}
        for name, value in self.validate(**values).items():
            object.__setattr__(self, name, value)

    @classmethod
    def validate(cls, **values: Any) -> dict[str, Any]:
        """Return values of some settings: lists as tuples, texts as valid Unicode.

        Paths keep the bytes that are no valid Unicode, so that the file can be opened.

        Raises:
            ConfigError: a value has the wrong type or is out of range.
        """
        hints = _type_hints(cast(Any, cls))
        checked = {}
        for item in dataclasses.fields(cls):
            if item.name in values:
                hint = hints[item.name]
                value = _as_stored(item, values[item.name], hint)
                _check_type(item, value, hint)
                _check_range(item, value)
                checked[item.name] = value
        return checked

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(item.name for item in dataclasses.fields(cls))

    @classmethod
    def of(cls, config: Settings | None = None, /, **settings: Any) -> Self:
        """Return `config` (or the defaults) overridden by `settings`.

        Raises:
            UnknownNameError: a setting does not exist; suggests the nearest.
            ConfigError: a value has the wrong type or is out of range, or a required
                setting is absent.
        """
        check_names(settings, cls.names(), cls.LISTED_BY)
        values = {}
        if config is not None:
            check_class("argument config", config, Settings, "Give settings by name")
            values = {name: getattr(config, name) for name in cls.names()}
        values |= settings

        for item in dataclasses.fields(cls):
            # Both are the marker MISSING if the setting has no default.
            is_required = item.default is item.default_factory
            if is_required and item.name not in values:
                raise ConfigError(
                    f"setting {item.name} must be given: {item.metadata['help']}."
                )
        return cls(**values)

    def recorded(self) -> dict[str, Any]:
        """Return all settings but secret ones as JSON values; :meth:`of` takes them
        back.
        """
        return {
            item.name: _as_json(getattr(self, item.name), _spelling(item))
            for item in dataclasses.fields(self)
            if "secret" not in item.metadata
        }

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as JSON values."""
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        return {
            name: value
            for name, value in self.recorded().items()
            if value != defaults[name]
        }


MAX_LISTED_NAMES = 30
"""The names of a table are listed in an error if they are no more than these."""


def check_names(
    names: Iterable[str], valid: Iterable[str], listed_by: str, noun: str = "setting"
) -> None:
    """Raise UnknownNameError if some names are not `valid`.

    The error lists all of them, each with the nearest valid name, so that a file of
    another program is answered once.
    """
    valid = sorted(valid)
    hints = {name: suggest(str(name), valid) for name in names if name not in valid}
    if not hints:
        return
    lists_all = f"{listed_by} lists all"
    if len(valid) <= MAX_LISTED_NAMES:
        lists_all = f"{listed_by} explains {', '.join(valid)}"
    if len(hints) == 1:
        [(name, hint)] = hints.items()
        message = f"unknown {noun} {quote(name)}; {lists_all}.{hint}"
    else:
        unknown_names = [
            f"{quote(name)} ({hint.strip()})" if hint else quote(name)
            for name, hint in hints.items()
        ]
        message = (
            f"{len(unknown_names)} unknown {noun}s: {', '.join(unknown_names)}; "
            f"{lists_all}."
        )
    raise UnknownNameError(message)


def check_class(where: str, value: Any, kind: Any, remedy: str = "") -> None:
    """Raise ConfigError for a value of another class."""
    if not isinstance(value, kind):
        shown_value = quote(value) if isinstance(value, str) else type(value).__name__
        rule = f"it must be {kind.__name__}"
        raise ConfigError(sentence(where, rule, found=shown_value, remedy=remedy))


def kind_of(value: object) -> str:
    """Return the kind of `value` in words, for errors that must not show it."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, int | float):
        return "a number"
    return "another value"


def fingerprint(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON text of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


_type_hints = functools.cache(typing.get_type_hints)
"""The types of the fields of a class; resolving them is slow."""

_PATHS = frozenset({"place", "local", "path"})
"""Metadata of settings that are paths."""


def _as_stored(item: dataclasses.Field[Any], value: Any, hint: Any) -> Any:
    """Return the value that an object of settings stores for a value of the user."""
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str):
            value = (value,)  # one text in place of several
    if "secret" in item.metadata or _PATHS & item.metadata.keys():
        return value
    return _as_unicode(value)


def _as_unicode(value: Any) -> Any:
    """Return a value with its texts as valid Unicode; see :func:`to_unicode`."""
    if isinstance(value, str):
        return value if value.isascii() else to_unicode(value)
    if isinstance(value, Mapping):
        return {key: _as_unicode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_as_unicode(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(_as_unicode(entry) for entry in value)
    return value


def _spelling(item: dataclasses.Field[Any]) -> Callable[[str], str]:
    """Return the function that makes texts of a setting fit to be recorded."""
    if "place" in item.metadata:
        return display  # without a login
    if _PATHS & item.metadata.keys():
        return to_unicode
    return str  # unchanged


def _as_json(value: Any, spell: Callable[[str], str]) -> Any:
    """Return the value of a setting as a JSON value."""
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, Mapping):
        return {key: _as_json(entry, spell) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(entry, spell) for entry in value]
    return value


def _check_type(item: dataclasses.Field[Any], value: Any, hint: Any) -> None:
    if not _has_type(value, hint):
        # A place may hold a login, which an error must not show.
        hides_value = "secret" in item.metadata or "place" in item.metadata
        text = kind_of(value) if hides_value else quote(value)
        rule = _type_in_words(_without_none(hint))
        raise ConfigError(f"setting {item.name} must be {rule}; found {text}.")
    if value and "local" in item.metadata and ("://" in value or is_mistyped(value)):
        raise ConfigError(
            f"setting {item.name} must be a folder on this machine; found "
            f"{display(value)}."
        )


def _check_range(item: dataclasses.Field[Any], value: Any) -> None:
    if value is None:
        return
    low = item.metadata.get("low")
    high = item.metadata.get("high")
    below = item.metadata.get("below")
    if low is not None and value < low:
        rule = f"at least {low}"
    elif high is not None and value > high:
        rule = f"at most {high}"
    elif below is not None and value >= below:
        rule = f"below {below}"
    else:
        return
    raise ConfigError(f"setting {item.name} must be {rule}; found {value}.")


def _has_type(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _without_none(hint: Any) -> Any:
    """Return a type without None, which stands for a setting that is left out."""
    arguments = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if is_union and len(arguments) == 1:
        return arguments[0]
    return hint


def _type_in_words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return "one of: " + ", ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_in_words(argument) for argument in arguments)
    if origin is tuple:
        return "a list of strings"
    if origin is not None:
        return f"a mapping from string to {_type_in_words(arguments[1])}"
    if hint is type(None):
        return "None"
    words = {
        Any: "a JSON value",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
    }
    name: str = hint.__name__
    return words.get(hint, name)
