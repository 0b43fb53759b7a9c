"""Generates datasets in which anything but the hashes may be wrong.

A case is a pure function of its number: a small dataset of some kind, layout, profile and file
format, with carried columns and side data, in which some values, borders, types, rows, figures of
the pack index or fields of a manifest were changed. Sizes, hashes, checksums and counts are then
made to fit, as an attacker would. The seeds are packed by packstore when they are first asked for.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import random
import re
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import packstore
from packstore.io.side.side import SideWriter

Files = dict[str, bytes]
CARRY = ("source:string", "turns:int64", "weight:float64", "checked:bool")
SIDE = {"tag": "string", "score": "float64", "ref_logps": "list<float32>", "good": "bool"}
COMBINATIONS = sorted(
    itertools.product(
        ("preference", "sft", "ranked"),
        ("concat", "shared_prefix"),
        ("plain", "spans"),
        ("parquet", "arrow"),
        (False, True),
    )
)
MANIFEST, SIDE_MANIFEST = "_packstore/manifest-000001.json", "_packstore/side-000001.json"
NUMBERS = (0, 1, 2, 3, 7, -1, -2, -100, 64, 127, 1000, 65_536, 3_000_000, 2**31 - 1, -(2**31))
LARGE = (2**31, 2**32 + 5, 2**40, 2**62, 2**63 - 1, -(2**63))
BROKEN = (
    pa.ArrowException,
    ArithmeticError,
    LookupError,
    OSError,
    SystemError,
    TypeError,
    ValueError,
)
"""What pyarrow and Python raise at what is already wrong."""

TARGETS = ("shard",) * 11 + ("index",) * 2 + ("side",) * 4 + ("manifest",) * 2


def records(kind: str, n: int) -> list[dict[str, Any]]:
    """Records of token ids with something to carry."""
    rng, found = random.Random(n), []
    for i in range(n):
        prompt, sides = (
            [5, 6, 7][: 1 + i % 3],
            [[8 + i, x, *[9] * rng.randint(0, 6)] for x in (30, 31, 32)],
        )
        carried = {"source": "né"[: i % 3], "turns": i, "weight": i / 3, "checked": i % 2 == 0}
        if kind == "preference":
            record: dict[str, Any] = {"chosen": sides[0], "rejected": sides[1]}
        elif kind == "sft":
            record = {"response": sides[0]}
        else:
            count = 2 + i % 2
            record = {"responses": sides[:count], "scores": [1.0, 0.5, 0.25][:count]}
        found.append({"prompt": prompt, **record, **carried})
    return found


@functools.cache
def seed(number: int) -> tuple[str, Files]:
    """The files of an undamaged dataset, and of a side dataset of it below ``side/``; its name."""
    kind, layout, labels, form, carried = COMBINATIONS[number]
    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/ds"
        data = packstore.pack(
            records(kind, 9),
            url,
            pack_size=32,
            row_group_tokens=64,
            layout=layout,
            labels=labels,
            format=form,
            carry=CARRY if carried else (),
            num_workers=0,
        )
        with SideWriter(f"{url}/side", data, SIDE) as side:
            for packs in data.iter_packs():
                ids, counts = packs.example_ids, packs.num_responses
                values: dict[str, Any] = {
                    "tag": np.array([f"é{i}" for i in ids], object),
                    "score": ids / 3,
                    "ref_logps": np.full(counts.sum(), -1.5, np.float32),
                    "good": ids % 2 == 0,
                }
                side.write(ids, values, counts)
        files = (path for path in Path(url).rglob("*") if path.is_file())
        found = {path.relative_to(url).as_posix(): path.read_bytes() for path in files}
    return "-".join([kind, layout, labels, form, "carry" if carried else "plain"]), found


def make(number: int, folder: Path) -> str:
    """Writes a case into `folder` and, of side data, into ``folder/side``; says what was done."""
    rng = random.Random(number)
    name, files = seed(rng.randrange(len(COMBINATIONS)))
    files, told = dict(files), [name]
    for target in {rng.choice(TARGETS): 0 for _ in range(rng.choice((1, 1, 1, 2)))}:
        try:
            told.append(f"{target}: {CHANGES[target](files, rng)}")
        except BROKEN as error:  # by the change before
            told.append(f"{target}: {type(error).__name__}")
    for path, data in files.items():
        there = folder / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data)
    return "; ".join(told)


def change_shard(files: Files, rng: random.Random) -> str:
    """Changes a shard; its entry in the manifest fits, nearly always with its counts."""
    manifest = json.loads(files[MANIFEST])
    entry = rng.choice(manifest["shards"])
    batches = read_batches(files[entry["path"]])
    group = rng.randrange(len(batches))
    is_arrow = manifest["file_format"] == "arrow"
    raw = is_arrow and rng.random() < 0.5
    told = ""
    for _ in range(0 if raw else rng.choice((1, 1, 1, 2, 3))):
        batches[group], done = changed(batches[group], rng)
        told += f"{done}, "
    try:
        data, how = encode(batches, is_arrow, rng)
    except (*BROKEN, NotImplementedError) as error:
        return f"not written: {error}"
    if raw:
        data, how = patched(data, rng)
    files[entry["path"]] = data
    try:
        describe(entry, data, batches if rng.random() < 0.9 else None)
    except (*BROKEN, AttributeError, NotImplementedError) as error:
        how += f" (no checksum: {type(error).__name__})"
    names = (
        ("packs", "rows"),
        ("tokens",) * 2,
        ("examples",) * 2,
        ("sequences",) * 2,
        ("bytes",) * 2,
    )
    for total, column in names:
        manifest["totals"][total] = sum(shard[column] for shard in manifest["shards"])
    manifest["records"]["packed"] = manifest["totals"]["examples"]
    dropped = manifest["records"]["dropped"]
    if isinstance(dropped, dict):  # else an earlier change spoilt it
        manifest["records"]["read"] = sum((manifest["records"]["packed"], *dropped.values()))
    if rng.random() < 0.6:
        manifest.pop("pack_index", None)
    put_manifest(files, MANIFEST, manifest)
    return f"row group {group}: {told} {how}"


def change_index(files: Files, rng: random.Random) -> str:
    """A figure of the pack index; another one of its column makes up for it, or not."""
    manifest = json.loads(files[MANIFEST])
    if "pack_index" not in manifest:
        return "none"
    entry = manifest["pack_index"]
    table = pq.read_table(io.BytesIO(files[entry["path"]]))
    name = rng.choice(table.column_names)
    values = table[name].to_pylist()
    place, other, new = rng.randrange(len(values)), rng.randrange(len(values)), pick(rng)
    if rng.random() < 0.6 and values[other] is not None and values[place] is not None:
        values[other] += values[place] - new
    values[place] = new
    at = table.column_names.index(name)
    try:
        column = pa.array(values, table.field(at).type)
        table = table.set_column(at, table.field(at), column)
    except (pa.ArrowException, OverflowError):
        return "nothing"
    rows = [shard["rows"] for shard in manifest["shards"]]
    cuts = [0, *itertools.accumulate(rows)]
    groups = [table.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **options(rng)) as writer:
        for part in groups:
            writer.write_table(part, max(part.num_rows, 1))
    put(files, entry, sink.getvalue())
    put_manifest(files, MANIFEST, manifest)
    return f"{name} {place} is {new}"


def change_side(files: Files, rng: random.Random) -> str:
    """Something in the shard of the side dataset; its entry in the manifest fits."""
    manifest = json.loads(files[f"side/{SIDE_MANIFEST}"])
    (entry,) = manifest["shards"]
    path = f"side/{entry['path']}"
    (batch,) = read_batches(files[path])
    batch, told = changed(batch, rng)
    try:
        data, how = encode([batch], False, rng)
    except (*BROKEN, NotImplementedError) as error:
        return f"not written: {error}"
    files[path] = data
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if rng.random() < 0.9:
        entry["rows"] = batch.num_rows
    put_manifest(files, f"side/{SIDE_MANIFEST}", manifest)
    return f"{told} {how}"


def change_manifest(files: Files, rng: random.Random) -> str:
    """A field of a manifest, anywhere in it."""
    name = MANIFEST if rng.random() < 0.8 else f"side/{SIDE_MANIFEST}"
    manifest = json.loads(files[name])
    manifest.pop("sha256", None)
    parent: Any = manifest
    told = "nothing"
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        if not len(keys):
            break
        key = rng.choice(keys)
        if not isinstance(parent[key], dict | list) or not parent[key] or rng.random() < 0.1:
            old = parent[key]
            near = old + rng.choice((-1, 1, 3)) if isinstance(old, int) else ""
            found = (pick(rng), rng.choice(LARGE), near, None, "x", [], {}, [1], True, 0.5, -1e308)
            parent[key] = rng.choice(found)
            told = f"{name}: {key!r} is {parent[key]!r}"
            break
        parent = parent[key]
    put_manifest(files, name, manifest)
    return told


CHANGES: dict[str, Callable[[Files, random.Random], str]] = {
    "shard": change_shard,
    "index": change_index,
    "side": change_side,
    "manifest": change_manifest,
}


def pick(rng: random.Random) -> int:
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.randrange(-(2**31), 2**31)


def read_batches(data: bytes) -> list[pa.RecordBatch]:
    """The row groups of a shard."""
    if data.startswith(b"ARROW1"):
        file = pa.ipc.open_file(io.BytesIO(data))
        return [file.get_batch(i) for i in range(file.num_record_batches)]
    parquet = pq.ParquetFile(io.BytesIO(data))
    groups = (parquet.read_row_group(i) for i in range(parquet.num_row_groups))
    return [group.combine_chunks().to_batches()[0] for group in groups]


def changed(batch: pa.RecordBatch, rng: random.Random) -> tuple[pa.RecordBatch, str]:
    """A batch that is valid for Arrow, and what is wrong with it."""
    how = rng.choice(
        ("value",) * 7 + ("balance", "border") * 4 + ("rows", "column", "type", "null", "grow")
    )
    light = [n for n in batch.schema.names if n not in ("input_ids", "labels")]
    name = rng.choice(light if rng.random() < 0.8 else batch.schema.names)
    at = batch.schema.get_field_index(name)
    rows = batch.to_pydict()[name]
    if how == "rows":
        order = [rng.randrange(batch.num_rows) for _ in range(rng.randrange(batch.num_rows + 2))]
        return batch.take(pa.array(order, pa.int64())), f"rows {order}"
    if how == "column":
        return _other_columns(batch, at, rng)
    if how == "null" and rows:
        place = rng.randrange(len(rows))
        if isinstance(rows[place], list) and rows[place] and rng.random() < 0.5:
            rows[place][rng.randrange(len(rows[place]))] = None
        else:
            rows[place] = None
        field = pa.field(name, _nullable(batch.schema.field(at).type))
        return _with(batch, at, pa.array(rows, field.type), field), f"a null in {name}"
    if how == "type":
        type_ = rng.choice(TYPES)
        type_ = pa.list_(type_) if rng.random() < 0.7 else type_
        column = pa.nulls(batch.num_rows, type_)
        try:
            column = batch.column(at).cast(type_)
        except (pa.ArrowException, NotImplementedError):
            column = column.fill_null(0) if pa.types.is_integer(type_) else column
        return _with(batch, at, column, pa.field(name, type_)), f"{name} is {type_}"
    if how == "border" and batch.num_rows > 1 and isinstance(rows[0], list):
        row = rng.randrange(1, batch.num_rows)
        flat = rows[row - 1] + rows[row]
        cut = rng.randint(0, len(flat))
        rows[row - 1], rows[row] = flat[:cut], flat[cut:]
    elif how == "balance" and rows and isinstance(rows[0], list):
        holder = rng.choice(rows)
        if len(holder) < 2 or not isinstance(holder[0], int):
            return batch, "nothing"
        by = rng.choice((1, 3, 200, 3000, 100_000, 30_000_000, 2**31 - 40)) * rng.choice((1, -1))
        one, other = rng.sample(range(len(holder)), 2)
        holder[one] += by
        holder[other] -= by
        if rng.random() < 0.3:
            holder[rng.randrange(len(holder))] += 1
    elif how == "grow" and rows and isinstance(rows[0], list):
        place, most = rng.randrange(len(rows)), rng.choice((1, 3, 40, 100_000))
        rows[place] = rows[place] * most if rng.random() < 0.7 else []
    elif rows:
        place = rng.randrange(len(rows))
        holder: Any = rows[place] if isinstance(rows[place], list) else rows
        if not holder:
            return batch, "nothing"
        place = rng.randrange(len(holder))
        holder[place] = _other(holder[place], rng)
        told = f"value {place} of {name} is {holder[place]!r}"
    else:
        return batch, "nothing"
    field = batch.schema.field(at)
    try:
        made = _with(batch, at, pa.array(rows, field.type), field)
    except (pa.ArrowException, OverflowError, TypeError):
        return batch, "nothing"
    return made, told if how == "value" else f"{how} in {name}"


TYPES = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint32(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.list_(pa.int32()),
    pa.dictionary(pa.int32(), pa.int32()),
)


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return rng.choice(("", "\x1b]0;x\x07", "x" * 70_000, "\u202e", "é" * 9, "\0"))
    if isinstance(value, float):
        return rng.choice((float("nan"), float("inf"), -1e38, 0.0, -0.0, 1e-45, value + 1))
    return value + rng.choice((-3, -1, 1, 5)) if rng.random() < 0.5 else pick(rng)


def _nullable(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", type_.value_type)) if pa.types.is_list(type_) else type_


def _with(batch: pa.RecordBatch, at: int, column: pa.Array, field: pa.Field) -> pa.RecordBatch:
    schema = batch.schema.set(at, field).with_metadata(batch.schema.metadata)
    columns = list(batch.columns)
    columns[at] = column
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _other_columns(
    batch: pa.RecordBatch, at: int, rng: random.Random
) -> tuple[pa.RecordBatch, str]:
    names = list(batch.schema.names)
    how = rng.choice(("drop", "rename", "swap", "twice", "metadata"))
    fields, columns, metadata = list(batch.schema), list(batch.columns), batch.schema.metadata
    other = rng.randrange(len(names))
    if how == "drop":
        del fields[at], columns[at]
    elif how == "rename":
        fields[at] = fields[at].with_name(rng.choice(("x", "", names[other], "label_spans")))
    elif how == "swap":
        columns[at], columns[other] = columns[other], columns[at]
        fields[at] = fields[at].with_type(columns[at].type)
        fields[other] = fields[other].with_type(columns[other].type)
    elif how == "twice":
        fields.append(fields[other])
        columns.append(columns[other])
    else:
        key = rng.choice(list(metadata or {b"x": b""}))
        metadata = {**(metadata or {}), key: rng.choice((b"", b"2", b"ranked", b"\xff"))}
    schema = pa.schema(fields, metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema), f"{how} {names[at]} {names[other]}"


def options(rng: random.Random) -> dict[str, Any]:
    """Draws the options of a Parquet writer: ours, or others."""
    ours: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": False,
        "write_statistics": False,
        "write_page_checksum": True,
    }
    if rng.random() < 0.85:
        return ours
    return ours | rng.choice(
        (
            {"compression": rng.choice(("none", "snappy", "gzip", "brotli", "lz4"))},
            {"use_dictionary": True},
            {"write_page_checksum": False},
            {"data_page_version": "2.0"},
            {"store_schema": False},
            {"write_statistics": True, "write_page_index": True},
            {"data_page_size": 16},
            {"version": "1.0"},
        )
    )


def encode(batches: list[pa.RecordBatch], arrow: bool, rng: random.Random) -> tuple[bytes, str]:
    """The bytes of a shard, and how they were encoded."""
    sink, schema = io.BytesIO(), max((b.schema for b in batches), key=_strangeness(batches))
    batches = [b if b.schema == schema else _like(b, schema) for b in batches]
    if arrow:
        codec = "zstd" if rng.random() < 0.03 else None
        with pa.ipc.new_file(
            sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)
        ) as file:
            for batch in batches:
                file.write_batch(batch)
        return sink.getvalue(), f"compressed by {codec}" if codec else ""
    how = options(rng)
    with pq.ParquetWriter(sink, schema, **how) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_batches([batch]), max(batch.num_rows, 1))
    return sink.getvalue(), str({k: v for k, v in how.items() if k not in COMMON or v != COMMON[k]})


COMMON = options(random.Random(0))


def _strangeness(batches: list[pa.RecordBatch]) -> Callable[[pa.Schema], int]:
    """The schema that fewest batches have counts most."""
    return lambda schema: -sum(b.schema == schema for b in batches)


def _like(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the part of a batch that fits another schema."""
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        same = at >= 0 and batch.schema.field(at).type == field.type
        empty = pa.array([[]] * batch.num_rows if pa.types.is_list(field.type) else [])
        columns.append(batch.column(at) if same else empty.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def patched(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """An Arrow file in which a number in a buffer, or in what frames a batch, is another."""
    source = pa.py_buffer(data)
    file = pa.ipc.open_file(source)
    batch = file.get_batch(rng.randrange(file.num_record_batches))
    buffers = [b for column in batch.columns for b in column.buffers() if b is not None and b.size]
    if not buffers:
        return data, "nothing"
    spoiled = bytearray(data)
    if rng.random() < 0.15:
        start = min(b.address for b in buffers) - source.address
        place, width = start - 8 * rng.randrange(1, 60), 8
        new = rng.choice((*NUMBERS, *LARGE))
    else:
        buffer = rng.choice(buffers)
        width = 4
        start = buffer.address - source.address
        place = start + 4 * rng.randrange(max(buffer.size // 4, 1))
        new = pick(rng)
    old = int.from_bytes(data[place : place + width], "little", signed=True)
    if rng.random() < 0.3:
        new = old + rng.choice((-5, -1, 1, 2))
    if place < 8 or not -(2 ** (8 * width - 1)) <= new < 2 ** (8 * width - 1):
        return data, "nothing"
    spoiled[place : place + width] = new.to_bytes(width, "little", signed=True)
    return bytes(spoiled), f"{width} bytes at {place} are {new}, before {old}"


def describe(entry: dict[str, Any], data: bytes, batches: list[pa.RecordBatch] | None) -> None:
    """Makes what the manifest tells of a shard fit its bytes, and the counts of `batches`."""
    magic = 6 if data.startswith(b"ARROW1") else 4
    footer = int.from_bytes(data[-magic - 4 : -magic], "little") + 4 + magic
    entry |= {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "footer_bytes": footer,
        "footer_sha256": hashlib.sha256(data[-footer:]).hexdigest(),
    }
    groups = entry["row_groups"]
    if batches is not None:
        groups["rows"] = [b.num_rows for b in batches]
        for name, column in (("examples", "example_ids"), ("tokens", "input_ids")):
            if all(pa.types.is_list(b[column].type) for b in batches if column in b.schema.names):
                groups[name] = [
                    len(b[column].values) if column in b.schema.names else 0 for b in batches
                ]
        lengths = [b["lengths"] if "lengths" in b.schema.names else [] for b in batches]
        if all(isinstance(column, pa.ListArray) for column in lengths):
            entry["sequences"] = sum(len(column.values) for column in lengths)
        entry |= {name: sum(groups[name]) for name in ("rows", "examples", "tokens")}
    groups["crc32"] = "".join(f"{crc:08x}" for crc in checksums(data))


def checksums(data: bytes) -> list[int]:
    """crc32 of each row group: of its chunks (Parquet), or of its buffers and shapes (Arrow)."""
    if not data.startswith(b"ARROW1"):
        metadata, found = pq.read_metadata(io.BytesIO(data)), []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            last = group.column(group.num_columns - 1)
            start = group.column(0).data_page_offset
            found.append(
                zlib.crc32(data[start : last.data_page_offset + last.total_compressed_size])
            )
        return found
    file, found = pa.ipc.open_file(pa.py_buffer(data)), []
    for number in range(file.num_record_batches):
        crc = 0
        for column in file.get_batch(number).columns:
            shape = (len(column), column.null_count, len(column.values), column.values.null_count)
            crc = zlib.crc32(repr(shape).encode(), crc)
            for buffer in column.buffers():
                crc = crc if buffer is None else zlib.crc32(buffer, crc)
        found.append(crc)
    return found


def put(files: Files, entry: dict[str, Any], data: bytes) -> None:
    """Puts a file, and what a manifest tells of it."""
    files[entry["path"]] = data
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def put_manifest(files: Files, path: str, manifest: dict[str, Any]) -> None:
    """Puts a manifest with the hash that fits, as its last field."""
    manifest.pop("sha256", None)
    body = json.dumps(manifest, indent=1, ensure_ascii=False).encode().removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest()
    files[path] = body + b',\n "sha256": "%s"\n}\n' % digest.encode()
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
