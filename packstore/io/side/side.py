"""Side datasets: values derived from a dataset with a model, keyed by example id.

They are separate folders, so that datasets never change: Parquet shards under
``data/``, and a manifest ``_packstore/side-000001.json``, which is the commit, as for a
dataset.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from packstore.format.arrays import (
    Column,
    Float32,
    Int64,
    TokenValues,
    TopK,
    ragged_indices,
    to_offsets,
)
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
    TokenType,
    token_type,
)
from packstore.io.manifest.stored_file import decoding, read_stored
from packstore.io.shards.parquet import OPTIONS, check_group, check_lists
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.versions.write_job import writing
from packstore.version import VERSION

SHARD_ROWS = 1 << 20
"""Examples of a shard, which a writer holds, and a reader decodes at once."""

MAPPED_BYTES = 64 << 20
"""Bytes above which an array is kept in a mapped temporary file, which can be paged
out.
"""

_REMEDY = "Make the side dataset anew from this dataset"
_NO_IDS = np.empty(0, np.int64)
_NO_TEXTS = pa.nulls(0, pa.large_string())  # pa.array would import pandas

Values = Mapping[str, npt.NDArray[Any] | TopK]


# Writing


class SideWriter:
    """Writes a side dataset; a context manager that commits it, or aborts on an error.

    After an error its stored shards stay for `clean`, as an equal job may be about to
    commit them.

    Args:
        url: a local folder or an fsspec URL.
        source: the dataset of the examples, or its manifest.
        columns: name -> ``float32``, ``float64``, ``int64``, ``bool``, ``string``: one
            value for each example; or ``list<float32>``: one for each sequence, as of
            ``ref_logps``; or ``token<float32>``, ``token<float16>``: one for each
            supervised token; or ``token<top16,float16>``, ``token<top16,uint8>``: the
            16 most probable ids in place of each, and their log-probs, which 8 bits
            store as multiples of a number of the example.
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
        source_manifest = source.manifest if isinstance(source, Dataset) else source
        self._location = Location(url, storage_options or {})
        self._num_expected = source_manifest.totals.examples
        self._manifest = SideManifest(
            kind=source_manifest.kind,
            lineage=source_manifest.lineage,
            fingerprint=source_manifest.fingerprint,
            columns=dict(columns),
            provenance=dict(provenance or {}),
            package_version=VERSION,
            shards=(),
        )
        self._manifest.check(self._location.display)
        _require_known_columns(self._manifest, self._location.display)
        identity = [
            self._manifest.fingerprint,
            self._manifest.columns,
            self._manifest.provenance,
        ]
        self._run = fingerprint(identity)[:12]

        self._version = self._open_job(overwrite)
        self._staging = Staging(self._location, (FOLDER, DATA))
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0
        self._shards: list[SideShard] = []
        self.examples = 0

    def _open_job(self, overwrite: bool) -> int:
        """Mark the place as being written; return the number of the next version.

        The mark is removed by `_release`, also if nobody calls commit or abort.
        """
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(
                writing(self._location, overwrite, call="side data", name=SIDE)
            )
            self._release = weakref.finalize(self, stack.pop_all().close)
        return job.version

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
        self,
        example_ids: Int64,
        values: Values,
        num_responses: Any = None,
        num_targets: Any = None,
    ) -> None:
        """Add the values of some examples, in any order.

        Args:
            example_ids: int64 `[E]`.
            values: of every column: `[E]`; of ``list<float32>`` `[S]`, the sequences of
                each example in order; of ``token<…>`` `[n]` or a
                :class:`~packstore.torch.TopK` of `[n, k]`, the supervised tokens of
                each example in the order of sequence, then position.
            num_responses: int `[E]`, K of each example; needed only for kind
                ``scored``.
            num_targets: int `[E]`, supervised tokens of each example, as
                ``batch.num_targets``; needed only for columns of tokens.

        Raises:
            ConfigError: a column is absent, unknown, or of another shape or type.
            FormatError: a value of a sequence is not finite.
        """
        columns = self._manifest.columns
        if values.keys() != columns.keys():
            raise ConfigError(
                f"a side dataset of columns {', '.join(columns)} got "
                f"{', '.join(values)}."
            )
        ids = np.asarray(example_ids, np.int64)
        counts = self._sequence_counts(len(ids), num_responses)

        schema = self._manifest.schema
        arrays = [pa.array(ids)]
        for name, type_name in columns.items():
            type_ = schema.field(name).type
            of_tokens = token_type(type_name)
            if of_tokens is not None:
                if num_targets is None:
                    raise ConfigError(f"{name} is of tokens, and needs num_targets.")
                token_counts = np.asarray(num_targets, np.int64)
                array = _token_column(name, values[name], token_counts, of_tokens)
            elif pa.types.is_list(type_):
                array = _sequence_column(name, np.asarray(values[name]), counts, type_)
            else:
                array = _example_column(name, np.asarray(values[name]), len(ids), type_)
            arrays.append(array)
        self._pending.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        self._num_pending += len(ids)
        self.examples += len(ids)

        while self._num_pending >= SHARD_ROWS:
            self._flush(SHARD_ROWS)

    def _sequence_counts(self, num_examples: int, num_responses: Any) -> Int64:
        """Return the number of sequences of each example, int64 `[E]`."""
        if num_responses is not None:
            return np.asarray(num_responses, np.int64)
        responses_of_kind = KINDS[self._manifest.kind]
        if responses_of_kind is None:
            raise ConfigError("examples of kind scored need num_responses.")
        return np.full(num_examples, responses_of_kind, np.int64)

    def commit(self) -> int:
        """Finish the last shard and commit the side dataset; return its version.

        Raises:
            ConfigError: an example has no values, or more than once.
        """
        if self.examples != self._num_expected:
            raise ConfigError(
                f"a side dataset must hold each of {self._num_expected} examples of "
                f"its dataset once; got {self.examples}."
            )
        if self._num_pending > 0:
            self._flush(self._num_pending)
        manifest = replace(self._manifest, shards=tuple(self._shards))
        commit(self._location, manifest.to_json(), self._version, SIDE)
        self.abort()
        require_committed(self._location, manifest.files, self._version)
        return self._version

    def abort(self) -> None:
        """Remove unfinished files; stored shards stay for `clean`."""
        self._staging.remove()
        self._release()

    def _flush(self, num_rows: int) -> None:
        """Store pending rows as a shard, sorted by id."""
        pending = pa.Table.from_batches(self._pending)
        self._pending = pending.slice(num_rows).to_batches()
        self._num_pending -= num_rows

        table = pending.slice(0, num_rows).sort_by("example_ids").combine_chunks()
        with self._staging.file() as file:
            pq.write_table(table, file, store_schema=True, **OPTIONS)
        prefix = f"{DATA}/{self._run}-{len(self._shards):05d}"
        shard = SideShard.of(file.name, prefix, ".parquet", rows=num_rows)
        self._staging.store(file.name, shard.path)
        self._shards.append(shard)


def _require_known_columns(manifest: SideManifest, where: str) -> None:
    """Raise FormatError for columns that readers of this release would skip."""
    for name in sorted(manifest.columns):
        if name in manifest.known_columns:
            continue
        types = ", ".join(SIDE_TYPES)
        text = sentence(
            where=where,
            rule=f"columns must begin with a letter, and have a type among: {types}",
            found=f"{quote(name)} of type {quote(manifest.columns[name])}",
        )
        raise FormatError(text)


def _example_column(
    name: str, values: npt.NDArray[Any], num_examples: int, type_: pa.DataType
) -> pa.Array:
    """Return a column with one value for each example."""
    _require_length(name, values, num_examples)
    try:
        column = pa.array(values, type_, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must hold values of type {type_}: {error}."
        ) from error
    if column.null_count:
        raise ConfigError(f"{name} must have a value for each example; found None.")
    return column


def _sequence_column(
    name: str, values: npt.NDArray[Any], counts: Int64, type_: pa.DataType
) -> pa.Array:
    """Return a column with one value for each sequence; `counts` of each example."""
    _require_length(name, values, int(counts.sum()))
    _require_finite(name, values)
    return _lists(to_offsets(counts), values.astype(np.float32), type_)


def _token_column(name: str, values: Any, counts: Int64, type_: TokenType) -> pa.Array:
    """Return a column of tokens; `counts` of the supervised tokens of each example."""
    num_tokens = int(counts.sum())
    offsets = to_offsets(counts)
    if type_.k is None:
        numbers = np.asarray(values)
        _require_length(name, numbers, num_tokens)
        _require_finite(name, numbers)
        return _lists(offsets, numbers.astype(type_.dtype), type_.arrow)

    if not isinstance(values, TopK):
        raise ConfigError(f"{name} must be a TopK; found {type(values).__name__}.")
    ids = np.asarray(values.ids)
    logps = np.asarray(values.logps)
    for array in (ids, logps):
        if array.shape != (num_tokens, type_.k):
            raise ConfigError(
                f"{name} must have shape ({num_tokens}, {type_.k}); found "
                f"{array.shape}."
            )
    _require_finite(name, logps)
    fields = [field.type for field in type_.arrow]
    offsets_of_values = offsets * type_.k
    arrays = [_lists(offsets_of_values, ids.astype(np.int32).ravel(), fields[0])]
    if type_.dtype == "uint8":
        stored, scales = _to_bytes(logps, offsets)
        arrays.append(_lists(offsets_of_values, stored.ravel(), fields[1]))
        arrays.append(pa.array(scales))
    else:
        flat = logps.astype(type_.dtype).ravel()
        arrays.append(_lists(offsets_of_values, flat, fields[1]))
    return pa.StructArray.from_arrays(arrays, fields=list(type_.arrow))


def _to_bytes(
    logps: npt.NDArray[Any], offsets: Int64
) -> tuple[npt.NDArray[np.uint8], Float32]:
    """Return log-probs as multiples of ``-scale``, and the scale of each example."""
    lowest = np.zeros(len(offsets) - 1, np.float32)
    has_tokens = np.diff(offsets) > 0
    starts = offsets[:-1][has_tokens]
    lowest_of_tokens = logps.astype(np.float32).min(axis=1)
    if len(starts):
        lowest[has_tokens] = np.minimum.reduceat(lowest_of_tokens, starts)
    scales = (np.maximum(-lowest, 1e-6) / 255).astype(np.float32)
    scale_of_tokens = np.repeat(scales, np.diff(offsets))[:, None]
    steps = np.rint(-logps.astype(np.float32) / scale_of_tokens)
    return steps.clip(0, 255).astype(np.uint8), scales


def _lists(offsets: Int64, flat: npt.NDArray[Any], type_: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(flat), type=type_
    )


def _require_finite(name: str, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        text = sentence(
            name, rule="its values must be finite", found="NaN or infinite ones"
        )
        raise FormatError(text)


def _require_length(name: str, values: npt.NDArray[Any], length: int) -> None:
    if values.shape != (length,):
        raise ConfigError(f"{name} must have shape ({length},); found {values.shape}.")


# Reading


class Side:
    """A committed version of a side dataset. Picklable; reads lazily."""

    def __init__(
        self, location: Location, manifest: SideManifest, version: int
    ) -> None:
        self.location = location
        self.manifest = manifest
        self.version = version

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
        """Yield all rows by shard, sorted by id in each, with verified hashes.

        Raises:
            IntegrityError: a shard is not the one of the manifest.
            StorageError: the store refuses.
        """
        for shard in self.manifest.shards:
            yield self._read_shard(shard)

    def _read_shard(self, shard: SideShard) -> pa.RecordBatch:
        where = self.location.join(shard.path).display
        data = read_stored(self.location, shard)
        names = ["example_ids", *self.manifest.known_columns]
        with decoding(where):
            file = pq.ParquetFile(
                pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False
            )
            self._check_schema(file, shard, where)
            # Limits of lists and pages are checked before they are decoded.
            check_lists(file.metadata, names)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                check_group(group, group.num_rows, names=names)

            table = file.read(names, use_threads=False).combine_chunks()
            (batch,) = table.to_batches()
            batch.validate(full=True)
        return batch

    def _check_schema(self, file: pq.ParquetFile, shard: SideShard, where: str) -> None:
        num_rows = file.metadata.num_rows
        difference = schema_difference(file.schema_arrow, self.manifest.schema)
        if difference or num_rows != shard.rows:
            text = sentence(
                where=where,
                rule=f"it must have {shard.rows} rows, and the columns of the manifest",
                found=difference or f"{num_rows} rows",
            )
            raise IntegrityError(text)


def open_side(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> Side:
    """Open the side dataset at `url`, by default its current version.

    Args:
        url: a local folder or an fsspec URL.
        storage_options: options of the fsspec filesystem.
        version: number of a version; None: the current one.

    Raises:
        DatasetNotFoundError: no side dataset, or no such version, was committed there.
        FormatError: its manifest is not valid.
        StorageError: the store refuses.
    """
    location = Location(url, storage_options or {})
    data, where, number = read_committed(location, version, SIDE)
    return Side(location, SideManifest.from_json(data, where), number)


class SideTable:
    """The values of a side dataset by example id, read at once.

    Memory: the values, and 8 bytes for each example.

    Raises:
        IntegrityError: a shard is damaged, an id repeats, or a value of a sequence is
            not finite.
    """

    def __init__(self, side: Side) -> None:
        self.url = side.url
        batches = list(side.iter_batches())
        with decoding(self.url):
            ids = _concat([batch.column("example_ids") for batch in batches])
            order = np.argsort(ids, kind="stable")
            self._ids = _memmap_if_large(ids[order])
            self._require_distinct_ids()

            self._columns: dict[str, Any] = {}
            # Of columns with a value for each sequence: the first value of each row.
            self._offsets: dict[str, Int64] = {}
            # Of columns of 8 bits: the scale of each row.
            self._scales: dict[str, Float32] = {}
            for name, type_name in side.manifest.known_columns.items():
                arrays = [batch.column(name) for batch in batches]
                of_tokens = token_type(type_name)
                if of_tokens is not None:
                    self._load_tokens(name, arrays, order, of_tokens)
                elif type_name == PER_SEQUENCE:
                    self._load_lists(name, arrays, order)
                elif type_name == "string":
                    self._columns[name] = _concat_texts(arrays).take(pa.array(order))
                else:
                    values = _concat(arrays)
                    self._columns[name] = _memmap_if_large(values[order])

    def _require_distinct_ids(self) -> None:
        is_repeated = self._ids[1:] == self._ids[:-1]
        repeated = self._ids[1:][is_repeated]
        if len(repeated):
            text = sentence(
                where=self.url,
                rule="example ids must be distinct",
                found=f"{len(repeated)} that repeat, the first of them {repeated[0]}",
            )
            raise IntegrityError(text)

    def _load_lists(self, name: str, arrays: Sequence[pa.Array], order: Int64) -> None:
        values = _concat([array.flatten() for array in arrays])
        if not np.isfinite(values).all():
            text = sentence(
                self.url, rule=f"{name} must be finite", found="NaN or infinity"
            )
            raise IntegrityError(text)

        counts = [np.diff(as_numpy(array.offsets).astype(np.int64)) for array in arrays]
        counts_of_rows = np.concatenate([_NO_IDS, *counts])
        sorted_values = values[ragged_indices(to_offsets(counts_of_rows), order)]
        self._columns[name] = _memmap_if_large(sorted_values)
        self._offsets[name] = _memmap_if_large(to_offsets(counts_of_rows[order]))

    def _load_tokens(
        self, name: str, arrays: Sequence[pa.Array], order: Int64, type_: TokenType
    ) -> None:
        if type_.k is None:
            self._load_lists(name, arrays, order)
            return
        ids = [array.field("ids") for array in arrays]
        logps = [array.field("logps") for array in arrays]
        lengths = [np.diff(as_numpy(array.offsets).astype(np.int64)) for array in ids]
        counts = np.concatenate([_NO_IDS, *lengths]) // type_.k
        tokens = ragged_indices(to_offsets(counts), order)
        flat_ids = _concat([array.flatten() for array in ids])
        flat_logps = _concat([array.flatten() for array in logps])
        self._columns[name] = TopK(
            _memmap_if_large(flat_ids.reshape(-1, type_.k)[tokens]),
            _memmap_if_large(flat_logps.reshape(-1, type_.k)[tokens]),
        )
        self._offsets[name] = _memmap_if_large(to_offsets(counts[order]))
        if type_.dtype == "uint8":
            scales = _concat([array.field("scale") for array in arrays])
            self._scales[name] = scales[order]

    def find(self, example_ids: Int64) -> Int64:
        """Return the rows of examples, int64 `[E]`.

        Raises:
            CompatibilityError: an example has no values.
        """
        rows = np.searchsorted(self._ids, example_ids)
        rows[rows == len(self._ids)] = 0
        if len(self._ids):
            absent_ids = example_ids[self._ids[rows] != example_ids]
        else:
            absent_ids = example_ids
        if len(absent_ids):
            text = sentence(
                where=self.url,
                rule="every example must have its values",
                found=(
                    f"none for {len(absent_ids)} of {len(example_ids)}, the first of "
                    f"them {absent_ids[0]}"
                ),
                remedy=_REMEDY,
            )
            raise CompatibilityError(text)
        return rows

    def column(self, name: str, rows: Int64) -> Column:
        """Return the value of each example, `[E]`; texts as objects.

        Args:
            name: of a column with a value for each example.
            rows: int64 `[E]`, as of :meth:`find`.
        """
        values = self._columns[name]
        if isinstance(values, pa.Array):
            texts = values.take(pa.array(rows)).to_pylist()
            return np.array(texts, np.object_)
        return np.asarray(values[rows])

    def sequence_values(
        self, name: str, rows: Int64, num_responses: npt.NDArray[np.integer]
    ) -> Float32:
        """Return the value of each sequence, float32 `[S]`.

        Args:
            name: of a column with a value for each sequence.
            rows: int64 `[E]`, as of :meth:`find`.
            num_responses: int `[E]`, sequences of each example.

        Raises:
            CompatibilityError: an example has another number of sequences.
        """
        places = self._places_of_values(name, rows, num_responses, "sequences")
        return np.asarray(self._columns[name][places])

    def token_values(
        self, name: str, rows: Int64, num_targets: npt.NDArray[np.integer]
    ) -> TokenValues:
        """Return the values of the examples' supervised tokens.

        Args:
            name: of a column of tokens.
            rows: int64 `[E]`, as of :meth:`find`.
            num_targets: int `[E]`, supervised tokens of each example.

        Returns:
            `[n]`, or `[n, k]` each; log-probs of 8 bits as float32.

        Raises:
            CompatibilityError: an example has another number of supervised tokens.
        """
        places = self._places_of_values(name, rows, num_targets, "supervised tokens")
        values = self._columns[name]
        if not isinstance(values, TopK):
            return np.asarray(values[places])
        logps = np.asarray(values.logps[places])
        if name in self._scales:
            scales = np.repeat(self._scales[name][rows], num_targets)
            logps = logps * -scales[:, None]
        return TopK(np.asarray(values.ids[places]), logps)

    def _places_of_values(
        self, name: str, rows: Int64, counts: npt.NDArray[np.integer], unit: str
    ) -> Int64:
        """Return where the values of rows are, which must have these counts."""
        offsets = self._offsets[name]
        actual_counts = offsets[rows + 1] - offsets[rows]
        wrong_rows = np.flatnonzero(actual_counts != counts)
        if len(wrong_rows):
            first = wrong_rows[0]
            text = sentence(
                where=f"{self.url}, example {self._ids[rows[first]]}",
                rule=f"it must have {name} of {counts[first]} {unit}",
                found=str(actual_counts[first]),
                remedy=_REMEDY,
            )
            raise CompatibilityError(text)
        return ragged_indices(offsets, rows)


def _concat(arrays: Sequence[pa.Array]) -> npt.NDArray[Any]:
    """Return the values of all arrays; int64 `[0]` if there are none."""
    return np.concatenate([as_numpy(array) for array in arrays] or [_NO_IDS])


def _concat_texts(arrays: Sequence[pa.Array]) -> pa.Array:
    # Offsets of 32 bits would not reach all texts.
    large_arrays = [array.cast(pa.large_string()) for array in arrays]
    return pa.concat_arrays(large_arrays or [_NO_TEXTS])


def _memmap_if_large(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `values`, moved to a mapped temporary file if they are large."""
    if values.nbytes <= MAPPED_BYTES:
        return values
    with tempfile.TemporaryFile(prefix="packstore-side-") as file:
        values.tofile(file)
        file.flush()
        return np.memmap(file, values.dtype, "r", shape=values.shape)
