"""Reads structures of Thrift's compact protocol, in which Parquet writes what is not data.

After the specification in apache/thrift, ``doc/specs/thrift-compact-protocol.md``.
"""

from __future__ import annotations

from typing import Any

from packstore.errors import IntegrityError

_DEEPEST = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_NUMBERS = (4, 5, 6)


class Struct:
    """A structure: its fields by number. Each method raises :class:`IntegrityError` if the field is
    missing or of another type.
    """

    def __init__(self, fields: dict[int, Any]) -> None:
        self._fields = fields

    def has(self, field: int) -> bool:
        """Whether the field is there."""
        return field in self._fields

    def number(self, field: int) -> int:
        """A whole number."""
        value = self._fields.get(field)
        if type(value) is not int:
            raise _broken()
        return value

    def struct(self, field: int) -> Struct:
        """A structure."""
        value = self._fields.get(field)
        if not isinstance(value, Struct):
            raise _broken()
        return value

    def structs(self, field: int) -> list[Struct]:
        """A list of structures."""
        value = self._fields.get(field)
        if not isinstance(value, list) or not all(isinstance(v, Struct) for v in value):
            raise _broken()
        return value


def read_struct(data: bytes) -> tuple[Struct, int]:
    """The structure that `data` begins with, and its bytes.

    Raises:
        IntegrityError: it is broken, or longer than `data`.
    """
    try:
        return _struct(data, 0, 0)
    except IndexError as error:
        raise _broken() from error


def _broken() -> IntegrityError:
    return IntegrityError("its footer and page headers must be whole")


def _struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    if depth > _DEEPEST:
        raise _broken()
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = zigzag(data, at)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, kind, at, depth)
    return Struct(fields), at + 1


def _value(data: bytes, kind: int, at: int, depth: int) -> tuple[Any, int]:
    """A value of any kind; None where it is passed over."""
    if kind in _NUMBERS:
        return zigzag(data, at)
    if kind == _BINARY:
        size, at = varint(data, at)
        return None, at + size
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind in (_TRUE, _FALSE, _BYTE):
        return None, at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise _broken()  # Parquet has no maps


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    size, kind = data[at] >> 4, data[at] & 15
    at += 1
    if size == 15:
        size, at = varint(data, at)
    if size > len(data) - at or depth > _DEEPEST:  # each takes a byte at least
        raise _broken()
    values = []
    for _ in range(size):
        value, at = _value(data, kind, at, depth + 1)
        values.append(value)
    return values, at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The unsigned number at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise _broken()


def zigzag(data: bytes, at: int) -> tuple[int, int]:
    """The signed number at `at`, and where it ends."""
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at
