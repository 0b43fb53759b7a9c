"""The manifest of a side dataset: its source dataset, and the origin of its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from packstore.io.manifest.merge import runs
from packstore.io.manifest.stored_file import StoredFile

SIDE_VERSION = 1
"""Readers refuse a side dataset of a higher version."""

SIDE = "side"
"""Prefix of the names of its manifests."""

PART_FOLDER = "parts-"
"""Prefix of the folder of a run whose parts are not yet a version."""

REF_LOGPS = "ref_logps"
"""The column with a value for each sequence: its log-prob under a reference model."""

SIDE_TYPES = {
    **CARRY_TYPES,
    "float32": pa.float32(),
    "list<float32>": list_of(pa.float32()),
}
"""Types of columns, with one value for each example; of the list one for each sequence.
"""

PER_SEQUENCE = "list<float32>"


@dataclass(frozen=True, kw_only=True)
class SideShard(StoredFile):
    """One file of a side dataset: a row for each of its `rows` examples."""

    rows: Positive


class _Head(msgspec.Struct):
    side_version: Whole
    features: list[str]
    sha256: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True, kw_only=True)
class SideManifest:
    """Everything that a reader needs before it opens a shard."""

    kind: str  # of the examples: `preference`, `sft` or `scored`
    lineage: Sha256  # of the source dataset; see :attr:`Manifest.lineage`
    fingerprint: Sha256  # of that dataset
    columns: Mapping[str, str]  # name -> a name in `SIDE_TYPES`
    # origin of the values (model, dtype, …): texts, numbers, booleans
    provenance: Mapping[str, str | int | float | bool | None]
    package_version: str  # of the writer
    shards: tuple[SideShard, ...]  # in any order

    @property
    def known(self) -> dict[str, str]:
        """The columns that this release reads, name to type."""
        return known_columns(self.columns, SIDE_TYPES)

    @property
    def examples(self) -> int:
        """Number of examples with values."""
        return sum(s.rows for s in self.shards)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file that the manifest names, by path."""
        return {shard.path: shard.bytes for shard in self.shards}

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the shards; columns of a later release have type
        `ANY`.
        """
        fields = [pa.field("example_ids", pa.int64(), nullable=False)]
        for name in self.columns:
            type_ = SIDE_TYPES[self.known[name]] if name in self.known else ANY
            fields.append(pa.field(name, type_, nullable=type_ == ANY))
        return pa.schema(fields, {"packstore.side_version": str(SIDE_VERSION)})

    def to_json(self) -> bytes:
        """Returns canonical JSON: equal manifests give equal bytes."""
        head = {
            "side_version": SIDE_VERSION,
            "features": [],
            **dataclasses.asdict(self),
        }
        lines = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return dump_json(head, "side manifest", lines)

    @classmethod
    def from_json(cls, data: bytes, where: str = "side manifest") -> Self:
        """Parses the manifest in `data`; ignores unknown fields."""
        head = decode(data, _Head, where)
        if head.side_version != SIDE_VERSION or head.features:
            rule = f"its version must be {SIDE_VERSION}, and it must need no features"
            found = f"version {head.side_version}, features {quote(head.features)}"
            remedy = "Upgrade packstore to read this side dataset"
            raise UnsupportedFormatError(sentence(where, rule, found, remedy))
        check_last(head.sha256, where)
        manifest = decode(data, cls, where)
        manifest.check(where)
        return manifest

    def check(self, where: str) -> None:
        """Raises :class:`FormatError` if its parts contradict each other."""
        require(bool(self.columns), where, "it must have a column", {"columns": "none"})
        check_columns(self.columns, where)
        for name, type_name in self.columns.items():
            place = f"{where}, column {quote(name)}"
            rule = f"{REF_LOGPS} must have type {PER_SEQUENCE}"
            ok = name != REF_LOGPS or type_name == PER_SEQUENCE
            require(ok, place, rule, {"type": quote(type_name)})
        for (
            name,
            value,
        ) in self.provenance.items():  # of a caller; JSON was checked by its type
            ok = value is None or isinstance(value, str | int | float)
            rule = (
                f"provenance {quote(name)} must be a text, a number, a boolean or null"
            )
            require(ok, where, rule, {"value": quote(value)})
        require_different_paths([s.path for s in self.shards], where)
        require_known(where, "field kind", KINDS, self.kind)


class Span(NamedTuple):
    """Example ids of a dataset, both ends included; in a side dataset they count from
    `first`.
    """

    first: int
    last: int


def covered(side: SideManifest, data: Manifest, where: str) -> list[Span]:
    """Returns the ids that a side dataset covers: all, or those of a part of a combined
    dataset.

    Raises CompatibilityError for one that was not derived from these examples.
    """
    remedy = "Make it anew from this dataset"
    if side.kind != data.kind:
        rule = f"its kind must be that of the dataset, {quote(data.kind)}"
        raise CompatibilityError(sentence(where, rule, quote(side.kind), remedy))
    if side.lineage == data.lineage:
        if side.examples < data.totals.examples:
            rule = f"it must have values for each of {data.totals.examples} examples"
            raise CompatibilityError(sentence(where, rule, f"{side.examples}", remedy))
        return [Span(0, TOP)]
    parts, spans, done = data.provenance.get("combined_from", ()), list[Span](), 0
    starts = [
        n << SOURCE_SHIFT for n in accumulate((p["sources"] for p in parts), initial=0)
    ]
    for first, end, lineage in runs(parts):
        if lineage == side.lineage and first >= done:
            spans.append(Span(starts[first], starts[end] - 1))
            done = end
    if not spans:
        rule = f"its lineage must be that of the dataset, {quote(data.lineage, 80)}"
        rule += ", or of a part of it" if parts else ""
        raise CompatibilityError(sentence(where, rule, quote(side.lineage, 80), remedy))
    return spans


def require_covered(name: str, spans: Sequence[Span], data: Manifest) -> None:
    """Raises unless each id of a dataset is in one of the spans that have column
    `name`.
    """
    done, sources = 0, len(data.provenance["sources"])
    for span in sorted(spans):
        if span.first > done:
            break
        if span.first < done:
            raise ConfigError(
                f"two columns of the joined packs are named {quote(name)}."
            )
        done = span.last + 1
    if done < sources << SOURCE_SHIFT:
        rule = (
            f"side data {quote(name)} must cover all {sources} sources of the dataset"
        )
        found = f"none from source {done >> SOURCE_SHIFT} on"
        remedy = "Join the side data of every part, or make one anew from this dataset"
        raise CompatibilityError(sentence("side data", rule, found, remedy))
