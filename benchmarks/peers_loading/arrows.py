"""Packs as Arrow tables, for the readers that store those, and back without Python lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from peers_loading.base import DTYPES, Array, Sample, Source

ROWS = 1000
"""Packs that are made into Arrow at a time."""


def tables(source: Source, rows: int = ROWS) -> Iterator[pa.Table]:
    """The packs as tables of `rows` rows, a list column for each column of a pack."""
    for start in range(0, len(source), rows):
        stop = min(start + rows, len(source))
        yield pa.table(
            {name: _lists(*column, start, stop) for name, column in source.columns.items()}
        )


def table(source: Source) -> pa.Table:
    """All packs as one table."""
    return pa.concat_tables(tables(source)).combine_chunks()


def _lists(values: Array, offsets: Array, start: int, stop: int) -> pa.ListArray:
    """Rows `start` to `stop` of a column; copied, as Arrow would keep the mapped file open."""
    inside = offsets[start : stop + 1]
    return pa.ListArray.from_arrays(
        (inside - inside[0]).astype(np.int32), np.array(values[inside[0] : inside[-1]])
    )


class Rows:
    """The packs of a record batch, as views of its buffers.

    ``np.frombuffer`` on purpose: ``to_numpy`` on the child of a list imports pandas.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._columns = {name: self._flat(batch.column(name), name) for name in DTYPES}
        self._rows = batch.num_rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Sample:
        return {
            name: values[offsets[row] : offsets[row + 1]]
            for name, (values, offsets) in self._columns.items()
        }

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(self._rows))

    @staticmethod
    def _flat(column: Any, name: str) -> tuple[Array, Array]:
        """Values and offsets; works on a slice too."""
        child = column.values
        wide = pa.types.is_large_list(column.type)
        offsets = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32)
        values = np.frombuffer(child.buffers()[1], DTYPES[name])
        return values[child.offset :], offsets[column.offset :]
