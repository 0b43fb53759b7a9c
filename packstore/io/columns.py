"""Some columns of a shard alone, for what needs no tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import IntegrityError, sentence
from packstore.io.arrow_file import ArrowFile
from packstore.io.manifest import Manifest
from packstore.io.shard import ShardInfo
from packstore.io.storage import Location
from packstore.io.stored_file import decoding
from packstore.records import Int64


def read_columns(
    location: Location, manifest: Manifest, shard: ShardInfo, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Columns `names` of each row group of `shard`, in order.

    Raises:
        StorageError: the shard is missing, or the store refuses.
        IntegrityError: its bytes are not those that were written.
    """
    where = location.join(shard.path).display
    footer = location.read_bytes(shard.path, shard.bytes - shard.footer_bytes, shard.bytes)
    if hashlib.sha256(footer).hexdigest() != shard.footer_sha256:
        must = "its footer must have the sha256 that the manifest tells"
        raise IntegrityError(sentence(where, must))
    if manifest.file_format == "arrow":
        with decoding(where):
            arrow = ArrowFile(footer, shard.bytes)
            for start, end in arrow.ranges:
                yield _arrow_batch(location, shard, arrow, start, end).select(list(names))
        return
    with decoding(where), location.open_read(shard.path, cache_type="none") as file:
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        parquet = pq.ParquetFile(
            file, metadata=metadata, page_checksum_verification=True, pre_buffer=False
        )
        for i in range(parquet.num_row_groups):
            table = parquet.read_row_group(i, columns=list(names), use_threads=False)
            (batch,) = table.combine_chunks().to_batches()
            yield batch


def _arrow_batch(
    location: Location, shard: ShardInfo, arrow: ArrowFile, start: int, end: int
) -> pa.RecordBatch:
    """A batch with all of its columns; of a local file only what is looked at is read."""
    path = location.join(shard.path).local_path
    if path is None:
        return arrow.batch(location.read_bytes(shard.path, start, end))
    with pa.memory_map(path) as file:
        file.seek(start)
        return arrow.batch(file.read_buffer(end - start))


def flat_numbers(column: pa.ListArray) -> Int64:
    """The elements of a list column of int32, as int64 (``to_numpy`` would import pandas)."""
    values = column.flatten()
    return np.frombuffer(values.buffers()[1], np.int32, len(values), 4 * values.offset).astype(
        np.int64
    )
