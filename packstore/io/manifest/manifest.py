"""The manifest: one JSON file that describes a dataset; writing it is the commit."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from packstore.config import PackConfig
from packstore.errors import FormatError, quote, sentence
from packstore.format.arrays import Tally
from packstore.format.schema import (
    CARRY_TYPES,
    COLUMNS,
    FORMAT_VERSION,
    KINDS,
    LAYOUTS,
    check_features,
    pack_schema,
)
from packstore.format.typed_json import Count, Positive, Sha256, Whole, convert, decode, require
from packstore.io.manifest.commit import commit, read_committed
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.shard import PackShape, ShardInfo
from packstore.io.shards.statistics import PackCounter, Statistics, Totals
from packstore.io.store.location import Location, check_relative

MAX_FOOTER_BYTES, GROUP_FOOTER_BYTES = 1 << 24, 1 << 16
"""Maximum bytes of a footer: a constant part, and a part for each row group."""

FILE_FORMATS = ("parquet", "arrow")
_CHOICES = {"kind": tuple(KINDS), "layout": LAYOUTS, "file_format": FILE_FORMATS}
_GROUP_COLUMNS = ("rows", "examples", "tokens", "longest")
_OPTIONAL = ("fields_used", "fields_not_used")
_SUMS = ("examples", "sequences", "tokens", "supervised_tokens", "bytes")


@dataclass(frozen=True, kw_only=True)
class Records:
    """Counts of input records: ``read == packed + sum(dropped)``; `packed` includes `noted`.

    `fields_used` and `fields_not_used` count the records that have a field, by its name.
    """

    read: Count
    packed: Count
    dropped: Mapping[str, Count]
    noted: Mapping[str, Count]
    fields_used: Mapping[str, Count] = field(default_factory=dict)
    fields_not_used: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Everything that a reader needs before it opens a shard.

    Attributes:
        features: required features; a reader must support all of them.
        file_format: ``parquet`` or ``arrow``.
        provenance: `sources` (path, bytes, sha256, records of each), `tokenizer`, `settings`,
            `package_version`.
        shards: in dataset order.
        pack_index: the file with the sizes of every pack, if written; see :mod:`.pack_index`.
    """

    kind: str
    layout: str
    pack_size: Positive
    strategy: str
    seed: Whole
    pack_order: str
    file_format: str
    features: tuple[str, ...]
    carry: Mapping[str, str]
    totals: Totals
    statistics: Statistics
    records: Records
    provenance: Mapping[str, Any]
    shards: tuple[ShardInfo, ...]
    pack_index: StoredFile | None = None

    @property
    def num_responses(self) -> int | None:
        """Number of sequences K of each example; None for kind ``ranked``, where it varies."""
        return KINDS[self.kind]

    @property
    def num_packs(self) -> int:
        """Number of packs of the dataset."""
        return self.totals.packs

    @property
    def pairs(self) -> int:
        """Number of preference pairs: the examples of kind ``dpo``, else 0."""
        return self.totals.examples if self.kind == "dpo" else 0

    @property
    def fill_rate(self) -> float:
        """Tokens as a fraction of packs x pack size, 0 to 1."""
        return self.statistics.fill_rate

    @property
    def vocab_size(self) -> int | None:
        """Exclusive upper bound of token ids, if the tokenizer's size was recorded."""
        size = (self.provenance.get("tokenizer") or {}).get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def lineage(self) -> str:
        """Id shared by all datasets whose examples have equal tokens under equal ids.

        Repacking keeps it. By default it is the dataset's fingerprint.
        """
        return str(self.provenance.get("lineage", self.fingerprint))

    @property
    def schema(self) -> pa.Schema:
        """The logical Arrow schema, with plain `labels`."""
        return pack_schema(self.kind, self.layout, carry=self.carry)

    @property
    def stored_schema(self) -> pa.Schema:
        """The Arrow schema of the shards."""
        spans = "label_spans" in self.features
        return pack_schema(self.kind, self.layout, label_spans=spans, carry=self.carry)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the packs and their order, independent of the other fields."""
        what = [FORMAT_VERSION, self.kind, self.layout, self.pack_size, self.file_format]
        parts = [*what, *self.features, *(f"{s.sha256}+{s.example_id_base}" for s in self.shards)]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Returns canonical JSON: equal manifests give equal bytes.

        Raises:
            FormatError: a text is not valid Unicode.
        """
        return _dump(self)

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Parses the manifest in `data`; ignores unknown optional fields.

        Raises:
            UnsupportedFormatError: a higher version, or an unknown required feature.
            FormatError: a field is missing, of the wrong type, or contradicts others; names it.
        """
        return _parse(data, where)


def build_manifest(
    shape: PackShape,
    config: PackConfig,
    shards: Sequence[ShardInfo],
    counter: PackCounter,
    tally: Tally,
    planning: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Manifest:
    """Builds the manifest of a dataset that was just written.

    Args:
        shape: properties shared by all packs.
        config: the settings of the job.
        shards: returned by :meth:`ShardWriter.close`.
        counter: :attr:`ShardWriter.counter` of the writer.
        tally: counts of packed, dropped and noted records.
        planning: statistics of the plan.
        provenance: see :class:`Manifest`.

    Raises:
        FormatError: the parts contradict each other.
    """
    manifest = Manifest(
        kind=shape.kind,
        layout=shape.layout,
        pack_size=shape.pack_size,
        strategy=config.strategy,
        seed=config.seed,
        pack_order=config.pack_order,
        file_format=config.format,
        features=("label_spans",) if config.labels == "spans" else (),
        carry=dict(shape.carry),
        totals=counter.totals(sum(s.bytes for s in shards)),
        statistics=counter.statistics(shape.pack_size, planning),
        records=Records(
            read=tally.read,
            packed=tally.kept,
            dropped=dict(sorted(tally.dropped.items())),
            noted=dict(sorted(tally.events.items())),
            fields_used=dict(sorted(tally.used.items())),
            fields_not_used=dict(sorted(tally.unused.items())),
        ),
        provenance=provenance,
        shards=tuple(shards),
    )
    check_manifest(manifest, "manifest")
    return manifest


def read_manifest(location: Location, version: int | None = None) -> tuple[Manifest, int]:
    """Reads the manifest of a dataset, by default the current one; returns it and its version.

    Raises:
        DatasetNotFoundError: no dataset, or no such version, was committed there.
        FormatError: the manifest is not valid.
    """
    data, where, number = read_committed(location, version)
    return Manifest.from_json(data, where), number


def commit_manifest(
    location: Location, manifest: Manifest, overwrite: bool = False, version: int | None = None
) -> int:
    """Commits a dataset in one step; returns its version.

    Args:
        location: the dataset.
        manifest: of the new version.
        overwrite: replace an existing dataset.
        version: its number, chosen when the job started; None: the next one.

    Raises:
        DatasetExistsError: a dataset exists and `overwrite` is False, or another writer committed
            first.
        FormatError: the manifest is too large.
    """
    return commit(location, manifest.to_json(), overwrite, version=version)


class _Head(msgspec.Struct):
    """Fields checked before the others, and a flag if the optional one is null."""

    format_version: Count
    features: list[str]
    pack_index: msgspec.Raw = msgspec.Raw(b"{}")


class _Source(msgspec.Struct):
    path: str
    records: Count


class _Provenance(msgspec.Struct):
    """The part of `provenance` that readers rely on."""

    sources: list[_Source]
    settings: dict[str, Any]
    package_version: str
    tokenizer: dict[str, Any] | None = None
    lineage: Sha256 = ""


class _About(msgspec.Struct):
    provenance: _Provenance


def _dump(manifest: Manifest) -> bytes:
    """Returns canonical JSON: fields in order of declaration, a line for each field and shard."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    shards = [_compact(_dump_shard(s)) for s in fields.pop("shards")]
    head = {"format_version": FORMAT_VERSION, "features": fields.pop("features")}
    head |= {"kind": fields.pop("kind"), "num_responses": manifest.num_responses} | fields
    if manifest.pack_index is None:
        del head["pack_index"]
    told = dataclasses.asdict(manifest.records)
    head["records"] = {n: v for n, v in told.items() if v or n not in _OPTIONAL}
    lines = [b' "%s": %s' % (name.encode(), _compact(value)) for name, value in head.items()]
    rows = b",\n".join(b"  " + shard for shard in shards)
    lines.append(b' "shards": [\n%s\n ]' % rows if shards else b' "shards": []')
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def _parse(data: bytes, where: str) -> Manifest:
    """Returns the manifest in `data`.

    Raises:
        UnsupportedFormatError: a higher version, or an unknown required feature.
        FormatError: a field is missing, of the wrong type, or contradicts others.
    """
    head = decode(data, _Head, where)
    check_features(head.format_version, head.features, where)
    given = {"pack_index": bytes(head.pack_index).decode()}
    require(given["pack_index"] != "null", where, "pack_index must be a JSON object", given)
    manifest = decode(data, Manifest, where)
    check_manifest(manifest, where)
    return manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raises :class:`FormatError` if the parts of a manifest contradict each other."""
    records, totals = manifest.records, manifest.totals
    for name, choices in _CHOICES.items():
        value, allowed = getattr(manifest, name), ", ".join(choices)
        must = f"field {name} must be one of: {allowed}"
        require(value in choices, where, must, {name: quote(value)})
    require(
        records.read == records.packed + sum(records.dropped.values()),
        where,
        "records read must be those packed and those dropped",
        {"read": records.read, "packed": records.packed, "dropped": dict(records.dropped)},
    )
    require(
        records.packed == totals.examples,
        where,
        "records packed must be the examples",
        {"packed": records.packed, "examples": totals.examples},
    )
    for name, type_name in manifest.carry.items():
        place, names = f"{where}, carried column {quote(name)}", ("", *COLUMNS)
        require(name not in names, place, "its name must be its own", {"name": quote(name)})
        must = f"its type must be one of: {', '.join(CARRY_TYPES)}"
        require(type_name in CARRY_TYPES, place, must, {"type": quote(type_name)})
    for name in ("packs", *_SUMS):
        found = sum(getattr(s, "rows" if name == "packs" else name) for s in manifest.shards)
        expected = getattr(totals, name)
        figures = {"total": expected, "sum": found}
        require(found == expected, where, f"total {name} must be the sum over shards", figures)
    paths = [s.path for s in manifest.shards]
    counts = {"shards": len(paths), "paths": len(set(paths))}
    require(len(paths) == len(set(paths)), where, "shards must have different paths", counts)
    for shard in manifest.shards:
        _check_columns(shard, where)
        _check_shard(shard, manifest, f"{where}, shard {shard.path}")
    if manifest.pack_index is not None:
        _check_pack_index(manifest.pack_index, manifest, f"{where}, pack_index")
    convert({"provenance": manifest.provenance}, _About, where)


def _check_pack_index(index: StoredFile, manifest: Manifest, where: str) -> None:
    check_relative(index.path, where)
    limit = 65536 + 4096 * len(manifest.shards) + 32 * manifest.totals.packs
    figures = {"bytes": index.bytes, "limit": limit}
    require(index.bytes <= limit, where, "its bytes must be few for its packs", figures)
    paths = {s.path for s in manifest.shards}
    require(index.path not in paths, where, "it must not be a shard", {"path": index.path})


def _check_shard(shard: ShardInfo, manifest: Manifest, where: str) -> None:
    groups = shard.row_groups
    for name in ("rows", "examples", "tokens"):
        found, expected = int(getattr(groups, name).sum()), getattr(shard, name)
        figures = {"shard": expected, "sum": found}
        require(found == expected, where, f"its {name} must be the sum over row groups", figures)
    figures = {"footer": shard.footer_bytes, "file": shard.bytes}
    require(shard.footer_bytes <= shard.bytes, where, "its footer must fit in the file", figures)
    limit = MAX_FOOTER_BYTES + GROUP_FOOTER_BYTES * len(groups)
    require(
        shard.footer_bytes <= limit, where, f"its footer must have {limit} bytes at most", figures
    )
    if k := manifest.num_responses:
        figures = {"sequences": shard.sequences, "examples": shard.examples}
        must = f"sequences must be {k} times the examples"
        require(shard.sequences == k * shard.examples, where, must, figures)
    full = (groups.rows > 0) & (groups.examples >= groups.rows)
    full &= (groups.longest > 0) & (groups.longest <= groups.tokens)
    full &= groups.tokens <= groups.rows * manifest.pack_size
    bad = int(np.argmin(full)) if len(full) else 0
    figures = {name: getattr(groups, name)[bad : bad + 1].tolist() for name in _GROUP_COLUMNS}
    must = "every pack must hold an example and at most pack_size tokens"
    require(bool(full.all()), f"{where}, row group {bad}", must, figures)


def _compact(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise FormatError(
            sentence("manifest", "its texts must be valid Unicode", str(error))
        ) from error


def _dump_shard(shard: ShardInfo) -> dict[str, Any]:
    """Returns the fields of a shard as JSON values and arrays."""
    crc32 = shard.row_groups.crc32.astype(">u4").tobytes().hex()
    return {**vars(shard), "row_groups": {**vars(shard.row_groups), "crc32": crc32}}


def _check_columns(shard: ShardInfo, where: str) -> None:
    place = f"{where}, shard {check_relative(shard.path, where)}"
    found = {name: len(column) for name, column in vars(shard.row_groups).items()}
    must = "row_groups must have columns of one length"
    require(len(set(found.values())) == 1, place, must, found)
