"""Tables as records: Parquet and Arrow files, tables, frames and iterables in
memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packstore.config.record_fields import JUDGING_NUMBERS
from packstore.errors import InputError, PackstoreError, quote, sentence
from packstore.io.inputs.hugging_face import class_labels
from packstore.io.inputs.pieces import (
    Format,
    Piece,
    ReadOptions,
    cut,
    refuse_equal_names,
)
from packstore.io.inputs.text import parse_json

BATCH_ROWS = 1024
"""Rows decoded at once."""

BATCH_BYTES = 1 << 30
"""Maximum bytes of a batch's values in a column, if each is the longest of its
dictionary.
"""

MAX_FOOTER_BYTES = 1 << 26
"""Maximum bytes of the footer of a file: half a million column chunks."""

_PARQUET, _ARROW = (
    f"must be a readable {f}" for f in ("Parquet file", "Arrow IPC file or stream")
)
_MAGIC = b"ARROW1"
# Type and uncompressed size: the first two fields, always present, of a page header
# (PageHeader in parquet.thrift of apache/parquet-format) in Thrift's compact protocol.
_DICTIONARY_HEADER = re.compile(
    rb"\x15\x04\x15([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL
)
_JSON = {b"packstore": b"json"}  # metadata of a field
_LISTS = {
    pa.ListType: pa.list_,
    pa.LargeListType: pa.large_list,
    pa.ListViewType: pa.list_view,
    pa.LargeListViewType: pa.large_list_view,
}
_OPTIONS = pa.ipc.IpcReadOptions(
    use_threads=False
)  # our threads read; see io/dataset/reader.py


def is_table(source: object) -> bool:
    """Returns True for an Arrow table or reader, a Polars frame, or a similar
    object.
    """
    return any(hasattr(source, name) for name in ("__arrow_c_stream__", "sink_ipc"))


def table_records(table: Any) -> Iterator[object]:
    """Yields the rows of a table, a few at a time; those of a Polars LazyFrame from a
    copy.
    """
    with (
        _as_input_error("<table>", "must be a readable table"),
        tempfile.TemporaryFile() as copy,
    ):
        lazy = hasattr(table, "sink_ipc")
        batches = _run(table, copy) if lazy else pa.RecordBatchReader.from_stream(table)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _records(
                    _plain(batch.slice(start, BATCH_ROWS), "<table>"), "<table>"
                )


def record_pieces(
    records: Iterable[object], path: str, block_bytes: int
) -> Iterator[Piece]:
    """Yields records as JSON lines: equal ones have equal fingerprints from any
    container.
    """
    lines = (_line(record, f"{path}, item {n}") for n, record in enumerate(records, 1))
    for piece in cut(lines, block_bytes, len):
        yield piece._replace(payload=b"".join(piece.payload))


def _run(query: Any, file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Reads a LazyFrame through a file; Polars' `collect_batches` ends silently at a
    panic.
    """
    try:
        query.sink_ipc(file, compression="lz4", record_batch_size=BATCH_ROWS)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        remedy = (
            "Give its collect() instead, or Polars 1.38, and space for temporary files"
        )
        raise InputError(
            sentence("<table>", "its query must run", str(error), remedy)
        ) from error
    file.seek(0)
    return _batches(pa.ipc.open_file(file, options=_OPTIONS))


def _line(record: object, where: str) -> bytes:
    try:
        text = json.dumps(record, separators=(",", ":"), default=_plain_value)
        if "NaN" in text:  # of pandas' to_dict("records"), its nulls
            given = _without_nan(record)
            text = json.dumps(given, separators=(",", ":"), default=_plain_value)
    except (TypeError, ValueError, RecursionError) as error:
        rule = "a record must be made of text, numbers, lists and dicts"
        found = f"{error}, in {quote(record)}"
        raise InputError(sentence(where, rule, found, "Convert that field")) from error
    return text.encode() + b"\n"


def _plain_value(value: Any) -> object:
    """Converts containers and scalars of other libraries to Python's builtin types."""
    if isinstance(value, Mapping):
        return dict(value)
    if str(getattr(value, "dtype", "")) == "object":
        return _without_nulls(value)
    for method in ("tolist", "isoformat"):  # of arrays; of dates and times
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__}")


def _without_nan(value: Any, is_record: bool = True) -> Any:
    """Returns a record without NaN, but for items of lists, and where a number is to be
    one.
    """
    if isinstance(value, Mapping):
        return {
            name: _without_nan(member, is_record=False)
            for name, member in value.items()
            if not (isinstance(member, float) and member != member)
            or (is_record and name in JUDGING_NUMBERS)
        }
    return (
        [_without_nan(item, is_record=False) for item in value]
        if type(value) is list
        else value
    )


def _without_nulls(value: Any) -> Any:
    """Returns an array of objects, as pandas has them of Arrow, without null members of
    structs.
    """
    if isinstance(value, Mapping):
        members = {name: _without_nulls(member) for name, member in value.items()}
        return {name: member for name, member in members.items() if member is not None}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [*map(_without_nulls, value)]
    return None if value != value else value  # NaN


def _read_arrow(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    size = stream.seek(0, os.SEEK_END)
    reader = _arrow(stream, path)
    with _as_input_error(path, _ARROW):
        batches = _batches(reader)
        yield from _pieces(
            batches, path, options.block_bytes, lambda _: stream.tell() / size
        )


def _arrow(stream: BinaryIO, path: str) -> Any:
    """Returns a reader of a file or a stream, as the first bytes tell; None for no
    bytes.
    """
    with _as_input_error(path, _ARROW):
        stream.seek(0)
        head = stream.read(8)
        if head[:6] == _MAGIC:
            end = _end(stream, 10)
            if end[4:] == _MAGIC:
                _check_footer(end, path, _ARROW)
            return pa.ipc.open_file(stream, options=_OPTIONS)
        _check_footer(
            head[4:] if head[:4] == b"\xff" * 4 else head, path, _ARROW
        )  # its schema
        stream.seek(0)
        return pa.ipc.open_stream(stream, options=_OPTIONS) if head else None


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Yields the record batches of a file or a stream."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return map(reader.get_batch, range(reader.num_record_batches))
    return iter(reader or ())


def _read_parquet(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Streams the pages, as a row group may be larger than memory; fewer rows
    if large.
    """
    metadata = _footer(stream, path)
    with _as_input_error(path, _PARQUET):
        how = {"buffer_size": 1 << 20, "pre_buffer": False}
        file = pq.ParquetFile(stream, metadata=metadata, **how)
        rows = BATCH_BYTES // _largest_dictionary(stream, metadata)
        batches = file.iter_batches(max(rows, 1))
        reached = (1 / max(metadata.num_rows, 1)).__mul__
        yield from _pieces(batches, path, options.block_bytes, reached)


def _footer(stream: BinaryIO, path: str) -> pq.FileMetaData:
    with _as_input_error(path, _PARQUET):
        end = _end(stream, 8)
        if end[4:] in (b"PAR1", b"PARE"):  # the footer is plain, or encrypted
            _check_footer(end, path, _PARQUET)
        return pq.read_metadata(stream)


def _end(stream: BinaryIO, count: int) -> bytes:
    """Returns the last bytes."""
    stream.seek(max(stream.seek(0, os.SEEK_END) - count, 0))
    return stream.read(count)


def _check_footer(size: bytes, where: str, rule: str) -> None:
    """Refuses a footer by its size, in the first four bytes of `size`."""
    declared = int.from_bytes(size[:4], "little")
    if declared > MAX_FOOTER_BYTES:
        rule += f", with a footer or schema of at most {MAX_FOOTER_BYTES} bytes"
        remedy = "Write it again, in larger row groups"
        raise InputError(sentence(where, rule, f"one of {declared} bytes", remedy))


def _largest_dictionary(stream: BinaryIO, metadata: pq.FileMetaData) -> int:
    """Returns the bytes of the largest dictionary of texts; at least those of no
    consequence.
    """
    largest = BATCH_BYTES // BATCH_ROWS
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            size = column.total_uncompressed_size
            texts = column.has_dictionary_page and column.physical_type.endswith(
                "BYTE_ARRAY"
            )
            if texts and size > largest:
                stream.seek(column.dictionary_page_offset)
                if header := _DICTIONARY_HEADER.match(stream.read(8)):
                    # Seven bits in each byte, the lowest first; zigzag doubles the
                    # number.
                    size = (
                        sum((byte & 127) << 7 * i for i, byte in enumerate(header[1]))
                        >> 1
                    )
                largest = max(largest, size)
    return largest


def _pieces(
    batches: Iterable[pa.RecordBatch],
    path: str,
    block_bytes: int,
    reached: Callable[[int], float],
) -> Iterator[Piece]:
    """Yields the rows of all batches as pieces of Arrow IPC bytes.

    `reached` returns the part of the file that was read, for a number of rows.
    """
    first, before = 0, 0.0
    for batch in batches:
        end = reached(first + batch.num_rows)
        share = (end - before) / max(batch.num_rows, 1)
        before = end
        for part in _cut(_plain(batch, path), block_bytes):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_batch(part)
            payload = sink.getvalue().to_pybytes()
            yield Piece(first, part.num_rows, payload, share * part.num_rows)
            first += part.num_rows


def _parse(payload: bytes, path: str, first: int) -> tuple[range, list[object]]:
    where = f"{path}, after row {first}"
    with _as_input_error(where, "values must be convertible"):
        values = _records(pa.ipc.open_stream(payload).read_next_batch(), where)
    return range(first, first + len(values)), values


def _records(batch: pa.RecordBatch, where: str) -> list[object]:
    """Returns the rows of a plain batch: JSON is parsed, null members of structs are
    absent.
    """
    with _as_input_error(where, "the keys of a map must differ"):
        rows: list[Any] = batch.to_pylist(maps_as_pydicts="strict")
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if convert := _conversion(field, column, where):
            for row in rows:
                row[field.name] = convert(row[field.name])
    return rows


def _conversion(
    field: pa.Field, column: pa.Array, where: str
) -> Callable[[Any], Any] | None:
    """Returns the function that converts the Python values of a column; None if none is
    needed.
    """
    kinds, type_ = pa.types, field.type
    if field.metadata == _JSON:
        return lambda text: text and parse_json(text.encode(), where)
    if kinds.is_struct(type_):
        members = [column.field(i) for i in range(type_.num_fields)]
        inner = {
            f.name: _conversion(f, m, where)
            for f, m in zip(type_, members, strict=True)
        }
        convert = {name: function for name, function in inner.items() if function}
        if not convert and not any(member.null_count for member in members):
            return None
        # Arrow gives all structs of a column the members of each: null says that there
        # is none.
        return lambda struct: (
            struct
            and {
                name: convert[name](value) if name in convert else value
                for name, value in struct.items()
                if value is not None
            }
        )
    if kinds.is_map(type_) and (
        held := _conversion(type_.item_field, column.items, where)
    ):
        return lambda entries: (
            entries and {n: held(value) for n, value in entries.items()}
        )
    is_list = isinstance(type_, (*_LISTS, pa.FixedSizeListType))
    if is_list and (item := _conversion(type_.value_field, column.values, where)):
        return lambda values: values and [*map(item, values)]
    return None


def _plain(batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
    """Validates a batch and casts it to types that slice cheaply and are equal in all
    formats.
    """
    with _as_input_error(path, "columns must be whole and of a known type"):
        batch.validate(full=True)
        refuse_equal_names(batch.schema.names, path)
        for name, names in class_labels(batch.schema.metadata).items():
            if name in batch.schema.names and pa.types.is_integer(
                batch.schema.field(name).type
            ):
                none = pc.equal(batch[name], -1)
                chosen = pc.if_else(none, len(names), batch[name])
                at = batch.schema.names.index(name)
                batch = batch.set_column(
                    at, name, pa.array([*names, None]).take(chosen)
                )
        batch = pa.record_batch(_Stored(batch))
        while not batch.schema.equals(
            schema := pa.schema(map(_plain_field, batch.schema))
        ):
            batch = batch.cast(schema)
        return batch


class _Stored:
    """A batch with the types that its extension types are stored as; fields of JSON are
    marked.

    Arrow's casts of nested extension types may read memory that is not theirs: none
    meets one.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(
        self, requested_schema: object = None
    ) -> tuple[object, object]:
        schema = pa.schema(map(_stored, self._batch.schema))
        return schema.__arrow_c_schema__(), self._batch.__arrow_c_array__()[1]


def _stored(field: pa.Field) -> pa.Field:
    """Returns a field without extension types and metadata, but for the mark of
    JSON.
    """
    type_, field = field.type, field.remove_metadata()
    if isinstance(type_, pa.BaseExtensionType):
        inner = _stored(field.with_type(type_.storage_type))
        return (
            inner.with_metadata(_JSON)
            if type_.extension_name == "arrow.json"
            else inner
        )
    if pa.types.is_dictionary(type_):
        inner = _stored(field.with_type(type_.value_type))
        return inner.with_type(
            pa.dictionary(type_.index_type, inner.type, type_.ordered)
        )
    return field.with_type(_nested(type_, _stored))


@contextlib.contextmanager
def _as_input_error(where: str, rule: str) -> Iterator[None]:
    """Turns Arrow's errors about bad data in this context into an
    :class:`InputError`.
    """
    try:
        yield
    except PackstoreError:
        raise
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        OverflowError,
        KeyError,
        MemoryError,
    ) as error:
        raise InputError(
            sentence(where, rule, str(error), "Write the file again")
        ) from error


def _cut(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yields slices of at most `block_bytes`, or of one row."""
    if batch.num_rows > 1 and batch.nbytes > block_bytes:
        half = batch.num_rows // 2
        yield from _cut(batch.slice(0, half), block_bytes)
        yield from _cut(batch.slice(half), block_bytes)
    elif batch.num_rows:
        yield batch


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _nested(type_: Any, change: Callable[[pa.Field], pa.Field]) -> Any:
    """Returns a type whose fields are changed; one without fields as it is."""
    kinds = pa.types
    if kinds.is_struct(type_):
        return pa.struct([*map(change, type_)])
    if kinds.is_map(type_):
        return pa.map_(
            change(type_.key_field), change(type_.item_field), type_.keys_sorted
        )
    if kinds.is_fixed_size_list(type_):
        return pa.list_(change(type_.value_field), type_.list_size)
    make = _LISTS.get(type(type_))
    return make(change(type_.value_field)) if make else type_


def _plain_type(type_: Any) -> Any:
    """Returns the plain type of a type, or the next type of a chain of casts to it."""
    kinds = pa.types
    if kinds.is_dictionary(type_):
        values = _plain_type(type_.value_type)  # first these: Arrow can't decode views
        return (
            values
            if values == type_.value_type
            else pa.dictionary(type_.index_type, values)
        )
    if kinds.is_string_view(type_):
        return pa.large_string()
    if kinds.is_binary_view(type_):
        return pa.large_binary()
    if kinds.is_timestamp(type_) or kinds.is_date(type_) or kinds.is_time(type_):
        return pa.string()
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_struct(type_):
        return _nested(type_, _plain_field)
    return type_


PARQUET = Format(unit="row", read=_read_parquet, parse=_parse, check=_footer)
ARROW = Format(unit="row", read=_read_arrow, parse=_parse, check=_arrow)
"""Arrow IPC: files (also Feather 2) and streams."""
