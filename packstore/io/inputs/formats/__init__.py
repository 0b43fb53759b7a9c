"""File formats of the input: a module and a line in :data:`FORMATS` for each.

One process reads: :attr:`~.pieces.Format.read` cuts a file into payloads and inspects records as
little as possible. Workers parse: :attr:`~.pieces.Format.parse` turns a payload into records.
"""

from __future__ import annotations

import os

from packstore.io.inputs.pieces import Format
from packstore.registry import Registry

FORMATS: Registry[Format] = Registry(
    "input format",
    {
        "jsonl": "packstore.io.inputs.formats.jsonl:JSONL",
        "json": "packstore.io.inputs.formats.json:JSON",
        "parquet": "packstore.io.inputs.formats.parquet:PARQUET",
        "arrow": "packstore.io.inputs.formats.arrow:ARROW",
        "csv": "packstore.io.inputs.formats.csv:CSV",
        "tsv": "packstore.io.inputs.formats.csv:TSV",
    },
)

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Suffix of a file name -> its format."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Last suffix of a file name -> its compression."""


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
