"""Columns of the input that are kept beside the examples: their types, and their
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.format.schema import COLUMN_NAME, COLUMNS
from packstore.tokenizer.refusals import Refused

TYPES: dict[str, tuple[type, Any]] = {
    "string": (str, np.object_),
    "int64": (int, np.int64),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}
"""Type name -> its Python class and its numpy type."""

_TYPE_OF_CLASS = {python_class: name for name, (python_class, _) in TYPES.items()}

LARGEST_EXACT = 1 << 53
"""Every integer up to this magnitude is a float64."""


def typed_carry(config: TokenizeConfig, records: Sequence[object]) -> tuple[str, ...]:
    """Return the setting `carry` with a type for every column, inferred from the first
    records.
    """
    types = parse_carry(config, records)
    return tuple(f"{name}:{type_name}" for name, type_name in types.items())


def parse_carry(
    config: TokenizeConfig, records: Sequence[object] = ()
) -> dict[str, str]:
    """Return the names of carried columns and their types: as set, else by values of
    `records`.

    Mixed integers and floats are ``float64``; a column without values is ``string``.

    Raises:
        ConfigError: a type or a name is invalid, or a name stands twice.
    """
    types: dict[str, str] = {}
    for entry in config.carry:
        name, has_type, type_name = entry.partition(":")
        if not has_type:
            type_name = _infer_type(name, records)
        if type_name not in TYPES:
            rule = f"a type must be one of: {', '.join(TYPES)}"
            raise ConfigError(sentence("setting carry", rule, quote(type_name)))
        if name in COLUMNS or name in types:
            rule = "a name must not be named twice, or a column of the format"
            raise ConfigError(sentence("setting carry", rule, quote(name)))
        if not COLUMN_NAME.fullmatch(name):
            rule = (
                "a name must be letters a to z, digits and _, and begin with a letter"
            )
            remedy = "Rename the field in the input"
            raise ConfigError(sentence("setting carry", rule, quote(name), remedy))
        types[name] = type_name
    return types


def _infer_type(name: str, records: Sequence[object]) -> str:
    """Return the type of a column by its values; of several, the first one here."""
    classes = {
        type(record.get(name)) for record in records if isinstance(record, Mapping)
    }
    for type_name in ("bool", "float64", "int64"):
        python_class, _ = TYPES[type_name]
        if python_class in classes:
            return type_name
    return "string"


def check_carried(record: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Raise if a record lacks a value to carry, or has one of another type.

    Raises:
        Refused: ``missing_field``, ``wrong_type`` or ``invalid_unicode``.
    """
    for name, type_name in types.items():
        value: Any = record.get(name)
        if value is None:
            raise Refused("missing_field", f"no field {name!r} to carry")
        if not _fits(value, type_name):
            detail = f"field {name!r} must be {type_name}, found {quote(value)}"
            fitting_type = _TYPE_OF_CLASS.get(type(value), type_name)
            if fitting_type != type_name:
                detail += f" (carry {name}:{fitting_type})"
            raise Refused("wrong_type", detail)
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise Refused(
                    "invalid_unicode", f"field {name!r}: {error.reason}"
                ) from error


def _fits(value: Any, type_name: str) -> bool:
    if type_name == "float64" and type(value) is int:
        return abs(value) <= LARGEST_EXACT
    if type_name == "int64" and type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    python_class, _ = TYPES[type_name]
    return type(value) is python_class
