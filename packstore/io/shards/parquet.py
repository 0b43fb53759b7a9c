"""Writes and reads row groups of Parquet shards with pyarrow; checks limits before decoding.

The limits are checked on the footer, whose hash is in the manifest. Page headers are left to
pyarrow: an attacker who writes both shard and manifest can still make it fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import IntegrityError

MAX_GROUP_BYTES = 1 << 29
"""Maximum bytes of a row group, stored and decompressed."""

MAX_VALUES = 1 << 27
"""Maximum values of a column in a row group."""

PAGE_BYTES = 1 << 20

_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
"""Accepted encodings: for texts, only those that decode to no more memory than the stored bytes."""


def parquet_writer(sink: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Returns a writer of shards."""
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=PAGE_BYTES,
        store_schema=True,
    )


def check_group(group: pq.RowGroupMetaData, rows: int, values: int = MAX_VALUES) -> None:
    """Refuses a row group that exceeds the limits by its footer.

    Args:
        group: metadata in the footer.
        rows: number of rows in the manifest.
        values: maximum values of a column.

    Raises:
        IntegrityError: it has another number of rows, exceeds a limit, or has a dictionary.
    """
    if group.num_rows != rows:
        raise IntegrityError(f"must have {rows} rows; its footer declares {group.num_rows}")
    columns = [group.column(i) for i in range(group.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns)
    if not 0 <= size <= MAX_GROUP_BYTES:
        must = f"must have at most {MAX_GROUP_BYTES} bytes when decompressed"
        raise IntegrityError(f"{must}; its footer declares {size}")
    most, limit = max(column.num_values for column in columns), min(values, MAX_VALUES)
    if most > limit:
        must = f"must have at most {limit} values a column"
        raise IntegrityError(f"{must}; its footer declares {most}")
    for column in columns:
        if column.has_dictionary_page or not _ENCODINGS.issuperset(column.encodings):
            must = f"its columns must have no dictionary, and encodings among {sorted(_ENCODINGS)}"
            raise IntegrityError(f"{must}; its footer declares {column.encodings}")


def byte_range(
    group: pq.RowGroupMetaData, size: int, columns: Sequence[int] | None = None
) -> tuple[int, int]:
    """Returns the byte range of column chunks in a file of `size` bytes: start, end (exclusive).

    Args:
        group: metadata in the footer; its chunks are contiguous.
        size: of the file.
        columns: numbers of the columns; None: all.

    Raises:
        IntegrityError: the range is outside the file, or exceeds the limit.
    """
    chunks = [group.column(i) for i in columns or range(group.num_columns)]
    start = min(c.data_page_offset for c in chunks)
    end = max(c.data_page_offset + c.total_compressed_size for c in chunks)
    if not 0 <= start < end <= min(size, start + MAX_GROUP_BYTES):
        raise IntegrityError(f"its bytes {start} to {end} must lie in the file")
    return start, end


def open_parquet(
    source: Any, metadata: pq.FileMetaData, page_checksums: bool = False
) -> pq.ParquetFile:
    """Opens a file for :func:`read_group`.

    Args:
        source: the file.
        metadata: of the file.
        page_checksums: verify them; needed if the crc32 of the row group is not verified.
    """
    # No pre-buffering: a thread of Arrow's may outlive the interpreter.
    return pq.ParquetFile(
        source, metadata=metadata, page_checksum_verification=page_checksums, pre_buffer=False
    )


def read_group(
    file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Decodes row group `number`, in this thread.

    Args:
        file: the Parquet file.
        number: of the row group.
        columns: names of some columns; None: all.

    Raises:
        IntegrityError: it has no rows.
        pyarrow.ArrowException, OSError: it cannot be decoded.
    """
    names = None if columns is None else list(columns)
    table = file.read_row_group(number, columns=names, use_threads=False)
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    if len(batches) != 1:
        raise IntegrityError("must have rows; found none")
    return batches[0]
