"""Records that are in no file: Arrow tables, Polars frames, Hugging Face datasets and
other iterables.

All are written as JSON lines, so that equal records have equal fingerprints whatever
container they come from.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from packstore.config.record_fields import JUDGING_NUMBERS
from packstore.errors import InputError, quote, sentence
from packstore.io.inputs.formats import Piece, cut_into_pieces
from packstore.io.inputs.hugging_face import several_splits
from packstore.io.inputs.tables import (
    BATCH_ROWS,
    as_input_error,
    iterate_batches,
    open_ipc_file,
    rows_of,
    simplify_batch,
)


@dataclass(frozen=True, eq=False)
class MemorySource:
    """Records in memory, or in an open stream.

    Attributes:
        path: stands for the path of a file in messages, such as ``<table>``; a key of
            :data:`packstore.io.inputs.formats.UNITS`.
        records: an iterable of records, or a binary stream of JSON lines.
        num_records: None if unknown.
        is_finite: False for an iterable that may be endless.
    """

    path: str
    records: Any
    num_records: int | None
    is_finite: bool

    @property
    def is_stream(self) -> bool:
        """True for a binary stream."""
        return hasattr(self.records, "readinto")


def open_in_memory(source: Any) -> MemorySource:
    """Return the records of any source other than paths.

    Raises:
        InputError: the source is neither a table, an iterable of records nor a stream,
            or has several splits.
    """
    source = _without_format(_only_split(source))
    num_records = len(source) if hasattr(source, "__len__") else None
    is_sized = num_records is not None
    if _is_table(source):
        return MemorySource(
            path="<table>",
            records=_TableRecords(source),
            num_records=num_records,
            is_finite=True,
        )
    if hasattr(source, "readinto"):
        return MemorySource(
            path="<standard input>",
            records=source,
            num_records=num_records,
            is_finite=is_sized,
        )
    # A mapping is an iterable, too: of its names.
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        return MemorySource(
            path="<iterable>",
            records=source,
            num_records=num_records,
            is_finite=is_sized,
        )

    raise InputError(
        sentence(
            "input",
            rule="must be a path, a list of paths, a table, or an iterable of records",
            found=f"a {type(source).__name__}",
            remedy="Give a list of records" if isinstance(source, Mapping) else "",
        )
    )


# JSON lines


def record_pieces(
    records: Iterable[object], path: str, block_bytes: int
) -> Iterator[Piece]:
    """Yield pieces of JSON lines."""
    if _is_dataset(records):
        records = _dataset_records(records)
    lines = (
        _json_line(record, f"{path}, item {number}")
        for number, record in enumerate(records, start=1)
    )
    for piece in cut_into_pieces(lines, block_bytes, size_of=len):
        yield piece._replace(payload=b"".join(piece.payload))


def _json_line(record: object, where: str) -> bytes:
    try:
        text = _to_json(record)
        # pandas' to_dict("records") has NaN for null, but among `JUDGING_NUMBERS` NaN
        # is a wrong number. To search the text is cheaper than to search each record.
        if "NaN" in text:
            text = _to_json(_without_nan(record, number_names=JUDGING_NUMBERS))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            sentence(
                where,
                rule="a record must be made of text, numbers, lists and dicts",
                found=f"{error}, in {quote(record)}",
                remedy="Convert that field",
            )
        ) from error
    return text.encode() + b"\n"


def _to_json(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), default=_to_builtin)


def _to_builtin(value: Any) -> object:
    """Convert a container or scalar of another library to a builtin type."""
    if isinstance(value, Mapping):
        return dict(value)
    if str(getattr(value, "dtype", "")) == "object":
        return _without_struct_nulls(value)
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__}")


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and value != value


def _without_nan(value: Any, number_names: Iterable[str] = ()) -> Any:
    """Return a value without members that are NaN.

    NaN stays as an item of a list, and as a member that must be a number: the settings
    for bad records decide about it later.

    Args:
        value: a record, or a value inside it.
        number_names: names of the members of `value` that must be numbers.
    """
    if isinstance(value, Mapping):
        return {
            name: _without_nan(member)
            for name, member in value.items()
            if name in number_names or not _is_nan(member)
        }
    if type(value) is list:
        return [_without_nan(item) for item in value]
    return value


def _without_struct_nulls(value: Any) -> Any:
    """Return a value without null members of structs, arrays as lists.

    pandas holds a column of Arrow's structs as an array of objects.
    """
    if isinstance(value, Mapping):
        members = {
            name: _without_struct_nulls(member) for name, member in value.items()
        }
        return {name: member for name, member in members.items() if member is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_without_struct_nulls(item) for item in value]
    is_null = value != value  # pandas' NaN or NaT
    return None if is_null else value


# Arrow tables and Polars frames


def _is_table(source: object) -> bool:
    """Return True for an Arrow table or reader, a Polars frame, or a similar object."""
    return hasattr(source, "__arrow_c_stream__") or _is_lazy_frame(source)


def _is_lazy_frame(source: object) -> bool:
    return hasattr(source, "sink_ipc")


class _TableRecords:
    """The rows of a table as records; iterated again, it is read again."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __iter__(self) -> Iterator[object]:
        return _table_records(self._table)


def _table_records(table: Any) -> Iterator[object]:
    """Yield the rows of a table, converting a few at a time."""
    with (
        as_input_error("<table>", "must be a readable table"),
        tempfile.TemporaryFile() as copy,
    ):
        if _is_lazy_frame(table):
            batches = _run_query(table, copy)
        else:
            batches = iter(pa.RecordBatchReader.from_stream(table))
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = simplify_batch(batch.slice(start, BATCH_ROWS), "<table>")
                yield from rows_of(part, "<table>")


def _run_query(query: Any, file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Run a LazyFrame into a file, and return its batches.

    Polars' `collect_batches` would end silently at a panic.
    """
    try:
        query.sink_ipc(file, compression="lz4", record_batch_size=BATCH_ROWS)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise InputError(
            sentence(
                "<table>",
                rule="its query must run",
                found=str(error),
                remedy="Give its collect() instead, or install Polars 1.38 or newer, "
                "and make space for temporary files",
            )
        ) from error
    file.seek(0)
    return iterate_batches(open_ipc_file(file))


# Hugging Face datasets, which are recognized without importing their package


def _is_dataset(source: object) -> bool:
    return hasattr(source, "with_format") and hasattr(source, "features")


def _only_split(source: Any) -> Any:
    """Return the only split of a ``DatasetDict``, and any other source unchanged.

    Raises:
        InputError: there are several splits.
    """
    if not isinstance(source, Mapping) or not source:
        return source
    if not all(_is_dataset(split) for split in source.values()):
        return source

    first = next(iter(source))
    if len(source) > 1:
        remedy = f"Give one of them, e.g. dataset[{first!r}]"
        raise several_splits("input", source, remedy)
    return source[first]


def _without_format(source: Any) -> Any:
    """Return a ``Dataset`` that yields Python's types, and any other source unchanged.

    The format of torch would round rewards. A transform that the user set, which is the
    format ``custom``, stays.
    """
    if not _is_dataset(source):
        return source
    # An IterableDataset has no format, and no transform.
    format_ = getattr(source, "format", None) or {}
    if format_.get("type") == "custom":
        return source

    # Selected columns must be passed again: the default of with_format is all columns.
    columns = format_.get("columns")
    if not columns or format_.get("output_all_columns"):
        return source.with_format(None)
    return source.with_format(None, columns=columns)


def _dataset_records(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of a ``Dataset``: class labels as their names, and structs
    without the null members that Arrow adds.
    """
    features = getattr(dataset, "features", None) or {}
    for record in dataset:
        yield {
            name: _column_value(value, features.get(name))
            for name, value in record.items()
        }


def _column_value(value: Any, feature: Any) -> Any:
    is_class_label = hasattr(feature, "int2str")
    if is_class_label and isinstance(value, int):
        return feature.names[value] if value >= 0 else None
    return _without_added_nulls(value, feature)


def _without_added_nulls(value: Any, feature: Any) -> Any:
    """Return a value without null members of structs.

    Args:
        value: a value of a record.
        feature: its type in ``datasets``; None if unknown.
    """
    item_feature = _item_feature(feature)
    is_unknown = feature is None
    is_list = item_feature is not None
    is_struct = isinstance(feature, Mapping)
    if not (is_unknown or is_list or is_struct):
        return value  # a scalar, or JSON, which may have nulls of its own

    if isinstance(value, list):
        return [_without_added_nulls(item, item_feature) for item in value]
    if not isinstance(value, dict):
        return value
    member_features = feature or {}
    return {
        name: _without_added_nulls(member, member_features.get(name))
        for name, member in value.items()
        if member is not None
    }


def _item_feature(feature: Any) -> Any:
    """Return the type of a list's items; None for any other type.

    ``datasets`` writes a list as ``List(type)`` or as ``[type]``.
    """
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None)
