"""Side datasets: values derived from a dataset with a model, keyed by example id.

They are separate folders, so that datasets never change: Parquet shards under
``data/``, and a manifest ``_packstore/side-000001.json``, which is the commit, as for a
dataset.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packstore.config import fingerprint
from packstore.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    PackstoreError,
    quote,
    sentence,
)
from packstore.format.arrays import Int64, Packs, TopK, to_offsets
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
    Span,
    covered_spans,
    spans_of_lineages,
    token_type,
)
from packstore.io.manifest.stored_file import decoding, read_stored
from packstore.io.shards.parquet import (
    OPTIONS,
    SPLIT,
    check_group,
    check_lists,
    open_parquet,
    read_group,
)
from packstore.io.side.table import SideTable, require_distinct_ids
from packstore.io.side.tokens import (
    ColumnRows,
    check_stored_lists,
    list_counts,
    sequence_lists,
    token_lists,
)
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.versions.write_job import writing
from packstore.version import VERSION

SHARD_ROWS = 1 << 20
"""Maximum examples of a shard."""

SHARD_BYTES = 128 << 20
"""Bytes of rows that a writer holds before it stores them as a shard."""

GROUP_BYTES = 32 << 20
"""Maximum bytes of the rows of a row group, which a reader decodes at once."""

MAX_THREADS = 4
"""Maximum row groups of a shard that are decoded at once."""

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
            round to 1/255 of the lowest of the example.
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
        self._source_totals = source_manifest.totals
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
        self._pending_bytes = 0
        self._shards: list[SideShard] = []
        self.examples = 0
        self._num_targets = 0

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
            ConfigError: a column is absent, unknown, or of another shape, k or type.
            FormatError: a value breaks a rule of its type: numbers of sequences and
                tokens are finite and in the range of their type; token ids are at least
                0, fit int32, and are distinct in a token; log-probs of a token are at
                most 0, from the highest to the lowest.
        """
        columns = self._manifest.columns
        if values.keys() != columns.keys():
            raise ConfigError(
                f"a side dataset of columns {', '.join(columns)} got "
                f"{', '.join(values)}."
            )
        ids = np.asarray(example_ids, np.int64)
        sequence_counts = self._sequence_counts(len(ids), num_responses)
        token_counts = self._token_counts(len(ids), num_targets)

        batch = self._encode(ids, values, sequence_counts, token_counts)
        for run in _cut_by_bytes(batch, SHARD_BYTES):
            self._pending.append(run)
            self._num_pending += len(run)
            self._pending_bytes += run.nbytes
            while self._num_pending >= SHARD_ROWS:
                self._flush(SHARD_ROWS)
            if self._pending_bytes >= SHARD_BYTES:
                self._flush(self._num_pending)
        self.examples += len(ids)
        self._num_targets += int(token_counts.sum())

    def _encode(
        self, ids: Int64, values: Values, sequence_counts: Int64, token_counts: Int64
    ) -> pa.RecordBatch:
        """Return rows of the shards; see :meth:`write`."""
        schema = self._manifest.schema
        arrays = [pa.array(ids)]
        for name, type_name in self._manifest.columns.items():
            type_ = schema.field(name).type
            type_of_tokens = token_type(type_name)
            if type_of_tokens is not None:
                rows = ColumnRows(name, ids, token_counts)
                array = token_lists(values[name], type_of_tokens, rows)
            elif pa.types.is_list(type_):
                rows = ColumnRows(name, ids, sequence_counts)
                array = sequence_lists(np.asarray(values[name]), rows)
            else:
                array = _example_column(name, np.asarray(values[name]), len(ids), type_)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _sequence_counts(self, num_examples: int, num_responses: Any) -> Int64:
        """Return the number of sequences of each example, int64 `[E]`."""
        if num_responses is not None:
            return _counts("num_responses", num_responses, num_examples)
        responses_of_kind = KINDS[self._manifest.kind]
        if responses_of_kind is None:
            raise ConfigError("examples of kind scored need num_responses.")
        return np.full(num_examples, responses_of_kind, np.int64)

    def _token_counts(self, num_examples: int, num_targets: Any) -> Int64:
        """Return the number of supervised tokens of each example, int64 `[E]`; zeros
        if no column is of tokens.
        """
        token_columns = self._token_columns
        if not token_columns:
            return np.zeros(num_examples, np.int64)
        if num_targets is None:
            raise ConfigError(
                sentence(
                    where=f"column {quote(token_columns[0])}",
                    rule="values of tokens need num_targets, the number of supervised "
                    "tokens of each example",
                    found="none",
                    remedy="A batch of a loader has it: num_targets=batch.num_targets",
                )
            )
        return _counts("num_targets", num_targets, num_examples)

    @property
    def _encodings(self) -> dict[str, str]:
        """Encodings of columns in Parquet, by path; others are PLAIN."""
        encodings = {}
        for name in self._token_columns:
            type_ = token_type(self._manifest.columns[name])
            if type_ is None or type_.k is None:
                continue
            encodings[f"{name}.ids.list.element"] = SPLIT
            # Halves stay PLAIN, though they would be a sixth smaller: DuckDB 2.0 does
            # not read split ones.
            if type_.dtype == "uint8":
                encodings[f"{name}.logps.list.element"] = SPLIT
        return encodings

    @property
    def _token_columns(self) -> list[str]:
        columns = self._manifest.columns
        return [name for name, type_name in columns.items() if token_type(type_name)]

    def commit(self) -> int:
        """Finish the last shard and commit the side dataset; return its version.

        Raises:
            ConfigError: an example has no values, or more than once; or the dataset
                has another number of supervised tokens.
        """
        num_examples = self._source_totals.examples
        if self.examples != num_examples:
            raise ConfigError(
                f"a side dataset must hold each of {num_examples} examples of its "
                f"dataset once; got {self.examples}."
            )
        num_targets = self._source_totals.supervised_tokens
        if self._token_columns and self._num_targets != num_targets:
            raise ConfigError(
                f"{self._token_columns[0]} must have values for each of {num_targets} "
                f"supervised tokens of its dataset; got {self._num_targets}."
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
        self._pending_bytes = sum(batch.nbytes for batch in self._pending)

        table = pending.slice(0, num_rows).sort_by("example_ids").combine_chunks()
        (rows,) = table.to_batches()
        with (
            self._staging.file() as file,
            pq.ParquetWriter(
                file, table.schema, **OPTIONS, column_encoding=self._encodings
            ) as writer,
        ):
            for row_group in _cut_by_bytes(rows, GROUP_BYTES):
                writer.write_batch(row_group)
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
    if values.shape != (num_examples,):
        raise ConfigError(
            f"{name} must have shape ({num_examples},); found {values.shape}."
        )
    try:
        column = pa.array(values, type_, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must hold values of type {type_}: {error}."
        ) from error
    if column.null_count:
        raise ConfigError(f"{name} must have a value for each example; found None.")
    return column


def _counts(name: str, values: Any, num_examples: int) -> Int64:
    """Return the counts of each example, int64 `[E]`."""
    counts = np.asarray(values, np.int64)
    if counts.shape != (num_examples,) or (counts < 0).any():
        raise ConfigError(
            f"{name} must be a count for each of {num_examples} examples; found "
            f"{quote(counts.tolist())}."
        )
    return counts


def _row_bytes(array: pa.Array) -> Int64:
    """Return about how many bytes each row of a column takes in memory, int64 `[E]`."""
    type_ = array.type
    num_bytes = np.full(len(array), 8, np.int64)
    if pa.types.is_struct(type_):
        for field in array.flatten():
            num_bytes += _row_bytes(field)
    elif pa.types.is_list(type_):
        num_bytes += list_counts(array) * (type_.value_type.bit_width // 8)
    elif pa.types.is_string(type_):
        num_bytes += as_numpy(pc.binary_length(array))
    return num_bytes


def _cut_by_bytes(batch: pa.RecordBatch, max_bytes: int) -> list[pa.RecordBatch]:
    """Cut rows into runs of at most `max_bytes`; a larger row is a run alone."""
    num_bytes = np.zeros(len(batch), np.int64)
    for column in batch.columns:
        num_bytes += _row_bytes(column)
    offsets = to_offsets(num_bytes)
    runs = []
    start = 0
    while start < len(batch):
        last = np.searchsorted(offsets, offsets[start] + max_bytes, side="right") - 1
        end = max(start + 1, int(last))
        runs.append(batch.slice(start, end - start))
        start = end
    return runs


# Reading


@dataclass(frozen=True)
class SideReport:
    """The result of :meth:`Side.verify`.

    Attributes:
        url: the side dataset, without secrets.
        problems: one sentence each; empty if the side dataset is intact.
        examples: number of examples with values, by the manifest.
        shards: number of shards checked.
    """

    url: str
    problems: tuple[str, ...]
    examples: int
    shards: int

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


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
        """Yield all rows by row group, sorted by id in each shard.

        Hashes, limits and the rules of values are checked, but not whether the ids of a
        token are distinct, nor those of examples.

        Raises:
            IntegrityError: a shard is not the one of the manifest, or a value breaks a
                rule of its type.
            StorageError: the store refuses.
        """
        for shard in self.manifest.shards:
            yield from self._read_shard(shard)

    def verify(self, dataset: Dataset | None = None) -> SideReport:
        """Read the whole side dataset, and check every hash and rule.

        Args:
            dataset: its dataset, or one that it should join: its lineage is compared,
                and its numbers of sequences and supervised tokens of each example.

        Returns:
            All problems, in one report.
        """
        problems = self._check_shards()
        if dataset is not None and not problems:
            problems = self._check_dataset(dataset)
        return SideReport(
            url=self.url,
            problems=tuple(problems),
            examples=len(self),
            shards=len(self.manifest.shards),
        )

    def _check_shards(self) -> list[str]:
        """Return the first problem of each shard, and ids that repeat."""
        problems: list[str] = []
        example_ids = [np.empty(0, np.int64)]
        for shard in self.manifest.shards:
            with _collect(problems):
                for batch in self._read_shard(shard, distinct=True):
                    example_ids.append(as_numpy(batch.column("example_ids")))
        with _collect(problems):
            require_distinct_ids(np.sort(np.concatenate(example_ids)), self.url)
        return problems

    def _check_dataset(self, dataset: Dataset) -> list[str]:
        """Return the first problem of the values of a dataset's examples."""
        problems: list[str] = []
        runs = spans_of_lineages({self.manifest.lineage}, dataset.manifest)
        with _collect(problems):
            spans = covered_spans(self.manifest, dataset.manifest, runs, self.url)
            table = self.load()
            for packs in dataset.iter_packs():
                for span in spans:
                    self._check_counts(table, packs, span)
        return problems

    def _check_counts(self, table: SideTable, packs: Packs, span: Span) -> None:
        """Raise unless examples in a span have rows with their counts."""
        ids = packs.example_ids
        is_inside = (ids >= span.first) & (ids <= span.last)
        rows = table.find(ids[is_inside] - span.first)
        for name, type_name in self.manifest.known_columns.items():
            if token_type(type_name) is not None:
                table.require_counts(name, rows, packs.num_targets[is_inside])
            elif type_name == PER_SEQUENCE:
                table.require_counts(name, rows, packs.num_responses[is_inside])

    def load(self) -> SideTable:
        """Return the values of all examples, to be looked up by example id.

        Raises like :meth:`iter_batches`, and IntegrityError for an id that repeats.
        """
        return SideTable(self.url, self.manifest.known_columns, self.iter_batches())

    def _read_shard(
        self, shard: SideShard, *, distinct: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield the row groups of a shard; see :meth:`iter_batches`.

        Args:
            shard: an entry of the manifest.
            distinct: check besides that the ids of each token are distinct.
        """
        where = self.location.join(shard.path).display
        data = read_stored(self.location, shard)
        names = ["example_ids", *self.manifest.known_columns]
        with decoding(where):
            metadata = pq.read_metadata(pa.BufferReader(data))
            file = open_parquet(pa.BufferReader(data), metadata, page_checksums=True)
            self._check_schema(file, shard, where)
            # Limits of lists and pages are checked before they are decoded.
            check_lists(metadata, names)
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                check_group(group, group.num_rows, names=names)

        def decode(number: int) -> pa.RecordBatch:
            with decoding(where):
                # A ParquetFile belongs to one thread.
                source = pa.BufferReader(data)
                file = open_parquet(source, metadata, page_checksums=True)
                batch = read_group(file, number, names)
                batch.validate(full=True)
                self._check_values(batch, where, distinct=distinct)
            return batch

        # Levels of lists take most of the time, which is spent without the lock of
        # Python.
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        pending: deque[Future[pa.RecordBatch]] = deque()
        with ThreadPoolExecutor(num_threads) as pool:
            for number in range(metadata.num_row_groups):
                # Few bytes may decode to many, so that few groups are in memory.
                if len(pending) == num_threads:
                    yield pending.popleft().result()
                pending.append(pool.submit(decode, number))
            while pending:
                yield pending.popleft().result()

    def _check_values(
        self, batch: pa.RecordBatch, where: str, *, distinct: bool
    ) -> None:
        """Raise IntegrityError if a value breaks a rule of its type."""
        for name, type_name in self.manifest.known_columns.items():
            check_stored_lists(batch, name, type_name, where, distinct=distinct)

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


@contextlib.contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    """Add an error of this context to the problems."""
    try:
        yield
    except PackstoreError as error:
        problems.append(str(error))


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
