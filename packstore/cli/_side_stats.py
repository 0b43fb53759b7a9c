"""Statistics of side datasets: the bytes of columns, and distributions of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packstore.errors import ConfigError
from packstore.format.arrays import Packs, TokenValues, TopK
from packstore.io.manifest.side_manifest import (
    PER_SEQUENCE,
    REF_LOGPS,
    TokenType,
    token_type,
)
from packstore.pages.values import numbers_of

if TYPE_CHECKING:
    import pyarrow as pa

    from packstore.io.side.side import Side

Distributions = dict[str, Any]
"""Name of a distribution -> its values, `[n]`."""


class ColumnSize(NamedTuple):
    """The size of a column over all shards.

    Attributes:
        type: its type, such as ``token<float32>``.
        unit: there is one value for each of these.
        values: number of values; of a top k, each is k ids and log-probs.
        bytes: compressed bytes in the shards.
    """

    type: str
    unit: str
    values: int
    bytes: int

    @property
    def bytes_per_value(self) -> float:
        """Compressed bytes of a value."""
        return self.bytes / max(self.values, 1)


class SideStatistics:
    """Collects the statistics of side datasets, batch by batch.

    Attributes:
        examples: number of rows.
        distributions: the values, by name.
    """

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = sides
        self.examples = 0
        self._values: Counter[str] = Counter()
        self._parts: list[Distributions] = []

    def read(self) -> Iterator[None]:
        """Read all rows; yield after each row group."""
        for side in self.sides:
            types = side.manifest.known_columns
            for batch in side.iter_batches():
                self.examples += batch.num_rows
                part: Distributions = {}
                for name, type_name in types.items():
                    values = _values_of(batch.column(name), type_name)
                    self._values[name] += _length(values)
                    part |= distributions_of(name, values)
                self._parts.append(part)
                yield

    @property
    def distributions(self) -> Distributions:
        """The values of each distribution."""
        return concat_distributions(self._parts)

    def columns(self) -> dict[str, ColumnSize]:
        """Return the size of each column; reads the footers of the shards."""
        num_bytes: Counter[str] = Counter()
        types: dict[str, str] = {}
        for side in self.sides:
            types |= side.manifest.known_columns
            num_bytes.update(_stored_bytes(side))
        return {
            name: ColumnSize(
                type=type_name,
                unit=unit_of(type_name),
                values=self._values[name],
                bytes=num_bytes[name],
            )
            for name, type_name in types.items()
        }


def require_same_columns(sides: Sequence[Side]) -> None:
    """Raise ConfigError if side datasets of parts have other columns or types."""
    expected = sides[0].manifest.known_columns
    for side in sides:
        columns = side.manifest.known_columns
        if columns != expected:
            raise ConfigError(
                f"{side.url} must have the columns of {sides[0].url}; found "
                f"{_describe_columns(columns)} beside {_describe_columns(expected)}. "
                "Name one of them."
            )


def _describe_columns(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {type_name}" for name, type_name in columns.items())


def column_cells(
    columns: Mapping[str, ColumnSize],
) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table of sizes."""
    rows = [
        [
            name,
            size.type,
            f"{size.values:,} {size.unit}s",
            f"{size.bytes:,}",
            f"{size.bytes_per_value:,.4g}",
        ]
        for name, size in columns.items()
    ]
    return ["", "type", "values", "bytes", "bytes a value"], rows


def _values_of(array: pa.Array, type_name: str) -> TokenValues | pa.Array:
    """Return the values of a stored column; log-probs of a top k as float32."""
    from packstore.format.schema import as_numpy

    type_ = token_type(type_name)
    if type_ is not None and type_.k is not None:
        return _top_k(array, type_, type_.k)
    if type_ is not None or type_name == PER_SEQUENCE:
        return as_numpy(array.flatten())
    if type_name == "string":
        return array
    return as_numpy(array)


def _top_k(array: pa.Array, type_: TokenType, k: int) -> TopK:
    from packstore.format.schema import as_numpy
    from packstore.io.side.tokens import from_gaps, list_counts, top_k_of

    ids, logps = top_k_of(array, k)
    if type_.dtype != "uint8":
        return TopK(ids, logps.astype(np.float32))
    scales = as_numpy(array.field("scale"))
    scale_of_tokens = np.repeat(scales, list_counts(array, k))
    return TopK(ids, from_gaps(logps, scale_of_tokens[:, None]))


def _length(values: TokenValues | pa.Array) -> int:
    return len(values.ids if isinstance(values, TopK) else values)


def unit_of(type_name: str) -> str:
    """Return the things that a column of this type has a value for."""
    if token_type(type_name) is not None:
        return "supervised token"
    return "sequence" if type_name == PER_SEQUENCE else "example"


def _stored_bytes(side: Side) -> Counter[str]:
    """Return the compressed bytes of each column, by the footers of the shards."""
    import pyarrow.parquet as pq

    num_bytes: Counter[str] = Counter()
    for shard in side.manifest.shards:
        with side.location.open_read(shard.path) as file:
            metadata = pq.read_metadata(file)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for i in range(group.num_columns):
                chunk = group.column(i)
                name = chunk.path_in_schema.partition(".")[0]
                num_bytes[name] += chunk.total_compressed_size
    return num_bytes


def distributions_of_packs(packs: Packs, names: Sequence[str]) -> Distributions:
    """Return the distributions of joined columns.

    Of a top k, there is also the log-prob of each supervised token that is among the k.
    """
    distributions: Distributions = {}
    for name in names:
        if name in packs.token_columns:
            values = packs.token_columns[name]
            distributions |= distributions_of(name, values)
            if isinstance(values, TopK):
                numbers = numbers_of(packs, name)
                is_among = np.isfinite(numbers)
                distributions[f"{name}: log-prob of the token"] = numbers[is_among]
                distributions[f"{name}: share of tokens in it"] = is_among.astype(int)
        elif name == REF_LOGPS:
            distributions[name] = packs.ref_logps
        elif name in packs.sequence_columns:
            distributions[name] = packs.sequence_columns[name]
        else:
            distributions |= distributions_of(name, packs.columns[name])
    return distributions


def distributions_of(name: str, values: Any) -> Distributions:
    """Return the distributions of a column's values.

    Of numbers it is their own; there is none of texts. Of a top k there are the mass of
    the k, and the entropy in nats of k + 1 outcomes, the k and the rest.
    """
    if isinstance(values, TopK):
        logps = values.logps.astype(np.float32)
        probabilities = np.exp(logps)
        mass = probabilities.sum(axis=1)
        rest = np.clip(1 - mass, 0, 1)
        entropy = -(probabilities * logps).sum(axis=1)
        entropy -= rest * np.log(np.where(rest > 0, rest, 1))
        return {f"{name}: mass": mass, f"{name}: entropy": entropy}
    if not isinstance(values, np.ndarray) or values.dtype == np.object_:
        return {}
    if values.dtype == np.bool_:
        values = values.astype(np.int8)
    if values.dtype == np.float16:  # sums of halves lose digits
        values = values.astype(np.float32)
    return {name: values[np.isfinite(values)]}


def concat_distributions(parts: list[Distributions]) -> Distributions:
    """Concatenate the values of parts, which are freed, so that memory holds the values
    once.
    """
    names = list(parts[0]) if parts else []
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in names}
