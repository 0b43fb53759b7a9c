"""Checksums of row groups, so that damage is found at reading.

Parquet has page checksums, which do not cover page headers; Arrow files have none.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.format.arrays import Int64
from packstore.io.shards.parquet import byte_range

_crc32 = zlib.crc32
with contextlib.suppress(ImportError):
    from isal.isal_zlib import crc32 as _faster

    # Every read depends on it, so a native crc32 is used only if it passes the standard test.
    if _faster(b"56789", _faster(b"1234")) == _faster(b"123456789") == 0xCBF43926:
        _crc32 = _faster


def crc32_of(data: Any, before: int = 0) -> int:
    """Returns the crc32 of a buffer, continued from the crc32 `before` of earlier bytes."""
    return int(_crc32(data, before))


def batch_crc32(batch: pa.RecordBatch) -> int:
    """Returns the crc32 of an Arrow batch: its counts of rows and nulls, and its buffers."""
    crc = 0
    for column in batch.columns:
        shape = (len(column), column.null_count, len(column.values), column.values.null_count)
        crc = crc32_of(repr(shape).encode(), crc)
        for buffer in column.buffers():
            if buffer is not None:
                crc = crc32_of(buffer, crc)
    return crc


def row_group_crc32(path: str) -> Int64:
    """Returns int64 `[G]`, the crc32 of each row group or batch of a finished local file."""
    with pa.memory_map(os.fsencode(path)) as source:  # Arrow takes texts for UTF-8
        if source.read(4) == b"PAR1":
            metadata = pq.read_metadata(source)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            ranges = [byte_range(group, source.size()) for group in groups]
            found = [crc32_of(source.read_at(end - start, start)) for start, end in ranges]
        else:
            file = pa.ipc.open_file(source)
            found = [batch_crc32(file.get_batch(i)) for i in range(file.num_record_batches)]
    return np.array(found, np.int64)
