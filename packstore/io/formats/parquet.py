"""Parquet files, read a batch of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow.parquet as pq

from packstore.io.formats import Format, Piece, ReadOptions
from packstore.io.pages import largest_growing_page
from packstore.io.tabular import BATCH_ROWS, as_input_error, parse, pieces

BATCH_BYTES = 1 << 30
"""Bytes that the values of a column may take at once, if all are the longest of a dictionary."""


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Streams the pages: a row group may be larger than memory.

    Few rows at a time where a large dictionary may make each of them large.
    """
    with as_input_error(path, "must be a readable Parquet file"):
        largest = largest_growing_page(stream, stream.seek(0, os.SEEK_END))
        rows = max(min(BATCH_ROWS, BATCH_BYTES // max(largest, 1)), 1)
        stream.seek(0)
        file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
        yield from pieces(file.iter_batches(rows), path, options.block_bytes)


PARQUET = Format(unit="row", read=read, parse=parse, random_access=True)
