"""Writes packs to shards with content-hashed names.

1. Check all invariants of the packs, and convert them to Arrow rows.
2. Cut row groups at `row_group_tokens`, independent of how the packs are batched.
3. Write them to the open shard, a hidden local file, in the writer's own thread.
4. At `shard_tokens` close it, hash it, and store it as ``data/<run>-<number>-<hash>``.

Shards become part of a dataset when a manifest names them
(:mod:`packstore.io.manifest.manifest`). The *figures* of packs are numbers that are
counted while they are written, such as tokens and examples; they become the totals,
statistics and pack index of a manifest.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import WriteConfig
from packstore.format.arrays import Int32, Int64, Packs
from packstore.format.rules import check_packs
from packstore.format.schema import pack_schema, to_arrow
from packstore.io.manifest.commit import DATA, FOLDER
from packstore.io.manifest.partition_notes import FinishedShard
from packstore.io.shards.arrow_file import batch_crc32
from packstore.io.shards.parquet import OPTIONS, byte_range
from packstore.io.shards.shard import (
    PackCounter,
    PackFigures,
    PackShape,
    crc32_of,
    describe_shard,
    file_hashes,
)
from packstore.io.store import local
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.store.storage_errors import as_storage_errors

AHEAD = 4
"""Maximum number of row groups that wait to be encoded, in memory."""


class _PendingRows(NamedTuple):
    """Rows of the next row group."""

    batch: pa.RecordBatch
    figures: PackFigures
    lengths: Int32  # [S], logical lengths of the sequences


class ShardWriter:
    """Writes packs as the shards of a dataset; a context manager.

    At its end, unfinished files are removed. After an error, stored shards stay until
    ``packstore clean``, as another run of the same job may be committing them. The
    bytes depend only on packs, settings and pyarrow's release. Memory: a few row
    groups.

    Args:
        location: place of the dataset.
        shape: shape of its packs.
        config: sizes of row groups and shards, and the format.
        run: prefix of the names of all shards.
    """

    def __init__(
        self, location: Location, shape: PackShape, config: WriteConfig, run: str
    ) -> None:
        self._location = location
        self._shape = shape
        self._config = config
        self._run = run
        self._schema = pack_schema(shape.kind, shape.layout, carry=dict(shape.carry))
        self._staging = Staging(location, (FOLDER, DATA))

        self._encoder = ThreadPoolExecutor(1, "packstore-write")
        # Start the thread now, by a call of no use. If its start were interrupted
        # (Ctrl-C), Python would not wait for it at the end, and a file could be closed
        # while it writes; there is none yet.
        self._encoder.submit(int)
        self._encoding: deque[Future[None]] = deque()

        self._num_rows = 0
        self._pending: list[_PendingRows] = []
        self._pending_tokens = 0
        self._shard: ShardFile | None = None
        self._finished_shards: list[FinishedShard] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._encoder.shutdown(cancel_futures=True)
        if self._shard is not None:
            self._shard.discard()
        self._staging.remove()

    def write(self, packs: Packs) -> None:
        """Add packs, in dataset order; raise FormatError for a violated invariant."""
        if len(packs) == 0:
            return
        check_packs(
            packs,
            layout=self._shape.layout,
            where=f"packs for {self._location.display}",
            first_row=self._num_rows,
            pack_size=self._shape.pack_size,
            vocab_size=self._shape.vocab_size,
        )
        self._num_rows += len(packs)

        rows = _PendingRows(
            batch=to_arrow(packs, self._schema),
            figures=PackFigures.of(packs, self._shape.kind),
            lengths=packs.lengths,
        )
        start = 0
        for row, tokens in enumerate(np.diff(packs.token_offsets).tolist()):
            is_full = self._pending_tokens + tokens > self._config.row_group_tokens
            if is_full and self._pending_tokens > 0:
                self._hold(rows, packs, start, row)
                self._flush()
                start = row
            self._pending_tokens += tokens
        self._hold(rows, packs, start, len(packs))

    def _hold(self, rows: _PendingRows, packs: Packs, start: int, stop: int) -> None:
        """Keep the rows `start` to `stop` for the next row group.

        `rows` and `packs` are the same packs.
        """
        if start == stop:
            return
        first_sequence = packs.sequence_offsets[start]
        end_sequence = packs.sequence_offsets[stop]
        part = _PendingRows(
            batch=rows.batch.slice(start, stop - start),
            figures=rows.figures[start:stop],
            lengths=rows.lengths[first_sequence:end_sequence],
        )
        self._pending.append(part)

    def finish(self) -> list[FinishedShard]:
        """Finish the last shard; return all shards in order."""
        if self._pending_tokens > 0:
            self._flush()
        if self._shard is not None:
            self._close_shard(self._shard)
        return self._finished_shards

    def _flush(self) -> None:
        """Queue the pending rows as one row group; close the shard if it is full."""
        if self._shard is None:
            path = self._staging.path()
            self._shard = ShardFile(path, self._schema, self._config)
        shard = self._shard

        batches = [part.batch for part in self._pending]
        figures = PackFigures.concat([part.figures for part in self._pending])
        lengths = np.concatenate([part.lengths for part in self._pending])
        self._pending = []
        self._pending_tokens = 0

        shard.count(figures, lengths)
        self._encoding.append(self._encoder.submit(shard.append, batches))
        self._wait(AHEAD)
        if shard.counter.tokens >= self._config.shard_tokens:
            self._close_shard(shard)

    def _wait(self, max_unwritten: int) -> None:
        """Wait until at most so many row groups are unwritten; raise errors of
        writing.
        """
        while len(self._encoding) > max_unwritten:
            self._encoding.popleft().result()

    def _close_shard(self, shard: ShardFile) -> None:
        """Store a finished shard: move or upload it into the dataset."""
        self._wait(max_unwritten=0)
        hashes, crc32 = shard.finish(durable=self._staging.durable)
        number = len(self._finished_shards)
        content_hash = hashes["sha256"][:16]
        name = f"{self._run}-{number:05d}-{content_hash}.{self._config.format}"
        info = describe_shard(f"{DATA}/{name}", shard.figures, hashes, crc32)
        self._staging.store(shard.path, info.path)
        self._shard = None

        sizes = PackFigures.concat(shard.figures).sizes
        finished = FinishedShard(shard=info, counter=shard.counter, sizes=sizes)
        self._finished_shards.append(finished)


class ShardFile:
    """A new Parquet or Arrow file at a local path.

    Attributes:
        path: path of the file.
        counter: totals of its packs.
        figures: for each row group the figures of its packs.
    """

    def __init__(self, path: str, schema: pa.Schema, config: WriteConfig) -> None:
        self.path = path
        self.counter = PackCounter()
        self.figures: list[PackFigures] = []
        with as_storage_errors("write", path, {}):
            self._file = open(path, "xb")  # noqa: SIM115
            if config.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                self._writer = pq.ParquetWriter(
                    self._file,
                    schema,
                    compression_level=3,
                    data_page_size=1 << 20,
                    store_schema=True,
                    **OPTIONS,
                )

    def count(self, figures: PackFigures, lengths: Int32) -> None:
        """Count a row group.

        Args:
            figures: figures of its packs.
            lengths: int32 `[S]`, logical lengths of its sequences.
        """
        self.figures.append(figures)
        self.counter.add(figures, lengths)

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append one row group that consists of all batches."""
        # A single batch is copied, too: the bytes of a slice depend on its place in the
        # larger batch.
        table = pa.Table.from_batches([pa.concat_batches(batches)])
        with as_storage_errors("write", self.path, {}):
            self._writer.write_table(table, table.num_rows)

    def finish(self, durable: bool) -> tuple[dict[str, Any], Int64]:
        """Close the file, and sync it if `durable`.

        Returns:
            Its sizes and hashes, named as in ``ShardInfo``, and the crc32 of its row
            groups, int64 `[G]`.
        """
        with as_storage_errors("write", self.path, {}):
            self._writer.close()
            local.finish_file(self._file, durable)
            with open(self.path, "rb") as file:
                return file_hashes(file), row_group_crc32(self.path)

    def discard(self) -> None:
        """Close the file and ignore errors: it is going to be removed."""
        for handle in (self._writer, self._file):
            with contextlib.suppress(OSError, pa.ArrowException):
                handle.close()


def row_group_crc32(path: str) -> Int64:
    """Return the crc32 of each row group of a finished local file, int64 `[G]`.

    In an Arrow file a row group is a record batch.
    """
    # Arrow encodes texts as UTF-8, whatever the encoding of the filesystem is.
    with pa.OSFile(os.fsencode(path)) as source:
        is_parquet = source.read(4) == b"PAR1"
        crcs = _parquet_crc32(source) if is_parquet else _arrow_crc32(source)
    return np.array(crcs, np.int64)


def _parquet_crc32(source: pa.NativeFile) -> list[int]:
    metadata = pq.read_metadata(source)
    crcs = []
    for number in range(metadata.num_row_groups):
        start, end = byte_range(metadata.row_group(number), source.size())
        crcs.append(crc32_of(source.read_at(end - start, start)))
    return crcs


def _arrow_crc32(source: pa.NativeFile) -> list[int]:
    file = pa.ipc.open_file(source)
    return [batch_crc32(file.get_batch(i)) for i in range(file.num_record_batches)]
