"""Further scalar columns of the input that are kept beside the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.records import Column
from packstore.schema import COLUMNS
from packstore.tokenizer.refusals import Refused

TYPES: dict[str, tuple[type, Any]] = {
    "string": (str, np.object_),
    "int64": (int, np.int64),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}
"""Type name -> its Python class and its numpy type."""


def parse_carry(config: TokenizeConfig) -> dict[str, str]:
    """Names of the carried columns and their types; without a type it is ``string``.

    Raises:
        ConfigError: an unknown type, or a name that is taken.
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
    """The carried values of one record.

    Raises:
        Refused: ``missing_field``, ``wrong_type`` or ``invalid_unicode``.
    """
    return [_value(record, name, type_name) for name, type_name in types.items()]


def to_columns(rows: Sequence[Sequence[Any]], types: Mapping[str, str]) -> dict[str, Column]:
    """The values of all records as columns."""
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
        raise Refused("wrong_type", f"field {name!r} must be {type_name}, found {quote(value)}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("invalid_unicode", f"field {name!r}: {error.reason}") from error
    return value
