"""Carried columns: additional scalar columns of the input, kept with the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.format.arrays import Column
from packstore.format.schema import COLUMNS
from packstore.tokenizer.refusals import Refused

TYPES: dict[str, tuple[type, Any]] = {
    "string": (str, np.object_),
    "int64": (int, np.int64),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}
"""Type name -> its Python class and its numpy type."""


def typed_carry(config: TokenizeConfig, records: Sequence[object]) -> tuple[str, ...]:
    """Returns the setting `carry` with a type for every column, inferred from records if missing.

    Args:
        config: the settings.
        records: the first records of the input. Mixed integers and floats are ``float64``; a column
            without values is ``string``.

    Raises:
        ConfigError: see :func:`parse_carry`.
    """
    types = parse_carry(config)
    return tuple(
        entry if ":" in entry else f"{entry}:{_type_of(entry, records)}"
        for entry, _ in zip(config.carry, types, strict=True)
    )


def _type_of(name: str, records: Sequence[object]) -> str:
    values = (record.get(name) for record in records if isinstance(record, Mapping))
    found = {type(value) for value in values}
    if found & {int, float} and bool not in found:
        return "float64" if float in found else "int64"
    return "bool" if found & {bool} else "string"


def parse_carry(config: TokenizeConfig) -> dict[str, str]:
    """Returns the names of carried columns and their types, by default ``string``.

    Raises:
        ConfigError: a type is unknown, or a name is reserved.
    """
    found: dict[str, str] = {}
    for entry in config.carry:
        name, _, written = entry.rpartition(":") if ":" in entry else (entry, "", "string")
        if written not in TYPES:
            choices = ", ".join(TYPES)
            raise ConfigError(
                sentence("setting carry", f"a type must be one of: {choices}", quote(written))
            )
        if name in COLUMNS or name in found or not name:
            must = "a name must not be empty, named twice, or a column of the format"
            raise ConfigError(sentence("setting carry", must, quote(name)))
        found[name] = written
    return found


def carried_values(record: Mapping[str, Any], types: Mapping[str, str]) -> list[Any]:
    """Returns the carried values of one record.

    Raises:
        Refused: ``missing_field``, ``wrong_type`` or ``invalid_unicode``.
    """
    return [_value(record, name, type_name) for name, type_name in types.items()]


def to_columns(rows: Sequence[Sequence[Any]], types: Mapping[str, str]) -> dict[str, Column]:
    """Converts the values of all records to columns."""
    columns: dict[str, Column] = {}
    for i, (name, type_name) in enumerate(types.items()):
        column = np.empty(len(rows), TYPES[type_name][1])
        column[:] = [row[i] for row in rows]
        columns[name] = column
    return columns


def _value(record: Mapping[str, Any], name: str, type_name: str) -> Any:
    value: Any = record.get(name)
    if value is None:
        raise Refused("missing_field", f"no field {name!r} to carry")
    if type_name == "float64" and type(value) is int:
        value = float(value)
    if type(value) is not TYPES[type_name][0] or (
        isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    ):
        detail = f"field {name!r} must be {type_name}, found {quote(value)}"
        kinds = [t for t, (kind, _) in TYPES.items() if type(value) is kind and t != type_name]
        raise Refused("wrong_type", detail + "".join(f" (carry {name}:{t})" for t in kinds))
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("invalid_unicode", f"field {name!r}: {error.reason}") from error
    return value
