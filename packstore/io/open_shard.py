"""A shard that is being written: row groups are encoded anywhere, and appended one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from packstore.config import WriteConfig
from packstore.io.arrow_shard import ArrowShard
from packstore.io.row_groups import EncodedGroup, ParquetShard, encode_group
from packstore.io.statistics import PackCounter
from packstore.records import Int64

Encoded: TypeAlias = EncodedGroup | pa.RecordBatch


def encode(batches: Sequence[pa.RecordBatch], config: WriteConfig) -> Encoded:
    """The batches as one row group, for :meth:`OpenShard.append`; to be called from any thread."""
    return pa.concat_batches(batches) if config.format == "arrow" else encode_group(batches, config)


class OpenShard:
    """A shard file on the local disk, and what its packs add up to.

    Args:
        path: a local path that nothing has yet.
        schema: of the packs.
        config: the file format.
    """

    def __init__(self, path: str, schema: pa.Schema, config: WriteConfig) -> None:
        arrow = config.format == "arrow"
        self.file = ArrowShard(path, schema) if arrow else ParquetShard(path)
        self.figures: list[Int64] = []
        self.counter = PackCounter()

    def append(self, group: Encoded, figures: Int64, counter: PackCounter) -> None:
        """Adds one row group.

        Raises:
            StorageError: no space, or no permission.
        """
        self.file.append(group)
        self.figures.append(figures)
        self.counter.merge(counter)
