"""Reads Parquet and Arrow files as records.

A file is read in batches, each cast to plain types and written as Arrow IPC bytes for
the workers, which convert its rows to Python values. *Plain types* are the types that
Arrow slices cheaply and converts to Python values as JSON has them: no dictionaries,
views or dates. A *dictionary* of a Parquet or Arrow column lists its distinct values
once; rows hold numbers of these.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packstore.errors import InputError, PackstoreError, sentence
from packstore.io.inputs.formats import (
    Format,
    Piece,
    ReadOptions,
    require_distinct_columns,
)
from packstore.io.inputs.hugging_face import class_labels
from packstore.io.inputs.json_text import parse_json

BATCH_ROWS = 1024
"""Maximum number of rows decoded at once."""

BATCH_BYTES = 1 << 30
"""Maximum bytes of a decoded column of a batch in the worst case, that is, if each row
has the longest value of its dictionary: a small file may name a long text many times.
"""

MAX_FOOTER_BYTES = 1 << 26
"""Maximum bytes of a file's footer: enough for half a million column chunks."""

_PARQUET_RULE = "must be a readable Parquet file"
_ARROW_RULE = "must be a readable Arrow IPC file or stream"

_ARROW_MAGIC = b"ARROW1"
_STREAM_MARK = b"\xff\xff\xff\xff"
"""First bytes of an Arrow stream, before the size of its schema."""

_PARQUET_MAGICS = (b"PAR1", b"PARE")
"""Last bytes of a Parquet file with a plain or an encrypted footer."""

_DICTIONARY_HEADER = re.compile(
    rb"\x15\x04\x15([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL
)
"""Start of the header of a dictionary page, in Thrift's compact protocol: its type and
its uncompressed size, the first two fields of ``PageHeader`` (``parquet.thrift`` of
apache/parquet-format), which are always present. The group is the size.
"""

_JSON_MARK = {b"packstore": b"json"}
"""Metadata of a text field that holds JSON."""

# Class of a list type -> function that makes such a type.
_LIST_FACTORIES = {
    pa.ListType: pa.list_,
    pa.LargeListType: pa.large_list,
    pa.ListViewType: pa.list_view,
    pa.LargeListViewType: pa.large_list_view,
}

Conversion = Callable[[Any], Any]
"""Converts a Python value that Arrow returned."""


@contextlib.contextmanager
def as_input_error(where: str, rule: str) -> Iterator[None]:
    """Turn Arrow's errors about damaged data into :class:`InputError`."""
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
            sentence(where, rule=rule, found=str(error), remedy="Write the file again")
        ) from error


# Arrow files and streams


def _read_arrow(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    size = stream.seek(0, os.SEEK_END)
    reader = _open_arrow(stream, path)

    def share_read(_: int) -> float:
        return stream.tell() / size

    with as_input_error(path, _ARROW_RULE):
        yield from _batch_pieces(
            iterate_batches(reader), path, options.block_bytes, share_read
        )


def _open_arrow(stream: BinaryIO, path: str) -> Any:
    """Return a reader of an Arrow file or stream; None if it is empty."""
    with as_input_error(path, _ARROW_RULE):
        stream.seek(0)
        head = stream.read(8)
        if head.startswith(_ARROW_MAGIC):
            end = _last_bytes(stream, 10)
            if end[4:] == _ARROW_MAGIC:
                _require_small_footer(end[:4], path, _ARROW_RULE)
            return open_ipc_file(stream)

        # Streams of Arrow before 0.15 begin with the size of the schema, without mark.
        schema_size = head.removeprefix(_STREAM_MARK)[:4]
        _require_small_footer(schema_size, path, _ARROW_RULE)
        if not head:
            return None
        stream.seek(0)
        return pa.ipc.open_stream(stream, options=_ipc_options())


def open_ipc_file(file: BinaryIO) -> pa.ipc.RecordBatchFileReader:
    """Open an Arrow file for reading in the calling thread."""
    return pa.ipc.open_file(file, options=_ipc_options())


def _ipc_options() -> pa.ipc.IpcReadOptions:
    # A thread of Arrow's that reads a Python file may outlive the interpreter.
    return pa.ipc.IpcReadOptions(use_threads=False)


def iterate_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a reader of a file or stream.

    `reader` None stands for an empty file.
    """
    if reader is None:
        return
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


# Parquet files


def _read_parquet(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Yield pieces from a stream of pages, as a row group may be larger than memory."""
    metadata = _read_footer(stream, path)
    num_rows: int = max(metadata.num_rows, 1)

    def share_read(rows: int) -> float:
        return rows / num_rows

    with as_input_error(path, _PARQUET_RULE):
        file = pq.ParquetFile(
            stream, metadata=metadata, buffer_size=1 << 20, pre_buffer=False
        )
        batch_rows = BATCH_BYTES // _largest_dictionary(stream, metadata)
        batches = file.iter_batches(max(batch_rows, 1))
        yield from _batch_pieces(batches, path, options.block_bytes, share_read)


def _read_footer(stream: BinaryIO, path: str) -> pq.FileMetaData:
    """Read the footer of a Parquet file; raise if it is damaged, or too large."""
    with as_input_error(path, _PARQUET_RULE):
        end = _last_bytes(stream, 8)
        if end[4:] in _PARQUET_MAGICS:
            _require_small_footer(end[:4], path, _PARQUET_RULE)
        return pq.read_metadata(stream)


def _largest_dictionary(stream: BinaryIO, metadata: pq.FileMetaData) -> int:
    """Return the bytes of the largest dictionary of texts in a file.

    No value of a dictionary is longer. The result is at least ``BATCH_BYTES //
    BATCH_ROWS``, so that a batch has at most :data:`BATCH_ROWS` rows.
    """
    largest = BATCH_BYTES // BATCH_ROWS
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(group.num_columns):
            column = group.column(column_number)
            is_text = column.physical_type.endswith("BYTE_ARRAY")
            if not is_text or not column.has_dictionary_page:
                continue
            # A dictionary is part of its column: a small column needs no further look,
            # which saves most reads of page headers.
            if column.total_uncompressed_size > largest:
                largest = max(largest, _dictionary_size(stream, column))
    return largest


def _dictionary_size(stream: BinaryIO, column: pq.ColumnChunkMetaData) -> int:
    """Return the decompressed bytes of a column's dictionary, by its page header."""
    stream.seek(column.dictionary_page_offset)
    header = _DICTIONARY_HEADER.match(stream.read(8))
    if header is None:
        return int(column.total_uncompressed_size)
    # A varint: seven bits in each byte, the lowest first; zigzag doubles the number.
    doubled = 0
    for position, byte in enumerate(header[1]):
        doubled |= (byte & 127) << (7 * position)
    return doubled >> 1


def _last_bytes(stream: BinaryIO, count: int) -> bytes:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - count, 0))
    return stream.read(count)


def _require_small_footer(size: bytes, where: str, rule: str) -> None:
    """Raise if a footer or schema declares too many bytes for memory.

    Args:
        size: the declared size, four bytes as stored (little-endian).
        where: place of the error.
        rule: the start of the broken rule.
    """
    declared_bytes = int.from_bytes(size, "little")
    if declared_bytes > MAX_FOOTER_BYTES:
        raise InputError(
            sentence(
                where,
                rule=f"{rule}, with a footer or schema of at most {MAX_FOOTER_BYTES} "
                "bytes",
                found=f"one of {declared_bytes} bytes",
                remedy="Write it again, in larger row groups",
            )
        )


# Pieces: slices of batches as Arrow IPC bytes


def _batch_pieces(
    batches: Iterable[pa.RecordBatch],
    path: str,
    block_bytes: int,
    share_read: Callable[[int], float],
) -> Iterator[Piece]:
    """Yield the rows of all batches as pieces of Arrow IPC bytes.

    Args:
        batches: all batches of a file.
        path: the file's name in errors.
        block_bytes: maximum bytes of a piece of more than one row.
        share_read: returns the share of the file, 0..1, that was read by the time so
            many rows (its argument) were.
    """
    first = 0
    share_before = 0.0
    for batch in batches:
        share_after = share_read(first + batch.num_rows)
        share_of_row = (share_after - share_before) / max(batch.num_rows, 1)
        share_before = share_after
        for part in _halve(simplify_batch(batch, path), block_bytes):
            yield Piece(
                first=first,
                num_records=part.num_rows,
                payload=_to_ipc(part),
                share=share_of_row * part.num_rows,
            )
            first += part.num_rows


def _halve(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield slices of at most `block_bytes`, or of one row.

    A batch that is too large is halved, again and again.
    """
    if batch.num_rows > 1 and batch.nbytes > block_bytes:
        middle = batch.num_rows // 2
        yield from _halve(batch.slice(0, middle), block_bytes)
        yield from _halve(batch.slice(middle), block_bytes)
    elif batch.num_rows:
        yield batch


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _parse(payload: bytes, path: str, first: int) -> tuple[range, list[object]]:
    where = f"{path}, after row {first}"
    with as_input_error(where, "values must be convertible"):
        batch = pa.ipc.open_stream(payload).read_next_batch()
        values = rows_of(batch, where)
    return range(first, first + len(values)), values


# Plain types: they slice cheaply, and are equal in all formats


def simplify_batch(batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
    """Validate a batch, and cast it to types that :func:`rows_of` converts."""
    with as_input_error(path, "columns must be whole and of a known type"):
        batch.validate(full=True)
        require_distinct_columns(batch.schema.names, path)
        batch = _name_class_labels(batch)
        batch = pa.record_batch(_StorageView(batch))
        # Some types take several casts, e.g. a dictionary of views.
        schema = _plain_schema(batch.schema)
        while not batch.schema.equals(schema):
            batch = batch.cast(schema)
            schema = _plain_schema(batch.schema)
        return batch


def _name_class_labels(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with the names of class labels in place of their numbers."""
    columns = batch.schema.names
    for column, label_names in class_labels(batch.schema.metadata).items():
        if column not in columns:
            continue
        index = columns.index(column)
        if not pa.types.is_integer(batch.schema.field(index).type):
            continue
        numbers = batch.column(index)
        # -1 stands for no label: take the null that is appended to the names.
        positions = pc.if_else(pc.equal(numbers, -1), len(label_names), numbers)
        labels = pa.array([*label_names, None]).take(positions)
        batch = batch.set_column(index, column, labels)
    return batch


class _StorageView:
    """A batch with storage types in place of its extension types.

    An extension type, such as ``arrow.json``, gives a name to values of another type,
    its storage. Arrow's casts of nested extension types may read memory outside of
    their buffers, so the types are replaced without a cast: ``pa.record_batch`` reads
    this object by Arrow's C interface, and gets the arrays with another schema.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(
        self, requested_schema: object = None
    ) -> tuple[object, object]:
        schema = pa.schema([_storage_field(field) for field in self._batch.schema])
        _, array = self._batch.__arrow_c_array__()
        return schema.__arrow_c_schema__(), array


def _storage_field(field: pa.Field) -> pa.Field:
    """Return a field without extension types and metadata, but for the mark of JSON."""
    type_ = field.type
    field = field.remove_metadata()
    if isinstance(type_, pa.BaseExtensionType):
        storage = _storage_field(field.with_type(type_.storage_type))
        if type_.extension_name == "arrow.json":
            return storage.with_metadata(_JSON_MARK)
        return storage
    if pa.types.is_dictionary(type_):
        values = _storage_field(field.with_type(type_.value_type))
        return values.with_type(
            pa.dictionary(type_.index_type, values.type, type_.ordered)
        )
    return field.with_type(_with_fields(type_, _storage_field))


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema after the next cast."""
    return pa.schema([_plain_field(field) for field in schema])


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _plain_type(type_: Any) -> Any:
    """Return the plain type of a type, or the next type on the way to it."""
    kinds = pa.types
    if kinds.is_dictionary(type_):
        # Arrow can't decode a dictionary of views, so its values are cast first.
        values = _plain_type(type_.value_type)
        if values == type_.value_type:
            return values
        return pa.dictionary(type_.index_type, values)
    if kinds.is_string_view(type_):
        return pa.large_string()
    if kinds.is_binary_view(type_):
        return pa.large_binary()
    if kinds.is_timestamp(type_) or kinds.is_date(type_) or kinds.is_time(type_):
        return pa.string()
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_struct(type_):
        return _with_fields(type_, _plain_field)
    return type_


def _with_fields(type_: Any, change: Callable[[pa.Field], pa.Field]) -> Any:
    """Return a nested type with changed fields, and any other type unchanged."""
    kinds = pa.types
    if kinds.is_struct(type_):
        return pa.struct([change(field) for field in type_])
    if kinds.is_map(type_):
        return pa.map_(
            change(type_.key_field), change(type_.item_field), type_.keys_sorted
        )
    if kinds.is_fixed_size_list(type_):
        return pa.list_(change(type_.value_field), type_.list_size)
    list_factory = _LIST_FACTORIES.get(type(type_))
    if list_factory is None:
        return type_
    return list_factory(change(type_.value_field))


# Rows: Python values, with JSON parsed, and without null members of structs


def rows_of(batch: pa.RecordBatch, where: str) -> list[object]:
    """Return the rows of a batch of plain types."""
    with as_input_error(where, "the keys of a map must differ"):
        rows: list[Any] = batch.to_pylist(maps_as_pydicts="strict")
    for field, column in zip(batch.schema, batch.columns, strict=True):
        convert = _conversion(field, column, where)
        if convert is not None:
            for row in rows:
                row[field.name] = convert(row[field.name])
    return rows


def _conversion(field: pa.Field, column: pa.Array, where: str) -> Conversion | None:
    """Return the conversion of a column's values; None if none is needed."""
    kinds = pa.types
    type_ = field.type
    if field.metadata == _JSON_MARK:
        return _json_conversion(where)
    if kinds.is_struct(type_):
        return _struct_conversion(type_, column, where)
    if kinds.is_map(type_):
        convert_value = _conversion(type_.item_field, column.items, where)
        return None if convert_value is None else _map_conversion(convert_value)
    is_list = isinstance(type_, (*_LIST_FACTORIES, pa.FixedSizeListType))
    if is_list:
        convert_item = _conversion(type_.value_field, column.values, where)
        return None if convert_item is None else _list_conversion(convert_item)
    return None


def _json_conversion(where: str) -> Conversion:
    def convert(text: str | None) -> object:
        if not text:  # null, or no text
            return text
        return parse_json(text.encode(), where)

    return convert


def _struct_conversion(
    type_: pa.StructType, column: pa.Array, where: str
) -> Conversion | None:
    conversions = {}  # name of a member -> conversion of its values
    has_nulls = False
    for index, field in enumerate(type_):
        member = column.field(index)
        has_nulls = has_nulls or member.null_count > 0
        convert_member = _conversion(field, member, where)
        if convert_member is not None:
            conversions[field.name] = convert_member
    if not conversions and not has_nulls:
        return None

    def convert(struct: dict[str, Any] | None) -> dict[str, Any] | None:
        if not struct:
            return struct
        # All structs of a column have the same members: null stands for an absent one.
        members = {name: value for name, value in struct.items() if value is not None}
        for name in conversions.keys() & members.keys():
            members[name] = conversions[name](members[name])
        return members

    return convert


def _map_conversion(convert_value: Conversion) -> Conversion:
    def convert(entries: dict[str, Any] | None) -> dict[str, Any] | None:
        if not entries:
            return entries
        return {key: convert_value(value) for key, value in entries.items()}

    return convert


def _list_conversion(convert_item: Conversion) -> Conversion:
    def convert(items: list[Any] | None) -> list[Any] | None:
        if not items:
            return items
        return [convert_item(item) for item in items]

    return convert


PARQUET = Format(unit="row", read=_read_parquet, parse=_parse, check=_read_footer)

ARROW = Format(unit="row", read=_read_arrow, parse=_parse, check=_open_arrow)
"""Arrow IPC: files (also Feather 2) and streams."""
