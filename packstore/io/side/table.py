"""The values of a side dataset by example id, in memory or in mapped files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packstore.errors import CompatibilityError, IntegrityError, sentence
from packstore.format.arrays import (
    Column,
    Float32,
    Int64,
    TokenValues,
    TopK,
    ragged_indices,
    to_offsets,
)
from packstore.format.schema import as_numpy
from packstore.io.manifest.side_manifest import PER_SEQUENCE, TokenType, token_type
from packstore.io.side.tokens import from_gaps, list_counts, top_k_of

MAPPED_BYTES = 64 << 20
"""Bytes above which an array is kept in a mapped temporary file, which can be paged
out.
"""

REMEDY = "Make the side dataset anew from this dataset"

_NO_TEXTS = pa.nulls(0, pa.large_string())  # pa.array would import pandas


class SideTable:
    """The values of a side dataset by example id, read at once.

    Memory: the values in their stored types, and 16 bytes for each example, 8 more for
    each column of lists; while it is read, a stored shard and a few row groups.

    Args:
        url: of the side dataset, for messages.
        columns: those of the manifest, name to type.
        batches: all rows.

    Raises:
        IntegrityError: an id repeats.
    """

    def __init__(
        self, url: str, columns: Mapping[str, str], batches: Iterable[pa.RecordBatch]
    ) -> None:
        self.url = url
        self._types = columns
        self._columns = {
            name: _column_of_type(type_name) for name, type_name in columns.items()
        }
        ids = _GrowingArray(np.int64)
        for batch in batches:
            ids.append(as_numpy(batch.column("example_ids")))
            for name, column in self._columns.items():
                column.append(batch.column(name))
        for column in self._columns.values():
            column.finish()

        # Values stay in the order of the shards; ids lead to them.
        stored_ids = ids.finish()
        self._rows = np.argsort(stored_ids, kind="stable")
        self._ids = stored_ids[self._rows]
        require_distinct_ids(self._ids, self.url)

    def find(self, example_ids: Int64) -> Int64:
        """Return the rows of examples, int64 `[E]`.

        Raises:
            CompatibilityError: an example has no values.
        """
        places = np.searchsorted(self._ids, example_ids)
        places[places == len(self._ids)] = 0
        if len(self._ids):
            absent_ids = example_ids[self._ids[places] != example_ids]
        else:
            absent_ids = example_ids
        if len(absent_ids):
            text = sentence(
                where=self.url,
                rule="every example must have its values",
                found=(
                    f"none for {len(absent_ids)} of {len(example_ids)}, the first of "
                    f"them {absent_ids[0]}"
                ),
                remedy=REMEDY,
            )
            raise CompatibilityError(text)
        return self._rows[places]

    def column(self, name: str, rows: Int64) -> Column:
        """Return the value of each example, `[E]`; texts as objects.

        Args:
            name: of a column with a value for each example.
            rows: int64 `[E]`, as of :meth:`find`.
        """
        values: Column = self._columns[name].take(rows)
        return values

    def sequence_values(
        self, name: str, rows: Int64, num_responses: npt.NDArray[np.integer]
    ) -> Float32:
        """Return the value of each sequence, float32 `[S]`.

        Args:
            name: of a column with a value for each sequence.
            rows: int64 `[E]`, as of :meth:`find`.
            num_responses: int `[E]`, sequences of each example.

        Raises:
            CompatibilityError: an example has another number of sequences.
        """
        self.require_counts(name, rows, num_responses)
        values: Float32 = self._columns[name].take(rows)
        return values

    def token_values(
        self, name: str, rows: Int64, num_targets: npt.NDArray[np.integer]
    ) -> TokenValues:
        """Return the values of the examples' supervised tokens, one after another.

        Args:
            name: of a column of tokens.
            rows: int64 `[E]`, as of :meth:`find`.
            num_targets: int `[E]`, supervised tokens of each example.

        Returns:
            `[n]`, or a :class:`TopK` of `[n, k]`: a copy, with log-probs of 8 bits as
            float32.

        Raises:
            CompatibilityError: an example has another number of supervised tokens.
        """
        self.require_counts(name, rows, num_targets)
        values: TokenValues = self._columns[name].take_tokens(rows)
        return values

    def require_counts(
        self, name: str, rows: Int64, counts: npt.NDArray[np.integer]
    ) -> None:
        """Raise CompatibilityError unless rows have these numbers of values.

        Args:
            name: of a column with a value for each sequence, or supervised token.
            rows: int64 `[E]`, as of :meth:`find`.
            counts: int `[E]`, sequences, or supervised tokens, of each example.
        """
        offsets = self._columns[name].offsets
        actual_counts = offsets[rows + 1] - offsets[rows]
        wrong_rows = np.flatnonzero(actual_counts != counts)
        if len(wrong_rows):
            first = wrong_rows[0]
            example_id = self._ids[self._rows == rows[first]][0]
            is_per_sequence = self._types[name] == PER_SEQUENCE
            unit = "sequences" if is_per_sequence else "supervised tokens [token-count]"
            text = sentence(
                where=f"{self.url}, example {example_id}",
                rule=f"{name} must hold values of {counts[first]} {unit}",
                found=str(actual_counts[first]),
                remedy=REMEDY,
            )
            raise CompatibilityError(text)


def require_distinct_ids(sorted_ids: Int64, where: str) -> None:
    """Raise IntegrityError if an example id repeats."""
    is_repeated = sorted_ids[1:] == sorted_ids[:-1]
    repeated_ids = sorted_ids[1:][is_repeated]
    if len(repeated_ids):
        text = sentence(
            where=where,
            rule="example ids must be distinct",
            found=(
                f"{len(repeated_ids)} that repeat, the first of them {repeated_ids[0]}"
            ),
        )
        raise IntegrityError(text)


# Columns: rows are appended in the order of the shards, and taken in any


def _column_of_type(type_name: str) -> Any:
    type_ = token_type(type_name)
    if type_ is not None and type_.k is not None:
        return _TopKLists(type_, type_.k)
    if type_ is not None:
        return _Lists(type_.dtype)
    if type_name == PER_SEQUENCE:
        return _Lists("float32")
    if type_name == "string":
        return _Texts()
    return _Numbers(type_name)


class _Numbers:
    """A column with a number, or a boolean, for each example."""

    def __init__(self, dtype: str) -> None:
        self._values = _GrowingArray(dtype)

    def append(self, array: pa.Array) -> None:
        self._values.append(as_numpy(array))

    def finish(self) -> None:
        self._finished_values = self._values.finish()

    def take(self, rows: Int64) -> Column:
        return self._finished_values[rows]


class _Texts:
    """A column with a text for each example."""

    def __init__(self) -> None:
        self._parts: list[pa.Array] = []

    def append(self, array: pa.Array) -> None:
        # Offsets of 32 bits would not reach all texts.
        self._parts.append(array.cast(pa.large_string()))

    def finish(self) -> None:
        self._values = pa.concat_arrays(self._parts or [_NO_TEXTS])
        self._parts = []

    def take(self, rows: Int64) -> Column:
        texts = self._values.take(pa.array(rows)).to_pylist()
        return np.array(texts, np.object_)


class _Lists:
    """A column with a number for each sequence, or supervised token, of an example.

    Attributes:
        offsets: int64 `[rows + 1]`, the first value of each row.
    """

    def __init__(self, dtype: str) -> None:
        self._counts = _GrowingArray(np.int64)
        self._values = _GrowingArray(dtype)

    def append(self, array: pa.Array) -> None:
        self._counts.append(list_counts(array))
        self._values.append(as_numpy(array.flatten()))

    def finish(self) -> None:
        self.offsets = to_offsets(self._counts.finish())
        self._finished_values = self._values.finish()

    def take(self, rows: Int64) -> Column:
        return self._finished_values[ragged_indices(self.offsets, rows)]

    def take_tokens(self, rows: Int64) -> Column:
        return _take_slices(self._finished_values, _slices(self.offsets, rows))


class _TopKLists:
    """A column with the top k of each supervised token of an example.

    Attributes:
        offsets: int64 `[rows + 1]`, the first token of each row.
    """

    def __init__(self, type_: TokenType, k: int) -> None:
        self._k = k
        self._counts = _GrowingArray(np.int64)
        self._ids = _GrowingArray(np.int32)
        self._logps = _GrowingArray(type_.dtype)
        self._scales = _GrowingArray(np.float32) if type_.dtype == "uint8" else None

    def append(self, array: pa.Array) -> None:
        ids, logps = top_k_of(array, self._k)
        self._counts.append(list_counts(array, self._k))
        self._ids.append(ids)
        self._logps.append(logps)
        if self._scales is not None:
            self._scales.append(as_numpy(array.field("scale")))

    def finish(self) -> None:
        self.offsets = to_offsets(self._counts.finish())
        self._top_k = TopK(
            self._ids.finish().reshape(-1, self._k),
            self._logps.finish().reshape(-1, self._k),
        )
        if self._scales is not None:
            self._scale_of_rows = self._scales.finish()

    def take_tokens(self, rows: Int64) -> TopK:
        slices = _slices(self.offsets, rows)
        ids = _take_slices(self._top_k.ids, slices)
        logps = _take_slices(self._top_k.logps, slices)
        if self._scales is not None:
            counts = self.offsets[rows + 1] - self.offsets[rows]
            scales = np.repeat(self._scale_of_rows[rows], counts)
            logps = from_gaps(logps, scales[:, None])
        return TopK(ids, logps)


def _slices(offsets: Int64, rows: Int64) -> list[slice]:
    """Return the places of the values of each row."""
    starts = offsets[rows].tolist()
    ends = offsets[rows + 1].tolist()
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _take_slices(values: npt.NDArray[Any], slices: Sequence[slice]) -> npt.NDArray[Any]:
    """Return the values at slices, one after another."""
    # Whole slices: an index of each value would take longer than the copy.
    return np.concatenate([values[:0], *[values[part] for part in slices]])


class _GrowingArray:
    """Values that are appended: in memory, or in a temporary file once they are many.

    So a large array is never in memory twice, nor as a whole.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._parts: list[npt.NDArray[Any]] = []
        self._num_bytes = 0
        self._file: Any = None

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add values; they are flattened."""
        self._num_bytes += values.nbytes
        self._parts.append(values.ravel())
        if self._num_bytes > MAPPED_BYTES:
            self._write_parts()

    def _write_parts(self) -> None:
        if self._file is None:
            # Closed by `finish`, or with the last reference to it.
            self._file = tempfile.TemporaryFile(prefix="packstore-side-")  # noqa: SIM115
        for part in self._parts:
            part.tofile(self._file)
        self._parts = []

    def finish(self) -> npt.NDArray[Any]:
        """Return all values, `[n]`; none can be appended any more."""
        if self._file is None:
            values = np.concatenate([np.empty(0, self._dtype), *self._parts])
            self._parts = []
            return values
        self._write_parts()
        self._file.flush()
        length = self._num_bytes // self._dtype.itemsize
        with self._file:
            values = np.memmap(self._file, self._dtype, "r", shape=(length,))
        return np.asarray(values)  # slices of a memmap take longer to make
