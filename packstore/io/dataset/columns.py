"""Reads some columns of a shard, for code that needs no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packstore.errors import IntegrityError
from packstore.format.arrays import Int64
from packstore.format.schema import flat_column
from packstore.io.dataset.reader import ShardReader
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.stored_file import decoding
from packstore.io.shards.shard import ShardInfo
from packstore.io.store.location import Location


def read_columns(
    location: Location, manifest: Manifest, shard: ShardInfo, names: Sequence[str]
) -> Iterator[Mapping[str, tuple[Any, Int64]]]:
    """Yields columns `names` of each row group of `shard`, in order: values and pack offsets.

    For Parquet, fetches and verifies only the pages of these columns; for Arrow, whole batches.

    Raises:
        StorageError: the shard is missing, or the store refuses.
        IntegrityError: a checksum does not match, or counts do not agree.
    """
    reader = ShardReader(location, manifest, shard)
    for group in range(len(shard.row_groups)):
        batch = reader.read_columns(group, names)
        with decoding(f"{reader.where}, row group {group}"):
            columns = {name: flat_column(batch, name, None) for name in names}
            check_counts(columns, int(shard.row_groups.rows[group]))
        yield columns


def check_counts(columns: Mapping[str, tuple[Any, Int64]], rows: int) -> None:
    """Refuses out-of-range offsets; see :func:`packstore.format.rules.check_structure`.

    `rows` is the number of packs. Callers compare the sums with the manifest.
    """
    for name, (values, offsets) in columns.items():
        if len(offsets) != rows + 1:
            raise IntegrityError(f"column {name} must have {rows} rows; found {len(offsets) - 1}")
        if name in ("lengths", "num_responses") and len(values) and values.min() < 1:
            raise IntegrityError(f"column {name} must hold positive numbers; found {values.min()}")
    if "seq_boundaries" in columns:
        bounds, offsets = columns["seq_boundaries"]
        steps = np.diff(bounds.astype(np.int64))
        steps[offsets[1:-1] - 1] = 1  # from the end of one pack to the start of the next
        if np.any(np.diff(offsets) < 1) or np.any(bounds[offsets[:-1]]) or np.any(steps < 1):
            raise IntegrityError("column seq_boundaries must rise from 0 in each pack")
