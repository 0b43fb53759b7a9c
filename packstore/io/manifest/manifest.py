"""The manifest: one JSON file that describes a dataset; writing it is the commit.

It names the shards and other files of a version, and has counts of records, examples
and tokens. Its provenance names the sources, the tokenizer and the settings. It is
checked on writing and on reading by the rules of ``schemas/annex-b-writing.md``: fields
have their types, and counts add up. Fields of later releases are kept or ignored, never
refused, unless `features` names them.
"""

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
from packstore.format.arrays import Int64
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
from packstore.io.manifest.partition_notes import FinishedShard
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.shard import (
    PackCounter,
    PackShape,
    ShardInfo,
    Statistics,
    Totals,
)
from packstore.io.store.location import Location, check_relative

MAX_FOOTER_BYTES = 1 << 24
"""Maximum bytes of a footer, without its part for each row group."""

GROUP_FOOTER_BYTES = 1 << 16
"""Maximum bytes of a footer for each row group."""

CHECKED_AT_ONCE = 8
"""Shards whose row groups are checked at once, in little memory."""

FILE_FORMATS = ("parquet", "arrow")

_SHARD_FIELDS = {f.name for f in dataclasses.fields(ShardInfo)} - {"further"}
_HISTOGRAM_KEYS = {str(1 << bits) for bits in range(31)}

# Fields of a manifest, and of its records, that are written only if they hold anything.
_OMITTED_IF_EMPTY = ("pack_index", "further_files", "writer_features")
_RECORDS_OMITTED_IF_EMPTY = ("fields_used", "fields_not_used")


@dataclass(frozen=True, kw_only=True)
class Records:
    """Counts of input records: ``read == packed + sum(dropped)``.

    `noted` counts packed records by event, such as ``truncated_prompt``.
    """

    read: Count
    packed: Count
    dropped: Mapping[str, Count]  # reason -> records
    noted: Mapping[str, Count]  # event -> records
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
    # `sources`, `tokenizer`, `settings`, `package_version`
    provenance: Mapping[str, Any]
    shards: tuple[ShardInfo, ...]  # in dataset order
    # the file with the sizes of every pack, if written
    pack_index: StoredFile | None = None
    further_files: tuple[StoredFile, ...] = ()  # of a later release
    # who extends or cleans the dataset must support all of them
    writer_features: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        return card("Manifest", self.facts)

    @property
    def facts(self) -> dict[str, object]:
        """Kind, counts, fill, tokenizer and sources, for people."""
        packs = f"{self.num_packs:,} of {self.pack_size:,} tokens"
        tokens = f"{self.totals.tokens:,}, fill {self.fill_rate:.2%}"
        if self.totals.logical_tokens > self.totals.tokens:
            tokens += f", unpacked {self.totals.logical_tokens:,}"
        records = self.records
        facts: dict[str, object] = {
            "kind": self.kind,
            "examples": self.totals.examples,
            "packs": f"{packs}, layout {self.layout}",
            "tokens": tokens,
            "records": f"{records.read:,} read, {records.packed:,} packed",
        }
        for reason, count in records.dropped.items():
            facts[f"dropped: {reason}"] = count
        facts["tokenizer"] = self._tokenizer_name or "token ids were given"
        facts["sources"] = self._first_sources or "records in memory"
        return facts

    @property
    def _tokenizer_name(self) -> str | None:
        tokenizer = self.provenance.get("tokenizer") or {}
        return tokenizer.get("name") or tokenizer.get("path")

    @property
    def _first_sources(self) -> str:
        names = self.source_names
        text = ", ".join(names[:3])
        if len(names) > 3:
            text += f" and {len(names) - 3:,} more"
        return text

    @property
    def num_responses(self) -> int | None:
        """Number of sequences K of each example; None if it varies (kind `scored`)."""
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
    def stored_files(self) -> tuple[ShardInfo | StoredFile, ...]:
        """Every file that the manifest names."""
        files: list[ShardInfo | StoredFile] = [*self.shards, *self.further_files]
        if self.pack_index is not None:
            files.append(self.pack_index)
        return tuple(files)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file that the manifest names, by path."""
        return {file.path: file.bytes for file in self.stored_files}

    @property
    def fill_rate(self) -> float:
        """Tokens as a fraction of packs x pack size, 0 to 1."""
        return self.statistics.fill_rate

    @property
    def vocab_size(self) -> int | None:
        """Exclusive upper bound of token ids, if the tokenizer's size was recorded."""
        tokenizer = self.provenance.get("tokenizer") or {}
        size = tokenizer.get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def source_names(self) -> list[str]:
        """Names of the input files, or their full paths where names repeat."""
        sources = self.provenance.get("sources") or ()
        paths = [str(source.get("path")) for source in sources]
        names = [PurePosixPath(path).name for path in paths]
        occurrences = Counter(names)
        return [
            name if occurrences[name] == 1 else path
            for name, path in zip(names, paths, strict=True)
        ]

    @property
    def lineage(self) -> str:
        """Id shared by datasets with equal tokens and labels under equal example
        ids.
        """
        return str(self.provenance.get("lineage", self.fingerprint))

    @property
    def carried(self) -> dict[str, str]:
        """The carried columns that this release reads, name to type."""
        return known_columns(self.carry, CARRY_TYPES)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the columns that this release reads."""
        return pack_schema(self.kind, self.layout, carry=self.carried)

    @property
    def stored_schema(self) -> pa.Schema:
        """The Arrow schema of the shards; unknown columns have type `ANY_LIST`."""
        known_types = self.carried
        carry = {name: known_types.get(name, "") for name in self.carry}
        return pack_schema(self.kind, self.layout, carry=carry)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the packs and their order, independent of other fields."""
        parts = [
            FORMAT_VERSION,
            self.kind,
            self.layout,
            self.pack_size,
            self.file_format,
            *self.features,
        ]
        for shard in self.shards:
            parts.append(f"{shard.sha256}+{shard.example_id_base}")
        text = "\n".join(str(part) for part in parts)
        return hashlib.sha256(text.encode()).hexdigest()

    def require_writable(self, where: str) -> None:
        """Raise UnsupportedFormatError if only a later release can extend or clean."""
        if not self.writer_features:
            return
        text = sentence(
            where=where,
            rule="who extends or cleans it must know its writer_features",
            found=", ".join(quote(feature) for feature in self.writer_features),
            remedy="Upgrade packstore to change this dataset",
        )
        raise UnsupportedFormatError(text)

    def require_readable(self, where: str) -> None:
        """Raise UnsupportedFormatError if a reader would skip a column.

        To pack such a dataset anew would lose the column.
        """
        known_types = self.carried
        for name, type_name in self.carry.items():
            if name in known_types:
                continue
            text = sentence(
                where=where,
                rule="carried columns that are packed anew must be known",
                found=f"{quote(name)} of type {quote(type_name)}",
                remedy=UPGRADE,
            )
            raise UnsupportedFormatError(text)

    def to_json(self) -> bytes:
        """Return canonical JSON: a line for each field, in order, and each shard."""
        fields: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "features": self.features,
            "kind": self.kind,
            "num_responses": self.num_responses,
        }
        for declared in dataclasses.fields(self):
            if declared.name != "shards":
                fields[declared.name] = getattr(self, declared.name)
        for name in _OMITTED_IF_EMPTY:
            if not fields[name]:
                del fields[name]
        fields["records"] = _records_to_json(self.records)

        lines = []
        for name, value in fields.items():
            lines.append(b' "%s": %s' % (name.encode(), dump_json(value)))
        shards = b",\n".join(b"  " + _shard_to_json(shard) for shard in self.shards)
        if shards:
            lines.append(b' "shards": [\n%s\n ]' % shards)
        else:
            lines.append(b' "shards": []')
        return b"{\n" + b",\n".join(lines) + b"\n}\n"

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Parse and validate a manifest.

        Unknown fields of shards are kept, others are ignored.

        Args:
            data: JSON, without the hash.
            where: its place, for messages.

        Raises:
            FormatError: a field is absent or of another type, or parts contradict each
                other.
            UnsupportedFormatError: it needs a later release.
        """
        head = decode(data, _Head, where)
        check_features(head.format_version, head.features, where)
        check_last(head.sha256, where)
        # The field is left out without an index: `Manifest` alone would accept null.
        pack_index = bytes(head.pack_index).decode()
        require(
            pack_index != "null",
            where,
            "pack_index must be a JSON object",
            {"pack_index": pack_index},
        )

        manifest = decode(data, cls, where)
        manifest = _with_further_fields(manifest, head.shards)
        check_manifest(manifest, where)

        num_responses = bytes(head.num_responses).decode()
        expected = json.dumps(manifest.num_responses)
        require(
            num_responses == expected,
            where,
            f"num_responses must be {expected}, as the kind is {manifest.kind}",
            {"num_responses": num_responses},
        )
        return manifest


def read_manifest(
    location: Location,
    version: int | None = None,
    sizes: Mapping[int, int] | None = None,
) -> tuple[Manifest, int]:
    """Return the manifest of a dataset, by default the current one, and its version.

    `sizes`: see :func:`read_committed`.
    """
    data, where, number = read_committed(location, version, sizes=sizes)
    return Manifest.from_json(data, where), number


def build_manifest(
    shape: PackShape,
    config: PackConfig,
    parts: Sequence[FinishedShard],
    records: Records,
    planning: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of a dataset that was just written; see :class:`Manifest`.

    Args:
        shape: kind, layout, pack size and carried columns of the packs.
        config: settings of the job.
        parts: the shards, in dataset order.
        records: counts of the input records.
        planning: figures of the planner, for the statistics.
        provenance: sources, tokenizer, settings and so on.
    """
    counter = PackCounter()
    for part in parts:
        counter.merge(part.counter)
    num_bytes = sum(part.shard.bytes for part in parts)

    return Manifest(
        kind=shape.kind,
        layout=shape.layout,
        pack_size=shape.pack_size,
        strategy=config.strategy,
        seed=config.seed,
        pack_order="shuffled" if config.shuffle else "plain",
        file_format=config.format,
        features=(),
        carry=dict(shape.carry),
        totals=counter.totals(num_bytes),
        statistics=counter.statistics(shape.pack_size, planning),
        records=records,
        provenance=provenance,
        shards=tuple(part.shard for part in parts),
    )


# To JSON


def dump_json(value: Any, where: str = "manifest", option: int = 0) -> bytes:
    """Return JSON; raise FormatError if a text is not valid Unicode."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | option)
    except orjson.JSONEncodeError as error:
        text = sentence(where, rule="its texts must be valid Unicode", found=str(error))
        raise FormatError(text) from error


def manifest_bytes(shards: Sequence[ShardInfo]) -> int:
    """Return the bytes that `shards` take in a manifest."""
    return sum(len(_shard_to_json(shard)) for shard in shards)


def _records_to_json(records: Records) -> dict[str, Any]:
    fields = dataclasses.asdict(records)
    for name in _RECORDS_OMITTED_IF_EMPTY:
        if not fields[name]:
            del fields[name]
    return fields


def _shard_to_json(shard: ShardInfo) -> bytes:
    crc32 = shard.row_groups.crc32.astype(">u4").tobytes().hex()
    fields = {
        **vars(shard),
        "row_groups": {**vars(shard.row_groups), "crc32": crc32},
    }
    later_fields = fields.pop("further")
    return dump_json({**fields, **later_fields})


# From JSON: types that are checked besides the fields of `Manifest`


class _Head(msgspec.Struct):
    """Fields that decide whether and how the others are read."""

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
    """The members of the provenance that packstore reads; it may have others."""

    sources: list[_Source]
    settings: _Settings
    package_version: str
    tokenizer: _Tokenizer | None = None
    lineage: Sha256 = ""
    repacked_from: _Repacked | msgspec.UnsetType = msgspec.UNSET
    combined_from: list[_Origin] = []


class _ProvenanceField(msgspec.Struct):
    """A struct with the field itself, so that errors name it in their paths."""

    provenance: _Provenance


def _with_further_fields(
    manifest: Manifest, shards: Sequence[Mapping[str, msgspec.Raw]]
) -> Manifest:
    """Return the manifest with the fields of its shards that a later release wrote."""
    later_fields = [
        {
            name: msgspec.json.decode(value)
            for name, value in fields.items()
            if name not in _SHARD_FIELDS
        }
        for fields in shards
    ]
    if not any(later_fields):
        return manifest
    complete = [
        replace(shard, further=fields)
        for shard, fields in zip(manifest.shards, later_fields, strict=True)
    ]
    return replace(manifest, shards=tuple(complete))


# Rules of a manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise FormatError if the parts of a manifest contradict each other."""
    require_known(where, "field kind", KINDS, manifest.kind)
    require_known(where, "field layout", LAYOUTS, manifest.layout)
    require_known(where, "field file_format", FILE_FORMATS, manifest.file_format)
    _check_records(manifest, where)
    check_columns(manifest.carry, where)
    _check_totals(manifest, where)
    for key in manifest.statistics.length_histogram:
        rule = "keys of length_histogram must be powers of two below 2^31"
        require(key in _HISTOGRAM_KEYS, where, rule, {"key": quote(key)})
    require_different_paths([file.path for file in manifest.stored_files], where)
    for file in manifest.further_files:
        _check_further_file(file, where)
    for shard in manifest.shards:
        _check_shard(shard, manifest.num_responses, f"{where}, shard {shard.path}")
    for first in range(0, len(manifest.shards), CHECKED_AT_ONCE):
        shards = manifest.shards[first : first + CHECKED_AT_ONCE]
        _check_row_groups(shards, manifest.pack_size, where)
    if manifest.pack_index is not None:
        _check_pack_index(manifest.pack_index, manifest, f"{where}, pack_index")
    convert({"provenance": manifest.provenance}, _ProvenanceField, where)


def _check_records(manifest: Manifest, where: str) -> None:
    records = manifest.records
    num_accounted = records.packed + sum(records.dropped.values())
    counts = {
        "read": records.read,
        "packed": records.packed,
        "dropped": dict(records.dropped),
    }
    rule = "records read must be those packed and those dropped"
    require(records.read == num_accounted, where, rule, counts)
    require_equal(
        where,
        "records packed must be the examples",
        packed=records.packed,
        examples=manifest.totals.examples,
    )


def _check_totals(manifest: Manifest, where: str) -> None:
    totals = manifest.totals
    require_equal(
        where,
        "total packs must be the sum over shards",
        total=totals.packs,
        sum=sum(shard.rows for shard in manifest.shards),
    )
    for name in ("examples", "sequences", "tokens", "supervised_tokens", "bytes"):
        require_equal(
            where,
            f"total {name} must be the sum over shards",
            total=getattr(totals, name),
            sum=sum(getattr(shard, name) for shard in manifest.shards),
        )


def _check_further_file(file: StoredFile, where: str) -> None:
    _, _, name = file.path.rpartition("/")
    is_in_data = file.path.startswith("data/")
    has_hash = file.sha256[:16] in name
    rule = "a further file must lie in data/, and its name hold 16 digits of its sha256"
    require(is_in_data and has_hash, where, rule, {"path": file.path})


def _check_pack_index(index: StoredFile, manifest: Manifest, where: str) -> None:
    # Generous, but it bounds the memory of a reader.
    limit = 65536 + 4096 * len(manifest.shards) + 32 * manifest.totals.packs
    rule = "its bytes must be few for its packs"
    sizes = {"bytes": index.bytes, "limit": limit}
    require(index.bytes <= limit, where, rule, sizes)

    # Readers such as `datasets` take every Parquet file of a folder for rows.
    is_table = index.path.endswith(".parquet")
    rule = "its name must not end in .parquet"
    require(not is_table, where, rule, {"path": index.path})


def _check_shard(shard: ShardInfo, responses: int | None, where: str) -> None:
    lengths = {name: len(column) for name, column in vars(shard.row_groups).items()}
    require_equal(where, "row_groups must have columns of one length", **lengths)
    _check_footer(shard, where)
    if responses is not None:
        counts = {"sequences": shard.sequences, "examples": shard.examples}
        rule = f"sequences must be {responses} times the examples"
        require(shard.sequences == responses * shard.examples, where, rule, counts)


def _check_footer(shard: ShardInfo, where: str) -> None:
    sizes = {"footer": shard.footer_bytes, "file": shard.bytes}
    rule = "its footer must fit in the file"
    require(shard.footer_bytes <= shard.bytes, where, rule, sizes)

    limit = MAX_FOOTER_BYTES + GROUP_FOOTER_BYTES * len(shard.row_groups)
    rule = f"its footer must have {limit} bytes at most"
    require(shard.footer_bytes <= limit, where, rule, sizes)


def _check_row_groups(shards: Sequence[ShardInfo], pack_size: int, where: str) -> None:
    """Check the row groups of several shards at once: there may be many small ones."""
    counts = np.array([len(shard.row_groups) for shard in shards], np.int64)
    ends = np.cumsum(counts)
    columns = {
        name: _join([getattr(shard.row_groups, name) for shard in shards])
        for name in ("rows", "examples", "tokens", "longest")
    }
    for name in ("rows", "examples", "tokens"):
        sums_before = np.concatenate([[0], np.cumsum(columns[name])])
        sums = sums_before[ends] - sums_before[ends - counts]
        for shard, actual_sum in zip(shards, sums.tolist(), strict=True):
            if getattr(shard, name) != actual_sum:
                require_equal(
                    f"{where}, shard {shard.path}",
                    f"its {name} must be the sum over row groups",
                    shard=getattr(shard, name),
                    sum=actual_sum,
                )

    rows, examples, tokens, longest = columns.values()
    has_rows = rows > 0
    has_examples = examples >= rows
    has_length = (longest > 0) & (longest <= tokens)
    fits = tokens <= rows * pack_size
    is_valid = has_rows & has_examples & has_length & fits
    if is_valid.all():
        return

    number = int(np.argmin(is_valid))
    shard_number = int(np.searchsorted(ends, number, side="right"))
    number_in_shard = number - int(ends[shard_number] - counts[shard_number])
    figures = {name: int(column[number]) for name, column in columns.items()}
    rule = "every pack must hold an example and at most pack_size tokens"
    place = f"{where}, shard {shards[shard_number].path}, row group {number_in_shard}"
    require(False, place, rule, figures)


def _join(columns: Sequence[Int64]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *columns])


# Rules that manifests of side datasets share


def check_columns(names: Iterable[str], where: str) -> None:
    """Raise FormatError unless the names of columns are allowed.

    Args:
        names: names of carried columns, or of the columns of a side dataset.
        where: place of the manifest, for messages.
    """
    rule = (
        "columns must have names of their own, of letters, digits and _, a letter first"
    )
    for name in names:
        is_name = COLUMN_NAME.fullmatch(name.removeprefix("_")) is not None
        is_free = name not in COLUMNS
        require(is_name and is_free, where, rule, {"name": quote(name)})


def known_columns(columns: Mapping[str, str], types: Collection[str]) -> dict[str, str]:
    """Return the columns, name to type, that this release reads.

    Columns of other types, or with an underscore first, are skipped.

    Args:
        columns: name -> type of carried columns, or of those of a side dataset.
        types: names of the types that this release reads.
    """
    return {
        name: type_name
        for name, type_name in columns.items()
        if type_name in types and not name.startswith("_")
    }


def check_last(sha256: msgspec.Raw, where: str) -> None:
    """Raise FormatError if a hash of the manifest is not its last field."""
    is_last = not bytes(sha256)  # the last one was verified and removed
    rule = "sha256 must be the last field"
    require(is_last, where, rule, {"another": "follows it"})


def require_different_paths(paths: Sequence[str], where: str) -> None:
    """Raise FormatError unless `paths` differ, and are valid in a dataset."""
    for path in paths:
        check_relative(path, where)
    rule = "its files must have different paths"
    require_equal(where, rule, files=len(paths), paths=len(set(paths)))
