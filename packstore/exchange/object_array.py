"""Reads an ``.npy`` file that holds an array of Python dicts of lists of numbers, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from packstore.errors import InputError, PackstoreError, quote, sentence
from packstore.exchange.pickles import Machine
from packstore.exchange.values import List, kind_of
from packstore.records import Int64

Row = dict[str, List]


def read_rows(stream: BinaryIO, path: str, keys: frozenset[str]) -> Iterator[Row]:
    """The rows of the array, one after another.

    Args:
        stream: the file; it is read to its end.
        path: what error texts call it.
        keys: the keys of every row, no more and no less; each value is a list.

    Raises:
        InputError: it is not such a file, asks for anything else, or ends early.
    """
    declared, rows = _declared(stream, path), 0
    for row in Machine(stream, path, keys).run():
        rows += 1
        if rows > declared:
            break
        yield row
    if rows != declared:
        found = f"more than {declared}" if rows > declared else str(rows)
        raise InputError(sentence(path, f"must hold the {declared} rows of its header", found))


def numbers(values: List, where: str) -> Int64:
    """A list of whole numbers as int64.

    Raises:
        InputError: there is anything else in it.
    """
    parts: list[npt.ArrayLike] = []
    for part in values.parts:
        if type(part) is int and -(1 << 63) <= part < 1 << 63:
            parts.append([part])
        elif isinstance(part, np.ndarray):
            parts.append(part)
        else:
            raise InputError(sentence(where, "must be whole numbers of 64 bits", kind_of(part)))
    if values.rows:
        raise InputError(sentence(where, "must be whole numbers of 64 bits", "a dict"))
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)


def reals(values: List, where: str) -> npt.NDArray[np.float64]:
    """A list of numbers as float64.

    Raises:
        InputError: there is anything else in it.
    """
    parts: list[npt.ArrayLike] = []
    for part in values.parts:
        if type(part) is float or (type(part) is int and abs(part) < 1 << 63):
            parts.append([float(part)])
        elif isinstance(part, np.ndarray):
            parts.append(part)
        else:
            raise InputError(sentence(where, "must be numbers", kind_of(part)))
    if values.rows:
        raise InputError(sentence(where, "must be numbers", "a dict"))
    return np.concatenate(parts, dtype=np.float64) if parts else np.empty(0, np.float64)


def _declared(stream: BinaryIO, path: str) -> int:
    """Rows that the header of the file declares."""
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
