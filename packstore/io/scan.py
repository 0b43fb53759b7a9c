"""A dataset as a Polars LazyFrame: a row for each example, read and verified as it is
needed.

Row groups are read one after another, and of each only the columns that the query uses.
For a condition on `pack` and `shard` alone, row groups without a match are not read; if
token ids are selected, other conditions are evaluated on their own columns first.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from packstore.errors import FormatError
from packstore.format.arrays import (
    IGNORE_INDEX,
    Bool,
    Int64,
    Packs,
    TokenValues,
    TopK,
    to_offsets,
)
from packstore.format.schema import KINDS, as_arrow, flat_column
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.pack_index import check_counts
from packstore.io.manifest.side_manifest import PER_SEQUENCE, REF_LOGPS, token_type
from packstore.io.manifest.stored_file import decoding
from packstore.io.side.join import SideColumns
from packstore.io.side.side import Side
from packstore.pack.fill import unpack
from packstore.registry import require_package

if TYPE_CHECKING:
    from polars import DataFrame, Expr, LazyFrame

_PLACE_COLUMNS = frozenset({"pack", "shard"})
_TOKEN_COLUMNS = frozenset({"input_ids", "labels"})
_RESPONSE_COLUMNS = {"lengths": "lengths", "rewards": "reward"}
"""Column with a list for each example -> stored column with a value per response."""

_RESERVED_NAMES = frozenset(
    {"example_id", *_PLACE_COLUMNS, *_RESPONSE_COLUMNS, *_TOKEN_COLUMNS}
)

ROWS = 1 << 16
"""Examples of a frame without token ids."""


def scan(
    url: str | os.PathLike[str] | Dataset,
    *,
    version: int | None = None,
    tokens: bool = False,
    side: Side | str | os.PathLike[str] | Sequence[Side | str | os.PathLike[str]] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> LazyFrame:
    """Return the examples of a dataset as a ``polars.LazyFrame``, in file order,
    unread.

        >>> frame = packstore.scan("prefs-8k")
        >>> is_long = pl.col("lengths").list.max() > 4096
        >>> frame.filter(is_long).select("example_id").collect()

    Columns: `example_id`; `pack`, its number in the dataset, and `shard`, its position
    in the manifest, from 0; `lengths` and `rewards`, lists with a value for each
    response (preference: chosen, then rejected); and the carried columns, named
    ``NAME_carried`` if one of these has its name. Values are verified by checksum.

    Columns of side datasets have a value for each example; or a list, with a value for
    each response; or for each response a list that is as long as its `input_ids`, with
    a value for each supervised token, and null for the others. A value of a top k is a
    struct of `ids` and `logps`, lists of k.

    Args:
        url: folder or fsspec URL of the dataset, or the opened dataset.
        version: number of an older version.
        tokens: adds `input_ids` and `labels` (-100 where unsupervised) of each
            response, whole, also in layout ``shared_prefix``, where shared tokens have
            label -100.
        side: a side dataset, its URL, or several: adds their columns, named
            ``NAME_side`` if a column above has its name. They are loaded into memory,
            or mapped files, when the first of them is read.
        storage_options: passed to the fsspec filesystem of the dataset.

    Raises:
        CompatibilityError: a side dataset does not belong to the dataset.
        PackstoreError: as :func:`packstore.open`; while the frame is collected, as
            :meth:`packstore.Dataset.read_packs`.
    """
    require_package("polars", "packstore.scan")
    from polars.io.plugins import register_io_source

    if isinstance(url, Dataset):
        dataset = url
    else:
        dataset = open_dataset(os.fspath(url), dict(storage_options or {}), version)
    sides = [side] if isinstance(side, Side | str | os.PathLike) else side
    side_columns = SideColumns(dataset, sides) if sides else None
    source = ExampleSource(dataset, tokens, side_columns)
    return register_io_source(
        source, schema=source.schema, is_pure=True, explain_name="packstore"
    )


class ExampleSource:
    """Reads examples for Polars, which calls it.

    Args:
        dataset: the dataset.
        tokens: whether there are columns of token ids.
        side: columns of side datasets; None: there are none.
    """

    def __init__(
        self, dataset: Dataset, tokens: bool, side: SideColumns | None = None
    ) -> None:
        self._dataset = dataset
        self._has_tokens = tokens
        self._carried: dict[str, str] = {}  # column of the frame -> stored column
        for name in dataset.manifest.carried:
            column = f"{name}_carried" if name in _RESERVED_NAMES else name
            self._carried[column] = name

        self._side = side
        self._side_types: dict[str, str] = {}  # column of the frame -> type
        self._side_names: dict[str, str] = {}  # column of the frame -> column of `side`
        if side is not None:
            for name, type_name in side.types.items():
                column = f"{name}_side" if name in _RESERVED_NAMES else name
                self._side_types[column] = type_name
                self._side_names[column] = name
        # Columns for which packs are read with their tokens.
        self._columns_of_packs = _TOKEN_COLUMNS.union(self._side_types)

    @property
    def schema(self) -> dict[str, Any]:
        """Name of each column -> its Polars type."""
        import polars as pl

        carry_types = {
            "string": pl.String,
            "int64": pl.Int64,
            "float64": pl.Float64,
            "bool": pl.Boolean,
        }
        schema: dict[str, Any] = {
            "example_id": pl.Int64,
            "pack": pl.Int64,
            "shard": pl.Int64,
            "lengths": pl.List(pl.Int32),
            "rewards": pl.List(pl.Float32),
        }
        for column, stored_name in self._carried.items():
            carry_type = self._dataset.manifest.carried[stored_name]
            schema[column] = carry_types[carry_type]
        if self._has_tokens:
            schema["input_ids"] = pl.List(pl.List(pl.Int32))
            schema["labels"] = pl.List(pl.List(pl.Int32))
        for column, type_name in self._side_types.items():
            schema[column] = _polars_type(type_name)
        return schema

    def __call__(
        self,
        with_columns: list[str] | None,
        predicate: Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[DataFrame]:
        """Yield rows, as Polars asks for them.

        Args:
            with_columns: columns to select; None: all.
            predicate: condition of the rows.
            n_rows: number of rows before the condition; None: all.
            batch_size: number of rows of a frame.
        """
        import polars as pl

        selected = list(self.schema) if with_columns is None else with_columns
        conditions = [] if predicate is None else sorted(predicate.meta.root_names())
        columns = list(dict.fromkeys([*selected, *conditions]))
        has_tokens = not self._columns_of_packs.isdisjoint(selected)
        min_rows = batch_size or ROWS

        frames: list[DataFrame] = []
        for group, count in self._groups_of_rows(n_rows):
            if self._can_skip(group, count, predicate, conditions, has_tokens):
                continue
            frame = self._read(group, columns).head(count)
            if predicate is not None:
                frame = frame.filter(predicate)
            frames.append(frame.select(selected))
            if has_tokens or sum(len(frame) for frame in frames) >= min_rows:
                yield pl.concat(frames)
                frames = []
        if frames:
            yield pl.concat(frames)

    def _groups_of_rows(self, n_rows: int | None) -> Iterator[tuple[int, int]]:
        """Yield the row groups of the first `n_rows` examples, with the number of these
        in each.
        """
        examples = self._dataset.row_groups.examples.tolist()
        remaining_rows = sum(examples) if n_rows is None else n_rows
        for group, group_examples in enumerate(examples):
            if remaining_rows <= 0:
                return
            count = min(remaining_rows, group_examples)
            remaining_rows -= count
            yield group, count

    def _can_skip(
        self,
        group: int,
        count: int,
        predicate: Expr | None,
        conditions: Sequence[str],
        has_tokens: bool,
    ) -> bool:
        """Return True if columns that are cheap to read show that no row matches.

        Args:
            group: number of the row group.
            count: number of its first examples that are rows.
            predicate: condition of the rows; None: all match.
            conditions: columns of the predicate.
            has_tokens: whether columns of token ids or of side datasets are selected.
        """
        import polars as pl

        if predicate is None:
            return False
        if _PLACE_COLUMNS.issuperset(conditions):
            one_example_each = np.ones(self._dataset.row_groups.rows[group], np.int64)
            places = pl.DataFrame(self._places(group, one_example_each))
            return places.filter(predicate).is_empty()
        if has_tokens and self._columns_of_packs.isdisjoint(conditions):
            frame = self._read(group, conditions).head(count)
            return frame.filter(predicate).is_empty()
        return False

    def _places(self, group: int, examples_of_packs: Int64) -> dict[str, Int64]:
        """Return columns `pack` and `shard` of the examples of a row group.

        Args:
            group: number of the row group.
            examples_of_packs: int64 `[P]`, examples of each pack in it.
        """
        first, end = self._dataset.group_offsets[group : group + 2].tolist()
        packs = np.repeat(np.arange(first, end), examples_of_packs)
        shard = self._dataset.row_groups.shard[group]
        return {"pack": packs, "shard": np.full(len(packs), shard)}

    def _read(self, group: int, names: Sequence[str]) -> DataFrame:
        """Return columns of all examples of a row group."""
        import polars as pl

        if self._columns_of_packs.isdisjoint(names):
            arrays, examples_of_packs = self._read_columns(group, names)
        else:
            packs = self._dataset.read_packs(group)
            arrays = _columns_of_packs(packs, names, self._carried)
            side_columns = [name for name in self._side_types if name in names]
            if side_columns:
                arrays |= self._read_side(packs, side_columns)
            examples_of_packs = np.diff(packs.example_offsets)
        for name, values in self._places(group, examples_of_packs).items():
            arrays[name] = as_arrow(values, pa.int64())
        return pl.DataFrame(pa.table({name: arrays[name] for name in names}))

    def _read_side(self, packs: Packs, columns: Collection[str]) -> dict[str, Any]:
        """Return columns of side datasets: name -> Arrow array."""
        assert self._side is not None
        names = {self._side_names[column] for column in columns}
        (joined,) = self._side.join([packs], names)
        examples = unpack(packs)
        response_offsets = to_offsets(packs.num_responses)

        arrays = {}
        for column in columns:
            name = self._side_names[column]
            type_name = self._side_types[column]
            if token_type(type_name) is not None:
                values = _align(joined.token_columns[name], examples.supervised)
                lists = _nest(values, examples.sequence_offsets)
                arrays[column] = _nest(lists, response_offsets)
            elif type_name == PER_SEQUENCE:
                is_reference = name == REF_LOGPS
                sequence_values = (
                    joined.ref_logps if is_reference else joined.sequence_columns[name]
                )
                arrays[column] = _to_lists(sequence_values, response_offsets)
            else:
                arrays[column] = pa.array(joined.columns[name], from_pandas=False)
        return arrays

    def _read_columns(
        self, group: int, names: Sequence[str]
    ) -> tuple[dict[str, Any], Int64]:
        """Return columns other than token ids, read without the rest of the packs.

        Returns:
            Name -> Arrow array, and int64 `[P]`, the examples of each pack.
        """
        response_columns = [name for name in _RESPONSE_COLUMNS if name in names]
        carried = [name for name in self._carried if name in names]
        responses = KINDS[self._dataset.manifest.kind]  # of an example; None: they vary
        counted_columns = {"example_ids"}
        counted_columns |= {_RESPONSE_COLUMNS[name] for name in response_columns}
        if response_columns and responses is None:
            counted_columns.add("num_responses")

        stored_names = counted_columns | {self._carried[name] for name in carried}
        batch, where, id_base = self._dataset.read_columns(group, sorted(stored_names))
        with decoding(where):
            columns = {name: flat_column(batch, name, None) for name in counted_columns}
            check_counts(columns, int(self._dataset.row_groups.rows[group]))
            ids, example_offsets = columns["example_ids"]
            arrays: dict[str, Any] = {"example_id": as_arrow(ids + id_base, pa.int64())}
            for name in response_columns:
                if responses is None:
                    counts, _ = columns["num_responses"]
                else:
                    counts = np.full(len(ids), responses)
                values, _ = columns[_RESPONSE_COLUMNS[name]]
                arrays[name] = _to_lists(values, to_offsets(counts))
            for name in carried:
                arrays[name] = _flatten_carried(batch, name, self._carried, len(ids))
        return arrays, np.diff(example_offsets)


def _flatten_carried(
    batch: pa.RecordBatch, name: str, carried: Mapping[str, str], num_examples: int
) -> pa.Array:
    """Return a carried column with a value for each example."""
    column = batch.column(carried[name])
    column.validate(full=True)
    values = column.flatten()
    if len(values) != num_examples:
        raise FormatError(
            f"column {name} must have {num_examples} values [columns-agree]."
        )
    return values


def _columns_of_packs(
    packs: Packs, names: Sequence[str], carried: Mapping[str, str]
) -> dict[str, Any]:
    """Return columns of packs: name -> Arrow array.

    Args:
        packs: the packs.
        names: the columns.
        carried: column of the frame -> carried column of the packs.
    """
    response_offsets = to_offsets(packs.num_responses)
    columns = {
        "example_id": as_arrow(packs.example_ids, pa.int64()),
        "lengths": _to_lists(packs.lengths, response_offsets),
        "rewards": _to_lists(packs.reward, response_offsets),
    }
    for name, stored_name in carried.items():
        if name in names:
            columns[name] = pa.array(packs.columns[stored_name], from_pandas=False)

    examples = unpack(packs)
    if "input_ids" in names:
        ids = _to_lists(examples.input_ids, examples.sequence_offsets)
        columns["input_ids"] = _nest(ids, response_offsets)
    if "labels" in names:
        labels = np.where(
            examples.supervised, examples.input_ids, np.int32(IGNORE_INDEX)
        )
        lists = _to_lists(labels, examples.sequence_offsets)
        columns["labels"] = _nest(lists, response_offsets)
    return columns


def _polars_type(type_name: str) -> Any:
    """Return the Polars type of a column of a side dataset."""
    import polars as pl

    type_of_tokens = token_type(type_name)
    if type_of_tokens is not None and type_of_tokens.k is not None:
        top = pl.Struct({"ids": pl.List(pl.Int32), "logps": pl.List(pl.Float32)})
        return pl.List(pl.List(top))
    if type_of_tokens is not None:
        return pl.List(pl.List(pl.Float32))
    return {
        "float32": pl.Float32,
        "float64": pl.Float64,
        "int64": pl.Int64,
        "bool": pl.Boolean,
        "string": pl.String,
        PER_SEQUENCE: pl.List(pl.Float32),
    }[type_name]


def _align(values: TokenValues, supervised: Bool) -> Any:
    """Return an Arrow array with a value for each token, null where unsupervised.

    Args:
        values: `[n]` or `[n, k]` each, for the supervised tokens.
        supervised: bool `[N]`, n of them true.
    """
    is_null = pa.array(~supervised)
    if not isinstance(values, TopK):
        aligned = np.zeros(len(supervised), np.float32)
        aligned[supervised] = values
        return pa.array(aligned, mask=~supervised)

    # Unsupervised tokens have empty lists.
    offsets = to_offsets(np.where(supervised, values.ids.shape[1], 0))
    ids = _nest(pa.array(values.ids.ravel()), offsets)
    logps = _nest(pa.array(values.logps.astype(np.float32).ravel()), offsets)
    return pa.StructArray.from_arrays(
        [ids, logps], names=["ids", "logps"], mask=is_null
    )


def _to_lists(values: Any, offsets: Int64) -> Any:
    """Return an Arrow array of lists.

    Args:
        values: values of all lists, one after another.
        offsets: int64 `[n + 1]`, offsets of the lists in `values`.
    """
    if len(values) != offsets[-1]:
        rule = f"it must have {offsets[-1]} values in a column of responses"
        raise FormatError(f"{rule}; found {len(values)} [columns-agree].")
    return _nest(as_arrow(values, pa.from_numpy_dtype(values.dtype)), offsets)


def _nest(values: Any, offsets: Int64) -> Any:
    return pa.LargeListArray.from_arrays(as_arrow(offsets, pa.int64()), values)
