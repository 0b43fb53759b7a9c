"""Cuts Arrow record batches into pieces of Arrow IPC bytes, and parses these into records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from packstore.errors import InputError, PackstoreError, sentence
from packstore.io.inputs.pieces import Piece, refuse_equal_names

BATCH_ROWS = 1024
"""Rows decoded at once."""


def pieces(batches: Iterable[pa.RecordBatch], path: str, block_bytes: int) -> Iterator[Piece]:
    """Yields the rows of all batches as pieces.

    Raises:
        InputError: a batch is corrupt, or two columns have one name.
    """
    first = 0
    for batch in batches:
        for part in _cut(plain(batch, path), block_bytes):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_batch(part)
            yield Piece(first, part.num_rows, sink.getvalue().to_pybytes())
            first += part.num_rows


def parse(payload: bytes, path: str, first: int) -> tuple[range, list[object]]:
    """Parses a piece into records."""
    with as_input_error(f"{path}, after row {first}", "values must be convertible"):
        values: list[object] = pa.ipc.open_stream(payload).read_all().to_pylist()
    return range(first, first + len(values)), values


def plain(batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
    """Validates a batch and casts it to types that slice cheaply and are equal in all formats.

    Dictionaries and views, whose slices keep all values, become plain columns; dates and times
    become text.
    """
    with as_input_error(path, "columns must be whole and of a known type"):
        batch.validate(full=True)
        refuse_equal_names(batch.schema.names, path)
        while not batch.schema.equals(schema := pa.schema(_plain_fields(batch.schema))):
            batch = batch.cast(schema)
        return batch


@contextlib.contextmanager
def as_input_error(where: str, must: str) -> Iterator[None]:
    """Turns Arrow's errors about bad data in this context into an :class:`InputError`."""
    try:
        yield
    except PackstoreError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(sentence(where, must, str(error), "Write the file again")) from error


def _cut(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yields slices of at most `block_bytes`, or of one row."""
    if batch.num_rows > 1 and batch.nbytes > block_bytes:
        half = batch.num_rows // 2
        yield from _cut(batch.slice(0, half), block_bytes)
        yield from _cut(batch.slice(half), block_bytes)
    elif batch.num_rows:
        yield batch


def _plain_fields(fields: Iterable[pa.Field]) -> list[pa.Field]:
    return [f.with_type(_plain_type(f.type)) for f in fields]


def _plain_type(type_: Any) -> Any:
    """Returns the plain type of a type, or the next type of a chain of casts to it."""
    kinds = pa.types
    if kinds.is_dictionary(type_):
        values = _plain_type(type_.value_type)  # first these: Arrow can't decode views
        return values if values == type_.value_type else pa.dictionary(type_.index_type, values)
    if kinds.is_string_view(type_):
        return pa.large_string()
    if kinds.is_binary_view(type_):
        return pa.large_binary()
    if kinds.is_timestamp(type_) or kinds.is_date(type_) or kinds.is_time(type_):
        return pa.string()
    if kinds.is_list(type_) or kinds.is_large_list(type_):
        make = pa.list_ if kinds.is_list(type_) else pa.large_list
        return make(*_plain_fields([type_.value_field]))
    if kinds.is_struct(type_):
        return pa.struct(_plain_fields(type_))
    return type_
