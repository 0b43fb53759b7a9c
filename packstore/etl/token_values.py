"""Writes numbers of single tokens, which records hold, as side data of their dataset.

The packs are written first. Then the records are read again for the fields that the
setting `token_values` names, and the numbers of the examples in the packs become a side
dataset, ``VALUES/<lineage of the dataset>``. It is committed before the dataset: a job
that is killed in between leaves values without a dataset, and its rerun takes them
over. The lineage covers the bytes of the input and the names of the fields, so that
equal lineages have equal values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from packstore.config import PackConfig
from packstore.errors import DatasetNotFoundError
from packstore.etl.engines import engine_with, local
from packstore.etl.sources import RecordExampleReader
from packstore.format.arrays import Bool, Float32, Int64, example_id
from packstore.format.schema import as_numpy
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.files import Block
from packstore.io.shards.shard import Totals
from packstore.io.side.side import Side, SideWriter, open_side
from packstore.io.store.location import Location
from packstore.progress import Progress
from packstore.tokenizer.records.token_values import find_value, flat_numbers

log = logging.getLogger("packstore")

TYPE = "token<float32>"
"""Type of the columns."""


def values_location(
    dataset: Location, config: PackConfig, split: str | None
) -> Location:
    """Return the folder of the values of a dataset, and of all that is appended to it.

    Args:
        dataset: place of the dataset.
        config: `values_out` is the folder; None: a folder beside the dataset.
        split: name of the dataset, if the job makes several.
    """
    if config.values_out is not None:
        folder = Location(config.values_out, dataset.storage_options)
        return folder if split is None else folder.join(split)
    if "://" not in dataset.url:
        local_folder = f"{os.path.abspath(dataset.url)}-values"
        return Location(local_folder, dataset.storage_options)
    url, mark, query = dataset.url.partition("?")
    values_url = f"{url.rstrip('/')}-values{mark}{query}"
    return Location(values_url, dataset.storage_options)


def put_token_values(
    dataset: Dataset,
    values: Location,
    reader: RecordExampleReader,
    config: PackConfig,
    progress: Progress | None,
) -> None:
    """Commit the numbers of a dataset's tokens, unless they are there already.

    Args:
        dataset: the packs, whose manifest is not committed yet.
        values: see :func:`values_location`.
        reader: the records of the packs.
        config: settings.
        progress: see :func:`packstore.pack`.

    Raises:
        InputError: the input has changed since it was packed.
        StorageError: the store refuses.
    """
    manifest = dataset.manifest
    folder = values.join(manifest.lineage)
    stored_side = _find_side(folder)
    packed_ids = _packed_ids(dataset)
    stored_ids, stored_counts = _stored_counts(stored_side)
    new_ids = np.setdiff1d(packed_ids, stored_ids, assume_unique=True)
    if stored_side is not None and not len(new_ids):
        return

    # Another choice of the same records, as by another pack_size, may be stored: its
    # examples stay, as they are those of an earlier version.
    counts_of_others = stored_counts[~np.isin(stored_ids, packed_ids)]
    totals = _totals_with(manifest.totals, counts_of_others)
    with SideWriter(
        folder.url,
        replace(manifest, totals=totals),
        dict.fromkeys(config.token_values, TYPE),
        provenance=_provenance(config),
        overwrite=stored_side is not None,
        storage_options=folder.storage_options,
    ) as writer:
        if stored_side is not None:
            for batch in stored_side.iter_batches():
                _write_batch(writer, batch)
        blocks = reader.read_again(manifest.provenance["sources"])
        for ids, counts, columns in _read_values(blocks, config, new_ids):
            _write(writer, ids, counts, columns)
            if progress is not None:
                progress("values", writer.examples, totals.examples, "examples")
    log.info(
        "values of %s tokens (%s): %s",
        f"{manifest.totals.supervised_tokens:,}",
        ", ".join(config.token_values),
        values.display,
    )


def _find_side(folder: Location) -> Side | None:
    try:
        return open_side(folder.url, folder.storage_options)
    except DatasetNotFoundError:
        return None


def _packed_ids(dataset: Dataset) -> Int64:
    """Return the ids of all examples of a dataset, sorted, int64 `[E]`."""
    ids = [np.empty(0, np.int64)]
    for group in range(len(dataset.row_groups)):
        batch, _, base = dataset.read_columns(group, ["example_ids"])
        ids.append(as_numpy(batch.column("example_ids").flatten()) + base)
    return np.sort(np.concatenate(ids))


def _stored_counts(side: Side | None) -> tuple[Int64, Int64]:
    """Return ids and supervised tokens of all examples of a side dataset, int64 `[E]`
    each.
    """
    ids = [np.empty(0, np.int64)]
    counts = [np.empty(0, np.int64)]
    if side is not None:
        for batch in side.iter_batches():
            ids.append(as_numpy(batch.column("example_ids")))
            counts.append(as_numpy(batch.column(1).value_lengths()))
    return np.concatenate(ids), np.concatenate(counts)


def _totals_with(totals: Totals, counts: Int64) -> Totals:
    """Return totals with further examples.

    Args:
        totals: of a dataset.
        counts: int64 `[E]`, supervised tokens of each further example.
    """
    return replace(
        totals,
        examples=totals.examples + len(counts),
        supervised_tokens=totals.supervised_tokens + int(counts.sum()),
    )


def _provenance(config: PackConfig) -> dict[str, str]:
    """Return the field of each column."""
    return {f"{column}_field": field for column, field in config.token_values.items()}


def _write_batch(writer: SideWriter, batch: pa.RecordBatch) -> None:
    """Write rows of a side dataset as they are."""
    names = batch.schema.names[1:]
    counts = as_numpy(batch.column(names[0]).value_lengths())
    columns = {name: as_numpy(batch.column(name).flatten()) for name in names}
    _write(writer, as_numpy(batch.column("example_ids")), counts, columns)


def _write(
    writer: SideWriter, ids: Int64, counts: Any, columns: Mapping[str, Float32]
) -> None:
    # Kind scored asks for the number of responses, which no column of tokens has.
    num_responses = np.ones(len(ids), np.int64)
    writer.write(ids, columns, num_responses=num_responses, num_targets=counts)


# Reading


BlockValues = tuple[Int64, Int64, dict[str, Float32]]
"""Of the examples of a block: ids int64 `[E]`, supervised tokens int64 `[E]`, and the
numbers of each column, float32 `[n]`.
"""


def _read_values(
    blocks: Iterable[Block], config: PackConfig, example_ids: Int64
) -> Iterator[BlockValues]:
    """Yield the numbers of examples, by block.

    Args:
        blocks: all records.
        config: settings.
        example_ids: int64 `[E]`, ids of the examples, sorted.
    """
    run = engine_with(config.engine, config.num_workers)
    yield from run(_BlockReader(config.token_values, example_ids), blocks)


class _BlockReader:
    """Reads the numbers of a block's examples. Picklable.

    Args:
        fields: column -> field of the records.
        example_ids: int64 `[E]`, ids of the examples to read, sorted.
    """

    seconds_alone = local.SECONDS_ALONE_IF_QUICK

    def __init__(self, fields: Mapping[str, str], example_ids: Int64) -> None:
        self._fields = dict(fields)
        self._example_ids = example_ids

    def __call__(self, block: Block) -> BlockValues:
        rows = block.parse()
        ids = example_id(rows.source, 0) + np.array(rows.ordinals, np.int64)
        indices = np.flatnonzero(self._is_chosen(ids))
        records: list[Any] = [rows.values[i] for i in indices.tolist()]

        columns: dict[str, Float32] = {}
        counts = np.zeros(len(indices), np.int64)
        for column, field in self._fields.items():
            numbers = [flat_numbers(find_value(record, field)) for record in records]
            counts = np.array([len(x) for x in numbers], np.int64)
            columns[column] = np.concatenate([np.empty(0, np.float32), *numbers])
        return ids[indices], counts, columns

    def _is_chosen(self, ids: Int64) -> Bool:
        if not len(self._example_ids):  # of a split that an append adds nothing to
            return np.zeros(len(ids), np.bool_)
        places = np.searchsorted(self._example_ids, ids)
        places = np.minimum(places, len(self._example_ids) - 1)
        return np.asarray(self._example_ids[places] == ids)
