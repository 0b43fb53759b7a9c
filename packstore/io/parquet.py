"""Row groups of our Parquet files: written and read by pyarrow, bounded before they are decoded.

The limits compare the footer, whose hash the manifest holds, with the manifest. Headers of pages
are pyarrow's business: an attacker who writes both shard and manifest can still make it fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import WriteConfig
from packstore.errors import IntegrityError

MAX_GROUP_BYTES = 1 << 29
"""Bytes of a row group, as stored and when decompressed; a larger one is refused."""

MAX_VALUES = 1 << 27
"""Values of a column in a row group."""

PAGE_BYTES = 1 << 20

_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
"""Those of numbers, and of texts those whose values take no more memory than their bytes."""


def parquet_writer(sink: Any, schema: pa.Schema, config: WriteConfig) -> pq.ParquetWriter:
    """Returns a writer of shards with these settings."""
    return pq.ParquetWriter(
        sink,
        schema,
        compression=config.compression,
        compression_level=config.compression_level if config.compression == "zstd" else None,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=PAGE_BYTES,
        store_schema=True,
    )


def check_group(group: pq.RowGroupMetaData, rows: int, values: int = MAX_VALUES) -> None:
    """Refuses a row group whose footer declares more than it may hold.

    Args:
        group: of the footer.
        rows: that it must have.
        values: of a column at most.

    Raises:
        IntegrityError: it has other rows, exceeds a limit, or has a dictionary.
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
    """Returns where column chunks lie in a file of `size` bytes: start, end (exclusive).

    Args:
        group: of the footer; its chunks lie side by side.
        size: of the file.
        columns: numbers of the columns; None: all.

    Raises:
        IntegrityError: they would lie outside of the file, or exceed the limit.
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
        page_checksums: compares them; needed where no crc32 of the row group was compared.
    """
    # Nothing is buffered ahead: a thread of Arrow's may outlive the interpreter.
    return pq.ParquetFile(
        source, metadata=metadata, page_checksum_verification=page_checksums, pre_buffer=False
    )


def read_group(
    file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Decodes row group `number`, in this thread.

    Args:
        file: that holds it.
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
