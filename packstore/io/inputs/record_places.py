"""Formats the places of records, and reads formats from file names."""

from __future__ import annotations

import os

from packstore.io.inputs.formats import COMPRESSIONS, FORMATS, SUFFIXES


def format_of(path: str) -> tuple[str | None, str | None]:
    """Returns format and compression by the name of a file; None if the name has none."""
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return SUFFIXES.get(suffix), compression


def place_of(path: str, ordinal: int) -> str:
    """Returns the place of a record, in the form of :meth:`packstore.format.arrays.Rows.where`.

    Args:
        path: of its input, as in `sources`.
        ordinal: of its line, row or item, from 0.
    """
    form, _ = format_of(path)
    units = {"<table>": "row", "<iterable>": "item"}
    unit = FORMATS.load(form).unit if form else units.get(path, "record")
    return f"{path}, {unit} {ordinal + 1}"
