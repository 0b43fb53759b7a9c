"""Side datasets: values derived from a dataset with a model, keyed by example id.

They are separate folders, so that datasets never change: Parquet shards under ``data/``, and a
manifest ``_packstore/side-000001.json``, which is the commit, as for a dataset.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import fingerprint
from packstore.errors import ConfigError, FormatError, sentence
from packstore.format.arrays import Int64, to_offsets
from packstore.format.schema import KINDS
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import DATA, FOLDER, commit, require_committed
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.side_manifest import REF_LOGPS, SIDE, SideManifest, SideShard
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.parquet import OPTIONS
from packstore.io.side.side_reader import Side, open_side
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging
from packstore.io.write.write_job import writing
from packstore.version import VERSION

__all__ = ["SHARD_ROWS", "Side", "SideWriter", "open_side"]

SHARD_ROWS = 1 << 20
"""Examples of a shard: what a writer holds, and what a reader decodes at once."""

Values = Mapping[str, npt.NDArray[Any]]


class SideWriter:
    """Writes a side dataset; a context manager that commits it, or aborts after an error.

    After an error its stored shards stay for `clean`, as an equal job may be about to commit them.

    Args:
        url: a local folder or an fsspec URL.
        source: the dataset whose examples the values belong to, or its manifest.
        columns: name -> ``float32``, ``float64``, ``int64``, ``bool``, ``string``: one value for
            each example; or ``ref_logps`` -> ``list<float32>``: one for each sequence.
        provenance: origin of the values, such as `model`, `model_sha256`, `tokenizer_sha256`,
            `chat_template_sha256`, `dtype`, `attention`, `head_dtype`: texts, numbers, booleans.
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.commit()
        except BaseException:
            self.abort()
            raise
        if error is not None:
            self.abort()

    def write(self, example_ids: Int64, values: Values, num_responses: Any = None) -> None:
        """Adds the values of some examples, in any order.

        Args:
            example_ids: int64 `[E]`.
            values: of every column: `[E]`, and of ``ref_logps`` float32 `[S]`, the sequences of
                each example in order.
            num_responses: int `[E]`, K of each example; needed only for kind ``ranked``.
        """
        head = self._manifest
        if values.keys() != head.columns.keys():
            names = ", ".join(head.columns)
            raise ConfigError(f"a side dataset of columns {names} got {', '.join(values)}.")
        k = KINDS[head.kind]
        if num_responses is None and k is None:
            raise ConfigError("examples of kind ranked need num_responses.")
        counts = np.full(len(example_ids), k) if num_responses is None else num_responses
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
            must = f"a side dataset must hold each of {self._expected} examples of its dataset once"
            raise ConfigError(f"{must}; got {self.examples}.")
        if self._pending_rows:
            self._flush(self._pending_rows)
        self._staging.remove()
        manifest = replace(self._manifest, shards=tuple(self._shards))
        commit(self._location, manifest.to_json(), self._version, SIDE)
        self._release()
        require_committed(self._location, manifest.files, self._version)
        return self._version

    def abort(self) -> None:
        """Aborts and removes unfinished files; stored shards stay for `clean`."""
        self._staging.remove()
        self._release()

    def _flush(self, rows: int) -> None:
        """Writes the first pending rows as a shard, sorted by id."""
        table = pa.Table.from_batches(self._pending)
        self._pending = table.slice(rows).to_batches()
        self._pending_rows -= rows
        table = table.slice(0, rows).sort_by("example_ids").combine_chunks()
        with self._staging.file() as file:
            pq.write_table(table, file, store_schema=True, **OPTIONS)
        found = StoredFile.of("", file.name)
        path = f"{DATA}/{self._run}-{len(self._shards):05d}-{found.sha256[:16]}.parquet"
        shard = SideShard(path=path, bytes=found.bytes, sha256=found.sha256, rows=rows)
        self._staging.store(file.name, path)
        self._shards.append(shard)


def _column(name: str, values: npt.NDArray[Any], counts: Any, type_: pa.DataType) -> pa.Array:
    """Converts a column to Arrow."""
    per_sequence = name == REF_LOGPS
    expected = int(np.sum(counts)) if per_sequence else len(counts)
    if values.shape != (expected,):
        raise ConfigError(f"{name} must have shape ({expected},); found {values.shape}.")
    if not per_sequence:
        try:
            column = pa.array(values, type_, from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(f"{name} must hold values of type {type_}: {error}.") from error
        if column.null_count:
            raise ConfigError(f"{name} must have a value for each example; found None.")
        return column
    if not np.isfinite(values).all():
        raise FormatError(sentence(name, "log-probs must be finite", "NaN or infinite ones"))
    offsets = pa.array(to_offsets(np.asarray(counts, np.int64)).astype(np.int32))
    flat = pa.array(values.astype(np.float32))
    return pa.ListArray.from_arrays(offsets, flat, type=type_)
