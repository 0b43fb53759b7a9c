"""Writes packs to shards with content-hashed names.

1. Check all invariants of the packs, and convert them to Arrow rows.
2. Cut row groups at `row_group_tokens`, independent of how the packs are batched.
3. Write them to the open shard, a hidden local file, in the writer's own thread.
4. At `shard_tokens` close it, hash it, and store it as ``data/<run>-<number>-<hash>``.
Shards become part of a dataset when a manifest names them
(:mod:`packstore.io.manifest.manifest`).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import WriteConfig
from packstore.format.arrays import Int32, Int64, Packs
from packstore.format.rules import check_packs
from packstore.format.schema import pack_schema, to_arrow
from packstore.io.manifest.commit import DATA, FOLDER
from packstore.io.manifest.partition_notes import FinishedShard
from packstore.io.shards import shard as facts
from packstore.io.shards.arrow_file import batch_crc32
from packstore.io.shards.parquet import OPTIONS, byte_range
from packstore.io.store import local
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.store.storage_errors import as_storage_errors


class ShardFile:
    """A new Parquet or Arrow file at a local path, `figures` of its packs, and their
    totals.
    """

    def __init__(self, path: str, schema: pa.Schema, config: WriteConfig) -> None:
        self.path, self.counter = path, facts.PackCounter()
        self.figures: list[facts.PackFigures] = []
        with as_storage_errors("write", path, {}):
            self._file = open(path, "xb")  # noqa: SIM115
            if config.format == "arrow":
                self._writer = pa.ipc.new_file(self._file, schema)
            else:
                how = {
                    "compression_level": 3,
                    "data_page_size": 1 << 20,
                    "store_schema": True,
                }
                self._writer = pq.ParquetWriter(self._file, schema, **OPTIONS, **how)

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Appends one row group that consists of all batches."""
        # One batch is copied, too: the bytes of a slice depend on where it was taken
        # from.
        table = pa.Table.from_batches([pa.concat_batches(batches)])
        with as_storage_errors("write", self.path, {}):
            self._writer.write_table(table, table.num_rows)

    def finish(self, durable: bool) -> tuple[dict[str, Any], Int64]:
        """Closes the file, if `durable` synced; returns its hashes and row groups'
        crc32, `[G]`.
        """
        with as_storage_errors("write", self.path, {}):
            self._writer.close()
            local.finish_file(self._file, durable)
            with open(self.path, "rb") as file:
                return facts.file_hashes(file), row_group_crc32(self.path)

    def discard(self) -> None:
        """Closes the file and ignores errors: it is going to be removed."""
        for handle in (self._writer, self._file):
            with contextlib.suppress(OSError, pa.ArrowException):
                handle.close()


def row_group_crc32(path: str) -> Int64:
    """Returns int64 `[G]`, the crc32 of each row group or batch of a finished local
    file.
    """
    with pa.OSFile(os.fsencode(path)) as source:  # Arrow takes texts for UTF-8
        if source.read(4) == b"PAR1":
            metadata = pq.read_metadata(source)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            ranges = [byte_range(group, source.size()) for group in groups]
            crcs = [
                facts.crc32_of(source.read_at(end - start, start))
                for start, end in ranges
            ]
        else:
            file = pa.ipc.open_file(source)
            crcs = [
                batch_crc32(file.get_batch(i)) for i in range(file.num_record_batches)
            ]
    return np.array(crcs, np.int64)


AHEAD = 4
"""Maximum row groups queued for encoding."""


class ShardWriter:
    """Writes packs as the shards of a dataset; a context manager, at whose end nothing
    unfinished is left. Stored shards stay for `clean`: another run of the same job may
    be committing them.

    The bytes depend only on packs, settings and pyarrow's release; `run` is the prefix
    of all names. Memory: a few row groups.
    """

    def __init__(
        self, location: Location, shape: facts.PackShape, config: WriteConfig, run: str
    ):
        self._location, self._shape, self._config, self._run = (
            location,
            shape,
            config,
            run,
        )
        spans, carry = config.labels == "spans", dict(shape.carry)
        self._schema = pack_schema(
            shape.kind, shape.layout, label_spans=spans, carry=carry
        )
        self._staging = Staging(location, (FOLDER, DATA))
        self._encoder = ThreadPoolExecutor(1, "packstore-write")
        # A thread whose start is interrupted is not waited for, so it starts before
        # there is a file that could be closed while it writes.
        self._encoder.submit(int)
        self._encoding: deque[Future[None]] = deque()
        self._shard: ShardFile | None = None
        self._pending: list[tuple[pa.RecordBatch, facts.PackFigures, Int32]] = []
        self._pending_tokens = self._rows = 0
        self._finished: list[FinishedShard] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._encoder.shutdown(cancel_futures=True)
        if self._shard is not None:
            self._shard.discard()
        self._staging.remove()

    def write(self, packs: Packs) -> None:
        """Adds packs, in dataset order; raises FormatError if one violates an
        invariant.
        """
        if not len(packs):
            return
        shape, where = self._shape, f"packs for {self._location.display}"
        limits = {"pack_size": shape.pack_size, "vocab_size": shape.vocab_size}
        check_packs(
            packs, layout=shape.layout, where=where, first_row=self._rows, **limits
        )
        self._rows += len(packs)
        batch, figures = (
            to_arrow(packs, self._schema),
            facts.PackFigures.of(packs, shape.kind),
        )

        def hold(start: int, stop: int) -> None:
            first, last = packs.sequence_offsets[[start, stop]]
            rows = batch.slice(start, stop - start)
            self._pending.append((rows, figures[start:stop], packs.lengths[first:last]))

        start = 0
        for row, tokens in enumerate(np.diff(packs.token_offsets).tolist()):
            full = self._pending_tokens + tokens > self._config.row_group_tokens
            if self._pending_tokens and full:
                if row > start:
                    hold(start, row)
                self._flush()
                start = row
            self._pending_tokens += tokens
        hold(start, len(packs))

    def finish(self) -> list[FinishedShard]:
        """Finishes the last shard; returns all shards in order."""
        if self._pending_tokens:
            self._flush()
        if self._shard is not None:
            self._close_shard(self._shard)
        return self._finished

    def _flush(self) -> None:
        """Queues the pending rows as one row group; closes the shard if it is full."""
        batches, some_figures, some_lengths = zip(*self._pending, strict=True)
        shard = self._shard or ShardFile(
            self._staging.path(), self._schema, self._config
        )
        self._shard = shard
        figures = facts.PackFigures.concat(some_figures)
        shard.figures.append(figures)
        shard.counter.add(figures, np.concatenate(some_lengths))
        self._pending, self._pending_tokens = [], 0
        self._encoding.append(self._encoder.submit(shard.append, batches))
        self._wait(AHEAD)
        if shard.counter.tokens >= self._config.shard_tokens:
            self._close_shard(shard)

    def _wait(self, ahead: int) -> None:
        """Waits until at most `ahead` row groups are unwritten; raises errors of
        writing.
        """
        while len(self._encoding) > ahead:
            self._encoding.popleft().result()

    def _close_shard(self, shard: ShardFile) -> None:
        """Stores a finished shard: moves or uploads it into the dataset."""
        self._wait(0)
        hashes, crc32 = shard.finish(durable=self._staging.durable)
        number = len(self._finished)
        name = f"{self._run}-{number:05d}-{hashes['sha256'][:16]}.{self._config.format}"
        info = facts.describe_shard(f"{DATA}/{name}", shard.figures, hashes, crc32)
        self._staging.store(shard.path, info.path)
        self._shard = None
        sizes = facts.PackFigures.concat(shard.figures).sizes
        self._finished.append(FinishedShard(info, shard.counter, sizes))
