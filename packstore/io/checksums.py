"""A checksum for each row group, so that damage is found when it is read.

Parquet has checksums of its own for pages, but not for their headers; Arrow files have none.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.records import Int64

_crc32 = zlib.crc32
with contextlib.suppress(ImportError):
    from isal.isal_zlib import crc32 as _faster

    # It guards every read, so it is believed only where it gives what the standard says.
    if _faster(b"56789", _faster(b"1234")) == _faster(b"123456789") == 0xCBF43926:
        _crc32 = _faster


def crc32_of(data: Any, before: int = 0) -> int:
    """crc32 of what has a buffer, after bytes whose crc32 is `before`."""
    return int(_crc32(data, before))


def byte_range(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Where the column chunks of a Parquet row group lie in its file: start, end (exclusive).

    They lie one after another, in the order of the columns.
    """
    first, last = group.column(0), group.column(group.num_columns - 1)
    return first.data_page_offset, last.data_page_offset + last.total_compressed_size


def column_ranges(group: pq.RowGroupMetaData) -> list[tuple[int, int]]:
    """Where each of its column chunks lies, without dictionaries, which shards must not have."""
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [c.data_page_offset for c in columns]
    return [(s, s + c.total_compressed_size) for s, c in zip(starts, columns, strict=True)]


def batch_crc32(batch: pa.RecordBatch) -> int:
    """crc32 of the buffers of an Arrow batch as they lie in its file, and of what frames them."""
    crc = 0
    for column in batch.columns:
        shape = (len(column), column.null_count, len(column.values), column.values.null_count)
        crc = crc32_of(repr(shape).encode(), crc)
        for buffer in column.buffers():
            if buffer is not None:
                crc = crc32_of(buffer, crc)
    return crc


def arrow_crc32(path: str) -> Int64:
    """int64 `[G]`, crc32 of each batch of a local Arrow file."""
    with pa.memory_map(path) as source:
        file = pa.ipc.open_file(source)
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        return np.array([batch_crc32(b) for b in batches], np.int64)
