"""Reads an ``.npy`` file that holds an array of Python dicts of lists of numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from packstore.errors import InputError, PackstoreError, quote, sentence
from packstore.exchange.pickles import load
from packstore.format.arrays import Int64

Row = dict[str, list[Any]]


def read_rows(stream: BinaryIO, path: str, keys: frozenset[str]) -> Iterator[Row]:
    """Yields the rows of the array, all of which are in memory.

    Args:
        stream: the file; it is read to its end.
        path: name of the file in error texts.
        keys: the exact keys of every row; each value is a list.

    Raises:
        InputError: it is not such a file.
    """
    declared, rows = _declared(stream, path), load(stream.read(), path)
    if len(rows) != declared:
        must = f"must hold the {declared} rows of its header"
        raise InputError(sentence(path, must, str(len(rows))))
    seen: set[int] = set()
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        if type(row) is not dict or row.keys() != keys:
            must = f"must be a dict with the keys {', '.join(sorted(keys))}"
            found = ", ".join(map(_kind, row)) if type(row) is dict else _kind(row)
            raise InputError(sentence(where, must, found))
        for name, values in row.items():
            if type(values) is not list:
                raise InputError(sentence(f"{where}, {name}", "must be a list", _kind(values)))
        # A list that is used repeatedly could make any number of packs from a few bytes.
        used = {id(row), *map(id, row.values())}
        if len(used) <= len(keys) or used & seen:
            raise InputError(
                sentence(where, "must have lists of its own", "one that is used twice")
            )
        seen |= used
        yield row


def numbers(values: list[Any], where: str) -> Int64:
    """Converts a list of integers to int64.

    Raises:
        InputError: a value is no integer of 64 bits.
    """
    if set(map(type, values)) <= {int}:
        with contextlib.suppress(OverflowError):
            return np.array(values, np.int64)
    other = [v for v in values if type(v) is not int]
    wrong = other[0] if other else max(values, key=abs)
    raise InputError(sentence(where, "must be whole numbers of 64 bits", _kind(wrong)))


def reals(values: list[Any], where: str) -> npt.NDArray[np.float64]:
    """Converts a list of numbers to float64.

    Raises:
        InputError: a value is no number.
    """
    if set(map(type, values)) <= {int, float}:
        return np.array(values, np.float64)
    wrong = next(v for v in values if type(v) not in (int, float))
    raise InputError(sentence(where, "must be numbers", _kind(wrong)))


def _kind(value: Any) -> str:
    """Describes a value for error texts, briefly."""
    if value is None or isinstance(value, str | int | float):
        return quote(value)
    return "a " + type(value).__name__.lstrip("_")


def _declared(stream: BinaryIO, path: str) -> int:
    """Number of rows in the header of the file."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    except PackstoreError:
        raise
    except Exception as error:  # numpy reads the header as Python, whose parser raises many things
        must = "must begin with the header of an .npy file"
        raise InputError(sentence(path, must, quote(str(error), 120))) from error
    if dtype != np.dtype(object) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        found = f"shape {quote(shape)} of {quote(str(dtype))}"
        raise InputError(sentence(path, "must be a flat array of objects", found))
    return shape[0]
