"""Generates datasets in which anything but the hashes may be wrong.

A case is a pure function of its number: a small dataset of some kind, layout, profile
and file format, with carried columns and side data, in which some values, borders, rows
or figures of the pack index were changed. Other schemas and encodings are in the
conformance kit, in test_verify.py and in test_other_writers.py. Sizes, hashes,
checksums and counts are then made to fit, as an attacker would. The seeds are packed by
packstore when they are first asked for.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from forged import MANIFEST, checksums, fit, sealed

import packstore
from packstore.torch import SideWriter, TopK

Files = dict[str, bytes]
CARRY = ("source:string", "turns:int64", "measure:float64", "checked:bool")
SIDE = {
    "tag": "string",
    "score": "float64",
    "ref_logps": "list<float32>",
    "good": "bool",
    "old_logps": "token<float16>",
    "teacher": "token<top2,float16>",
    "coarse": "token<top2,uint8>",
}
COMBINATIONS = sorted(
    itertools.product(
        ("preference", "sft", "scored"),
        ("concat", "shared_prefix"),
        ("parquet", "arrow"),
        (False, True),
    )
)
SIDE_MANIFEST = "side/_packstore/side-000001.json"
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    -1,
    -2,
    -100,
    64,
    127,
    1000,
    65_536,
    3_000_000,
    2**31 - 1,
    -(2**31),
)
LARGE = (2**31, 2**32 + 5, 2**40, 2**62, 2**63 - 1, -(2**63))
BROKEN = (
    pa.ArrowException,
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
)
BROKEN += (OSError, SystemError, TypeError, ValueError)
"""Errors of pyarrow and Python at what is already wrong."""

OURS = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
OURS |= {"write_page_checksum": True}


def records(kind: str, n: int) -> list[dict[str, Any]]:
    """Records of token ids with something to carry."""
    rng, made = random.Random(n), []
    for i in range(n):
        sides = [[8 + i, x, *[9] * rng.randint(0, 6)] for x in (30, 31, 32)][
            : 2 + i % 2
        ]
        record: dict[str, Any] = {
            "responses": sides,
            "scores": [1.0, 0.5, 0.25][: 2 + i % 2],
        }
        if kind == "preference":
            record = {"chosen": sides[0], "rejected": sides[1]}
        elif kind == "sft":
            record = {"response": sides[0]}
        carried = {
            "source": "né"[: i % 3],
            "turns": i,
            "measure": i / 3,
            "checked": i % 2 == 0,
        }
        made.append({"prompt": [5, 6, 7, 4][: 1 + i % 4], **record, **carried})
    return made


@functools.cache
def seed(number: int) -> tuple[str, Files]:
    """The files of an undamaged dataset, and of a side dataset of it below ``side/``;
    its name.
    """
    kind, layout, form, carried = COMBINATIONS[number]
    how: dict[str, Any] = {
        "layout": layout,
        "format": form,
        "num_workers": 0,
    }
    how |= {"pack_size": 32, "row_group_tokens": 64, "carry": CARRY if carried else ()}
    if layout == "shared_prefix":
        # All prompts begin alike, so each pack is a tree.
        how["share_prefixes"] = "pack"
    with tempfile.TemporaryDirectory() as folder:
        data = packstore.pack(records(kind, 9), f"{folder}/ds", **how)
        with SideWriter(f"{folder}/ds/side", data, SIDE) as side:
            for packs in data.iter_packs():
                ids, counts = packs.example_ids, packs.num_responses
                values: dict[str, Any] = {"score": ids / 3, "good": ids % 2 == 0}
                values["tag"] = np.array([f"é{i}" for i in ids], object)
                values["ref_logps"] = np.full(counts.sum(), -1.5, np.float32)
                values |= values_of_tokens(int(packs.num_targets.sum()))
                side.write(ids, values, counts, packs.num_targets)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        files = {
            str(path.relative_to(f"{folder}/ds")): path.read_bytes() for path in paths
        }
    return "-".join([kind, layout, form, "carry" if carried else "plain"]), files


def values_of_tokens(n: int) -> dict[str, Any]:
    """Values of `n` supervised tokens."""
    ids = np.arange(2 * n, dtype=np.int32).reshape(n, 2)
    top = TopK(ids, np.linspace(0, -3, 2 * n, dtype=np.float32).reshape(n, 2))
    return {"old_logps": np.full(n, -0.5), "teacher": top, "coarse": top}


def make(number: int, folder: Path) -> str:
    """Writes a case into `folder` and, of side data, into ``folder/side``; says what
    was done.
    """
    rng = random.Random(number)
    name, files = seed(rng.randrange(len(COMBINATIONS)))
    files, done = dict(files), [name]
    for change in rng.choices(
        tuple(CHANGES), CHANGES.values(), k=rng.choice((1, 1, 1, 2))
    ):
        try:
            done.append(f"{change.__name__}: {change(files, rng)}")
        except BROKEN as error:  # of the change before, or nothing that can be written
            done.append(f"{change.__name__}: {error!r}")
    write(files, folder)
    return "; ".join(done)


def write(files: Files, folder: Path) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def change_shard(files: Files, rng: random.Random) -> str:
    """Changes a shard; its entry in the manifest fits, nearly always with its
    counts.
    """
    manifest = json.loads(files[MANIFEST])
    entry = rng.choice(manifest["shards"])
    batches = read_batches(files[entry["path"]])
    group, told = rng.randrange(len(batches)), ""
    arrow = manifest["file_format"] == "arrow"
    if arrow and rng.random() < 0.5:
        data, told = patched(files[entry["path"]], rng)
    else:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            batches[group], done = changed(batches[group], rng)
            told += f"{done}, "
        data = encode([b.cast(batches[group].schema) for b in batches], arrow)
    put(files, entry, entry["path"], data)
    if rng.random() < 0.9:
        count(entry, batches)
    with contextlib.suppress(*BROKEN):  # columns that are none of packstore's
        entry["row_groups"]["crc32"] = checksums(data)
    totals, packed = manifest["totals"], manifest["records"]
    for name in ("rows", "tokens", "examples", "sequences", "bytes"):
        totals["packs" if name == "rows" else name] = sum(
            s[name] for s in manifest["shards"]
        )
    packed["packed"] = totals["examples"]
    packed["read"] = totals["examples"] + sum(packed["dropped"].values())
    if rng.random() < 0.6:
        manifest.pop("pack_index", None)
    files[MANIFEST] = sealed(manifest)
    return f"row group {group}: {told}"


def change_index(files: Files, rng: random.Random) -> str:
    """A figure of the pack index; another one of its column makes up for it, or not."""
    manifest = json.loads(files[MANIFEST])
    entry = manifest["pack_index"]
    table = pq.read_table(io.BytesIO(files[entry["path"]]))
    name, new = rng.choice(table.column_names), pick(rng)
    values, at = table[name].to_pylist(), table.column_names.index(name)
    place, other = rng.randrange(len(values)), rng.randrange(len(values))
    if rng.random() < 0.6 and values[other] is not None and values[place] is not None:
        values[other] += values[place] - new
    values[place] = new
    table = table.set_column(
        at, table.field(at), pa.array(values, table.field(at).type)
    )
    cuts = itertools.accumulate(
        [shard["rows"] for shard in manifest["shards"]], initial=0
    )
    groups = [
        table.slice(a, b - a).combine_chunks() for a, b in itertools.pairwise(cuts)
    ]
    put(files, entry, entry["path"], encode(groups, False))
    files[MANIFEST] = sealed(manifest)
    return f"{name} {place} is {new}"


def change_side(files: Files, rng: random.Random) -> str:
    """Something in the shard of the side dataset; its entry in the manifest fits."""
    manifest = json.loads(files[SIDE_MANIFEST])
    (entry,) = manifest["shards"]
    (batch,) = read_batches(files[f"side/{entry['path']}"])
    batch, told = changed(batch, rng)
    put(files, entry, f"side/{entry['path']}", encode([batch], False))
    if rng.random() < 0.9:
        entry["rows"] = batch.num_rows
    files[SIDE_MANIFEST] = sealed(manifest)
    return told


CHANGES: dict[Callable[[Files, random.Random], str], int] = {
    change_shard: 11,
    change_index: 2,
    change_side: 4,
}
"""Each with its weight."""


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
    how = rng.choices(("values", "rows", "null"), (15, 1, 1))[0]
    light = [n for n in batch.schema.names if n not in ("input_ids", "labels")]
    name = rng.choice(light if rng.random() < 0.8 else batch.schema.names)
    at = batch.schema.get_field_index(name)
    field, rows = batch.schema.field(at), batch.column(at).to_pylist()
    if how == "rows":
        order = [
            rng.randrange(batch.num_rows)
            for _ in range(rng.randrange(batch.num_rows + 2))
        ]
        return batch.take(pa.array(order, pa.int64())), f"rows {order}"
    if how == "null":
        place = rng.randrange(len(rows))
        if isinstance(rows[place], list) and rng.random() < 0.5:
            rows[place][rng.randrange(len(rows[place]))] = None
        else:
            rows[place] = None
        if pa.types.is_list(field.type):
            field = pa.field(name, pa.list_(pa.field("element", field.type.value_type)))
        else:
            field = field.with_nullable(True)
    else:
        how = other_values(rows, rng)
    return batch.set_column(at, field, pa.array(rows, field.type)), f"{how} in {name}"


def other_values(rows: list[Any], rng: random.Random) -> str:
    """Changes a column: a value, the border of two rows, two values of one sum, or a
    length.
    """
    how = rng.choices(("value", "balance", "border", "grow"), (7, 4, 4, 1))[0]
    row = rng.randrange(len(rows))
    if isinstance(rows[row], dict):
        member = rng.choice(sorted(rows[row]))
        values = [value[member] for value in rows]
        done = other_values(values, rng)
        rows[:] = [
            value | {member: new} for value, new in zip(rows, values, strict=True)
        ]
        return f"{done} of {member}"
    if not isinstance(rows[row], list):
        rows[row] = other_value(rows[row], rng)
        return f"value {rows[row]!r}"
    items = rows[row]
    if how == "border":
        flat = rows[row - 1] + items
        cut = rng.randint(0, len(flat))
        rows[row - 1], rows[row] = flat[:cut], flat[cut:]
    elif how == "balance" and len(items) > 1 and isinstance(items[0], int):
        by = rng.choice(
            (1, 3, 200, 3000, 100_000, 30_000_000, 2**31 - 40)
        ) * rng.choice((1, -1))
        first, second = rng.sample(range(len(items)), 2)
        items[first] += by
        items[second] -= by
        items[rng.randrange(len(items))] += rng.random() < 0.3
    elif how == "grow":
        rows[row] = items * rng.choice((0, 1, 3, 40, 100_000))
    else:
        place = rng.randrange(len(items))
        items[place] = other_value(items[place], rng)
        return f"value {items[place]!r}"
    return how


def other_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return rng.choice(("", "\x1b]0;x\x07", "x" * 70_000, "\u202e", "é" * 9, "\0"))
    if isinstance(value, float):
        return rng.choice(
            (float("nan"), float("inf"), -1e38, 0.0, -0.0, 1e-45, value + 1)
        )
    return value + rng.choice((-3, -1, 1, 5)) if rng.random() < 0.5 else pick(rng)


def encode(groups: list[Any], arrow: bool, how: dict[str, Any] | None = None) -> bytes:
    """The bytes of a shard, by default encoded as packstore does."""
    how = ({"compression": None} if arrow else OURS) if how is None else how
    sink, schema = io.BytesIO(), groups[0].schema
    if arrow:
        with pa.ipc.new_file(
            sink, schema, options=pa.ipc.IpcWriteOptions(**how)
        ) as file:
            for batch in groups:
                file.write_batch(batch)
    else:
        with pq.ParquetWriter(sink, schema, **how) as writer:
            for group in groups:
                writer.write(group, max(group.num_rows, 1))
    return sink.getvalue()


def patched(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """An Arrow file in which a number in a buffer, or in what frames a batch, is
    another.
    """
    source = pa.py_buffer(data)
    file = pa.ipc.open_file(source)
    batch = file.get_batch(rng.randrange(file.num_record_batches))
    buffers = [
        b
        for column in batch.columns
        for b in column.buffers()
        if b is not None and b.size
    ]
    if rng.random() < 0.15:
        width, new = 8, rng.choice((*NUMBERS, *LARGE))
        place = (
            min(b.address for b in buffers) - source.address - 8 * rng.randrange(1, 60)
        )
    else:
        buffer, width, new = rng.choice(buffers), 4, pick(rng)
        place = (
            buffer.address
            - source.address
            + 4 * rng.randrange(max(buffer.size // 4, 1))
        )
    place = max(place, 8)
    old = int.from_bytes(data[place : place + width], "little", signed=True)
    if rng.random() < 0.3:
        new = old + rng.choice((-5, -1, 1, 2))
    number = (new % (1 << 8 * width)).to_bytes(width, "little")
    return data[:place] + number + data[
        place + width :
    ], f"{width} bytes at {place}: {new}"


def count(entry: dict[str, Any], batches: list[pa.RecordBatch]) -> None:
    """Makes the counts of a shard's entry those of its batches, where these have such
    columns.
    """
    groups = entry["row_groups"]
    groups["rows"] = [b.num_rows for b in batches]
    counts = {
        name: [
            len(b[name].values) if isinstance(b[name], pa.ListArray) else 0
            for b in batches
        ]
        for name in ("example_ids", "input_ids", "lengths")
        if all(b.schema.names.count(name) == 1 for b in batches)
    }
    groups["examples"] = counts.get("example_ids", groups["examples"])
    groups["tokens"] = counts.get("input_ids", groups["tokens"])
    entry["sequences"] = sum(counts.get("lengths", [entry["sequences"]]))
    entry |= {name: sum(groups[name]) for name in ("rows", "examples", "tokens")}


def put(files: Files, entry: dict[str, Any], path: str, data: bytes) -> None:
    """Puts a file, and what a manifest tells of it."""
    files[path] = data
    fit(entry, data)
