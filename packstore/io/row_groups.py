"""Row groups of a Parquet shard, each encoded on its own and then put one behind another.

pyarrow writes a row group as a file in memory, in whatever thread. What is appended to the shard
are its column chunks, whose bytes do not tell where they lie; the footer is that of such a file,
with the row groups of all, their offsets moved. It is byte for byte the file that pyarrow writes
when it gets one row group after another.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import WriteConfig
from packstore.io import local
from packstore.io.checksums import crc32_of
from packstore.io.faults import guarded
from packstore.io.footer import I64, LIST, STRUCT, Fields, pack_struct, unpack_struct
from packstore.io.shard import FileHashes
from packstore.records import Int64

PAGE_BYTES = 1 << 20
MAGIC = b"PAR1"

# Numbers of fields in parquet.thrift of apache/parquet-format.
_ROWS, _GROUPS = 3, 4  # of FileMetaData
_COLUMNS, _GROUP_OFFSET = 1, 5  # of RowGroup
_META_DATA, _PAGE_OFFSET = 3, 9  # of ColumnChunk and its ColumnMetaData


@dataclass(frozen=True, slots=True, eq=False)
class EncodedGroup:
    """A row group as it lies in a file of its own.

    Attributes:
        chunks: its column chunks, one after another.
        footer: of that file.
        crc32: of `chunks`.
    """

    chunks: memoryview
    footer: bytes
    crc32: int


def parquet_writer(sink: Any, schema: pa.Schema, config: WriteConfig) -> pq.ParquetWriter:
    """A writer of shards with these settings."""
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


def encode_group(batches: Sequence[pa.RecordBatch], config: WriteConfig) -> EncodedGroup:
    """The batches as one row group; to be called from any thread."""
    batch = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
    sink = pa.BufferOutputStream()
    with parquet_writer(sink, batch.schema, config) as writer:
        writer.write_table(pa.Table.from_batches([batch]), max(batch.num_rows, 1))
    data = memoryview(sink.getvalue())
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    chunks = data[len(MAGIC) : end]
    return EncodedGroup(chunks, bytes(data[end:-8]), crc32_of(chunks))


class ParquetShard:
    """A Parquet file of row groups that were encoded elsewhere, at least one.

    Args:
        path: a local path that nothing has yet.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: str) -> None:
        self.path, self.size = path, 0
        self._digest = hashlib.sha256()
        self._crc32: list[int] = []
        self._footer: Fields = {}
        self._groups: list[Fields] = []
        with guarded("write", path, {}):
            self._file = open(path, "xb")  # noqa: SIM115
        self._put(MAGIC)

    def append(self, group: EncodedGroup) -> None:
        """Adds a row group."""
        footer, _ = unpack_struct(group.footer)
        _, (_, (own,)) = footer[_GROUPS]
        _move(own, self.size - len(MAGIC))
        self._groups.append(own)
        if self._footer:
            footer[_ROWS] = I64, footer[_ROWS][1] + self._footer[_ROWS][1]
        self._footer = footer
        self._crc32.append(group.crc32)
        self._put(group.chunks)

    def finish(self, durable: bool) -> tuple[FileHashes, Int64]:
        """Closes the file; with `durable` it survives a power cut.

        Returns:
            its hashes, and int64 `[G]`, the crc32 of each row group.
        """
        self._footer[_GROUPS] = LIST, (STRUCT, self._groups)
        footer = pack_struct(self._footer)
        end = footer + len(footer).to_bytes(4, "little") + MAGIC
        self._put(end)
        with guarded("write", self.path, {}):
            local.settle(self._file, durable)
        hashes = FileHashes(
            bytes=self.size,
            sha256=self._digest.hexdigest(),
            footer_bytes=len(end),
            footer_sha256=hashlib.sha256(end).hexdigest(),
        )
        return hashes, np.array(self._crc32, np.int64)

    def discard(self) -> None:
        """Closes the file, whatever happens: it is going to be removed."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        with guarded("write", self.path, {}):
            self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def _move(group: Fields, by: int) -> None:
    """Moves the offsets of a row group."""
    group[_GROUP_OFFSET] = I64, group[_GROUP_OFFSET][1] + by
    _, (_, columns) = group[_COLUMNS]
    for column in columns:
        meta = column[_META_DATA][1]
        meta[_PAGE_OFFSET] = I64, meta[_PAGE_OFFSET][1] + by
