"""Side datasets: values derived from a dataset with a model, keyed by example id.

They are separate folders, so that datasets never change: Parquet shards under
``data/``, and a manifest ``_packstore/side-000001.json``, which is the commit, as for a
dataset.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import fingerprint
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    FormatError,
    IntegrityError,
    quote,
    sentence,
)
from packstore.format.arrays import Column, Float32, Int64, ragged_indices, to_offsets
from packstore.format.schema import KINDS, as_numpy, schema_difference
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import (
    DATA,
    FOLDER,
    commit,
    read_committed,
    require_committed,
)
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.side_manifest import (
    PER_SEQUENCE,
    SIDE,
    SIDE_TYPES,
    SideManifest,
    SideShard,
)
from packstore.io.manifest.stored_file import decoding, read_stored
from packstore.io.shards.parquet import OPTIONS, check_group, check_lists
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.versions.write_job import writing
from packstore.version import VERSION

SHARD_ROWS = 1 << 20
"""Examples of a shard: what a writer holds, and what a reader decodes at once."""

Values = Mapping[str, npt.NDArray[Any]]


class SideWriter:
    """Writes a side dataset; a context manager that commits it, or aborts after an
    error.

    After an error its stored shards stay for `clean`, as an equal job may be about to
    commit them.

    Args:
        url: a local folder or an fsspec URL.
        source: the dataset whose examples the values belong to, or its manifest.
        columns: name -> ``float32``, ``float64``, ``int64``, ``bool``, ``string``: one
            value for each example; or ``list<float32>``: one for each sequence, as of
            ``ref_logps``.
        provenance: origin of the values, such as `model`, `model_sha256`,
            `tokenizer_sha256`, `chat_template_sha256`, `dtype`, `attention`,
            `head_dtype`: texts, numbers, booleans.
        overwrite: replace an existing side dataset.
        storage_options: options of the fsspec filesystem.

    Attributes:
        examples: number written so far.
    """

    def __init__(
        self,
        url: str,
        source: Dataset | Manifest,
        columns: Mapping[str, str],
        *,
        provenance: Mapping[str, str | int | float | bool | None] | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        manifest = source.manifest if isinstance(source, Dataset) else source
        self._location = Location(url, storage_options or {})
        self._expected = manifest.totals.examples
        self._manifest = SideManifest(
            kind=manifest.kind,
            lineage=manifest.lineage,
            fingerprint=manifest.fingerprint,
            columns=dict(columns),
            provenance=dict(provenance or {}),
            package_version=VERSION,
            shards=(),
        )
        head = self._manifest
        head.check(self._location.display)
        if later := sorted(columns.keys() - head.known_columns.keys()):
            types = ", ".join(SIDE_TYPES)
            rule = f"columns must begin with a letter, and have a type among: {types}"
            found = f"{quote(later[0])} of type {quote(columns[later[0]])}"
            raise FormatError(sentence(self._location.display, rule, found))
        self._run = fingerprint([head.fingerprint, head.columns, head.provenance])[:12]
        opened = writing(self._location, overwrite, "side data", SIDE)
        with contextlib.ExitStack() as stack:
            self._version = stack.enter_context(opened).version
            # Also if neither commit nor abort is called.
            self._release = weakref.finalize(self, stack.pop_all().close)
        self._staging = Staging(self._location, (FOLDER, DATA))
        self._pending: list[pa.RecordBatch] = []
        self._shards: list[SideShard] = []
        self.examples = self._pending_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            if error is None:
                self.commit()
        finally:
            self.abort()

    def write(
        self, example_ids: Int64, values: Values, num_responses: Any = None
    ) -> None:
        """Adds the values of some examples, in any order.

        Args:
            example_ids: int64 `[E]`.
            values: of every column: `[E]`, and of ``list<float32>`` `[S]`, the
                sequences of each example in order.
            num_responses: int `[E]`, K of each example; needed only for kind
                ``scored``.
        """
        head = self._manifest
        if values.keys() != head.columns.keys():
            names = ", ".join(head.columns)
            raise ConfigError(
                f"a side dataset of columns {names} got {', '.join(values)}."
            )
        k = KINDS[head.kind]
        if num_responses is None and k is None:
            raise ConfigError("examples of kind scored need num_responses.")
        counts = (
            np.full(len(example_ids), k) if num_responses is None else num_responses
        )
        ids = np.asarray(example_ids, np.int64)
        arrays = [pa.array(ids)]
        for name, type_ in zip(head.columns, head.schema.types[1:], strict=True):
            arrays.append(_column(name, np.asarray(values[name]), counts, type_))
        self._pending.append(pa.RecordBatch.from_arrays(arrays, schema=head.schema))
        self.examples += len(ids)
        self._pending_rows += len(ids)
        while self._pending_rows >= SHARD_ROWS:
            self._flush(SHARD_ROWS)

    def commit(self) -> int:
        """Finishes the last shard and commits the side dataset; returns its version."""
        if self.examples != self._expected:
            rule = (
                f"a side dataset must hold each of {self._expected} examples of "
                "its "
                "dataset once"
            )
            raise ConfigError(f"{rule}; got {self.examples}.")
        if self._pending_rows:
            self._flush(self._pending_rows)
        manifest = replace(self._manifest, shards=tuple(self._shards))
        commit(self._location, manifest.to_json(), self._version, SIDE)
        self.abort()
        require_committed(self._location, manifest.files, self._version)
        return self._version

    def abort(self) -> None:
        """Removes unfinished files; stored shards stay for `clean`."""
        self._staging.remove()
        self._release()

    def _flush(self, rows: int) -> None:
        table = pa.Table.from_batches(self._pending)
        self._pending = table.slice(rows).to_batches()
        self._pending_rows -= rows
        table = table.slice(0, rows).sort_by("example_ids").combine_chunks()
        with self._staging.file() as file:
            pq.write_table(table, file, store_schema=True, **OPTIONS)
        prefix = f"{DATA}/{self._run}-{len(self._shards):05d}"
        shard = SideShard.of(file.name, prefix, ".parquet", rows=rows)
        self._staging.store(file.name, shard.path)
        self._shards.append(shard)


def _column(
    name: str, values: npt.NDArray[Any], counts: Any, type_: pa.DataType
) -> pa.Array:
    is_per_sequence = pa.types.is_list(type_)
    expected = int(np.sum(counts)) if is_per_sequence else len(counts)
    if values.shape != (expected,):
        raise ConfigError(
            f"{name} must have shape ({expected},); found {values.shape}."
        )
    if not is_per_sequence:
        try:
            column = pa.array(values, type_, from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} must hold values of type {type_}: {error}."
            ) from error
        if column.null_count:
            raise ConfigError(f"{name} must have a value for each example; found None.")
        return column
    if not np.isfinite(values).all():
        raise FormatError(
            sentence(name, "its values must be finite", "NaN or infinite ones")
        )
    offsets = pa.array(to_offsets(np.asarray(counts, np.int64)).astype(np.int32))
    flat = pa.array(values.astype(np.float32))
    return pa.ListArray.from_arrays(offsets, flat, type=type_)


class Side:
    """A committed version of a side dataset. Picklable; reads lazily."""

    def __init__(
        self, location: Location, manifest: SideManifest, version: int
    ) -> None:
        self.location, self.manifest, self.version = location, manifest, version

    def __len__(self) -> int:
        return self.manifest.examples

    def __repr__(self) -> str:
        columns = ", ".join(self.manifest.columns)
        return (
            f"Side({self.url!r}, version={self.version}, examples={len(self)}, "
            f"{columns})"
        )

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
                file = pq.ParquetFile(
                    source, page_checksum_verification=True, pre_buffer=False
                )
                rows, schema = file.metadata.num_rows, file.schema_arrow
                other = schema_difference(schema, self.manifest.schema)
                if other or rows != shard.rows:
                    rule = (
                        f"it must have {shard.rows} rows of the columns that the "
                        "manifest tells"
                    )
                    raise IntegrityError(sentence(where, rule, other or f"{rows} rows"))
                names = ["example_ids", *self.manifest.known_columns]
                check_lists(file.metadata, names)
                for group in map(file.metadata.row_group, range(file.num_row_groups)):
                    check_group(group, group.num_rows, names=names)
                (batch,) = (
                    file.read(names, use_threads=False).combine_chunks().to_batches()
                )
                batch.validate(full=True)
            yield batch


def open_side(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
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
"""Bytes above which an array is kept in a mapped temporary file, which can be paged
out.
"""


class SideTable:
    """The values of a side dataset by example id, 8 bytes for each besides; read at
    once.
    """

    def __init__(self, side: Side) -> None:
        self.url = side.url
        batches = list(side.iter_batches())
        with decoding(self.url):
            ids = np.concatenate(
                [as_numpy(b.column("example_ids")) for b in batches] or [_NO_IDS]
            )
            order = np.argsort(ids, kind="stable")
            self._ids = _memmap_if_large(ids[order])
            repeated = self._ids[1:][self._ids[1:] == self._ids[:-1]]
            if len(repeated):
                found = f"{len(repeated)} that repeat, the first of them {repeated[0]}"
                raise IntegrityError(
                    sentence(self.url, "example ids must be distinct", found)
                )
            self._columns: dict[str, Any] = {}
            self._offsets: dict[
                str, Any
            ] = {}  # of columns with a value for each sequence
            for name, type_name in side.manifest.known_columns.items():
                arrays = [b.column(name) for b in batches]
                if type_name == PER_SEQUENCE:
                    self._load_lists(name, arrays, order)
                elif type_name == "string":
                    whole = pa.concat_arrays(
                        [a.cast(pa.large_string()) for a in arrays] or [_NONE]
                    )
                    self._columns[name] = whole.take(pa.array(order))
                else:
                    values = np.concatenate([as_numpy(a) for a in arrays] or [_NO_IDS])
                    self._columns[name] = _memmap_if_large(values[order])

    def find(self, example_ids: Int64) -> Int64:
        """Returns the rows of these examples, int64 `[E]`; CompatibilityError if one
        has none.
        """
        rows = np.searchsorted(self._ids, example_ids)
        rows[rows == len(self._ids)] = 0
        missing = (
            example_ids[self._ids[rows] != example_ids]
            if len(self._ids)
            else example_ids
        )
        if len(missing):
            found = (
                f"none for {len(missing)} of {len(example_ids)}, the first of "
                "them "
                f"{missing[0]}"
            )
            rule = "every example must have its values"
            raise CompatibilityError(sentence(self.url, rule, found, _REMEDY))
        return rows

    def column(self, name: str, rows: Int64) -> Column:
        """Returns the value of each of these examples, `[E]`; strings as objects."""
        values = self._columns[name]
        if isinstance(values, pa.Array):
            return np.array(values.take(pa.array(rows)).to_pylist(), np.object_)
        return np.asarray(values[rows])

    def sequence_values(
        self, name: str, rows: Int64, num_responses: npt.NDArray[np.integer]
    ) -> Float32:
        """Returns the value of each sequence of these examples, float32 `[S]`."""
        values, offsets = self._columns[name], self._offsets[name]
        counts = offsets[rows + 1] - offsets[rows]
        wrong = np.flatnonzero(counts != num_responses)
        for i in wrong[:1]:
            where = f"{self.url}, example {self._ids[rows[i]]}"
            rule = f"it must have {name} of {num_responses[i]} sequences"
            raise CompatibilityError(sentence(where, rule, str(counts[i]), _REMEDY))
        return np.asarray(values[ragged_indices(offsets, rows)])

    def _load_lists(self, name: str, arrays: list[Any], order: Int64) -> None:
        flat = [as_numpy(a.flatten()) for a in arrays]
        lengths = [np.diff(as_numpy(a.offsets).astype(np.int64)) for a in arrays]
        values, counts = (np.concatenate(x or [_NO_IDS]) for x in (flat, lengths))
        if not np.isfinite(values).all():
            raise IntegrityError(
                sentence(self.url, f"{name} must be finite", "NaN or infinity")
            )
        self._columns[name] = _memmap_if_large(
            values[ragged_indices(to_offsets(counts), order)]
        )
        self._offsets[name] = _memmap_if_large(to_offsets(counts[order]))


def _memmap_if_large(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
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
