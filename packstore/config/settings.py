"""The base of every class of settings: help, types, ranges and names, checked in one
place.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec

from packstore.errors import (
    ConfigError,
    UnknownNameError,
    display,
    is_mistyped,
    quote,
    sentence,
    spelled,
)
from packstore.registry import meant

RANGES: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Bound of a number -> its name in an error, and the test."""


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Makes a field of a class of settings.

    Args:
        default: the default; ``...``: the setting is required; a callable is called per
            object.
        help: one line.
        metadata: `low`, `high`, `below`: bounds of a number; `flag`, `metavar`: name of
            the flag on the command line, and of its value; `secret`: it is neither
            shown nor recorded; `place`: a path or URL, recorded without its login;
            `local`: a path that may be no URL.
    """
    described = {"help": help, **metadata}
    if default is ...:
        return field(metadata=described)
    if callable(default):
        return field(default_factory=default, metadata=described)
    return field(default=default, metadata=described)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings with their defaults; an object is checked when it is made.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    LISTED_BY = "help()"
    """Command or call that lists all settings, for errors."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.names()}
        for name, value in self.checked(**given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def checked(cls, **values: Any) -> dict[str, Any]:
        """Returns values of some settings, lists as tuples.

        Raises:
            ConfigError: a value has the wrong type or is out of range.
        """
        kind: Any = cls
        hints = _hints(kind)
        for item in (item for item in dataclasses.fields(kind) if item.name in values):
            value, hint = values[item.name], hints[item.name]
            if typing.get_origin(hint) is tuple:
                one = isinstance(value, str) and "place" in item.metadata
                value = (
                    (value,)
                    if one
                    else tuple(value)
                    if isinstance(value, list)
                    else value
                )
                values[item.name] = value
            if not _fits(value, hint):
                rule = _spell(hint)
                hidden = {"secret", "place"} & item.metadata.keys()
                found = kind_of(value) if hidden else quote(value)
                raise ConfigError(f"setting {item.name} must be {rule}; found {found}.")
            if (
                "local" in item.metadata
                and value
                and ("://" in value or is_mistyped(value))
            ):
                rule = "must be a folder on this machine"
                raise ConfigError(
                    f"setting {item.name} {rule}; found {display(value)}."
                )
            for name in RANGES.keys() & item.metadata if value is not None else ():
                (text, holds), bound = RANGES[name], item.metadata[name]
                if not holds(value, bound):
                    raise ConfigError(
                        f"setting {item.name} must be {text} {bound}; found {value}."
                    )
        return values

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of all settings."""
        return tuple(item.name for item in dataclasses.fields(cls))

    @classmethod
    def of(cls, config: Settings | None = None, /, **settings: Any) -> Self:
        """Returns `config` (or the defaults) overridden by `settings`.

        Raises:
            UnknownNameError: a setting does not exist; suggests the nearest.
            ConfigError: a value has the wrong type or is out of range, or a setting is
                missing.
        """
        check_names(settings, cls.names(), cls.LISTED_BY)
        base = {}
        if config is not None:
            check_class("argument config", config, Settings, "Give settings by name")
            base = {name: getattr(config, name) for name in cls.names()}
        values = {**base, **settings}
        for item in dataclasses.fields(cls):
            if (
                item.name not in values and item.default is item.default_factory
            ):  # both missing
                raise ConfigError(
                    f"setting {item.name} must be given: {item.metadata['help']}."
                )
        return cls(**values)

    def recorded(self) -> dict[str, Any]:
        """Returns all settings but the secret ones as JSON values, as :meth:`of` takes
        them.
        """
        items = ((item, getattr(self, item.name)) for item in dataclasses.fields(self))
        return {
            item.name: _plain(value, display if "place" in item.metadata else spelled)
            for item, value in items
            if "secret" not in item.metadata
        }

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults, as JSON values."""
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        return {
            n: value for n, value in self.recorded().items() if value != defaults[n]
        }


def check_names(
    names: Iterable[str], known: Iterable[str], listed_by: str, noun: str = "setting"
) -> None:
    """Refuses unknown names."""
    known = sorted(known)
    for name in names:
        if name not in known:
            hint = meant(str(name), known)
            raise UnknownNameError(
                f"unknown {noun} {quote(name)}; {listed_by} lists all.{hint}"
            )


def check_class(where: str, value: Any, kind: Any, remedy: str = "") -> None:
    """Refuses a value of another class."""
    if not isinstance(value, kind):
        found = quote(value) if isinstance(value, str) else type(value).__name__
        raise ConfigError(sentence(where, f"it must be {kind.__name__}", found, remedy))


def fingerprint(value: Any) -> str:
    """Returns the sha256 (hex) of the canonical JSON text of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


_hints = functools.cache(typing.get_type_hints)
"""The types of the fields of a class; resolving them is slow."""


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _spell(hint: Any) -> str:
    """Returns a type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of: " + ", ".join(args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_spell, args))
    if origin is tuple:
        return "a list of strings"
    if origin is not None:
        return f"a mapping from string to {_spell(args[1])}"
    words = {
        Any: "a JSON value",
        int: "a whole number",
        float: "a number",
        str: "a string",
    }
    return "None" if hint is type(None) else words.get(hint, hint.__name__)


def kind_of(value: object) -> str:
    """Returns what `value` is, in words, where it may hold a secret."""
    kinds = {
        "a text": str,
        "a list": list | tuple,
        "a mapping": Mapping,
        "a number": int | float,
    }
    found = (words for words, kind in kinds.items() if isinstance(value, kind))
    return "nothing" if value is None else next(found, "another value")


def _plain(value: Any, spell: Callable[[str], str] = spelled) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, str):
        return spell(value)  # it may be the path of a file
    return (
        [_plain(entry, spell) for entry in value]
        if isinstance(value, tuple | list)
        else value
    )
