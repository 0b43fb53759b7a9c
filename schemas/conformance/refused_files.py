"""Datasets whose files, schemas or packs a reader must refuse, each for one reason.

All hashes and counts that a case does not name fit.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from accepted import (
    CASES,
    MANIFEST,
    later_fields,
    null_reward,
    rows_of,
)
from case import Case, Files, Row
from footers import gap, with_sizes
from forged import sealed
from golden import CARRY
from writer import dataset, lists

Change = Callable[[Any], Any]


def bad(
    name: str, about: str, *refuse: str, rows: list[Row] | None = None, **how: Any
) -> Case:
    """A dataset that may be refused under these names."""
    if how.get("form") == "arrow":
        refuse = (*refuse, "unsupported")
    files = dataset(rows_of() if rows is None else rows, **how)
    return Case(name, about, files=files, refuse=refuse)


def refused_files() -> Iterator[Case]:
    """All of them."""
    yield from from_table()
    yield from manifests()
    yield from files()
    yield from schemas()
    yield from encodings()


OTHER_NAMES = {
    "pair-of-three": ("manifest",),
    "sft-of-two": ("manifest",),
    "keys-too-many": ("counts",),
    "prefix-longer-than-its-parent": ("unsupported",),
}
"""What the manifest of a case breaks as well: K times the examples are its sequences,
and the most keys of a pack are a count of its packs; or it tells more keys than a
reader must take.
"""


def from_table() -> Iterator[Case]:
    """The packs of ``cases/invalid.json``, each before one that is valid."""
    for case in json.loads((CASES / "invalid.json").read_text(encoding="utf-8"))[
        "cases"
    ]:
        how = {
            n: case[n]
            for n in ("kind", "layout", "carry", "pack_size", "vocab_size")
            if n in case
        }
        if "most_keys" in case:
            how["manifest"] = at("statistics/most_keys", case["most_keys"])
        k, n = {"preference": 2, "sft": 1, "scored": 1}[case["kind"]], 1
        if not case["rows"][0]["example_ids"]:
            n = 2  # so that there are as many examples as packs
        filler = {
            "input_ids": [1, 2] * k * n,
            "labels": [-100, 2] * k * n,
            "lengths": [2] * k * n,
        }
        filler |= {
            "seq_boundaries": [*range(0, 2 * k * n + 1, 2)],
            "reward": [1.0] * k * n,
            "parent_distances": [0] * k * n,
        }
        filler |= {
            "example_ids": [*range(20, 20 + n)],
            "num_responses": [1] * n,
            "source": [""] * n,
        }
        also = case.get("also", ())
        names = (case["rule"], *also, *OTHER_NAMES.get(case["name"], ()))
        about = case.get("about", case["name"])
        rows = [*case["rows"], filler]
        yield bad(f"pack-{case['name']}", about, *names, rows=rows, **how)


def at(path: str, value: Any) -> Change:
    """Returns the change of a manifest that puts a value at a path."""

    def change(document: Row) -> None:
        *parents, last = path.split("/")
        target: Any = document
        for name in parents:
            target = target[int(name) if isinstance(target, list) else name]
        target[last] = value

    return change


def with_data(change: Callable[[Row, bytes], None]) -> Row:
    """Returns arguments of :func:`dataset`: a change of the manifest that needs the
    bytes of the last shard.
    """
    kept: list[bytes] = []

    def keep(data: bytes) -> bytes:
        kept.append(data)
        return data

    return {"data": keep, "manifest": lambda document: change(document, kept[-1])}


def manifests() -> Iterator[Case]:
    """Yields manifests of a later release, and ones that are none."""
    for path, value in (
        ("format_version", 2),
        ("features", ["zigzag"]),
        ("kind", "tree"),
        ("layout", "tree"),
        ("file_format", "lance"),
    ):
        yield bad(
            f"later-{path}",
            f"{path} of a later release",
            "unsupported",
            manifest=at(path, value),
        )
    for name, about, path, value in (
        ("responses", "num_responses of another kind", "num_responses", 2),
        ("total", "a total that is not the sum over shards", "totals/tokens", 1),
        ("records", "records that are neither packed nor dropped", "records/read", 99),
        (
            "carry-name",
            "a carried column with a dot in its name",
            "carry",
            {"a.b": "string"},
        ),
        (
            "carry-reserved",
            "a carried column named like one of the format",
            "carry",
            {"reward": "string"},
        ),
        ("path", "a shard outside the dataset", "shards/0/path", "../x.parquet"),
        ("pack-size", "a pack size that int32 cannot hold", "pack_size", 2**31),
        ("pack-size-0", "a pack size of 0", "pack_size", 0),
        ("footer", "a footer larger than its file", "shards/0/footer_bytes", 2**24),
        ("base", "a base that is negative", "shards/0/example_id_base", -1),
    ):
        yield bad(f"manifest-{name}", about, "manifest", manifest=at(path, value))

    def twice(document: Row) -> None:
        document["shards"] *= 2
        for counts in (document["totals"], document["records"]):
            counts |= {n: 2 * v for n, v in counts.items() if isinstance(v, int)}

    yield bad(
        "manifest-shard-twice",
        "a shard that is there twice",
        "manifest",
        manifest=twice,
    )

    def unnumbered(out: Files) -> None:
        out["_packstore/manifest-1.json"] = out.pop(MANIFEST)

    about = "a manifest whose name has no six digits"
    yield bad("manifest-missing", about, "manifest", files=unnumbered)
    texts: dict[str, tuple[str, Change]] = {
        "torn": ("half a manifest, beside an older version", lambda m: sealed(m)[:900]),
        "hash": (
            "a manifest that was changed",
            lambda m: sealed(m).replace(b"plain", b"plane"),
        ),
        "hash-name": (
            "a flipped bit in the name of its hash",
            lambda m: b"qha256".join(sealed(m).rsplit(b"sha256", 1)),
        ),
        "hash-first": (
            "its hash is not the last field",
            lambda m: json.dumps({"sha256": "0" * 64, **m}).encode(),
        ),
        "twice": (
            "two members of one name",
            lambda m: resealed(sealed(m).replace(TWINS[0], TWINS[1])),
        ),
        "hash-escaped": (
            "the name of its hash has an escape",
            lambda m: b"\\u0073ha256".join(sealed(m).rsplit(b"sha256", 1)),
        ),
        "number": ("a manifest that is a number", lambda m: b"7"),
        "utf-8": (
            "a text that is no UTF-8",
            lambda m: raw(m).replace(b"part-0", b"part-\xff"),
        ),
        "surrogate": (
            "a text with half a surrogate pair",
            lambda m: raw(m).replace(b"part-0", b"\\ud800"),
        ),
        "nan": (
            "a number that JSON does not have",
            lambda m: raw(m).replace(b'"seed": 0', b'"later": NaN, "seed": 0'),
        ),
        "infinite": (
            "a number that no double can hold",
            lambda m: raw(m).replace(b'"planning": {', b'"planning": {"x": 1e400'),
        ),
    }
    for name, (about, seal) in texts.items():
        case = bad(
            f"manifest-{name}",
            about,
            "manifest",
            seal=seal,
            number=1 + (name == "torn"),
        )
        case.files |= dataset(rows_of()) if name == "torn" else {}
        yield case


TWINS = b'"seed"', b'"seed": 1, "s\\u0065ed"'
"""A member of a manifest, and two that have its name."""


def resealed(text: bytes) -> bytes:
    """A text of a manifest that was changed, with the hash that fits now."""
    body = text[: text.rindex(b",")]
    return text.replace(text[-68:-4], hashlib.sha256(body).hexdigest().encode())


def raw(document: Row) -> bytes:
    """The text of a manifest without its hash."""
    return json.dumps(document).encode()


def shard_of(out: Files) -> str:
    """The path of the first shard."""
    return str(json.loads(out[MANIFEST])["shards"][0]["path"])


def files() -> Iterator[Case]:
    """Files that are missing, or have other bytes than the manifest tells."""

    def edit(change: Callable[[bytes], bytes]) -> Change:
        return lambda out: out.update({shard_of(out): change(out[shard_of(out)])})

    yield bad(
        "shard-missing",
        "a shard is missing",
        "bytes",
        files=lambda out: out.pop(shard_of(out)),
    )
    longer = edit(lambda data: data[:4] + b"\0" + data[4:])
    yield bad("shard-longer", "a shard with a byte too many", "bytes", files=longer)
    other = lambda m: m["shards"][0].update(sha256="0" * 64)  # noqa: E731
    yield bad("shard-hash", "another hash of a shard", "bytes", manifest=other)
    yield bad(
        "footer-hash",
        "another hash of a footer",
        "bytes",
        manifest=at("shards/0/footer_sha256", "0" * 64),
    )

    def more_footer(manifest: Row, data: bytes) -> None:
        shard = manifest["shards"][0]
        shard["footer_bytes"] += 1
        footer = data[-shard["footer_bytes"] :]
        shard["footer_sha256"] = hashlib.sha256(footer).hexdigest()

    about = "a footer that is shorter than its manifest tells; the hash fits"
    yield bad("footer-length", about, "bytes", "encoding", **with_data(more_footer))

    def huge(footer_bytes: int) -> Change:
        def change(manifest: Row) -> None:
            manifest["shards"][0] |= {"bytes": 2**25, "footer_bytes": footer_bytes}
            manifest["totals"]["bytes"] = 2**25

        return change

    most = 2**24 + 2**16
    about = "a footer as large as it may be with one row group, of a file that is not"
    yield bad("footer-largest", about, "bytes", manifest=huge(most))
    about = "a footer a byte larger than it may be with one row group"
    yield bad("manifest-footer-limit", about, "manifest", manifest=huge(most + 1))
    yield bad(
        "row-group-crc32",
        "another crc32 of a row group",
        "bytes",
        manifest=at("shards/0/row_groups/crc32", "0" * 8),
    )
    yield bad(
        "arrow-crc32",
        "another crc32 of a record batch",
        "bytes",
        form="arrow",
        manifest=at("shards/0/row_groups/crc32", "0" * 8),
    )
    yield bad(
        "further-file-missing",
        "a further file is missing",
        "bytes",
        manifest=later_fields,
    )

    def changed(out: Files) -> None:
        (info,) = json.loads(out[MANIFEST])["further_files"]
        out[info["path"]] = b"something"[: info["bytes"]]

    yield bad(
        "further-file-hash",
        "a further file has other bytes",
        "bytes",
        manifest=later_fields,
        files=changed,
    )


def cast(name: str, type_: pa.DataType, nullable: bool = False) -> Change:
    """Returns the change of a table that gives a column another type."""

    def change(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(name)
        values = pa.array(table.column(i).to_pylist(), type_)
        return table.set_column(i, pa.field(name, type_, nullable), values)

    return change


def nulls(name: str) -> Change:
    """Returns the change of a table that makes an element null."""

    def change(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(name)
        rows = table.column(i).to_pylist()
        rows[0][0] = None
        type_ = pa.list_(pa.field("element", table.column(i).type.value_type))
        return table.set_column(i, pa.field(name, type_, False), pa.array(rows, type_))

    return change


def renamed(**metadata: str) -> Change:
    """Returns the change of a table that gives its schema other metadata."""
    texts = {
        f"packstore.{name}".encode(): text.encode() for name, text in metadata.items()
    }
    return lambda t: t.replace_schema_metadata({**t.schema.metadata, **texts})


PARENTS = "parent_distances"


def schemas() -> Iterator[Case]:
    """Shards whose schema is not that of the manifest."""
    i32, item, plain = (
        pa.int32(),
        lists(pa.int32(), "item"),
        {"use_compliant_nested_type": False},
    )
    ones = pa.array([[1, 1], [1], [1, 1, 1]], lists(i32))
    columns: dict[str, tuple[str, Change]] = {
        "missing": ("no column reward", lambda t: t.drop_columns(["reward"])),
        "order": ("columns in another order", lambda t: t.select([1, 0, *range(2, 6)])),
        "further": (
            "a column that the manifest does not name",
            lambda t: t.append_column("x", t["lengths"]),
        ),
        "twice": (
            "a column that is there twice",
            lambda t: t.append_column(t.field(5), t["example_ids"]),
        ),
        "counts": (
            "num_responses in kind sft",
            lambda t: t.append_column(
                pa.field("num_responses", lists(i32), False), ones
            ),
        ),
        "ids": ("token ids of 64 bits", cast("input_ids", lists(pa.int64()))),
        "unsigned": ("lengths without a sign", cast("lengths", lists(pa.uint32()))),
        "reward": ("rewards of 64 bits", cast("reward", lists(pa.float64()))),
        "nullable": ("a column that may be null", cast("lengths", lists(i32), True)),
        "nullable-elements": (
            "elements that may be null",
            cast("lengths", pa.list_(pa.field("element", i32))),
        ),
        "nulls": ("an element that is null", nulls("reward")),
        "kind": ("metadata of another kind", renamed(kind="preference")),
        "features": ("metadata with a feature", renamed(features="zigzag")),
        "layout": ("metadata of another layout", renamed(layout="shared_prefix")),
        "parents": (
            "parent_distances in layout concat",
            lambda t: t.add_column(5, t.field(3).with_name(PARENTS), ones),
        ),
        "version": ("metadata of another version", renamed(format_version="2")),
        "key": ("metadata with a further key", renamed(later="1")),
        "keys": (
            "no metadata",
            lambda t: t.replace_schema_metadata({"packstore.kind": "sft"}),
        ),
    }
    for name, (about, table) in columns.items():
        yield bad(f"schema-{name}", about, "schema", table=table)
    cases = {"schema-item": plain, "schema-item-both": {**plain, "store_schema": True}}
    for name, how in cases.items():
        yield bad(
            name, "elements named item", "schema", how=how, table=cast("lengths", item)
        )
    yield bad(
        "schema-item-arrow",
        "elements named item, in Arrow",
        "schema",
        table=cast("lengths", item),
        form="arrow",
    )
    about = "no parent_distances in layout shared_prefix"
    shared = {"rows": rows_of(layout="shared_prefix"), "layout": "shared_prefix"}
    lost = lambda t: t.drop_columns([PARENTS])  # noqa: E731
    yield bad("schema-parents-missing", about, "schema", table=lost, **shared)
    other = cast("turns", lists(pa.int32()))
    small = [{**r, "turns": [0] * len(r["example_ids"])} for r in rows_of(carry=True)]
    yield bad(
        "schema-carried",
        "a carried column of another type",
        "schema",
        table=other,
        rows=small,
        carry=CARRY,
    )


def null_list(table: pa.Table) -> pa.Table:
    """The same table, whose first list of rewards is null, though its schema says that
    none is.
    """
    i = table.schema.get_field_index("reward")
    (chunk,) = table.column(i).chunks
    _, offsets, _, _ = chunk.buffers()
    buffers = [pa.py_buffer(b"\xfe"), offsets]
    column = pa.Array.from_buffers(
        chunk.type, len(chunk), buffers, children=[chunk.values]
    )
    return table.set_column(i, table.field(i), column)


def without_counts_of_nulls(manifest: Row, data: bytes) -> None:
    """Makes the checksum that of a batch without nulls, whatever is in it."""
    crc = 0
    for column in pa.ipc.open_file(pa.py_buffer(data)).get_batch(0).columns:
        crc = zlib.crc32(b"(%d, 0, %d, 0)" % (len(column), len(column.values)), crc)
        for buffer in filter(None, column.buffers()):
            crc = zlib.crc32(buffer, crc)
    manifest["shards"][0]["row_groups"]["crc32"] = f"{crc:08x}"


def encodings() -> Iterator[Case]:
    """Files that annex A forbids."""
    carry = {"rows": rows_of(carry=True), "carry": CARRY}
    delta = {"source.list.element": "DELTA_LENGTH_BYTE_ARRAY"}
    strings = {"source.list.element": "DELTA_BYTE_ARRAY"}
    options: dict[str, tuple[str, Row]] = {
        "gzip": ("compressed with gzip", {"compression": "gzip"}),
        "snappy": ("compressed with snappy", {"compression": "snappy"}),
        "brotli": ("compressed with brotli", {"compression": "brotli"}),
        "one-gzip": (
            "a column compressed with gzip",
            {"compression": {"reward.list.element": "gzip"}},
        ),
        "dictionary": ("encoded by a dictionary", {"use_dictionary": True}),
        "delta-length": (
            "texts as DELTA_LENGTH_BYTE_ARRAY",
            {"column_encoding": delta},
        ),
        "delta-strings": ("texts as DELTA_BYTE_ARRAY", {"column_encoding": strings}),
    }
    for name, (about, how) in options.items():
        yield bad(f"encoding-{name}", about, "encoding", how=how, **carry)

    def broken(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index("source")
        rows = [[b"\xff\xfe"] * len(r) for r in table.column(i).to_pylist()]
        values = pa.array(rows, lists(pa.binary())).view(table.column(i).type)
        return table.set_column(i, table.field(i), values)

    yield bad(
        "encoding-utf-8",
        "a carried text that is no UTF-8",
        "encoding",
        "bytes",
        table=broken,
        **carry,
    )
    packed = {"options": pa.ipc.IpcWriteOptions(compression="zstd")}
    yield bad(
        "arrow-compressed",
        "a compressed record batch",
        "encoding",
        form="arrow",
        how=packed,
    )
    dictionary = cast("source", lists(pa.dictionary(pa.int32(), pa.string())))
    yield bad(
        "arrow-dictionary",
        "a dictionary in Arrow",
        "encoding",
        "schema",
        form="arrow",
        table=dictionary,
        **carry,
    )
    about = "an element that is null, in a batch of Arrow"
    how = {"form": "arrow", **with_data(without_counts_of_nulls)}
    yield bad("arrow-nulls", about, "schema", "bytes", table=null_reward, **how)
    about = "a list that is null, in a batch of Arrow"
    yield bad("arrow-null-list", about, "schema", "bytes", table=null_list, **how)
    yield bad("encoding-gap", "a byte between two column chunks", "encoding", data=gap)
    about = "a footer that tells more than 2^27 values of a column"
    many = lambda data: with_sizes(data, num_values=2**27 + 1)  # noqa: E731
    yield bad("encoding-values", about, "encoding", data=many)
    about = "a footer that tells more than 512 MiB of a row group"
    large = lambda data: with_sizes(data, num_bytes=2**29 + 1)  # noqa: E731
    yield bad("encoding-bytes", about, "encoding", data=large)
