"""A dataset as a Polars LazyFrame: a row for each example, read and verified as it is
needed.

Row groups are read one after another, of each only the columns that the query uses. Of
a condition on `pack` and `shard` alone, row groups without a match are not read; if
token ids are wanted, other conditions are evaluated on their own columns first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from packstore.errors import FormatError
from packstore.format.arrays import IGNORE_INDEX, Int64, Packs, to_offsets
from packstore.format.schema import KINDS, as_arrow, flat_column
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.pack_index import check_counts
from packstore.io.manifest.stored_file import decoding
from packstore.pack.fill import unpack

if TYPE_CHECKING:
    from polars import DataFrame, Expr, LazyFrame

_PLACES = ("pack", "shard")
_TOKENS = ("input_ids", "labels")
_OWN = ("example_id", *_PLACES, "lengths", "rewards", *_TOKENS)
_STORED = {"example_id": "example_ids", "lengths": "lengths", "rewards": "reward"}

ROWS = 1 << 16
"""Examples of a frame without token ids."""


def scan(
    url: str | os.PathLike[str] | Dataset,
    *,
    version: int | None = None,
    tokens: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LazyFrame:
    """Returns the examples of a dataset as a ``polars.LazyFrame``, in file order,
    unread.

        >>> frame = packstore.scan("prefs-8k")
        >>> is_long = pl.col("lengths").list.max() > 4096
        >>> frame.filter(is_long).select("example_id").collect()

    Columns: `example_id`; `pack`, its number in the dataset, and `shard`, its position
    in the manifest, from 0; `lengths` and `rewards`, lists with a value for each
    response (preference: chosen, then rejected); and the carried columns, named
    ``NAME_carried`` if one of these has its name. What is read is verified by checksum.

    Args:
        url: folder or fsspec URL of the dataset, or the opened dataset.
        version: number of an older version.
        tokens: adds `input_ids` and `labels` (-100 where unsupervised) of each
            response, whole, also in layout ``shared_prefix``.
        storage_options: passed to the fsspec filesystem.

    Raises:
        PackstoreError: as :func:`packstore.open`; while the frame is collected, as
            :meth:`packstore.Dataset.read_packs`.
    """
    from polars.io.plugins import register_io_source

    options = dict(storage_options or {})
    dataset = (
        url
        if isinstance(url, Dataset)
        else open_dataset(os.fspath(url), options, version)
    )
    source = ExampleSource(dataset, tokens)
    return register_io_source(
        source, schema=source.schema, is_pure=True, explain_name="packstore"
    )


class ExampleSource:
    """Reads examples for Polars, which calls it."""

    def __init__(self, dataset: Dataset, tokens: bool) -> None:
        self._dataset, self._tokens = dataset, tokens
        self._carried = {
            f"{name}_carried" if name in _OWN else name: name
            for name in dataset.manifest.carried
        }

    @property
    def schema(self) -> dict[str, Any]:
        """Type of each column."""
        import polars as pl

        types = {
            "string": pl.String,
            "int64": pl.Int64,
            "float64": pl.Float64,
            "bool": pl.Boolean,
        }
        carry = self._dataset.manifest.carried
        lists = pl.List(pl.List(pl.Int32))
        return {
            **dict.fromkeys(("example_id", *_PLACES), pl.Int64),
            "lengths": pl.List(pl.Int32),
            "rewards": pl.List(pl.Float32),
            **{name: types[carry[stored]] for name, stored in self._carried.items()},
            **(dict.fromkeys(_TOKENS, lists) if self._tokens else {}),
        }

    def __call__(
        self,
        with_columns: list[str] | None,
        predicate: Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[DataFrame]:
        """Yields the rows of `predicate` among the first `n_rows`, as Polars asks for
        them.
        """
        import polars as pl

        names = list(self.schema) if with_columns is None else with_columns
        needed = set() if predicate is None else set(predicate.meta.root_names())
        together: list[DataFrame] = []
        tokens, size = set(_TOKENS), batch_size or ROWS
        groups = self._dataset.row_groups
        left = int(groups.examples.sum()) if n_rows is None else n_rows
        for group in range(len(groups)):
            if left <= 0:
                break
            count = min(left, int(groups.examples[group]))
            left -= count
            if predicate is not None and needed <= set(_PLACES):
                ones = np.ones(groups.rows[group], np.int64)
                if pl.DataFrame(self._places(group, ones)).filter(predicate).is_empty():
                    continue
            elif (
                predicate is not None
                and tokens.isdisjoint(needed)
                and tokens & set(names)
            ):
                head = self._frame(group, sorted(needed)).head(count)
                if head.filter(predicate).is_empty():
                    continue
            frame = self._frame(
                group, list(dict.fromkeys([*names, *sorted(needed)]))
            ).head(count)
            if predicate is not None:
                frame = frame.filter(predicate)
            together.append(frame.select(names))
            if sum(map(len, together)) >= size or tokens & set(names):
                yield pl.concat(together)
                together = []
        if together:
            yield pl.concat(together)

    def _places(self, group: int, counts: Int64) -> dict[str, Int64]:
        """Returns `pack` and `shard` of the rows of a row group; `counts`: rows of each
        pack.
        """
        first, end = self._dataset.group_offsets[group : group + 2].tolist()
        packs = np.repeat(np.arange(first, end), counts)
        return {
            "pack": packs,
            "shard": np.full(len(packs), self._dataset.row_groups.shard[group]),
        }

    def _frame(self, group: int, names: Sequence[str]) -> DataFrame:
        import polars as pl

        if not set(_TOKENS).isdisjoint(names):
            arrays = _arrays_of_packs(
                self._dataset.read_packs(group), names, self._carried
            )
        else:
            arrays = self._arrays_of_columns(group, names)
        places = self._places(group, arrays.pop("counts"))
        arrays |= {
            name: as_arrow(values, pa.int64()) for name, values in places.items()
        }
        return pl.DataFrame(pa.table({name: arrays[name] for name in names}))

    def _arrays_of_columns(self, group: int, names: Sequence[str]) -> dict[str, Any]:
        k, per_response = (
            KINDS[self._dataset.manifest.kind],
            set(names) & {"lengths", "rewards"},
        )
        stored = {"example_ids", *(_STORED[n] for n in names if n in _STORED)}
        stored |= {"num_responses"} if per_response and k is None else set()
        carried = {n: self._carried[n] for n in names if n in self._carried}
        batch, where, base = self._dataset.read_columns(
            group, sorted(stored | {*carried.values()})
        )
        with decoding(where):
            flat = {name: flat_column(batch, name, None) for name in stored}
            check_counts(flat, int(self._dataset.row_groups.rows[group]))
            ids, examples = flat["example_ids"]
            example_id = as_arrow(ids + base, pa.int64())
            arrays: dict[str, Any] = {
                "counts": np.diff(examples),
                "example_id": example_id,
            }
            for name in per_response:
                counts = flat["num_responses"][0] if k is None else np.full(len(ids), k)
                arrays[name] = _lists(flat[_STORED[name]][0], to_offsets(counts))
            for name in carried:
                column = batch.column(carried[name])
                column.validate(full=True)
                arrays[name] = column.flatten()
                if len(arrays[name]) != len(ids):
                    raise FormatError(
                        f"column {name} must have {len(ids)} values [columns-agree]."
                    )
        return arrays


def _arrays_of_packs(
    packs: Packs, names: Sequence[str], carried: Mapping[str, str]
) -> dict[str, Any]:
    examples, offsets = unpack(packs), to_offsets(packs.num_responses)
    arrays = {
        "counts": np.diff(packs.example_offsets),
        "example_id": as_arrow(packs.example_ids, pa.int64()),
        "lengths": _lists(packs.lengths, offsets),
        "rewards": _lists(packs.reward, offsets),
    }
    for name in carried.keys() & set(names):
        arrays[name] = pa.array(packs.columns[carried[name]], from_pandas=False)
    ids = examples.input_ids
    labels = np.where(examples.supervised, ids, np.int32(IGNORE_INDEX))
    for name, values in (("input_ids", ids), ("labels", labels)):
        if name in names:
            lists = _lists(values, examples.sequence_offsets)
            arrays[name] = pa.LargeListArray.from_arrays(
                as_arrow(offsets, pa.int64()), lists
            )
    return arrays


def _lists(values: Any, offsets: Int64) -> Any:
    """Returns an Arrow array of lists; `offsets` are those of the values."""
    if len(values) != offsets[-1]:
        rule = f"it must have {offsets[-1]} values in a column of responses"
        raise FormatError(f"{rule}; found {len(values)} [columns-agree].")
    numbers = as_arrow(values, pa.from_numpy_dtype(values.dtype))
    return pa.LargeListArray.from_arrays(as_arrow(offsets, pa.int64()), numbers)
