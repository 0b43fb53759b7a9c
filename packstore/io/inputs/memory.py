"""Converts records in memory (tables, frames, iterables) to JSON lines.

All go through the same form, so that equal records have equal fingerprints from any container, and
workers get the same blocks as from a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from packstore.errors import InputError, quote, sentence
from packstore.io.inputs.pieces import Piece, cut
from packstore.io.inputs.tabular import BATCH_ROWS, as_input_error, plain


def is_table(source: object) -> bool:
    """Returns True for an Arrow table or reader, a Polars frame, or a similar object."""
    return any(hasattr(source, name) for name in ("__arrow_c_stream__", "collect_batches"))


def table_records(table: Any) -> Iterator[object]:
    """Yields the rows of a table, converted a few at a time.

    Args:
        table: an object with the Arrow PyCapsule stream interface, or a Polars LazyFrame.
    """
    if hasattr(table, "collect_batches"):
        for frame in table.collect_batches(maintain_order=True):
            yield from table_records(frame)
        return
    with as_input_error("<table>", "must be a readable table"):
        for batch in pa.RecordBatchReader.from_stream(table):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from plain(batch.slice(start, BATCH_ROWS), "<table>").to_pylist()


def record_pieces(records: Iterable[object], path: str, block_bytes: int) -> Iterator[Piece]:
    """Yields the records as pieces of JSON lines: ``json.dumps`` of each, without spaces.

    Raises:
        InputError: a record contains a value that JSON cannot represent.
    """
    lines = (_line(record, f"{path}, item {n}") for n, record in enumerate(records, 1))
    for piece in cut(lines, block_bytes, len):
        yield piece._replace(payload=b"".join(piece.payload))


def _line(record: object, where: str) -> bytes:
    try:
        text = json.dumps(record, separators=(",", ":"), default=_plain_value)
    except (TypeError, ValueError, RecursionError) as error:
        must = "a record must be made of text, numbers, lists and dicts"
        found = f"{error}, in {quote(record)}"
        do = "Convert that field, or leave it out"
        raise InputError(sentence(where, must, found, do)) from error
    return text.encode() + b"\n"


def _plain_value(value: Any) -> object:
    """Converts containers and scalars of other libraries to Python's builtin types."""
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("tolist", "isoformat"):  # of arrays; of dates and times
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__}")
