"""Reads row groups of Parquet shards with pyarrow; checks limits before decoding.

The limits are checked on the footer, as the manifest has its hash. Page headers are
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
from packstore.io.shards.shard import NonconformingFile, ShardInfo

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

SPLIT = "BYTE_STREAM_SPLIT"
"""Encoding that makes token ids and small numbers compress better."""

_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
"""Accepted encodings: for texts, only those that decode to no more memory than the
stored bytes.
"""

_LEVELS = {"", "list.element", "ids.list.element", "logps.list.element", "scale"}
"""Levels of a column: of a value, of lists, and of the struct of a column of side data
with the top k of each token.
"""

_CODECS = {"ZSTD", "LZ4", "UNCOMPRESSED"}
"""Accepted compression, as pyarrow names it: every reader of Parquet has these."""


class ParquetShard:
    """Schema and row groups of a Parquet shard, by its verified footer. Thread-safe.

    Callers read the bytes of row groups.

    Args:
        footer: bytes of the file from the metadata on.
        shard: the manifest's entry.
        names: columns to read.

    Raises:
        NonconformingFile: lists have another form than the schema shows.
    """

    def __init__(self, footer: bytes, shard: ShardInfo, names: Sequence[str]) -> None:
        self.names = names
        self._shard = shard
        self._metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        self.schema = self._metadata.schema.to_arrow_schema()
        self.num_groups = self._metadata.num_row_groups
        self._ranges: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        # One file object for all row groups: opening one costs a tenth of decoding a
        # row group.
        self._slice = _FileSlice(shard.bytes)
        self._file = open_parquet(self._slice, self._metadata)
        check_lists(self._metadata, names)

    def range(
        self, group: int, columns: Sequence[str] | None = None
    ) -> tuple[int, int]:
        """Return the byte range of a row group, or of contiguous columns in it: start,
        end (exclusive).

        Raises:
            IntegrityError: the row group breaks a limit, or is not in the file.
        """
        if columns is None and group in self._ranges:
            return self._ranges[group]

        metadata = self._metadata.row_group(group)
        rows = int(self._shard.row_groups.rows[group])
        tokens = int(self._shard.row_groups.tokens[group])
        # The longest column, the boundaries, has at most one value more than tokens in
        # each pack.
        max_values = rows + tokens
        check_group(metadata, rows, max_values, self.names)
        range_ = byte_range(metadata, self._shard.bytes, columns)
        if columns is None:
            self._ranges[group] = range_
        return range_

    def batch(self, group: int, data: bytes) -> pa.RecordBatch:
        """Decode a row group from its bytes; the caller has verified their crc32."""
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
        """Decode columns of a row group, and verify the checksums of their pages.

        Args:
            group: number of the row group.
            names: the columns.
            read: returns the bytes of the file from a start to an end (exclusive).
        """
        start, end = self.range(group, names)
        file_slice = _FileSlice(self._shard.bytes)
        file_slice.hold(read(start, end), start)
        file = open_parquet(file_slice, self._metadata, page_checksums=True)
        return read_group(file, group, names)


def check_group(
    group: pq.RowGroupMetaData,
    rows: int,
    max_values: int = MAX_VALUES,
    names: Sequence[str] | None = None,
) -> None:
    """Raise NonconformingFile if columns of a row group break a limit.

    Args:
        group: metadata of the row group.
        rows: number of rows that it must have.
        max_values: maximum values of a column.
        names: columns to read; None: all.
    """
    chunks = _column_chunks(group, names)
    if group.num_rows != rows:
        raise _broken_limit(f"{rows} rows", group.num_rows)

    num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
    if not 0 <= num_bytes <= MAX_GROUP_BYTES:
        limit = f"at most {MAX_GROUP_BYTES} bytes when decompressed"
        raise _broken_limit(limit, num_bytes)

    max_values = min(max_values, MAX_VALUES)
    num_values = max(chunk.num_values for chunk in chunks)
    if num_values > max_values:
        raise _broken_limit(f"at most {max_values} values a column", num_values)

    encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
    has_dictionary = any(chunk.has_dictionary_page for chunk in chunks)
    if has_dictionary or not encodings <= _ENCODINGS:
        limit = f"no dictionary, and encodings among {sorted(_ENCODINGS)}"
        raise _broken_limit(limit, sorted(encodings))

    codecs = {chunk.compression for chunk in chunks}
    if not codecs <= _CODECS:
        raise _broken_limit(f"compression among {sorted(_CODECS)}", sorted(codecs))


def _broken_limit(limit: str, declared: object) -> NonconformingFile:
    return NonconformingFile(f"must have {limit}; its footer declares {declared}")


def check_lists(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    """Raise NonconformingFile if levels of lists have other names than
    ``list.element``.

    The stored Arrow schema would hide them. A column may be a struct of lists.

    Args:
        metadata: footer of a file.
        names: columns to read.
    """
    for index in range(metadata.num_columns):
        name, _, levels = metadata.schema.column(index).path.partition(".")
        if name in names and levels not in _LEVELS:
            raise NonconformingFile(
                f"its lists must be named list.element; found {levels}"
            )


def byte_range(
    group: pq.RowGroupMetaData, file_bytes: int, columns: Sequence[str] | None = None
) -> tuple[int, int]:
    """Return the range of contiguous columns in a file: start, end (exclusive).

    Args:
        group: metadata of a row group.
        file_bytes: size of the file.
        columns: names of the columns; None: all.

    Raises:
        IntegrityError: the columns are not in the file.
        NonconformingFile: they are not side by side.
    """
    chunks = _column_chunks(group, columns)
    starts = [chunk.data_page_offset for chunk in chunks]
    ends = [chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks]
    start = min(starts)
    end = max(ends)
    max_end = min(file_bytes, start + MAX_GROUP_BYTES)
    if not 0 <= start < end <= max_end:
        raise IntegrityError(f"its bytes {start} to {end} must lie in the file")
    if columns is None and starts[1:] != ends[:-1]:
        raise NonconformingFile("its column chunks must lie side by side")
    return start, end


def _column_chunks(
    group: pq.RowGroupMetaData, names: Sequence[str] | None
) -> list[Any]:
    chunks = [group.column(index) for index in range(group.num_columns)]
    if names is None:
        return chunks
    return [
        chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names
    ]


def open_parquet(
    source: Any, metadata: pq.FileMetaData, page_checksums: bool = False
) -> pq.ParquetFile:
    """Open a file for reading in the calling thread.

    Args:
        source: a seekable binary file.
        metadata: its footer.
        page_checksums: verify the checksum of each page, as is needed if the crc32 of
            the row group is not verified.
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
    """Decode a row group in the calling thread.

    Args:
        file: result of :func:`open_parquet`.
        number: number of the row group.
        columns: names of the columns; None: all.

    Raises:
        IntegrityError: the row group is empty.
        pyarrow.ArrowException: the row group is damaged.
    """
    names = None if columns is None else list(columns)
    table = file.read_row_group(number, columns=names, use_threads=False)
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    if len(batches) != 1:
        raise IntegrityError("must have rows; found none")
    return batches[0]


class _FileSlice(io.RawIOBase):
    """A file for pyarrow with some of its bytes only, at their offsets.

    Args:
        file_bytes: size of the full file.
    """

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self.hold(b"", 0)

    def hold(self, data: bytes, start: int) -> None:
        """Replace the bytes; `start` is their offset in the file."""
        self._data = memoryview(data)
        self._start = start
        self._position = start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self._file_bytes
        self._position = offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        start = self._position - self._start
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise IntegrityError("a column must lie in the bytes of its row group")
        self._position += stop - start
        return self._data[start:stop]
