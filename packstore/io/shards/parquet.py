"""Reads row groups of Parquet shards with pyarrow; checks limits before decoding.

The limits are checked on the footer, whose hash is in the manifest. Page headers are
left to pyarrow: an attacker who writes both shard and manifest can still make it fail.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import IntegrityError
from packstore.io.shards.shard import ShardInfo

MAX_GROUP_BYTES = 1 << 29
"""Maximum bytes of a row group, stored and decompressed."""

MAX_VALUES = 1 << 27
"""Maximum values of a column in a row group."""

OPTIONS = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}
"""Options of pyarrow for every file that is written."""

_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
"""Accepted encodings: for texts, only those that decode to no more memory than the
stored bytes.
"""

_CODECS = {"ZSTD", "LZ4", "UNCOMPRESSED"}
"""Accepted compression, as pyarrow names it: what every reader can read."""


class ParquetShard:
    """The verified footer of a Parquet shard; decodes row groups whose bytes callers
    read.

    Thread-safe.
    """

    def __init__(self, footer: bytes, shard: ShardInfo, names: Sequence[str]) -> None:
        self._metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        self.schema = self._metadata.schema.to_arrow_schema()
        self.num_groups = self._metadata.num_row_groups
        self._shard, self.names = shard, names  # of the columns to read
        self._ranges: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._slice = _FileSlice(shard.bytes)
        # One file object for all row groups: opening one costs a tenth of decoding a
        # row group.
        self._file = open_parquet(self._slice, self._metadata)
        check_lists(self._metadata, names)

    def range(
        self, group: int, columns: Sequence[str] | None = None
    ) -> tuple[int, int]:
        """Returns the byte range of a row group, or some of its columns: start, end
        (exclusive).
        """
        if columns is None and group in self._ranges:
            return self._ranges[group]
        metadata, groups = self._metadata.row_group(group), self._shard.row_groups
        rows, tokens = int(groups.rows[group]), int(groups.tokens[group])
        # Most values: two per token (spans), or one more than tokens in each pack
        # (boundaries).
        check_group(metadata, rows, rows + 2 * tokens, self.names)
        part = byte_range(metadata, self._shard.bytes, columns)
        if columns is None:
            self._ranges[group] = part
        return part

    def batch(self, group: int, data: bytes) -> pa.RecordBatch:
        """Decodes a row group from its bytes `data`, whose crc32 is already
        verified.
        """
        start, _ = self.range(group)
        with self._lock:
            self._slice.hold(data, start)
            try:
                return read_group(self._file, group, self.names)
            finally:
                self._slice.hold(b"", 0)

    def columns(
        self, group: int, names: Sequence[str], read: Callable[[int, int], bytes]
    ) -> pa.RecordBatch:
        """Decodes columns, of bytes `start` to `end` from `read`; verifies checksums of
        pages.
        """
        start, end = self.range(group, names)
        part = _FileSlice(self._shard.bytes)
        part.hold(read(start, end), start)
        return read_group(
            open_parquet(part, self._metadata, page_checksums=True), group, names
        )


def check_group(
    group: pq.RowGroupMetaData,
    rows: int,
    values: int = MAX_VALUES,
    names: Sequence[str] | None = None,
) -> None:
    """Refuses a row group with other rows, too many values, or a dictionary, in columns
    to read.
    """
    columns = _chunks(group, names)
    size = sum(column.total_uncompressed_size for column in columns)
    most, limit = max(column.num_values for column in columns), min(values, MAX_VALUES)
    top = MAX_GROUP_BYTES
    encodings = {name for column in columns for name in column.encodings}
    codecs = {column.compression for column in columns}
    plain = encodings <= _ENCODINGS and not any(
        column.has_dictionary_page for column in columns
    )
    for ok, rule, declared in (
        (group.num_rows == rows, f"{rows} rows", group.num_rows),
        (0 <= size <= top, f"at most {top} bytes when decompressed", size),
        (most <= limit, f"at most {limit} values a column", most),
        (
            plain,
            f"no dictionary, and encodings among {sorted(_ENCODINGS)}",
            sorted(encodings),
        ),
        (codecs <= _CODECS, f"compression among {sorted(_CODECS)}", sorted(codecs)),
    ):
        if not ok:
            raise IntegrityError(f"must have {rule}; its footer declares {declared}")


def check_lists(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    """Refuses lists whose levels have other names: the stored Arrow schema would hide
    them.
    """
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    for name, _, levels in (path.partition(".") for path in paths):
        if name in names and levels not in ("", "list.element"):
            raise IntegrityError(
                f"its lists must be named list.element; found {levels}"
            )


def byte_range(
    group: pq.RowGroupMetaData, size: int, columns: Sequence[str] | None = None
) -> tuple[int, int]:
    """Returns the bytes, start and end, of contiguous columns, default all, in
    a file.
    """
    chunks = _chunks(group, columns)
    starts = [c.data_page_offset for c in chunks]
    ends = [a + c.total_compressed_size for a, c in zip(starts, chunks, strict=True)]
    start, end = min(starts), max(ends)
    if not 0 <= start < end <= min(size, start + MAX_GROUP_BYTES):
        raise IntegrityError(f"its bytes {start} to {end} must lie in the file")
    if columns is None and starts[1:] != ends[:-1]:
        raise IntegrityError("its column chunks must lie side by side")
    return start, end


def _chunks(group: pq.RowGroupMetaData, names: Sequence[str] | None) -> list[Any]:
    chunks = [group.column(i) for i in range(group.num_columns)]
    if names is None:
        return chunks
    return [
        chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names
    ]


def open_parquet(
    source: Any, metadata: pq.FileMetaData, page_checksums: bool = False
) -> pq.ParquetFile:
    """Opens a file; `page_checksums` are needed if the crc32 of a row group is not
    verified.
    """
    # No pre-buffering: a thread of Arrow's may outlive the interpreter.
    return pq.ParquetFile(
        source,
        metadata=metadata,
        page_checksum_verification=page_checksums,
        pre_buffer=False,
    )


def read_group(
    file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Decodes a row group, or columns of these names, in this thread; raises Arrow's
    errors.
    """
    table = file.read_row_group(
        number, columns=columns and list(columns), use_threads=False
    )
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    if len(batches) != 1:
        raise IntegrityError("must have rows; found none")
    return batches[0]


class _FileSlice(io.RawIOBase):
    """A part of a file of `size` bytes, with the offsets of the whole file, for
    pyarrow.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.hold(b"", 0)

    def hold(self, data: bytes, start: int) -> None:
        """Replaces the part; `start` is its offset in the file."""
        self._data, self._start, self._position = memoryview(data), start, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[
            whence
        ]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        start = self._position - self._start
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise IntegrityError("a column must lie in the bytes of its row group")
        self._position += stop - start
        return self._data[start:stop]
