"""Typed access to the fields of parsed JSON, with an error that names the field."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from packstore.errors import FormatError, quote, sentence

_TOP = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Fields:
    """The fields of one JSON object. Fields that nobody asks for are ignored.

    Every method raises :class:`FormatError` if the field is missing or of the wrong type.

    Args:
        value: what must be an object.
        where: its place, for error texts.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(sentence(where, "must be a JSON object", quote(value)))
        self._values, self.where = value, where

    def text(self, name: str) -> str:
        """A string."""
        value = self._get(name)
        if not isinstance(value, str):
            self.refuse(name, "a string", value)
        return str(value)

    def count(self, name: str, low: int = 0) -> int:
        """A whole number of at least `low` that fits in 64 bits."""
        value = self._get(name)
        if type(value) is not int or not low <= value <= _TOP:
            self.refuse(name, f"a whole number of at least {low}", value)
        return int(value)

    def sha256(self, name: str) -> str:
        """A sha256: 64 hexadecimal digits in lower case."""
        value = self.text(name)
        if not _SHA256.fullmatch(value):
            self.refuse(name, "64 hexadecimal digits", value)
        return value

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._get(name)
        if not isinstance(value, list):
            self.refuse(name, "a list", value)
        return list(value)

    def child(self, name: str) -> Fields:
        """An object."""
        return Fields(self._get(name), f"{self.where}, field {name!r}")

    def mapping(self, name: str) -> dict[str, Any]:
        """An object whose members may be anything."""
        return dict(self.child(name)._values)

    def refuse(self, name: str, must: str, value: object) -> NoReturn:
        """Raises: field `name` must be `must`, `value` was found."""
        raise FormatError(sentence(self.where, f"field {name!r} must be {must}", quote(value)))

    def _get(self, name: str) -> Any:
        if name not in self._values:
            raise FormatError(sentence(self.where, f"must have a field {name!r}", "none"))
        return self._values[name]
