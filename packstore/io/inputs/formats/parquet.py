"""Parquet files, read in batches of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow.parquet as pq

from packstore.io.inputs.pieces import Format, Piece, ReadOptions
from packstore.io.inputs.tabular import BATCH_ROWS, as_input_error, parse, pieces

BATCH_BYTES = 1 << 30
"""Maximum bytes of a batch's values in a column, if each is the longest of its dictionary."""

# Type and uncompressed size: the first two fields, always present, of a page header (PageHeader in
# parquet.thrift of apache/parquet-format) in Thrift's compact protocol.
_DICTIONARY_HEADER = re.compile(rb"\x15\x04\x15([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Streams the pages, as a row group may be larger than memory.

    Reads fewer rows at a time if a large dictionary can make each of them large.
    """
    with as_input_error(path, "must be a readable Parquet file"):
        file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
        rows = BATCH_BYTES // _largest_dictionary(stream, file.metadata)
        yield from pieces(file.iter_batches(max(rows, 1)), path, options.block_bytes)


def _largest_dictionary(stream: BinaryIO, metadata: pq.FileMetaData) -> int:
    """Returns the bytes of the largest dictionary of texts; at least those of no consequence."""
    largest = BATCH_BYTES // BATCH_ROWS
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            size = column.total_uncompressed_size
            texts = column.has_dictionary_page and column.physical_type.endswith("BYTE_ARRAY")
            if texts and size > largest:
                stream.seek(column.dictionary_page_offset)
                if header := _DICTIONARY_HEADER.match(stream.read(8)):
                    # Seven bits in each byte, the lowest first; zigzag doubles the number.
                    size = sum((byte & 127) << 7 * i for i, byte in enumerate(header[1])) >> 1
                largest = max(largest, size)
    return largest


PARQUET = Format(unit="row", read=read, parse=parse, random_access=True)
