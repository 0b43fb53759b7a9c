"""Converts records in memory (tables, frames, iterables) to JSON lines.

All go through the same form, so that equal records have equal fingerprints from any container, and
workers get the same blocks as from a file.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa

from packstore.errors import InputError, quote, sentence
from packstore.io.inputs.formats.arrow import batches
from packstore.io.inputs.pieces import Piece, cut
from packstore.io.inputs.tabular import BATCH_ROWS, as_input_error, plain


def is_table(source: object) -> bool:
    """Returns True for an Arrow table or reader, a Polars frame, or a similar object."""
    return any(hasattr(source, name) for name in ("__arrow_c_stream__", "sink_ipc"))


def table_records(table: Any) -> Iterator[object]:
    """Yields the rows of a table, converted a few at a time.

    `table` has the Arrow PyCapsule stream interface, or is a Polars LazyFrame, whose rows are
    copied to a temporary file.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_input_error("<table>", "must be a readable table"))
        if hasattr(table, "sink_ipc"):
            copy = stack.enter_context(tempfile.TemporaryFile())
            _run(table, copy)
            found = batches(copy)
        else:
            found = pa.RecordBatchReader.from_stream(table)
        for batch in found:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from plain(batch.slice(start, BATCH_ROWS), "<table>").to_pylist()


def _run(query: Any, file: BinaryIO) -> None:
    """Writes the rows of a LazyFrame to a file; `collect_batches` ends silently at a panic."""
    try:
        query.sink_ipc(file, compression="lz4", record_batch_size=BATCH_ROWS)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        do = "Give its collect() instead, or Polars 1.38, and space for temporary files (TMPDIR)"
        raise InputError(sentence("<table>", "its query must run", str(error), do)) from error
    file.seek(0)


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
