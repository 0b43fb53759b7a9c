"""Parquet files, read a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow.parquet as pq

from packstore.io.formats import Format, Piece, ReadOptions
from packstore.io.tabular import BATCH_ROWS, as_input_error, parse, pieces


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Streams the pages: a row group may be larger than memory."""
    with as_input_error(path, "must be a readable Parquet file"):
        file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
        yield from pieces(file.iter_batches(BATCH_ROWS), path, options.block_bytes)


PARQUET = Format(unit="row", read=read, parse=parse, random_access=True)
