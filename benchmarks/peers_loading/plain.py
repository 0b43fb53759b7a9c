"""Reads packs without a loader: Parquet and Arrow by pyarrow, and mapped flat files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from peers_loading.arrows import Rows, table
from peers_loading.base import (
    PACKS_PER_BATCH,
    SEED,
    Loader,
    Permuted,
    Reader,
    Replayed,
    Source,
    collate,
)

ROWS_PER_GROUP = 1000
"""Rows of a row group (pyarrow's default, 1,048,576 rows, would be the whole file)."""


class PlainParquet(Reader):
    """Parquet as pyarrow writes it by default; row groups shuffled, and the rows inside them."""

    def write(self, source: Source, folder: Path) -> None:
        folder.mkdir()
        pq.write_table(table(source), folder / "packs.parquet", row_group_size=ROWS_PER_GROUP)

    def open(self, folder: Path, scratch: Path) -> Loader:
        return Replayed(_ShuffledGroups(folder / "packs.parquet"))


class _ShuffledGroups:
    """Batches of packs, one shuffled row group after another."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Any]:
        file, rng = pq.ParquetFile(self._path), np.random.default_rng(SEED)
        for group in rng.permutation(file.num_row_groups).tolist():
            rows = Rows(file.read_row_group(group).combine_chunks().to_batches()[0])
            order = rng.permutation(len(rows)).tolist()
            for start in range(0, len(order), PACKS_PER_BATCH):
                yield collate([rows[i] for i in order[start : start + PACKS_PER_BATCH]])


class Memmap(Reader):
    """Flat files of numpy, mapped; a bound too."""

    def write(self, source: Source, folder: Path) -> None:
        folder.mkdir()
        for name, (values, offsets) in source.columns.items():
            np.save(folder / f"{name}.npy", values)
            np.save(folder / f"{name}_offsets.npy", offsets)

    def open(self, folder: Path, scratch: Path) -> Loader:
        return Permuted(Source(folder))
