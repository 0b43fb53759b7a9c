"""A manifest as JSON text and back, and what must hold in it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from packstore.errors import FormatError, quote, sentence
from packstore.io.fields import TOP, Fields, require
from packstore.io.manifest import Manifest, Records
from packstore.io.manifest_lines import by_line
from packstore.io.shard import RowGroups, ShardInfo
from packstore.io.statistics import Spread, Statistics, Totals
from packstore.io.storage import check_relative
from packstore.io.stored_file import StoredFile
from packstore.records import Int64
from packstore.schema import (
    CARRY_TYPES,
    COLUMNS,
    FORMAT_VERSION,
    KINDS,
    LAYOUTS,
    check_features,
)

MAX_FOOTER_BYTES, GROUP_FOOTER_BYTES = 1 << 24, 1 << 16
"""Bytes of a footer at most: in all, and more for each row group."""

FILE_FORMATS = ("parquet", "arrow")
_HEX = re.compile(r"[0-9a-f]*")
_GROUP_COLUMNS = tuple(f.name for f in dataclasses.fields(RowGroups) if f.name != "crc32")
_OPTIONAL = ("fields_used", "fields_not_used")
_SUMS = ("examples", "sequences", "tokens", "supervised_tokens", "bytes")


def dump(manifest: Manifest) -> bytes:
    """Canonical JSON: fields as declared, one line for each, and one for each shard."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    shards = [_compact(dump_shard(s)) for s in fields.pop("shards")]
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


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`.

    Raises:
        UnsupportedFormatError: a higher version, or a required feature that is unknown.
        FormatError: anything missing, of the wrong type, or contradictory.
    """
    with contextlib.suppress(orjson.JSONDecodeError):  # not canonical, or not JSON
        if (parts := by_line(data)) is not None:
            return _parse(*parts, where)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(sentence(where, "must be valid JSON", str(error))) from error
    return _parse(value, None, where)


def _parse(value: object, shards: Iterable[object] | None, where: str) -> Manifest:
    top = Fields(value, where)
    features = top.items("features")
    if not all(isinstance(f, str) for f in features):
        top.refuse("features", "a list of strings", features)
    check_features(top.count("format_version"), features, where)
    manifest = Manifest(
        kind=top.choice("kind", tuple(KINDS)),
        layout=top.choice("layout", LAYOUTS),
        pack_size=top.count("pack_size", 1),
        strategy=top.text("strategy"),
        seed=top.count("seed", -TOP - 1),
        pack_order=top.text("pack_order"),
        file_format=top.choice("file_format", FILE_FORMATS),
        features=tuple(features),
        carry=top.texts("carry"),
        totals=Totals(**_counts(top.child("totals"), Totals)),
        statistics=_statistics(top.child("statistics")),
        records=_records(top.child("records")),
        provenance=top.mapping("provenance"),
        pack_index=_pack_index(top),
        shards=tuple(parse_shard(s, where) for s in shards or top.items("shards")),
    )
    check_manifest(manifest, where)
    return manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raises :class:`FormatError` if the parts of a manifest contradict each other."""
    records, totals = manifest.records, manifest.totals
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
        _check_shard(shard, manifest, f"{where}, shard {shard.path}")
    if manifest.pack_index is not None:
        _check_pack_index(manifest.pack_index, manifest, f"{where}, pack_index")
    _check_provenance(manifest, where)


def _check_pack_index(index: StoredFile, manifest: Manifest, where: str) -> None:
    check_relative(index.path, where)
    limit = 65536 + 4096 * len(manifest.shards) + 32 * manifest.totals.packs
    figures = {"bytes": index.bytes, "limit": limit}
    require(index.bytes <= limit, where, "its bytes must be few for its packs", figures)
    paths = {s.path for s in manifest.shards}
    require(index.path not in paths, where, "it must not be a shard", {"path": index.path})


def _check_shard(shard: ShardInfo, manifest: Manifest, where: str) -> None:
    check_relative(shard.path, where)
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


def _check_provenance(manifest: Manifest, where: str) -> None:
    top = Fields(manifest.provenance, f"{where}, provenance")
    for number, source in enumerate(top.items("sources")):
        fields = Fields(source, f"{where}, source {number}")
        fields.text("path")
        fields.count("records")
    top.mapping("settings")
    top.text("package_version")
    if manifest.provenance.get("tokenizer") is not None:
        top.mapping("tokenizer")
    if top.has("lineage"):
        top.sha256("lineage")


def _compact(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise FormatError(
            sentence("manifest", "its texts must be valid Unicode", str(error))
        ) from error


def dump_shard(shard: ShardInfo) -> dict[str, Any]:
    """What a manifest says of a shard, as JSON values and arrays."""
    fields = {f.name: getattr(shard, f.name) for f in dataclasses.fields(shard)}
    groups = {name: getattr(shard.row_groups, name) for name in _GROUP_COLUMNS}
    groups["crc32"] = shard.row_groups.crc32.astype(">u4").tobytes().hex()
    return {**fields, "row_groups": groups}


def parse_shard(value: object, where: str) -> ShardInfo:
    """What a manifest says of a shard; raises :class:`FormatError` as :func:`parse` does."""
    top = Fields(value, f"{where}, a shard")
    path = check_relative(top.text("path"), where)
    top.where = f"{where}, shard {path}"
    groups = top.child("row_groups")
    columns = {name: _column(groups, name) for name in _GROUP_COLUMNS}
    columns["crc32"] = _checksums(groups)
    if len({len(c) for c in columns.values()}) != 1:
        top.refuse("row_groups", "columns of one length", {n: len(c) for n, c in columns.items()})
    return ShardInfo(
        path=path,
        sha256=top.sha256("sha256"),
        footer_bytes=top.count("footer_bytes", 1),
        footer_sha256=top.sha256("footer_sha256"),
        row_groups=RowGroups(**columns),
        rows=top.count("rows"),
        example_id_base=top.count("example_id_base"),
        **{name: top.count(name) for name in _SUMS},
    )


def _pack_index(top: Fields) -> StoredFile | None:
    """The optional field."""
    return StoredFile.parse(top.child("pack_index")) if top.has("pack_index") else None


def _column(fields: Fields, name: str) -> Int64:
    values = fields.items(name)
    try:
        column = np.array(values) if values else np.empty(0, np.int64)
    except ValueError:  # lists of several lengths
        column = np.empty(0, object)
    if column.dtype != np.int64 or column.ndim != 1 or np.any(column < 0):
        fields.refuse(name, "a list of whole numbers of at least 0", values)
    return column


def _checksums(fields: Fields) -> Int64:
    text = fields.text("crc32")
    if len(text) % 8 or not _HEX.fullmatch(text):
        fields.refuse("crc32", "8 hexadecimal digits for each row group", text)
    return np.frombuffer(bytes.fromhex(text), ">u4").astype(np.int64)


def _statistics(top: Fields) -> Statistics:
    spread = top.child("examples_per_pack")
    return Statistics(
        fill_rate=top.real("fill_rate"),
        examples_per_pack=Spread(
            min=spread.count("min"), mean=spread.real("mean"), max=spread.count("max")
        ),
        longest_sequence=top.count("longest_sequence"),
        most_segments=top.count("most_segments"),
        shortest_pack=top.count("shortest_pack"),
        length_histogram=top.counts("length_histogram"),
        planning=top.mapping("planning"),
    )


def _records(top: Fields) -> Records:
    return Records(
        read=top.count("read"),
        packed=top.count("packed"),
        dropped=top.counts("dropped"),
        noted=top.counts("noted"),
        **{name: top.counts(name) for name in _OPTIONAL if top.has(name)},
    )


def _counts(top: Fields, what: type[Totals]) -> dict[str, int]:
    return {f.name: top.count(f.name) for f in dataclasses.fields(what)}
