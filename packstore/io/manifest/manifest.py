"""The manifest: one JSON file that describes a dataset; writing it is the commit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from packstore.config import PackConfig
from packstore.errors import FormatError, UnsupportedFormatError, quote, sentence
from packstore.format.arrays import Tally
from packstore.format.html import card
from packstore.format.schema import (
    CARRY_TYPES,
    COLUMN_NAME,
    COLUMNS,
    FORMAT_VERSION,
    KINDS,
    LAYOUTS,
    check_features,
    pack_schema,
)
from packstore.format.typed_json import (
    UPGRADE,
    Count,
    Int31,
    Sha256,
    Whole,
    convert,
    decode,
    require,
    require_equal,
    require_known,
)
from packstore.io.manifest.commit import read_committed
from packstore.io.manifest.partition_notes import Finished
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.shard import (
    PackCounter,
    PackShape,
    ShardInfo,
    Statistics,
    Totals,
)
from packstore.io.store.location import Location, check_relative

MAX_FOOTER_BYTES, GROUP_FOOTER_BYTES = 1 << 24, 1 << 16
"""Maximum bytes of a footer: a constant part, and a part for each row group."""

FILE_FORMATS = ("parquet", "arrow")
_SHARD_FIELDS = {f.name for f in dataclasses.fields(ShardInfo)} - {"further"}
_BUCKETS = {str(1 << bits) for bits in range(31)}
_SUMS = ("examples", "sequences", "tokens", "supervised_tokens", "bytes")


@dataclass(frozen=True, kw_only=True)
class Records:
    """Counts of input records: ``read == packed + sum(dropped)``; `packed` includes
    `noted`.
    """

    read: Count
    packed: Count
    dropped: Mapping[str, Count]
    noted: Mapping[str, Count]
    # field -> records that have it
    fields_used: Mapping[str, Count] = field(default_factory=dict)
    fields_not_used: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Everything that a reader needs before it opens a shard."""

    kind: str
    layout: str
    pack_size: Int31
    strategy: str
    seed: Whole
    pack_order: str
    file_format: str  # `parquet` or `arrow`
    features: tuple[str, ...]  # a reader must support all of them
    carry: Mapping[str, str]
    totals: Totals
    statistics: Statistics
    records: Records
    provenance: Mapping[
        str, Any
    ]  # `sources`, `tokenizer`, `settings`, `package_version`
    shards: tuple[ShardInfo, ...]  # in dataset order
    pack_index: StoredFile | None = (
        None  # the file with the sizes of every pack, if written
    )
    further_files: tuple[StoredFile, ...] = ()  # of a later release
    writer_features: tuple[
        str, ...
    ] = ()  # who extends or cleans it must support all of them

    def _repr_html_(self) -> str:
        return card("Manifest", self.facts)

    @property
    def facts(self) -> dict[str, object]:
        """Kind, counts, fill, tokenizer and sources, for people."""
        tokenizer, names = self.provenance.get("tokenizer") or {}, self.source_names
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        return {
            "kind": self.kind,
            "examples": self.totals.examples,
            "packs": f"{self.num_packs:,} of {self.pack_size:,} tokens, layout "
            f"{self.layout}",
            "tokens": f"{self.totals.tokens:,}, fill {self.fill_rate:.2%}",
            "records": f"{self.records.read:,} read, {self.records.packed:,} packed",
            **{
                f"dropped: {reason}": count
                for reason, count in self.records.dropped.items()
            },
            "tokenizer": tokenizer.get("name")
            or tokenizer.get("path")
            or "token ids were given",
            "sources": ", ".join(names[:3]) + more or "records in memory",
        }

    @property
    def num_responses(self) -> int | None:
        """Number of sequences K of each example; None for kind ``scored``, where it
        varies.
        """
        return KINDS[self.kind]

    @property
    def num_packs(self) -> int:
        """Number of packs of the dataset."""
        return self.totals.packs

    @property
    def pairs(self) -> int:
        """Number of preference pairs: the examples of kind ``preference``, else 0."""
        return self.totals.examples if self.kind == "preference" else 0

    @property
    def stored(self) -> tuple[ShardInfo | StoredFile, ...]:
        """Every file that the manifest names."""
        index = () if self.pack_index is None else (self.pack_index,)
        return (*self.shards, *self.further_files, *index)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file that the manifest names, by path."""
        return {file.path: file.bytes for file in self.stored}

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
    def source_names(self) -> list[str]:
        """Names of the input files, or their whole paths where names repeat."""
        paths = [
            str(source.get("path")) for source in self.provenance.get("sources") or ()
        ]
        names = [PurePosixPath(path).name for path in paths]
        times = Counter(names)
        return [n if times[n] == 1 else p for n, p in zip(names, paths, strict=True)]

    @property
    def lineage(self) -> str:
        """Id shared by all datasets whose examples have equal tokens under
        equal ids.
        """
        return str(self.provenance.get("lineage", self.fingerprint))

    @property
    def carried(self) -> dict[str, str]:
        """The carried columns that this release reads, name to type."""
        return known_columns(self.carry, CARRY_TYPES)

    @property
    def schema(self) -> pa.Schema:
        """The logical Arrow schema, with plain `labels`."""
        return pack_schema(self.kind, self.layout, carry=self.carried)

    @property
    def stored_schema(self) -> pa.Schema:
        """The Arrow schema of the shards; others than `carried` have type
        `ANY_LIST`.
        """
        carry = {**dict.fromkeys(self.carry, ""), **self.carried}
        spans = "label_spans" in self.features
        return pack_schema(self.kind, self.layout, label_spans=spans, carry=carry)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the packs and their order, independent of the other
        fields.
        """
        what = [
            FORMAT_VERSION,
            self.kind,
            self.layout,
            self.pack_size,
            self.file_format,
        ]
        parts = [
            *what,
            *self.features,
            *(f"{s.sha256}+{s.example_id_base}" for s in self.shards),
        ]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def require_writable(self, where: str) -> None:
        """Raises UnsupportedFormatError if only a later release can extend or
        clean it.
        """
        if self.writer_features:
            rule = "who extends or cleans it must know its writer_features"
            remedy = "Upgrade packstore to change this dataset"
            found = ", ".join(map(quote, self.writer_features))
            raise UnsupportedFormatError(sentence(where, rule, found, remedy))

    def require_readable(self, where: str) -> None:
        """Raises UnsupportedFormatError if a reader skips a column, which nobody may
        pack anew.
        """
        for name in self.carry.keys() - self.carried.keys():
            rule = "carried columns that are packed anew must be known"
            found = f"{quote(name)} of type {quote(self.carry[name])}"
            raise UnsupportedFormatError(sentence(where, rule, found, UPGRADE))

    def to_json(self) -> bytes:
        """Returns canonical JSON: fields as declared, a line for each field and
        shard.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shards = [_dump_shard(shard) for shard in fields.pop("shards")]
        head = {"format_version": FORMAT_VERSION, "features": fields.pop("features")}
        head |= {
            "kind": fields.pop("kind"),
            "num_responses": self.num_responses,
        } | fields
        for name in ("pack_index", "further_files", "writer_features"):
            if not head[name]:
                del head[name]
        counts, optional = (
            dataclasses.asdict(self.records),
            ("fields_used", "fields_not_used"),
        )
        head["records"] = {n: v for n, v in counts.items() if v or n not in optional}
        lines = [
            b' "%s": %s' % (name.encode(), dump_json(value))
            for name, value in head.items()
        ]
        rows = b",\n".join(b"  " + shard for shard in shards)
        lines.append(b' "shards": [\n%s\n ]' % rows if shards else b' "shards": []')
        return b"{\n" + b",\n".join(lines) + b"\n}\n"

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Parses the manifest in `data`; keeps unknown fields of shards, ignores
        others.
        """
        head = decode(data, _Head, where)
        check_features(head.format_version, head.features, where)
        rule = "features must not repeat"
        require_equal(
            where, rule, features=len(head.features), names=len({*head.features})
        )
        check_last(head.sha256, where)
        index = bytes(head.pack_index).decode()
        require(
            index != "null",
            where,
            "pack_index must be a JSON object",
            {"pack_index": index},
        )
        manifest = decode(data, cls, where)
        further = [
            {n: msgspec.json.decode(s[n]) for n in s if n not in _SHARD_FIELDS}
            for s in head.shards
        ]
        if any(further):
            pairs = zip(manifest.shards, further, strict=True)
            manifest = replace(
                manifest, shards=tuple(replace(s, further=f) for s, f in pairs)
            )
        check_manifest(manifest, where)
        responses, k = (
            bytes(head.num_responses).decode(),
            json.dumps(manifest.num_responses),
        )
        rule = f"num_responses must be {k}, as the kind is {manifest.kind}"
        require(responses == k, where, rule, {"num_responses": responses})
        return manifest


def build_manifest(
    shape: PackShape,
    config: PackConfig,
    parts: Sequence[Finished],
    tally: Tally,
    planning: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Manifest:
    """Builds the manifest of a dataset that was just written; see :class:`Manifest`."""
    counter = PackCounter()
    for part in parts:
        counter.merge(part.counter)
    events = {"dropped": tally.dropped, "noted": tally.events}
    events |= {"fields_used": tally.used, "fields_not_used": tally.unused}
    counts = {name: dict(sorted(counted.items())) for name, counted in events.items()}
    return Manifest(
        kind=shape.kind,
        layout=shape.layout,
        pack_size=shape.pack_size,
        strategy=config.strategy,
        seed=config.seed,
        pack_order="shuffled" if config.shuffle else "plain",
        file_format=config.format,
        features=("label_spans",) if config.labels == "spans" else (),
        carry=dict(shape.carry),
        totals=counter.totals(sum(part.shard.bytes for part in parts)),
        statistics=counter.statistics(shape.pack_size, planning),
        records=Records(read=tally.read, packed=tally.kept, **counts),
        provenance=provenance,
        shards=tuple(part.shard for part in parts),
    )


def manifest_bytes(shards: Sequence[ShardInfo]) -> int:
    """Returns the bytes that `shards` take in a manifest."""
    return sum(len(_dump_shard(shard)) for shard in shards)


def read_manifest(
    location: Location, version: int | None = None
) -> tuple[Manifest, int]:
    """Returns the manifest of a dataset, by default the current one, and its
    version.
    """
    data, where, number = read_committed(location, version)
    return Manifest.from_json(data, where), number


class _Head(msgspec.Struct):
    format_version: Count
    features: list[str]
    num_responses: msgspec.Raw
    sha256: msgspec.Raw = msgspec.Raw(b"")
    pack_index: msgspec.Raw = msgspec.Raw(b"{}")
    shards: list[dict[str, msgspec.Raw]] = []


class _Source(msgspec.Struct):
    path: str
    records: Count
    bytes: Count = 0
    sha256: Sha256 = ""


class _Origin(msgspec.Struct):
    path: str
    fingerprint: Sha256
    lineage: Sha256
    sources: Count
    shards: Count


class _Tokenizer(msgspec.Struct):
    name: str | None = None
    path: str | None = None
    sha256: str | None = None
    vocab_sha256: str | None = None
    probe_sha256: str | None = None
    vocab_size: Int31 = 1
    files: dict[str, str] | None = None
    bos_id: Count | None = None
    eos_id: Count | None = None
    pad_id: Count | None = None
    chat_template: str | None = None
    chat_template_sha256: str | None = None
    tool_use_template: str | None = None
    tool_use_template_sha256: str | None = None


class _Settings(msgspec.Struct):
    """Settings that are read before PackConfig checks all of them."""

    on: dict[str, str] = {}
    chat_template: str | None = None
    pad_to_multiple: Int31 = 1


class _Repacked(msgspec.Struct):
    path: str
    fingerprint: Sha256


class _Provenance(msgspec.Struct):
    sources: list[_Source]
    settings: _Settings
    package_version: str
    tokenizer: _Tokenizer | None = None
    lineage: Sha256 = ""
    repacked_from: _Repacked | msgspec.UnsetType = msgspec.UNSET
    combined_from: list[_Origin] = []


class _About(msgspec.Struct):
    """Types of what :class:`Manifest` keeps as it is: of all members that anything here
    uses.
    """

    provenance: _Provenance


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raises :class:`FormatError` if the parts of a manifest contradict each other."""
    records, totals, shards = manifest.records, manifest.totals, manifest.shards
    for name, choices in {
        "kind": KINDS,
        "layout": LAYOUTS,
        "file_format": FILE_FORMATS,
    }.items():
        require_known(where, f"field {name}", choices, getattr(manifest, name))
    counts = {
        "read": records.read,
        "packed": records.packed,
        "dropped": dict(records.dropped),
    }
    whole = records.read == records.packed + sum(records.dropped.values())
    require(whole, where, "records read must be those packed and those dropped", counts)
    rule = "records packed must be the examples"
    require_equal(where, rule, packed=records.packed, examples=totals.examples)
    check_columns(manifest.carry, where)
    for name in ("packs", *_SUMS):
        real = sum(getattr(s, "rows" if name == "packs" else name) for s in shards)
        rule = f"total {name} must be the sum over shards"
        require_equal(where, rule, total=getattr(totals, name), sum=real)
    for bound in manifest.statistics.length_histogram:
        rule = "keys of length_histogram must be powers of two below 2^31"
        require(bound in _BUCKETS, where, rule, {"key": quote(bound)})
    require_different_paths([file.path for file in manifest.stored], where)
    for file in manifest.further_files:
        named = file.sha256[:16] in file.path.rpartition("/")[2]
        ok = file.path.startswith("data/") and named
        rule = (
            "a further file must lie in data/, and its name hold 16 digits of its "
            "sha256"
        )
        require(ok, where, rule, {"path": file.path})
    for shard in shards:
        _check_shard(shard, manifest, f"{where}, shard {shard.path}")
    if (index := manifest.pack_index) is not None:
        place, limit = (
            f"{where}, pack_index",
            65536 + 4096 * len(shards) + 32 * totals.packs,
        )
        figures = {"bytes": index.bytes, "limit": limit}
        require(
            index.bytes <= limit, place, "its bytes must be few for its packs", figures
        )
        plain = not index.path.endswith(".parquet")
        require(plain, place, "its name must not end in .parquet", {"path": index.path})
    convert({"provenance": manifest.provenance}, _About, where)


def _check_shard(shard: ShardInfo, manifest: Manifest, where: str) -> None:
    groups = shard.row_groups
    lengths = {name: len(column) for name, column in vars(groups).items()}
    require_equal(where, "row_groups must have columns of one length", **lengths)
    for name in ("rows", "examples", "tokens"):
        real = int(getattr(groups, name).sum())
        rule = f"its {name} must be the sum over row groups"
        require_equal(where, rule, shard=getattr(shard, name), sum=real)
    figures = {"footer": shard.footer_bytes, "file": shard.bytes}
    require(
        shard.footer_bytes <= shard.bytes,
        where,
        "its footer must fit in the file",
        figures,
    )
    limit = MAX_FOOTER_BYTES + GROUP_FOOTER_BYTES * len(groups)
    rule = f"its footer must have {limit} bytes at most"
    require(shard.footer_bytes <= limit, where, rule, figures)
    if k := manifest.num_responses:
        figures = {"sequences": shard.sequences, "examples": shard.examples}
        rule = f"sequences must be {k} times the examples"
        require(shard.sequences == k * shard.examples, where, rule, figures)
    full = (groups.rows > 0) & (groups.examples >= groups.rows)
    full &= (groups.longest > 0) & (groups.longest <= groups.tokens)
    full &= groups.tokens <= groups.rows * manifest.pack_size
    if not full.all():
        bad = int(np.argmin(full))
        names = ("rows", "examples", "tokens", "longest")
        figures = {name: int(getattr(groups, name)[bad]) for name in names}
        rule = "every pack must hold an example and at most pack_size tokens"
        require(False, f"{where}, row group {bad}", rule, figures)


def check_columns(names: Iterable[str], where: str) -> None:
    """Raises :class:`FormatError` unless the names of further columns are allowed."""
    for name in names:
        ok = COLUMN_NAME.fullmatch(name.removeprefix("_")) and name not in COLUMNS
        rule = (
            "columns must have names of their own, of letters, digits and _, a "
            "letter first"
        )
        require(bool(ok), where, rule, {"name": quote(name)})


def known_columns(columns: Mapping[str, str], types: Collection[str]) -> dict[str, str]:
    """Returns the further columns, name to type, that this release reads; others are
    skipped.
    """
    return {n: t for n, t in columns.items() if t in types and not n.startswith("_")}


def check_last(sha256: msgspec.Raw, where: str) -> None:
    """Raises :class:`FormatError` for a hash of the manifest that is not its last
    field.
    """
    require(
        not bytes(sha256),
        where,
        "sha256 must be the last field",
        {"another": "follows it"},
    )


def require_different_paths(paths: Sequence[str], where: str) -> None:
    """Raises :class:`FormatError` unless `paths` differ, and are valid in a dataset."""
    for path in paths:
        check_relative(path, where)
    rule = "its files must have different paths"
    require_equal(where, rule, files=len(paths), paths=len(set(paths)))


def dump_json(value: Any, where: str = "manifest", option: int = 0) -> bytes:
    """Returns JSON; raises FormatError if a text is not valid Unicode."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | option)
    except orjson.JSONEncodeError as error:
        raise FormatError(
            sentence(where, "its texts must be valid Unicode", str(error))
        ) from error


def _dump_shard(shard: ShardInfo) -> bytes:
    crc32 = shard.row_groups.crc32.astype(">u4").tobytes().hex()
    groups = {**vars(shard.row_groups), "crc32": crc32}
    fields = {**vars(shard), "row_groups": groups}
    further = fields.pop("further")
    return dump_json({**fields, **further})
