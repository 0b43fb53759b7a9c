"""Footers of Parquet files taken apart and put together again, byte for byte.

Thrift's compact protocol, as in :mod:`packstore.io.thrift`, with every value kept. For footers that
this process made: nothing is checked.
"""

from __future__ import annotations

from typing import Any

from packstore.io.thrift import varint, zigzag

I16, I32, I64, BINARY, LIST, STRUCT = 4, 5, 6, 8, 9, 12
_TRUE, _FALSE = 1, 2

Fields = dict[int, tuple[int, Any]]
"""A structure: number of a field -> its type and value, in the order of the file. The value of a
list is the type of its elements and the elements."""


def unpack_struct(data: bytes, at: int = 0) -> tuple[Fields, int]:
    """The structure at `at`, and where it ends."""
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = zigzag(data, at)
        kind = head & 15
        value, at = (None, at) if kind in (_TRUE, _FALSE) else _unpack(data, kind, at)
        fields[number] = kind, value
    return fields, at + 1


def _unpack(data: bytes, kind: int, at: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        return zigzag(data, at)
    if kind == STRUCT:
        return unpack_struct(data, at)
    if kind == BINARY:
        size, at = varint(data, at)
        return data[at : at + size], at + size
    if kind != LIST:  # a byte, or a truth in a list
        return data[at], at + 1
    size, inner = data[at] >> 4, data[at] & 15
    at += 1
    if size == 15:
        size, at = varint(data, at)
    values = []
    for _ in range(size):
        value, at = _unpack(data, inner, at)
        values.append(value)
    return (inner, values), at


def pack_struct(fields: Fields) -> bytes:
    """The inverse of :func:`unpack_struct`."""
    out = bytearray()
    _pack_struct(fields, out)
    return bytes(out)


def _pack_struct(fields: Fields, out: bytearray) -> None:
    last = 0
    for number, (kind, value) in fields.items():
        step = number - last
        if 0 < step < 16:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            _number(number, out)
        last = number
        if kind not in (_TRUE, _FALSE):
            _pack(kind, value, out)
    out.append(0)


def _pack(kind: int, value: Any, out: bytearray) -> None:
    if kind in (I16, I32, I64):
        _number(value, out)
    elif kind == STRUCT:
        _pack_struct(value, out)
    elif kind == BINARY:
        _size(len(value), out)
        out += value
    elif kind != LIST:
        out.append(value)
    else:
        inner, values = value
        if len(values) < 15:
            out.append(len(values) << 4 | inner)
        else:
            out.append(15 << 4 | inner)
            _size(len(values), out)
        for one in values:
            _pack(inner, one, out)


def _number(value: int, out: bytearray) -> None:
    _size(value << 1 ^ value >> 63, out)


def _size(value: int, out: bytearray) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
