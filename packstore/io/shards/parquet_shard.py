"""Decodes row groups of a Parquet shard; callers read the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.io.shards.file_slice import FileSlice
from packstore.io.shards.parquet import byte_range, check_group, open_parquet, read_group
from packstore.io.shards.shard import ShardInfo


class ParquetShard:
    """The parsed footer of a Parquet shard. Thread-safe.

    Args:
        footer: the end of the file, already verified by hash.
        shard: the manifest's entry of the shard.

    Attributes:
        schema: of the shard.
        num_groups: number of row groups in the footer.
    """

    def __init__(self, footer: bytes, shard: ShardInfo) -> None:
        self._metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        self.schema = self._metadata.schema.to_arrow_schema()
        self.num_groups = self._metadata.num_row_groups
        self._shard = shard
        self._ranges: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._slice = FileSlice(shard.bytes)
        # One file object for all row groups: opening one costs a tenth of decoding a row group.
        self._file = open_parquet(self._slice, self._metadata)

    def range(self, group: int) -> tuple[int, int]:
        """Returns the byte range of a row group in the file: start, end (exclusive).

        Raises:
            IntegrityError: by the footer it exceeds the limits or the file.
        """
        found = self._ranges.get(group)
        if found is None:
            found = byte_range(self._checked(group), self._shard.bytes)
            self._ranges[group] = found
        return found

    def batch(self, group: int, data: bytes) -> pa.RecordBatch:
        """Decodes a row group from its bytes `data`, whose crc32 is already verified."""
        start, _ = self.range(group)
        with self._lock:
            self._slice.hold(data, start)
            try:
                return read_group(self._file, group)
            finally:
                self._slice.hold(b"", 0)

    def columns(
        self, group: int, names: Sequence[str], read: Callable[[int, int], bytes]
    ) -> pa.RecordBatch:
        """Decodes some columns of a row group and verifies the checksums of their pages.

        Args:
            group: number of the row group.
            names: of the columns.
            read: returns bytes `start` to `end` of the file; called once.
        """
        places = [self.schema.names.index(name) for name in names]
        start, end = byte_range(self._checked(group), self._shard.bytes, places)
        part = FileSlice(self._shard.bytes, read(start, end), start)
        return read_group(open_parquet(part, self._metadata, page_checksums=True), group, names)

    def _checked(self, group: int) -> pq.RowGroupMetaData:
        found, groups = self._metadata.row_group(group), self._shard.row_groups
        rows, tokens = int(groups.rows[group]), int(groups.tokens[group])
        # Most values: two per token (spans), or one more than tokens in each pack (boundaries).
        check_group(found, rows, rows + 2 * tokens)
        return found
