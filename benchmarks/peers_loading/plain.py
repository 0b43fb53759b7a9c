"""Reads packs without a loader: Parquet by pyarrow, and mapped flat files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from peers_loading import base
from peers_loading.base import (
    DTYPES,
    PACKS_PER_BATCH,
    SEED,
    Columns,
    Counted,
    Reader,
    Source,
)

ROWS_PER_GROUP = 1000
"""Rows of a row group (pyarrow's default, 1,048,576 rows, would be the whole file)."""


def table(source: Source) -> pa.Table:
    """The packs with a list column for each of theirs; copied, or Arrow keeps the file
    open.
    """
    return pa.table(
        {
            name: pa.ListArray.from_arrays(offsets.astype(np.int32), np.array(values))
            for name, (values, offsets) in source.columns.items()
        }
    )


class Rows(Columns):
    """The packs of a record batch, as views of its buffers.

    ``np.frombuffer`` on purpose: ``to_numpy`` on the child of a list imports pandas.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.columns = {name: self._flat(batch.column(name), name) for name in DTYPES}

    @staticmethod
    def _flat(column: Any, name: str) -> tuple[base.Array, base.Array]:
        offsets = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1]
        return np.frombuffer(column.values.buffers()[1], DTYPES[name]), offsets


class PlainParquet(Reader):
    """Parquet as pyarrow writes it by default; row groups shuffled, and the rows inside
    them.

    What lies before a position is read again and thrown away.
    """

    def write(self, source: Source, folder: Path) -> None:
        folder.mkdir()
        pq.write_table(
            table(source), folder / "packs.parquet", row_group_size=ROWS_PER_GROUP
        )

    def open(self, folder: Path, scratch: Path) -> Counted:
        def batches() -> Iterator[Any]:
            file, rng = (
                pq.ParquetFile(folder / "packs.parquet"),
                np.random.default_rng(SEED),
            )
            for group in rng.permutation(file.num_row_groups).tolist():
                rows = Rows(file.read_row_group(group).combine_chunks().to_batches()[0])
                order = rng.permutation(len(rows)).tolist()
                for start in range(0, len(order), PACKS_PER_BATCH):
                    yield base.collate(
                        [rows[i] for i in order[start : start + PACKS_PER_BATCH]]
                    )

        return Counted(lambda given: itertools.islice(batches(), given, None))


class Memmap(Reader):
    """Flat files of numpy, mapped; a bound too."""

    def write(self, source: Source, folder: Path) -> None:
        folder.mkdir()
        for name, (values, offsets) in source.columns.items():
            np.save(folder / f"{name}.npy", values)
            np.save(folder / f"{name}_offsets.npy", offsets)

    def open(self, folder: Path, scratch: Path) -> Counted:
        packs = Source(folder)

        def batches(given: int) -> Iterator[Any]:
            order = np.random.default_rng(SEED).permutation(len(packs)).tolist()
            for start in range(given * PACKS_PER_BATCH, len(order), PACKS_PER_BATCH):
                yield base.collate(
                    [packs[i] for i in order[start : start + PACKS_PER_BATCH]]
                )

        return Counted(batches)
