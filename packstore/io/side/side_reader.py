"""Reads committed side datasets, and finds their values by example id."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.errors import CompatibilityError, IntegrityError, sentence
from packstore.format.arrays import Column, Float32, Int64, ragged_indices, to_offsets
from packstore.format.schema import as_numpy
from packstore.io.manifest.commit import read_committed
from packstore.io.manifest.side_manifest import REF_LOGPS, SIDE, SideManifest
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


MAPPED_BYTES = 64 << 20
"""Bytes above which an array is kept in a mapped temporary file, which can be paged out."""


class SideTable:
    """The values of a side dataset by example id, 8 bytes for each besides; read at once."""

    def __init__(self, side: Side) -> None:
        self.url = side.url
        batches = list(side.iter_batches())
        with decoding(self.url):
            ids = np.concatenate([as_numpy(b.column("example_ids")) for b in batches] or [_NO_IDS])
            order = np.argsort(ids, kind="stable")
            self._ids = _settled(ids[order])
            repeated = self._ids[1:][self._ids[1:] == self._ids[:-1]]
            if len(repeated):
                found = f"{len(repeated)} that repeat, the first of them {repeated[0]}"
                raise IntegrityError(sentence(self.url, "example ids must be distinct", found))
            self._columns: dict[str, Any] = {}
            self._offsets: Int64 | None = None
            for name, type_name in side.manifest.columns.items():
                arrays = [b.column(name) for b in batches]
                if name == REF_LOGPS:
                    self._load_lists(arrays, order)
                elif type_name == "string":
                    whole = pa.concat_arrays([a.cast(pa.large_string()) for a in arrays] or [_NONE])
                    self._columns[name] = whole.take(pa.array(order))
                else:
                    values = np.concatenate([as_numpy(a) for a in arrays] or [_NO_IDS])
                    self._columns[name] = _settled(values[order])

    def find(self, example_ids: Int64) -> Int64:
        """Returns the rows of these examples, int64 `[E]`; CompatibilityError if one has none."""
        rows = np.searchsorted(self._ids, example_ids)
        rows[rows == len(self._ids)] = 0
        missing = example_ids[self._ids[rows] != example_ids] if len(self._ids) else example_ids
        if len(missing):
            found = f"none for {len(missing)} of {len(example_ids)}, the first of them {missing[0]}"
            must = "every example must have its values"
            raise CompatibilityError(sentence(self.url, must, found, _REMEDY))
        return rows

    def column(self, name: str, rows: Int64) -> Column:
        """Returns the value of each of these examples, `[E]`; strings as objects."""
        values = self._columns[name]
        if isinstance(values, pa.Array):
            return np.array(values.take(pa.array(rows)).to_pylist(), np.object_)
        return np.asarray(values[rows])

    def ref_logps(self, rows: Int64, num_responses: npt.NDArray[np.integer]) -> Float32:
        """Returns the value of each sequence of these examples, float32 `[S]`."""
        values, offsets = self._columns[REF_LOGPS], self._offsets
        assert offsets is not None
        counts = offsets[rows + 1] - offsets[rows]
        wrong = np.flatnonzero(counts != num_responses)
        if len(wrong):
            i = wrong[0]
            where = f"{self.url}, example {self._ids[rows[i]]}"
            must = f"it must have {REF_LOGPS} of {num_responses[i]} sequences"
            raise CompatibilityError(sentence(where, must, str(counts[i]), _REMEDY))
        return np.asarray(values[ragged_indices(offsets, rows)])

    def _load_lists(self, arrays: list[Any], order: Int64) -> None:
        flat = [as_numpy(a.flatten()) for a in arrays]
        lengths = [np.diff(as_numpy(a.offsets).astype(np.int64)) for a in arrays]
        values, counts = (np.concatenate(x or [_NO_IDS]) for x in (flat, lengths))
        if not np.isfinite(values).all():
            raise IntegrityError(sentence(self.url, "ref_logps must be finite", "NaN or infinity"))
        self._columns[REF_LOGPS] = _settled(values[ragged_indices(to_offsets(counts), order)])
        self._offsets = _settled(to_offsets(counts[order]))


def _settled(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns `values`, moved to a mapped temporary file if they are large."""
    if values.nbytes <= MAPPED_BYTES:
        return values
    with tempfile.TemporaryFile(prefix="packstore-side-") as file:
        values.tofile(file)
        file.flush()
        return np.memmap(file, values.dtype, "r", shape=values.shape)


_NO_IDS = np.empty(0, np.int64)
_NONE = pa.nulls(0, pa.large_string())  # pa.array would import pandas
_REMEDY = "Make the side dataset anew from this dataset"
