"""How the place of a record is told, and what the name of its file says."""

from __future__ import annotations

import os

from packstore.io.formats import COMPRESSIONS, FORMATS, SUFFIXES


def format_of(path: str) -> tuple[str | None, str | None]:
    """Format and compression by the name of a file; None where it tells none."""
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return SUFFIXES.get(suffix), compression


def place_of(path: str, ordinal: int) -> str:
    """Where a record is, as :meth:`packstore.records.Rows.where` spells it.

    Args:
        path: of its input, as `sources` names it.
        ordinal: its line, row or item, from 0.
    """
    form, _ = format_of(path)
    units = {"<table>": "row", "<iterable>": "item"}
    unit = FORMATS.load(form).unit if form else units.get(path, "record")
    return f"{path}, {unit} {ordinal + 1}"
