"""Opens and reads committed side datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import IntegrityError, sentence
from packstore.io.manifest.commit import read_committed
from packstore.io.manifest.side_manifest import SIDE, SideManifest
from packstore.io.manifest.stored_file import decoding, read_stored
from packstore.io.shards.parquet import check_group
from packstore.io.store.location import Location


class Side:
    """A committed version of a side dataset. Picklable; reads lazily."""

    def __init__(self, location: Location, manifest: SideManifest, version: int) -> None:
        self.location, self.manifest, self.version = location, manifest, version

    def __len__(self) -> int:
        return self.manifest.examples

    def __repr__(self) -> str:
        columns = ", ".join(self.manifest.columns)
        return f"Side({self.url!r}, version={self.version}, examples={len(self)}, {columns})"

    @property
    def url(self) -> str:
        """URL of the side dataset, without secrets."""
        return self.location.display

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows by shard, sorted by id in each; verifies hashes."""
        for shard in self.manifest.shards:
            where = self.location.join(shard.path).display
            data = read_stored(self.location, shard)
            with decoding(where):
                source = pa.BufferReader(data)
                file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
                schema = file.schema_arrow
                rows, expected = file.metadata.num_rows, self.manifest.schema
                fits = schema.equals(expected) and schema.metadata == expected.metadata
                if not fits or rows != shard.rows:
                    must = f"it must have {shard.rows} rows of the columns that the manifest tells"
                    raise IntegrityError(sentence(where, must, str((rows, schema.names))))
                for group in map(file.metadata.row_group, range(file.num_row_groups)):
                    check_group(group, group.num_rows)
                (batch,) = file.read(use_threads=False).combine_chunks().to_batches()
                batch.validate(full=True)
            yield batch


def open_side(
    url: str, storage_options: Mapping[str, Any] | None = None, version: int | None = None
) -> Side:
    """Opens the side dataset at `url`, by default its current version.

    Raises:
        DatasetNotFoundError: no side dataset, or no such version, was committed there.
        FormatError: its manifest is not valid.
        StorageError: the store refuses.
    """
    location = Location(url, storage_options or {})
    data, where, number = read_committed(location, version, SIDE)
    return Side(location, SideManifest.from_json(data, where), number)
