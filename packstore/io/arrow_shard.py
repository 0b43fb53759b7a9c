"""Shards in Arrow's own format: batches as they are in memory, one for each row group."""

from __future__ import annotations

import contextlib

import pyarrow as pa

from packstore.io import local
from packstore.io.checksums import arrow_crc32
from packstore.io.faults import guarded
from packstore.io.shard import FileHashes
from packstore.records import Int64


class ArrowShard:
    """An Arrow file; see :class:`packstore.io.row_groups.ParquetShard`.

    Args:
        path: a local path that nothing has yet.
        schema: of the batches.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.path, self.size = path, 0
        with guarded("write", path, {}):
            self._file = open(path, "xb")  # noqa: SIM115
            self._writer = pa.ipc.new_file(self._file, schema)

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds a batch."""
        with guarded("write", self.path, {}):
            self._writer.write_batch(batch)
            self.size = self._file.tell()

    def finish(self, durable: bool) -> tuple[FileHashes, Int64]:
        """Closes the file; with `durable` it survives a power cut.

        Returns:
            its hashes, and int64 `[G]`, the crc32 of each batch.
        """
        with guarded("write", self.path, {}):
            self._writer.close()
            local.settle(self._file, durable)
            with open(self.path, "rb") as file:
                return FileHashes.of(file), arrow_crc32(self.path)

    def discard(self) -> None:
        """Closes the file, whatever happens: it is going to be removed."""
        for handle in (self._writer, self._file):
            with contextlib.suppress(OSError, pa.ArrowException):
                handle.close()
