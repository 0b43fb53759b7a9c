"""The manifest of a side dataset: its source dataset, and the origin of its values.

A side dataset has further columns for the examples of a dataset, such as the log-probs
of a reference model, under the same example ids. It fits every dataset of the same
lineage, and covers a part of a combined dataset if the part has that lineage.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec
import orjson
import pyarrow as pa

from packstore.errors import (
    CompatibilityError,
    ConfigError,
    UnsupportedFormatError,
    quote,
    sentence,
)
from packstore.format.arrays import SOURCE_SHIFT
from packstore.format.schema import ANY, CARRY_TYPES, KINDS, list_of
from packstore.format.typed_json import (
    TOP,
    Positive,
    Sha256,
    Whole,
    decode,
    require,
    require_known,
)
from packstore.io.manifest.manifest import (
    Manifest,
    check_columns,
    check_last,
    dump_json,
    known_columns,
    require_different_paths,
)
from packstore.io.manifest.merge import (
    Part,
    all_parts_of,
    lineages_of_runs,
    parts_of,
)
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.store.location import Location

SIDE_VERSION = 1
"""Readers refuse a side dataset of a higher version."""

SIDE = "side"
"""Prefix of the names of manifests of side datasets."""

PART_FOLDER = "parts-"
"""Prefix of the folder with the finished parts of a run that is not committed yet."""

REF_LOGPS = "ref_logps"
"""The column with a value for each sequence: its log-prob under a reference model."""

REF_TOKEN_LOGPS = "ref_token_logps"
"""The column with the log-prob of each supervised token under a reference model."""

REF_TOP_K = "ref_top_k"
"""The column with the most probable ids of a reference model, or teacher, in place of
each supervised token, and their log-probs.
"""

PER_SEQUENCE = "list<float32>"
"""Type of a column with one value for each sequence of an example."""

MAX_TOP = 1024
"""Maximum k of a column with the top k of each token."""

_TOKEN_TYPE = re.compile(
    r"token<(?:top(?P<k>[1-9][0-9]{0,3}),)?(?P<dtype>float16|float32|uint8)>"
)

SIDE_TYPES = {
    **CARRY_TYPES,
    "float32": pa.float32(),
    PER_SEQUENCE: list_of(pa.float32()),
}
"""Name of a column's type -> its Arrow type. Columns have a value for each example;
those of type `PER_SEQUENCE` a list, with a value for each of its sequences. Types of
tokens are named in :class:`TokenType`.
"""


class TokenType(NamedTuple):
    """Type of a column with a value for each supervised token.

    Its names are ``token<float32>``, ``token<float16>``, and for the k most probable
    ids ``token<topK,float16>`` and ``token<topK,uint8>``, as ``token<top16,uint8>``.

    Attributes:
        dtype: of the numbers or log-probs. ``uint8``: a log-prob is stored as the gap
            to the one before it in its token, the first as the gap to 0, in multiples
            of ``-scale``, a number of the example.
        k: number of ids and log-probs for each token; None: one number.
    """

    dtype: str
    k: int | None

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type of the column."""
        numbers = list_of(pa.type_for_alias(self.dtype))
        if self.k is None:
            return numbers
        fields = [
            pa.field("ids", list_of(pa.int32()), nullable=False),
            pa.field("logps", numbers, nullable=False),
        ]
        if self.dtype == "uint8":
            fields.append(pa.field("scale", pa.float32(), nullable=False))
        return pa.struct(fields)


def token_type(name: str) -> TokenType | None:
    """Return the type of tokens of this name; None: it names none that is known."""
    match = _TOKEN_TYPE.fullmatch(name)
    if match is None:
        return None
    dtype = match["dtype"]
    if match["k"] is None:
        return TokenType(dtype, None) if dtype != "uint8" else None
    k = int(match["k"])
    return TokenType(dtype, k) if k <= MAX_TOP and dtype != "float32" else None


def side_type(name: str) -> pa.DataType | None:
    """Return the Arrow type of a column's type; None: this release does not know it."""
    type_of_tokens = token_type(name)
    return SIDE_TYPES.get(name) if type_of_tokens is None else type_of_tokens.arrow


_LINEAGE = re.compile("[0-9a-f]{64}")


def list_part_folders(location: Location) -> set[str]:
    """Return the subfolders of a place that are named by a lineage.

    Each has the side dataset of a part of a dataset, written with that part.
    """
    names = {entry.name for entry in location.entries() if entry.is_folder}
    return {name for name in names if _LINEAGE.fullmatch(name)}


@dataclass(frozen=True, kw_only=True)
class SideShard(StoredFile):
    """One file of a side dataset: a row for each of its `rows` examples."""

    rows: Positive


class _Head(msgspec.Struct):
    """Fields that decide whether and how the others are read."""

    side_version: Whole
    features: list[str]
    sha256: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True, kw_only=True)
class SideManifest:
    """Everything that a reader needs before it opens a shard."""

    kind: str  # of the examples: `preference`, `sft` or `scored`
    lineage: Sha256  # of the source dataset; see :attr:`Manifest.lineage`
    fingerprint: Sha256  # of the source dataset
    columns: Mapping[str, str]  # name -> a name in `SIDE_TYPES`
    # origin of the values (model, dtype, …): texts, numbers, booleans
    provenance: Mapping[str, str | int | float | bool | None]
    package_version: str  # of the writer
    shards: tuple[SideShard, ...]  # in any order

    @property
    def known_columns(self) -> dict[str, str]:
        """The columns that this release reads, name to type."""
        known_types = {name for name in self.columns.values() if side_type(name)}
        return known_columns(self.columns, known_types)

    @property
    def examples(self) -> int:
        """Number of examples with values."""
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file that the manifest names, by path."""
        return {shard.path: shard.bytes for shard in self.shards}

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the shards; unknown columns have type `ANY`."""
        known_types = self.known_columns
        fields = [pa.field("example_ids", pa.int64(), nullable=False)]
        for name in self.columns:
            if name in known_types:
                type_ = side_type(known_types[name])
                column = pa.field(name, type_, nullable=False)
            else:
                column = pa.field(name, ANY, nullable=True)
            fields.append(column)
        return pa.schema(fields, {"packstore.side_version": str(SIDE_VERSION)})

    def to_json(self) -> bytes:
        """Return canonical JSON: equal manifests give equal bytes."""
        fields = {
            "side_version": SIDE_VERSION,
            "features": [],
            **dataclasses.asdict(self),
        }
        layout = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return dump_json(fields, "side manifest", layout)

    @classmethod
    def from_json(cls, data: bytes, where: str = "side manifest") -> Self:
        """Parse and validate a manifest; ignore unknown fields.

        Args:
            data: JSON, without the hash.
            where: its place, for messages.

        Raises:
            FormatError: a field is absent or of another type, or parts contradict each
                other.
            UnsupportedFormatError: it needs a later release.
        """
        head = decode(data, _Head, where)
        if head.side_version != SIDE_VERSION or head.features:
            text = sentence(
                where=where,
                rule=(
                    f"its version must be {SIDE_VERSION}, and it must need no features"
                ),
                found=f"version {head.side_version}, features {quote(head.features)}",
                remedy="Upgrade packstore to read this side dataset",
            )
            raise UnsupportedFormatError(text)
        check_last(head.sha256, where)
        manifest = decode(data, cls, where)
        manifest.check(where)
        return manifest

    def check(self, where: str) -> None:
        """Raise FormatError if the parts of the manifest contradict each other."""
        require(bool(self.columns), where, "it must have a column", {"columns": "none"})
        check_columns(self.columns, where)
        type_name = self.columns.get(REF_LOGPS, PER_SEQUENCE)
        require(
            type_name == PER_SEQUENCE,
            f"{where}, column {quote(REF_LOGPS)}",
            f"{REF_LOGPS} must have type {PER_SEQUENCE}",
            {"type": quote(type_name)},
        )
        # The types of JSON were checked on reading; a caller may pass any values.
        for name, value in self.provenance.items():
            is_plain = value is None or isinstance(value, str | int | float)
            rule = (
                f"provenance {quote(name)} must be a text, a number, a boolean or null"
            )
            require(is_plain, where, rule, {"value": quote(value)})
        require_different_paths([shard.path for shard in self.shards], where)
        require_known(where, "field kind", KINDS, self.kind)


# The examples of a dataset that have values


class Span(NamedTuple):
    """Example ids of a dataset, both ends included.

    If a side dataset was made from one part of a combined dataset, its id 0 is the id
    `first` here.
    """

    first: int
    last: int


def spans_of_lineages(lineages: Set[str], data: Manifest) -> dict[str, list[Span]]:
    """Return the example ids of the runs of parts that have each of these lineages.

    Args:
        lineages: of side datasets.
        data: manifest of a dataset, or of a view of its last parts.

    Returns:
        Lineage -> runs; none for lineages that no run has, and for that of the dataset
        itself.
    """
    lineages = lineages - {data.lineage}  # of a side dataset of all parts
    # A run may begin before the parts of a view: only then all parts are searched.
    spans = _search_runs(lineages, parts_of(data))
    absent_lineages = lineages - spans.keys()
    if absent_lineages:
        spans |= _search_runs(absent_lineages, all_parts_of(data))
    return spans


def _search_runs(lineages: Set[str], parts: Sequence[Part]) -> dict[str, list[Span]]:
    runs: Iterable[tuple[int, int, str]] = lineages_of_runs(parts)
    if lineages <= {part.lineage for part in parts}:
        # To hash all runs would cost time quadratic in the number of parts.
        runs = ((n, n + 1, part.lineage) for n, part in enumerate(parts))

    spans: dict[str, list[Span]] = {}
    next_free_part = dict.fromkeys(lineages, 0)
    for first, end, lineage in runs:
        # Runs may overlap; an id gets its values once.
        if lineage in lineages and first >= next_free_part[lineage]:
            first_id = parts[first].first_source << SOURCE_SHIFT
            end_id = parts[end - 1].end_source << SOURCE_SHIFT
            spans.setdefault(lineage, []).append(Span(first_id, end_id - 1))
            next_free_part[lineage] = end
    return spans


def covered_spans(
    side: SideManifest,
    data: Manifest,
    runs: Mapping[str, Sequence[Span]],
    where: str,
) -> list[Span]:
    """Return the example ids of a dataset that a side dataset covers.

    These are all ids, or the ids of some parts of a combined dataset.

    Args:
        side: manifest of the side dataset.
        data: manifest of the dataset.
        runs: result of :func:`spans_of_lineages`.
        where: place of the side dataset, for messages.

    Raises:
        CompatibilityError: it was not derived from these examples.
    """
    remedy = "Make it anew from this dataset"
    if side.kind != data.kind:
        rule = f"its kind must be that of the dataset, {quote(data.kind)}"
        text = sentence(where, rule, found=quote(side.kind), remedy=remedy)
        raise CompatibilityError(text)
    if side.lineage == data.lineage:
        if side.examples < data.totals.examples:
            rule = f"it must have values for each of {data.totals.examples} examples"
            text = sentence(where, rule, found=str(side.examples), remedy=remedy)
            raise CompatibilityError(text)
        return [Span(0, TOP)]

    if side.lineage not in runs:
        rule = f"its lineage must be that of the dataset, {quote(data.lineage, 80)}"
        if "combined_from" in data.provenance:
            rule += ", or of a part of it"
        text = sentence(where, rule, found=quote(side.lineage, 80), remedy=remedy)
        raise CompatibilityError(text)
    return list(runs[side.lineage])


def require_covered(name: str, spans: Sequence[Span], data: Manifest) -> None:
    """Raise unless exactly one span covers each id of a dataset.

    Args:
        name: of a column.
        spans: of the side datasets that have the column.
        data: manifest of the dataset, or of a view of its last parts.

    Raises:
        ConfigError: spans overlap.
        CompatibilityError: an id is in no span.
    """
    parts = parts_of(data)
    if not parts:
        return
    first_source = parts[0].first_source
    next_id = first_source << SOURCE_SHIFT
    for span in sorted(spans):
        if span.last < first_source << SOURCE_SHIFT:
            continue  # of parts outside the view
        first_id = max(span.first, first_source << SOURCE_SHIFT)
        if first_id > next_id:
            break
        if first_id < next_id:  # both side datasets have values for this id
            raise ConfigError(
                sentence(
                    where="side data",
                    rule="an example must have one value of a column",
                    found=f"two of {quote(name)}",
                    remedy="Join one side dataset with this column at a time",
                )
            )
        next_id = span.last + 1

    num_sources = len(data.provenance["sources"])
    if next_id < num_sources << SOURCE_SHIFT:
        text = sentence(
            where="side data",
            rule=(
                f"side data {quote(name)} must cover all {num_sources - first_source} "
                "sources of the dataset"
            ),
            found=f"none from source {next_id >> SOURCE_SHIFT} on",
            remedy=(
                "Join the side data of every part, or make one anew from this dataset"
            ),
        )
        raise CompatibilityError(text)
