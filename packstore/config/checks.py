"""Shared by all settings: help, types, ranges, and a fingerprint."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from packstore.errors import ConfigError, quote


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Makes a dataclass field with a one-line help; a callable `default` is called per instance."""
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"help": help, **metadata})


def fingerprint(value: Any) -> str:
    """Returns the sha256 (hex) of the canonical JSON text of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


_MINIMUM = {
    "seed": -(1 << 63),
    "pack_size": 2,
    "pad_to_multiple": 1,
    "partitions": 1,
    "max_length": 2,
    "row_group_tokens": 1,
    "shard_tokens": 1,
    "num_workers": 0,
    "packs_per_batch": 1,
    "tokens_per_batch": 1,
    "examples_per_step": 1,
    "accumulation": 1,
    "attempts": 1,
    "backoff": 0,
    "longest_wait": 0,
    "seconds": 0,
    "requests": 1,
    "read_ahead_bytes": 0,
}
_MAXIMUM = {
    "seed": (1 << 63) - 1,  # the limit of manifests
    # Readers refuse row groups of more than 512 MiB; a token takes 32 bytes at worst.
    "row_group_tokens": 1 << 24,
}


def validate(config: Any) -> None:
    """Checks every field of a config dataclass against its annotation and range.

    Converts a list to a tuple where the annotation is a tuple.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    hints = _hints(config.__class__)
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, list) and typing.get_origin(hints[f.name]) is tuple:
            value = tuple(value)
            object.__setattr__(config, f.name, value)
        if not _fits(value, hints[f.name]):
            raise ConfigError(
                f"setting {f.name} must be {_spell(hints[f.name])}; found {quote(value)}."
            )
        low = _MINIMUM.get(f.name)
        if low is not None and value is not None and value < low:
            raise ConfigError(f"setting {f.name} must be at least {low}; found {value}.")
        high = _MAXIMUM.get(f.name)
        if high is not None and value > high:
            raise ConfigError(f"setting {f.name} must be at most {high}; found {value}.")
    if "max_drop_rate" in hints and not 0 <= config.max_drop_rate <= 1:
        raise ConfigError(f"setting max_drop_rate must lie in 0..1; found {config.max_drop_rate}.")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of the fields of a config dataclass, cached as resolving them is slow."""
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(v, args[0]) for v in value)
    if origin is not None:  # Mapping[str, …]
        return isinstance(value, Mapping) and all(
            isinstance(k, str) and _fits(v, args[1]) for k, v in value.items()
        )
    if hint is Any:
        return True
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of: " + ", ".join(args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(a) for a in args)
    if origin is tuple:
        return "a list of strings"
    if origin is not None:
        return f"a mapping from string to {_spell(typing.get_args(hint)[1])}"
    return {
        Any: "a JSON value",
        type(None): "None",
        int: "a whole number",
        float: "a number",
        str: "a string",
    }.get(hint, getattr(hint, "__name__", str(hint)))


RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that come from the records."""


def check_variables(variables: Mapping[str, Any]) -> None:
    """Checks the extra variables of chat templates.

    Raises:
        ConfigError: a name is reserved, or a value is not JSON-serialisable.
    """
    for name, value in variables.items():
        if name in RESERVED_VARIABLES:
            raise ConfigError(
                f"setting template_variables must leave {name} out: it comes from the records."
            )
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"setting template_variables must hold JSON values; found {quote(value)} as "
                f"{name} ({error})."
            ) from error


def unknown(name: str, known: set[str], lister: str) -> str:
    """Returns the text of the error for an unknown setting."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {name!r}; {lister} lists all.{hint}"
