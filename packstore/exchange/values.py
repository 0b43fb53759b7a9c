"""What a pickle machine makes of a file: tokens, lists and an array, and nothing that can act."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packstore.errors import quote


@dataclass(frozen=True, slots=True)
class Name:
    """A name out of the file: a token, not the thing."""

    name: str


@dataclass(slots=True, eq=False)
class List:
    """A list of the file.

    Attributes:
        parts: what is in it, in order; whole numbers mostly in runs, int64 arrays.
        rows: rows in it, which were given already.
    """

    parts: list[Any] = field(default_factory=list)
    rows: int = 0


@dataclass(slots=True, eq=False)
class Array:
    """The array, before and after it got its rows."""

    shape: Any = None
    rows: List | None = None


class DType:
    """The data type of Python objects."""


ROW, MARK = object(), object()
"""A row that was given already; the mark under some values."""


def kind_of(value: Any) -> str:
    """What a value is, for error texts; short, however large it is."""
    if isinstance(value, str | int | float) and not (type(value) is int and abs(value) >> 64):
        return quote(value)
    names = {
        List: "a list",
        dict: "a dict without all its keys",
        int: "a very large number",
        np.ndarray: "whole numbers",
    }
    return "a dict" if value is ROW else names.get(type(value), "something else")
