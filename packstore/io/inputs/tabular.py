"""Cuts Arrow record batches into pieces of Arrow IPC bytes, and parses these into records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from packstore.errors import InputError, IntegrityError, PackstoreError, quote, sentence
from packstore.io.inputs.pieces import Piece

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
        names = batch.schema.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            must = "the names of the columns must differ"
            raise InputError(sentence(path, must, f"{quote(twice)} twice"))
        while not batch.schema.equals(schema := _plain_schema(batch.schema)):
            batch = batch.cast(schema)
        return batch


@contextlib.contextmanager
def as_input_error(where: str, must: str) -> Iterator[None]:
    """Turns Arrow's errors about bad data in this context into an :class:`InputError`."""
    try:
        yield
    except PackstoreError as error:
        if not isinstance(error, IntegrityError):
            raise
        raise InputError(sentence(where, must, str(error), "Write the file again")) from error
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


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_type(_plain_type(f.type)) for f in schema])


def _plain_type(type_: Any) -> Any:
    """Returns the plain type of a type, or the next type of a chain of casts to it."""
    kinds = pa.types
    if kinds.is_dictionary(type_):
        plain_values = _plain_type(type_.value_type)
        if plain_values == type_.value_type:
            return plain_values
        return pa.dictionary(type_.index_type, plain_values)  # Arrow can't decode view dictionaries
    if kinds.is_string_view(type_):
        return pa.large_string()
    if kinds.is_binary_view(type_):
        return pa.large_binary()
    if kinds.is_timestamp(type_) or kinds.is_date(type_) or kinds.is_time(type_):
        return pa.string()
    if kinds.is_list(type_):
        return pa.list_(type_.value_field.with_type(_plain_type(type_.value_type)))
    if kinds.is_large_list(type_):
        return pa.large_list(type_.value_field.with_type(_plain_type(type_.value_type)))
    if kinds.is_struct(type_):
        return pa.struct([f.with_type(_plain_type(f.type)) for f in type_])
    return type_
