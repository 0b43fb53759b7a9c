"""Writes datasets and side datasets from rows of JSON values, by format.md alone.

It checks nothing, so that what it writes may be wrong in any way; sizes, hashes and
counts fit.
packstore writes the golden datasets, so this is another writer as well.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from forged import checksums, fit, sealed, shard_bytes

Row = dict[str, Any]
Files = dict[str, bytes]

KINDS = {"preference": 2, "sft": 1, "scored": None}
NUMBERS = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
TYPES: dict[str, pa.DataType] = {"string": pa.string(), **NUMBERS}
SIDE_TYPES = {**TYPES, "float32": pa.float32()}
HOW = {"store_schema": False, "write_page_checksum": True}
"""Options of most files: without the Arrow schema they are small."""


def lists(value: pa.DataType, name: str = "element") -> pa.DataType:
    """Returns the type of a column."""
    return pa.list_(pa.field(name, value, nullable=False))


def top(logp: pa.DataType, *more: pa.Field) -> pa.DataType:
    """Returns the type of a column of the top k."""
    ids = pa.field("ids", lists(pa.int32()), nullable=False)
    return pa.struct([ids, pa.field("logps", lists(logp), nullable=False), *more])


SCALE = pa.field("scale", pa.float32(), nullable=False)
SIDE_TYPES |= {
    "list<float32>": lists(pa.float32()),
    "token<float32>": lists(pa.float32()),
    "token<float16>": lists(pa.float16()),
    "token<top1,float16>": top(pa.float16()),
    "token<top2,float16>": top(pa.float16()),
    "token<top3,uint8>": top(pa.uint8(), SCALE),
}


def schema_of(kind: str, layout: str, carry: Mapping[str, Any]) -> pa.Schema:
    """Returns the schema of a shard; a carried type that is no text is an Arrow
    type.
    """
    i32, i64 = pa.int32(), pa.int64()
    columns = {
        "input_ids": i32,
        "labels": i32,
        "reward": pa.float32(),
    }
    columns |= {"lengths": i32, "seq_boundaries": i32}
    columns |= {"parent_distances": i32} if layout == "shared_prefix" else {}
    columns |= {"example_ids": i64}
    columns |= {"num_responses": i32} if KINDS[kind] is None else {}
    columns |= {n: TYPES[t] if isinstance(t, str) else t for n, t in carry.items()}
    metadata = {"format_version": "1", "kind": kind, "layout": layout}
    metadata["features"] = ""
    fields = [
        pa.field(name, lists(type_), nullable=False) for name, type_ in columns.items()
    ]
    return pa.schema(
        fields, {f"packstore.{name}": text for name, text in metadata.items()}
    )


def to_table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """Returns rows as a table; a reward may be too large for float32."""
    columns = []
    for field in schema:
        values: list[Any] = [row[field.name] for row in rows]
        if field.name == "reward":
            with np.errstate(over="ignore"):
                values = [np.array(v, np.float64).astype(np.float32) for v in values]
        columns.append(pa.array(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def counts_of(rows: Sequence[Row], kind: str) -> Row:
    """Returns what the manifest counts in packs."""
    b = [row["seq_boundaries"] for row in rows]
    steps = [y - x for bounds in b for x, y in itertools.pairwise(bounds)]
    tokens = [len(row["input_ids"]) for row in rows]
    labels = [i for row in rows for i in row["labels"] if i != -100]
    return {
        "rows": len(rows),
        "examples": sum(len(row["example_ids"]) for row in rows),
        "sequences": sum(len(row["lengths"]) for row in rows),
        "tokens": sum(tokens),
        "supervised_tokens": len(labels),
        "longest": min(max(1, *steps, 1), sum(tokens)),
        "squares": [squares_of(row) for row in rows],
    }


def squares_of(row: Row) -> int:
    """Returns what the pack index tells of the attention of a pack."""
    segments = itertools.pairwise(row["seq_boundaries"])
    pairs = zip(row["lengths"], segments, strict=False)  # a row may lack some
    return sum((end - start) * (2 * n - (end - start)) for n, (start, end) in pairs)


SUMS = ("rows", "examples", "sequences", "tokens", "supervised_tokens")


def targets_of(row: Row) -> int:
    """Returns the number of supervised tokens of a pack."""
    return sum(label != -100 for label in row["labels"])


def statistics_of(rows: Sequence[Row], pack_size: int) -> Row:
    """Returns the statistics of packs."""
    lengths = [n for row in rows for n in row["lengths"]]
    examples, tokens = (
        [len(row[n]) for row in rows] for n in ("example_ids", "input_ids")
    )
    histogram: dict[str, int] = {}
    for n in sorted(lengths):
        bucket = str(1 << max(n.bit_length() - 1, 0))
        histogram[bucket] = histogram.get(bucket, 0) + 1
    mean = sum(examples) / max(len(rows), 1)
    return {
        "fill_rate": sum(tokens) / (max(len(rows), 1) * pack_size),
        "examples_per_pack": {
            "min": min(examples, default=0),
            "mean": mean,
            "max": max(examples, default=0),
        },
        "longest_sequence": max(0, *lengths, 0),
        "most_segments": max((len(row["lengths"]) for row in rows), default=0),
        "most_keys": max((sum(row["lengths"]) for row in rows), default=0),
        "most_targets": max(map(targets_of, rows), default=0),
        "shortest_pack": min(tokens, default=0),
        "length_histogram": histogram,
        "planning": {},
    }


def same(value: Any) -> Any:
    """Returns what it gets."""
    return value


def dataset(
    rows: Sequence[Row],
    kind: str = "sft",
    layout: str = "concat",
    *,
    carry: Mapping[str, Any] | None = None,
    pack_size: int = 96,
    vocab_size: int | None = None,
    shards: Sequence[Sequence[int]] = (),
    bases: Sequence[int] = (),
    form: str = "parquet",
    index: bool = False,
    number: int = 1,
    how: Mapping[str, Any] | None = None,
    table: Callable[[pa.Table], pa.Table] = same,
    data: Callable[[bytes], bytes] = same,
    manifest: Callable[[Row], object] = same,
    files: Callable[[Files], object] = same,
    seal: Callable[[Row], bytes] = sealed,
) -> Files:
    """Returns the files of a dataset.

    Args:
        rows: packs.
        kind, layout, carry, pack_size, vocab_size: as in the manifest; `carry` may name
            a type ``later:...`` through a pair of its name and its Arrow type.
        shards: packs of each row group of each shard; by default one row group.
        bases: ``example_id_base`` of each shard.
        form: ``parquet`` or ``arrow``.
        index: with a pack index of sizes.
        number: of the manifest.
        how: options of pyarrow.
        table, data, manifest, files, seal: change the table of a shard, its bytes, the
            manifest, or all files, before their hashes are taken (`files`: after); the
            text of the manifest.
    """
    types = {n: t if isinstance(t, str) else t[0] for n, t in (carry or {}).items()}
    arrow = {n: t if isinstance(t, str) else t[1] for n, t in (carry or {}).items()}
    schema, out, infos, at = (
        schema_of(kind, layout, arrow),
        dict[str, bytes](),
        [],
        0,
    )
    for s, groups in enumerate(shards or [[len(rows)]] * bool(rows)):
        parts = [
            rows[a:b]
            for a, b in itertools.pairwise(itertools.accumulate(groups, initial=at))
        ]
        part, at = rows[at : at + sum(groups)], at + sum(groups)
        options = {**HOW, **(how or {})} if form == "parquet" else dict(how or {})
        made = data(
            shard_bytes(table(to_table(part, schema)), list(groups), form, **options)
        )
        counts = list(map(counts_of, parts, itertools.repeat(kind)))
        name = (
            f"data/0123456789ab-{s:05d}-{hashlib.sha256(made).hexdigest()[:16]}.{form}"
        )
        info = {"path": name, **{n: sum(c[n] for c in counts) for n in SUMS}}
        info |= {"bytes": 0, "sha256": "", "footer_bytes": 0, "footer_sha256": ""}
        fit(info, made)
        columns = ("rows", "examples", "tokens", "longest")
        info["example_id_base"] = bases[s] if bases else 0
        info["row_groups"] = {n: [c[n] for c in counts] for n in columns}
        info["row_groups"]["crc32"] = checksums(made)
        out[name] = made
        infos.append(info)
    totals = {n: sum(info[n] for info in infos) for n in SUMS}
    totals = {"packs": totals.pop("rows"), **totals}
    totals["logical_tokens"] = max(sum(n for row in rows for n in row["lengths"]), 0)
    totals["bytes"] = sum(info["bytes"] for info in infos)
    document = {
        "format_version": 1,
        "features": [],
        "kind": kind,
        "num_responses": KINDS[kind],
        "layout": layout,
        "pack_size": pack_size,
        "strategy": "none",
        "seed": 0,
        "pack_order": "plain",
        "file_format": form,
        "carry": types,
        "totals": totals,
        "statistics": statistics_of(rows, pack_size),
        "records": {
            "read": totals["examples"],
            "packed": totals["examples"],
            "dropped": {},
            "noted": {},
        },
        "provenance": {
            "sources": [{"path": f"part-{i}.jsonl", "records": 9} for i in range(2)],
            "settings": {},
            "package_version": "0.1.0",
            **({"tokenizer": {"vocab_size": vocab_size}} if vocab_size else {}),
        },
    }
    if index:
        put_index(
            document, out, index_table(rows), [sum(g) for g in shards or [[len(rows)]]]
        )
    document["shards"] = infos
    manifest(document)
    out[f"_packstore/manifest-{number:06d}.json"] = seal(document)
    files(out)
    return out


def index_table(rows: Sequence[Row]) -> pa.Table:
    """Returns the three columns of sizes that a pack index must have."""
    counts = [counts_of([row], "") for row in rows]
    sizes = {n: [c[n] for c in counts] for n in ("tokens", "examples")}
    sizes["squares"] = [c["squares"][0] for c in counts]
    types = (pa.int32(), pa.int32(), pa.int64())
    fields = [pa.field(n, t, nullable=False) for n, t in zip(sizes, types, strict=True)]
    return pa.table(sizes, schema=pa.schema(fields))


def put_index(
    document: Row,
    out: Files,
    table: pa.Table,
    rows: Sequence[int],
    data: Callable[[bytes], bytes] = same,
    **how: Any,
) -> None:
    """Puts an index with a row group for each shard, and names it in the manifest.

    Args:
        document, out: the manifest, and where the file goes.
        table, rows: its rows, and their number in each row group.
        data: changes the bytes of the file.
        how: options of pyarrow.
    """
    sink = io.BytesIO()
    options = {
        "compression": "zstd",
        "use_dictionary": False,
        "write_statistics": False,
        **HOW,
    }
    with pq.ParquetWriter(sink, table.schema, **{**options, **how}) as writer:
        for at, n in zip(itertools.accumulate(rows, initial=0), rows, strict=False):
            writer.write_table(table.slice(at, n))
    made = data(sink.getvalue())
    info: Row = {"path": "", "bytes": 0, "sha256": ""}
    fit(info, made)
    info["path"] = f"_packstore/packs-000001-{info['sha256'][:16]}.index"
    out[info["path"]] = made
    document["pack_index"] = info


def side_schema(columns: Mapping[str, Any]) -> pa.Schema:
    """Returns the schema of the shards of a side dataset."""
    types = {n: SIDE_TYPES[t] if isinstance(t, str) else t for n, t in columns.items()}
    fields = [pa.field(n, t, nullable=False) for n, t in types.items()]
    ids = pa.field("example_ids", pa.int64(), nullable=False)
    return pa.schema([ids, *fields], {"packstore.side_version": "1"})


def side(
    rows: Sequence[Row],
    columns: Mapping[str, Any],
    kind: str,
    lineage: str,
    *,
    how: Mapping[str, Any] | None = None,
    table: Callable[[pa.Table], pa.Table] = same,
    data: Callable[[bytes], bytes] = same,
    manifest: Callable[[Row], object] = same,
    files: Callable[[Files], object] = same,
    seal: Callable[[Row], bytes] = sealed,
) -> Files:
    """Returns the files of a side dataset of one shard; arguments as of
    :func:`dataset`.
    """
    types = {n: t if isinstance(t, str) else t[0] for n, t in columns.items()}
    schema = side_schema(
        {n: t if isinstance(t, str) else t[1] for n, t in columns.items()}
    )
    made = table(pa.Table.from_pylist(list(rows), schema))
    stored = shard_bytes(made, [len(made)], "parquet", **{**HOW, **(how or {})})
    stored = data(stored)
    info: Row = {"path": "", "bytes": 0, "sha256": "", "rows": len(made)}
    fit(info, stored)
    info["path"] = f"data/0123456789ab-00000-{info['sha256'][:16]}.parquet"
    document = {"side_version": 1, "features": [], "kind": kind, "lineage": lineage}
    document |= {"fingerprint": lineage, "columns": types, "provenance": {}}
    document |= {"package_version": "0.1.0", "shards": [info]}
    out = {info["path"]: stored}
    manifest(document)
    out["_packstore/side-000001.json"] = seal(document)
    files(out)
    return out
