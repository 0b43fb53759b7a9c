"""The format in Arrow terms: columns, version, feature flags, and conversion to numpy.

The specification is ``schemas/format.md`` and its annexes; a test compares them. The
rules for rows are in :mod:`packstore.format.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from packstore.errors import (
    FormatError,
    UnknownNameError,
    UnsupportedFormatError,
    quote,
    sentence,
)
from packstore.format.arrays import Column, Int32, Int64, Packs
from packstore.format.rules import check_and_sign
from packstore.format.typed_json import UPGRADE

FORMAT_VERSION = 1
"""Highest format version that readers accept."""

FEATURES: tuple[str, ...] = ()
"""Supported required features; a dataset that names another one is refused."""

KINDS: dict[str, int | None] = {"preference": 2, "sft": 1, "scored": None}
"""Kind -> K, the responses per example; None: stored in column ``num_responses``."""

LAYOUTS = ("concat", "shared_prefix")

COLUMNS = (
    "input_ids",
    "labels",
    "reward",
    "lengths",
    "seq_boundaries",
    "parent_distances",
    "example_ids",
    "num_responses",
)
"""All columns of the format; a carried column must not have any of these names."""

COLUMN_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
"""Pattern of the names of carried columns and of side data.

Names that begin with _ are reserved for later releases.
"""

CARRY_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""Types of carried scalar columns."""

LOG_PROB_COLUMNS = ("old_logps", "ref_token_logps")
"""Columns of side data with a number for each token that are log-probs: of the policy
that sampled the tokens, and of a reference model. Writers refuse numbers above
:data:`MAX_LOGP`, as these are probabilities, or log-probs without their sign.
"""

MAX_LOGP = 1e-3
"""Largest log-prob that a writer accepts: log-softmax may round above 0."""

ANY = pa.null()
"""Type of an expected column: any type, as a later release may store it."""

ANY_LIST = pa.list_(pa.null())
"""Type of an expected column: a list of any type, as a later release may store it."""


def list_of(value: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a column: a list with 32-bit offsets and non-null
    elements.
    """
    return pa.list_(pa.field("element", value, nullable=False))


def pack_schema(
    kind: str,
    layout: str,
    *,
    carry: Mapping[str, str] | None = None,
) -> pa.Schema:
    """Return the Arrow schema of a shard.

    Args:
        kind: a name in :data:`KINDS`.
        layout: a name in :data:`LAYOUTS`.
        carry: column -> a name in :data:`CARRY_TYPES`; any other name gives the type
            :data:`ANY_LIST`.
    """
    int32 = list_of(pa.int32())
    columns: dict[str, pa.DataType] = {
        "input_ids": int32,
        "labels": int32,
        "reward": list_of(pa.float32()),
        "lengths": int32,
        "seq_boundaries": int32,
    }
    if layout == "shared_prefix":
        columns["parent_distances"] = int32
    columns["example_ids"] = list_of(pa.int64())
    if KINDS[kind] is None:
        columns["num_responses"] = int32
    for name, type_name in (carry or {}).items():
        if type_name in CARRY_TYPES:
            columns[name] = list_of(CARRY_TYPES[type_name])
        else:
            columns[name] = ANY_LIST

    fields = [pa.field(name, type_, nullable=False) for name, type_ in columns.items()]
    metadata = {
        "packstore.format_version": str(FORMAT_VERSION),
        "packstore.kind": kind,
        "packstore.layout": layout,
        "packstore.features": "",
    }
    return pa.schema(fields, metadata)


def schema_difference(actual: pa.Schema, expected: pa.Schema) -> str:
    """Return the first difference of a file's columns from the expected ones, or an
    empty text.

    The type of an expected column may be :data:`ANY` or :data:`ANY_LIST`.
    """
    if actual.names != expected.names:
        return f"columns {', '.join(actual.names)}; not {', '.join(expected.names)}"
    difference = _metadata_difference(actual.metadata or {}, expected.metadata or {})
    if difference:
        return difference
    for field, expected_field in zip(actual, expected, strict=True):
        # As texts: `equals` ignores the names of the elements of lists.
        text = _field_text(field)
        expected_text = _field_text(expected_field)
        if text != expected_text and not _accepts_type(expected_field.type, field.type):
            return f"a column {text}; not {expected_text}"
    return ""


def _metadata_difference(
    actual: Mapping[bytes, bytes], expected: Mapping[bytes, bytes]
) -> str:
    for key in sorted({*actual, *expected}):
        if actual.get(key) == expected.get(key):
            continue
        name = key.decode(errors="replace")
        if key not in actual:
            return f"no key {name} in its metadata"
        if key not in expected:
            return f"a further key {name} in its metadata"
        return f"another value of key {name} in its metadata"
    return ""


def _accepts_type(expected: pa.DataType, actual: pa.DataType) -> bool:
    """Return True if the expected type stands for any type, or for any list."""
    if expected == ANY_LIST:
        return actual.id in _LISTS
    return bool(expected == ANY)


def _field_text(field: pa.Field) -> str:
    nullability = "" if field.nullable else " not null"
    return f"{field.name}: {field.type}{nullability}"


def require_kind(kind: str) -> None:
    """Raise :class:`UnknownNameError` unless the argument `kind` is in `KINDS`."""
    if kind not in KINDS:
        raise UnknownNameError(
            f"unknown kind {quote(kind)}; choose from: {', '.join(KINDS)}."
        )


def check_features(version: int, features: list[str], where: str) -> None:
    """Raise UnsupportedFormatError for a higher version, or an unknown required
    feature.
    """
    if not 1 <= version <= FORMAT_VERSION:
        raise UnsupportedFormatError(
            sentence(
                where,
                rule=f"the format version must be 1 to {FORMAT_VERSION}",
                found=repr(version),
                remedy=UPGRADE,
            )
        )
    for name in features:
        if name not in FEATURES:
            raise UnsupportedFormatError(
                sentence(
                    where,
                    rule="required features must be known; this release knows none",
                    found=repr(name),
                    remedy=UPGRADE,
                )
            )


def to_arrow(packs: Packs, schema: pa.Schema) -> pa.RecordBatch:
    """Convert packs to an Arrow batch of `schema`, one row per pack."""
    if len(packs.signed_ids) > np.iinfo(np.int32).max:
        raise FormatError(
            "one batch of packs holds over 2^31 - 1 tokens; write fewer at once."
        )
    columns: dict[str, tuple[Any, Int64]] = {
        "input_ids": (packs.input_ids, packs.token_offsets),
        "labels": (packs.labels, packs.token_offsets),
        "reward": (packs.reward, packs.sequence_offsets),
        "lengths": (packs.lengths, packs.sequence_offsets),
        "seq_boundaries": (packs.seq_boundaries, packs.boundary_offsets),
        "parent_distances": (packs.parent_distances, packs.sequence_offsets),
        "example_ids": (packs.example_ids, packs.example_offsets),
        "num_responses": (packs.num_responses, packs.example_offsets),
    }
    for name, column in packs.columns.items():
        columns[name] = (column, packs.example_offsets)

    arrays = []
    for field in schema:
        values, offsets = columns[field.name]
        array = pa.ListArray.from_arrays(
            as_arrow(offsets, pa.int32()),
            as_arrow(values, field.type.value_type),
            type=field.type,
        )
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _allocate(length: int) -> Int32:
    return np.empty(length, np.int32)


def from_arrow(
    batch: pa.RecordBatch,
    kind: str,
    *,
    vocab_size: int | None = None,
    where: str = "packs",
    allocate: Callable[[int], Int32] = _allocate,
) -> Packs:
    """Convert an Arrow batch to packs, with arrays of their own.

    The copies free the decoder's buffers (or the mapped file) at once, in the thread
    that allocated them; allocators keep the gaps between such buffers, about half as
    much memory again.

    Args:
        batch: the columns of a shard.
        kind: a name in :data:`KINDS`.
        vocab_size: upper bound of ids; None: not checked.
        where: name of the packs in error texts.
        allocate: returns an int32 array of a length, for the signed ids.

    Raises:
        FormatError: a column is absent or damaged, or an id or a label is invalid.
    """
    ids, token_offsets = flat_column(batch, "input_ids", pa.int32())
    reward, sequence_offsets = flat_column(batch, "reward", pa.float32())
    example_ids, example_offsets = flat_column(batch, "example_ids", pa.int64())

    lengths = _column(
        batch, "lengths", pa.int32(), sequence_offsets, rule="columns-agree"
    )
    boundary_offsets = sequence_offsets + np.arange(len(sequence_offsets))
    boundaries = _column(
        batch, "seq_boundaries", pa.int32(), boundary_offsets, rule="boundaries-count"
    )
    parent_distances = np.zeros(len(lengths), np.int32)
    if "parent_distances" in batch.schema.names:
        parent_distances = _column(
            batch,
            "parent_distances",
            pa.int32(),
            sequence_offsets,
            rule="parents-count",
        ).copy()
    fixed_responses = KINDS[kind]
    if fixed_responses is not None:
        num_responses = np.full(len(example_ids), fixed_responses, np.int32)
    else:
        num_responses = _column(
            batch, "num_responses", pa.int32(), example_offsets, rule="responses-count"
        ).copy()

    labels = _column(batch, "labels", pa.int32(), token_offsets, rule="columns-agree")
    signed_ids = allocate(len(ids))
    check_and_sign(ids, labels, token_offsets, signed_ids, vocab_size, where)

    columns = {}
    for name in batch.schema.names:
        if name not in COLUMNS:
            column = _column(batch, name, None, example_offsets, rule="columns-agree")
            columns[name] = column.copy()
    return Packs(
        signed_ids=signed_ids,
        reward=reward.copy(),
        lengths=lengths.copy(),
        seq_boundaries=boundaries.copy(),
        parent_distances=parent_distances,
        example_ids=example_ids.copy(),
        num_responses=num_responses,
        token_offsets=token_offsets,
        sequence_offsets=sequence_offsets,
        example_offsets=example_offsets,
        columns=columns,
    )


def _column(
    batch: pa.RecordBatch,
    name: str,
    type_: pa.DataType | None,
    expected_offsets: Int64,
    rule: str,
) -> Any:
    """Return the values of a list column; raise unless its lists have the expected
    lengths.
    """
    values, offsets = flat_column(batch, name, type_)
    if np.array_equal(offsets, expected_offsets):
        return values
    lengths = np.diff(offsets)
    expected_lengths = np.diff(expected_offsets)
    row = int(np.argmax(lengths != expected_lengths))
    raise FormatError(
        sentence(
            where=f"row {row}",
            rule=f"column {name} must have {expected_lengths[row]} elements there "
            f"[{rule}]",
            found=str(lengths[row]),
        )
    )


def flat_column(
    batch: pa.RecordBatch, name: str, value: pa.DataType | None
) -> tuple[Any, Int64]:
    """Return the values of a list column, and the offsets of its rows.

    Args:
        batch: the columns of a file.
        name: name of the column.
        value: type of the values; None: any.

    Returns:
        The values, numbers as a view; and int64 `[P + 1]`.

    Raises:
        FormatError: the column is absent, has another type, or holds nulls.
    """
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise FormatError(
            sentence(f"column {name!r}", rule="every shard must have it", found="none")
        )
    column = batch.column(position)
    _check_column_type(name, column.type, value)

    child = column.values
    offsets = as_numpy(column.offsets).astype(np.int64)
    first = int(offsets[0])
    last = int(offsets[-1])
    # Arrow's own check covers the first and last offset only.
    is_decreasing = np.count_nonzero(offsets[1:] < offsets[:-1]) > 0
    if first < 0 or last > len(child) or is_decreasing:
        raise FormatError(
            sentence(f"column {name!r}", "its offsets must rise inside its values")
        )
    if first or last < len(child):
        child = child.slice(first, last - first)
        offsets -= first
    if column.null_count or child.null_count:
        raise FormatError(
            sentence(f"column {name!r}", rule="it must not hold nulls", found="nulls")
        )
    return as_numpy(child), offsets


def _check_column_type(
    name: str, actual: pa.DataType, value: pa.DataType | None
) -> None:
    # Of the few possible types, comparing numbers is faster than comparing types.
    is_list = actual.id in _LISTS
    if is_list and (value is None or actual.value_type.id == value.id):
        return
    rule = "its type must be a list"
    if value is not None:
        rule = f"its type must be list<{value}>"
    raise FormatError(sentence(f"column {name!r}", rule=rule, found=str(actual)))


def as_arrow(values: Column, type_: pa.DataType) -> pa.Array:
    """View numbers as an Arrow array of a type; copy booleans and texts.

    Without ``pa.array`` for numbers, which imports pandas.
    """
    dtype = _NUMPY.get(type_.id)
    if dtype is None:
        return pa.array(values, type_, from_pandas=False)
    buffer = pa.py_buffer(np.ascontiguousarray(values, dtype))
    return pa.Array.from_buffers(type_, len(values), [None, buffer])


def as_numpy(array: pa.Array) -> Any:
    """View numbers of an Arrow array; copy booleans and texts.

    Without ``to_numpy``, which imports pandas.
    """
    dtype = _NUMPY.get(array.type.id)
    if dtype is None:
        array.validate(full=True)  # offsets of strings may be out of bounds
        is_boolean = pa.types.is_boolean(array.type)
        return np.array(array.to_pylist(), bool if is_boolean else object)
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


_LISTS = (pa.list_(pa.int32()).id, pa.large_list(pa.int32()).id)
# Written out: `to_pandas_dtype` of pyarrow 21 to 25 imports pandas, which nothing
# installs.
_NUMPY: dict[int, np.dtype[Any]] = {
    pa.int32().id: np.dtype(np.int32),
    pa.int64().id: np.dtype(np.int64),
    pa.uint8().id: np.dtype(np.uint8),
    pa.float16().id: np.dtype(np.float16),
    pa.float32().id: np.dtype(np.float32),
    pa.float64().id: np.dtype(np.float64),
}
