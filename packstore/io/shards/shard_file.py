"""Writes a shard to the local disk, row group by row group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import WriteConfig
from packstore.format.arrays import Int64
from packstore.io.shards.checksums import row_group_crc32
from packstore.io.shards.shard import FileHashes
from packstore.io.shards.statistics import PackCounter
from packstore.io.store import local
from packstore.io.store.storage_errors import as_storage_errors


class ShardFile:
    """A new Parquet or Arrow file at a local path, `figures` of its packs, and their totals."""

    def __init__(self, path: str, schema: pa.Schema, config: WriteConfig) -> None:
        self.path, self.counter = path, PackCounter()
        self.figures: list[Int64] = []
        with as_storage_errors("write", path, {}):
            self._file = open(path, "xb")  # noqa: SIM115
            if config.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                self._writer = pq.ParquetWriter(
                    self._file,
                    schema,
                    compression="zstd",
                    compression_level=3,
                    use_dictionary=False,
                    write_statistics=False,
                    write_page_checksum=True,
                    data_page_size=1 << 20,
                    store_schema=True,
                )

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Appends one row group that consists of all batches."""
        # One batch is copied, too: the bytes of a slice depend on where it was taken from.
        table = pa.Table.from_batches([pa.concat_batches(batches)])
        with as_storage_errors("write", self.path, {}):
            self._writer.write_table(table, max(table.num_rows, 1))

    def finish(self, durable: bool) -> tuple[FileHashes, Int64]:
        """Closes the file, if `durable` synced; returns its hashes and row groups' crc32, `[G]`."""
        with as_storage_errors("write", self.path, {}):
            self._writer.close()
            local.finish_file(self._file, durable)
            with open(self.path, "rb") as file:
                return FileHashes.of(file), row_group_crc32(self.path)

    def discard(self) -> None:
        """Closes the file and ignores errors: it is going to be removed."""
        for handle in (self._writer, self._file):
            with contextlib.suppress(OSError, pa.ArrowException):
                handle.close()
