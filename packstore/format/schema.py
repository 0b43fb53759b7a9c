"""The format in Arrow terms: columns, version, feature flags, and conversion to numpy.

The specification is ``schemas/format.md``, which a test compares with this file. The
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
from packstore.format.arrays import Bool, Column, Int32, Int64, Packs, to_offsets
from packstore.format.rules import check_and_sign
from packstore.format.typed_json import UPGRADE

FORMAT_VERSION = 1
"""Highest format version that readers accept."""

FEATURES = ("label_spans",)
"""Supported required features; a dataset that names another one is refused."""

KINDS: dict[str, int | None] = {"preference": 2, "sft": 1, "scored": None}
"""Kind -> K, the responses per example (None: stored per example in ``num_responses``).
"""

LAYOUTS = ("concat", "shared_prefix")

COLUMNS = (
    "input_ids",
    "labels",
    "label_spans",
    "reward",
    "lengths",
    "seq_boundaries",
    "example_ids",
    "num_responses",
)
"""All columns of the format; a carried column must not have any of these names."""

COLUMN_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
"""Names of carried columns and of side data; one that begins with _ is of a later
release.
"""

CARRY_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""Types of carried scalar columns."""

ANY, ANY_LIST = pa.null(), pa.list_(pa.null())
"""Types of columns of a later release, which readers skip."""


def list_of(value: pa.DataType) -> pa.DataType:
    """Returns the Arrow type of a column: a list with 32-bit offsets and non-null
    elements.
    """
    return pa.list_(pa.field("element", value, nullable=False))


def pack_schema(
    kind: str,
    layout: str,
    *,
    label_spans: bool = False,
    carry: Mapping[str, str] | None = None,
) -> pa.Schema:
    """Returns the Arrow schema of a shard; `carry`: column -> a name in `CARRY_TYPES`.

    Another name gives the type :data:`ANY_LIST`.
    """
    int32, int64 = list_of(pa.int32()), list_of(pa.int64())
    columns: dict[str, pa.DataType] = {
        "input_ids": int32,
        "label_spans" if label_spans else "labels": int32,
        "reward": list_of(pa.float32()),
        "lengths": int32,
        "seq_boundaries": int32,
        "example_ids": int64,
    }
    if KINDS[kind] is None:
        columns["num_responses"] = int32
    for name, type_name in (carry or {}).items():
        known = CARRY_TYPES.get(type_name)
        columns[name] = ANY_LIST if known is None else list_of(known)
    metadata = {
        "packstore.format_version": str(FORMAT_VERSION),
        "packstore.kind": kind,
        "packstore.layout": layout,
        "packstore.features": "label_spans" if label_spans else "",
    }
    return pa.schema(
        [pa.field(n, t, nullable=False) for n, t in columns.items()], metadata
    )


def schema_difference(found: pa.Schema, expected: pa.Schema) -> str:
    """Returns the first difference of a file's columns from those expected, or an empty
    text.

    These may be :data:`ANY`.
    """
    if found.names != expected.names:
        return f"columns {', '.join(found.names)}; not {', '.join(expected.names)}"
    have, need = found.metadata or {}, expected.metadata or {}
    for key in sorted({*have, *need}):
        if have.get(key) != need.get(key):
            value = "that is not there" if key in need else "of another writer"
            value = "of another value" if key in have and key in need else value
            return f"a key {key.decode(errors='replace')} in its metadata {value}"
    for field, asked in zip(found, expected, strict=True):
        # As texts: `equals` ignores the names of the elements of lists.
        is_list = asked.type == ANY_LIST and field.type.id in _LISTS
        if asked.type != ANY and not is_list and _text(field) != _text(asked):
            return f"a column {_text(field)}; not {_text(asked)}"
    return ""


def _text(field: pa.Field) -> str:
    return f"{field.name}: {field.type}{'' if field.nullable else ' not null'}"


def require_kind(kind: str) -> None:
    """Raises :class:`UnknownNameError` unless `kind`, of a call, is in `KINDS`."""
    if kind not in KINDS:
        raise UnknownNameError(
            f"unknown kind {quote(kind)}; choose from: {', '.join(KINDS)}."
        )


def check_features(version: int, features: list[str], where: str) -> None:
    """Raises UnsupportedFormatError for a higher version, or an unknown required
    feature.
    """
    if not 1 <= version <= FORMAT_VERSION:
        rule = f"the format version must be 1 to {FORMAT_VERSION}"
        raise UnsupportedFormatError(sentence(where, rule, repr(version), UPGRADE))
    for name in features:
        if name not in FEATURES:
            rule = f"required features must be among: {', '.join(FEATURES)}"
            raise UnsupportedFormatError(sentence(where, rule, repr(name), UPGRADE))


def to_arrow(packs: Packs, schema: pa.Schema) -> pa.RecordBatch:
    """Converts packs to an Arrow batch of `schema`, one row per pack."""
    if len(packs.signed_ids) > np.iinfo(np.int32).max:
        raise FormatError(
            "one batch of packs holds over 2^31 - 1 tokens; write fewer at once."
        )
    values: dict[str, tuple[Any, Int64]] = {
        "input_ids": (packs.input_ids, packs.token_offsets),
        "reward": (packs.reward, packs.sequence_offsets),
        "lengths": (packs.lengths, packs.sequence_offsets),
        "seq_boundaries": (packs.seq_boundaries, packs.boundary_offsets),
        "example_ids": (packs.example_ids, packs.example_offsets),
        "num_responses": (packs.num_responses, packs.example_offsets),
        **{
            name: (column, packs.example_offsets)
            for name, column in packs.columns.items()
        },
    }
    if "labels" in schema.names:
        values["labels"] = (packs.labels, packs.token_offsets)
    else:
        values["label_spans"] = _spans(packs.supervised, packs.token_offsets)
    arrays = []
    for field in schema:
        column, offsets = values[field.name]
        flat, starts = (
            as_arrow(column, field.type.value_type),
            as_arrow(offsets, pa.int32()),
        )
        arrays.append(pa.ListArray.from_arrays(starts, flat, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_arrow(
    batch: pa.RecordBatch,
    kind: str,
    *,
    vocab_size: int | None = None,
    where: str = "packs",
    allocate: Callable[[int], Int32] = lambda n: np.empty(n, np.int32),
) -> Packs:
    """Converts an Arrow batch to packs, with arrays of their own, signed ids from
    `allocate`.

    The copies free the decoder's buffers (or the mapped file) at once, in the thread
    that allocated them; allocators keep the gaps between such buffers, about half as
    much memory again.
    """
    ids, tokens = flat_column(batch, "input_ids", pa.int32())
    reward, sequences = flat_column(batch, "reward", pa.float32())
    example_ids, examples = flat_column(batch, "example_ids", pa.int64())

    def column(
        name: str, type_: pa.DataType | None, rule_name: str, expected: Int64
    ) -> Any:
        values, rows = flat_column(batch, name, type_)
        if not np.array_equal(rows, expected):
            sizes, required = np.diff(rows), np.diff(expected)
            row = int(np.argmax(sizes != required))
            rule = (
                f"column {name} must have {required[row]} elements there [{rule_name}]"
            )
            raise FormatError(sentence(f"row {row}", rule, str(sizes[row])))
        return values

    lengths = column("lengths", pa.int32(), "columns-agree", sequences)
    one_more = sequences + np.arange(len(sequences))
    boundaries = column("seq_boundaries", pa.int32(), "boundaries-count", one_more)
    if (fixed := KINDS[kind]) is None:
        num_responses = column(
            "num_responses", pa.int32(), "responses-count", examples
        ).copy()
    else:
        num_responses = np.full(len(example_ids), fixed, np.int32)
    carried = [name for name in batch.schema.names if name not in COLUMNS]
    signed_ids = allocate(len(ids))
    if "labels" in batch.schema.names:
        labels = column("labels", pa.int32(), "columns-agree", tokens)
        check_and_sign(ids, labels, tokens, signed_ids, vocab_size, where)
    else:
        runs = _runs(*flat_column(batch, "label_spans", pa.int32()), tokens)
        check_and_sign(ids, None, tokens, signed_ids, vocab_size, where)
        np.copyto(signed_ids, ids, where=np.repeat(np.arange(len(runs)) % 2 == 1, runs))
    return Packs(
        signed_ids=signed_ids,
        reward=reward.copy(),
        lengths=lengths.copy(),
        seq_boundaries=boundaries.copy(),
        example_ids=example_ids.copy(),
        num_responses=num_responses,
        token_offsets=tokens,
        sequence_offsets=sequences,
        example_offsets=examples,
        columns={n: column(n, None, "columns-agree", examples).copy() for n in carried},
    )


def _spans(on: Bool, token_offsets: Int64) -> tuple[Int32, Int64]:
    """Converts supervision to flat start, end pairs in their pack, and their offsets
    `[P + 1]`.
    """
    before, after = np.zeros_like(on), np.zeros_like(on)
    before[1:], after[:-1] = on[:-1], on[1:]
    before[token_offsets[:-1]] = after[token_offsets[1:] - 1] = False  # of other packs
    starts, stops = np.flatnonzero(on & ~before), np.flatnonzero(on & ~after) + 1
    pack = np.searchsorted(token_offsets, starts, side="right") - 1
    spans = np.stack([starts, stops], axis=1) - token_offsets[pack][:, None]
    runs = np.bincount(pack, minlength=len(token_offsets) - 1)
    return spans.astype(np.int32).ravel(), to_offsets(2 * runs)


def _runs(spans: Int32, span_offsets: Int64, token_offsets: Int64) -> Int64:
    """Lengths of alternating runs of tokens outside and inside spans."""
    counts = np.diff(span_offsets)
    base = np.repeat(token_offsets[:-1], counts)
    limit = np.repeat(np.diff(token_offsets), counts)
    inside = (spans >= 0) & (spans <= limit)
    flat = spans + base
    steps = np.diff(flat)
    if (
        np.any(counts % 2)
        or not inside.all()
        or np.any(steps < 0)
        or np.any(steps[::2] == 0)
    ):
        raise FormatError(
            "label_spans must hold ordered start, end pairs inside their pack "
            "[spans-ordered]."
        )
    return np.diff(flat, prepend=0, append=token_offsets[-1])


def flat_column(
    batch: pa.RecordBatch, name: str, value: pa.DataType | None
) -> tuple[Any, Int64]:
    """Returns values and int64 `[P + 1]` offsets of a list column; numbers are views.

    Value type None: any. Raises FormatError for anything else than lists of it without
        nulls.
    """
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise FormatError(
            sentence(f"column {name!r}", "every shard must have it", "none")
        )
    column = batch.column(position)
    # Types of few kinds: comparing numbers is faster than comparing types.
    child = column.values if column.type.id in _LISTS else None
    if child is None or (value is not None and child.type.id != value.id):
        rule = (
            f"its type must be list<{value}>"
            if value is not None
            else "its type must be a list"
        )
        raise FormatError(sentence(f"column {name!r}", rule, str(column.type)))
    offsets = as_numpy(column.offsets).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    # Arrow's own check covers the first and last offset only.
    if first < 0 or last > len(child) or np.count_nonzero(offsets[1:] < offsets[:-1]):
        raise FormatError(
            sentence(f"column {name!r}", "its offsets must rise inside its values")
        )
    if first or last < len(child):
        child = child.slice(first, last - first)
        offsets -= first
    if column.null_count or child.null_count:
        raise FormatError(
            sentence(f"column {name!r}", "it must not hold nulls", "nulls")
        )
    return as_numpy(child), offsets


def as_arrow(values: Column, type_: pa.DataType) -> pa.Array:
    """Views numbers as an Arrow array of a type (``pa.array`` imports pandas); copies
    the rest.
    """
    dtype = _NUMPY.get(type_.id)
    if dtype is None:
        return pa.array(values, type_, from_pandas=False)
    buffer = pa.py_buffer(np.ascontiguousarray(values, dtype))
    return pa.Array.from_buffers(type_, len(values), [None, buffer])


def as_numpy(array: pa.Array) -> Any:
    """Views numbers of an Arrow array (``to_numpy`` imports pandas); copies booleans
    and texts.
    """
    dtype = _NUMPY.get(array.type.id)
    if dtype is None:
        array.validate(full=True)  # offsets of strings may be out of bounds
        return np.array(
            array.to_pylist(), bool if pa.types.is_boolean(array.type) else object
        )
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
    pa.float32().id: np.dtype(np.float32),
    pa.float64().id: np.dtype(np.float64),
}
