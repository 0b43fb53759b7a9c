"""A reader of packstore datasets that was written from the pages in schemas/ alone.

    python examples/readers/reader.py DATASET [SIDE...]

It checks and reads all of a dataset, and prints what packstore's conformance kit asks
for. It needs pyarrow, not packstore, and reads a shard at once: clear code,
not a fast loader.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = {"preference": 2, "sft": 1, "scored": None}
COLUMNS = (
    "input_ids labels reward lengths seq_boundaries parent_distances example_ids "
    "num_responses"
)
SCALARS = {"string": "string", "int64": "int64", "float64": "double", "bool": "bool"}
LIST = "list<element: {} not null>"
NUMBERS = {
    "list<float32>": "float",
    "token<float32>": "float",
    "token<float16>": "halffloat",
}
SIDE = {**SCALARS, "float32": "float"} | {n: LIST.format(t) for n, t in NUMBERS.items()}
TOP = f"struct<ids: {LIST.format('int32')} not null, logps: {LIST} not null"
TOP_TYPES = {
    "float16": TOP.format("halffloat") + ">",
    "uint8": TOP.format("uint8") + ", scale: float not null>",
}
COUNTS = ["best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent"]
CODECS, ENCODINGS = (
    {"ZSTD", "LZ4", "UNCOMPRESSED"},
    {"PLAIN", "RLE", "DELTA_BINARY_PACKED"},
)
ENCODINGS |= {"BYTE_STREAM_SPLIT", "BIT_PACKED"}  # BIT_PACKED: levels of old writers
GROUPS = ["rows", "examples", "tokens", "longest"]
SUMS = ["rows", "examples", "sequences", "tokens", "supervised_tokens", "bytes"]
MOST = ["longest_sequence", "most_segments", "most_keys", "most_targets"]
MOST += ["shortest_pack"]

Json = dict[str, Any]


class Refused(Exception):
    """A dataset that must not be read; its text is the name of the broken rule."""


def need(ok: Any, name: str) -> None:
    """Refuses the dataset under a name of section 9 or annex G unless `ok`."""
    if not ok:
        raise Refused(name)


# --------------------------------------------- manifests (annex B; for side data, annex E)


def finite(text: str) -> float:
    """A number with a fraction or an exponent, in the range of a double."""
    need(math.isfinite(float(text)), "manifest")
    return float(text)


def members(pairs: list[tuple[str, Any]]) -> Json:
    """An object of I-JSON: names differ, and texts are valid Unicode."""
    need(len({name for name, _ in pairs}) == len(pairs), "manifest")
    return dict(pairs)


def checked(folder: Path, prefix: str, check: Callable[[Json], None]) -> Json:
    """The current manifest; a field that is missing or of another type breaks it."""
    document = read_manifest(folder, prefix)
    try:
        check(document)
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused("manifest") from error
    return document


def read_manifest(folder: Path, prefix: str) -> Json:
    """The manifest with the highest number, its hash verified."""
    pattern = re.compile(rf"{prefix}-([0-9]{{6}}|[1-9][0-9]{{6,}})\.json")
    names = [p.name for p in (folder / "_packstore").iterdir()]
    numbers = {int(m[1]): m[0] for m in map(pattern.fullmatch, names) if m}
    need(max(numbers, default=0) > 0, "manifest")
    data = (folder / "_packstore" / numbers[max(numbers)]).read_bytes()
    comma = data.rfind(b",")
    last = re.fullmatch(
        rb',\s*"(.*)"\s*:\s*"([0-9a-f]{64})"\s*}\s*', data[comma:], re.S
    )
    fits = last and hashlib.sha256(data[:comma]).hexdigest() == last[2].decode()
    need(not last or fits == (last[1] == b"sha256"), "manifest")
    try:
        text = data.decode()
        document = json.loads(
            text,
            object_pairs_hook=members,
            parse_float=finite,
            parse_constant=lambda _: 1 / 0,
        )
        json.dumps(document, ensure_ascii=False).encode()  # no half of a surrogate pair
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise Refused("manifest") from error
    need(isinstance(document, dict), "manifest")
    need(
        "sha256" not in document or (last and list(document)[-1] == "sha256"),
        "manifest",
    )
    return document


def count(value: Any, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number of a manifest."""
    need(type(value) is int and low <= value <= high, "manifest")
    return value


# Types of members, by name: ``?`` ends an optional one, ``*`` stands for any; a list
# has entries of one type. What is not named here may be anything.
TALLY, FILE = {"*": "count"}, {"path": "text", "bytes": "count", "sha256": "sha256"}
SHARD = {**FILE, **dict.fromkeys([*SUMS, "footer_bytes", "example_id_base"], "count")}
SHARD |= {"footer_sha256": "sha256", "row_groups": {name: ["count"] for name in GROUPS}}
PART = {"path": "text", "fingerprint": "sha256"}
TEXTS = "name path sha256 vocab_sha256 probe_sha256 chat_template chat_template_sha256"
TEXTS += " tool_use_template tool_use_template_sha256"
TOKENIZER = {f"{name}?": "text or null" for name in TEXTS.split()}
TOKENIZER |= {f"{name}?": "count or null" for name in ("bos_id", "eos_id", "pad_id")}
MANIFEST = {
    "format_version": "count",
    "features": ["text"],
    "strategy": "text",
    "seed": "whole",
    "pack_order": "text",
    "carry": {"*": "text"},
    "totals": dict.fromkeys(["packs", *SUMS[1:], "logical_tokens"], "count"),
    "statistics": {
        "fill_rate": "number",
        "examples_per_pack": {"min": "count", "mean": "number", "max": "count"},
        **dict.fromkeys(MOST, "count"),
        "length_histogram": TALLY,
        "planning": {},
    },
    "records": {
        "read": "count",
        "packed": "count",
        **dict.fromkeys(
            ["dropped", "noted", "fields_used?", "fields_not_used?"], TALLY
        ),
    },
    "provenance": {
        "sources": [
            {"path": "text", "records": "count", "bytes?": "count", "sha256?": "sha256"}
        ],
        "settings": {"on?": {"*": "text"}, "chat_template?": "text or null"},
        "package_version": "text",
        "lineage?": "sha256",
        "repacked_from?": PART,
        "combined_from?": [
            {**PART, "lineage": "sha256", "sources": "count", "shards": "count"}
        ],
    },
    "shards": [SHARD],
    "further_files?": [FILE],
    "pack_index?": FILE,
    "writer_features?": ["text"],
}
SIDE_MANIFEST = {
    "side_version": "count",
    "features": ["text"],
    "lineage": "sha256",
    "fingerprint": "sha256",
    "columns": {"*": "text"},
    "provenance": {"*": "plain"},
    "package_version": "text",
    "shards": [{**FILE, "rows": "count"}],
}


def check_type(value: Any, type_: Any) -> None:
    """Checks a value and all that is in it."""
    if isinstance(type_, list):
        need(isinstance(value, list), "manifest")
        for entry in value:
            check_type(entry, type_[0])
    elif isinstance(type_, dict):
        need(isinstance(value, dict), "manifest")
        if "*" in type_:
            type_ = dict.fromkeys(value, type_["*"])
        for name, inner in type_.items():
            if not name.endswith("?") or name[:-1] in value:
                check_type(value[name.removesuffix("?")], inner)
    elif type_.endswith(" or null"):
        if value is not None:
            check_type(value, type_.removesuffix(" or null"))
    elif type_ in ("count", "whole"):
        count(value, 0 if type_ == "count" else -(2**63))
    elif type_ == "sha256":
        need(re.fullmatch("[0-9a-f]{64}", value), "manifest")
    elif type_ == "number":
        need(type(value) in (int, float) and value >= 0, "manifest")
    else:
        need(
            isinstance(value, str if type_ == "text" else str | int | float | None),
            "manifest",
        )


def check_files(files: Sequence[Json]) -> None:
    """Paths are relative, and no two are the same."""
    part = r"[A-Za-z0-9_][A-Za-z0-9_.\-=]*"
    need(all(re.fullmatch(rf"{part}(/{part})*", f["path"]) for f in files), "manifest")
    need(len({f["path"] for f in files}) == len(files), "manifest")


def check_names(columns: Json) -> None:
    """Names of carried columns and of side data."""
    for name in columns:
        need(re.fullmatch("_?[A-Za-z][A-Za-z0-9_]*", name), "manifest")
        need(name not in COLUMNS.split(), "manifest")


def check_manifest(m: Json) -> None:
    """Checks a manifest by itself; a missing member raises a KeyError."""
    check_type(m, {name: MANIFEST[name] for name in ("format_version", "features")})
    need(m["format_version"] == 1 and not m["features"], "unsupported")
    supported = m["kind"] in KINDS and m["layout"] in ("concat", "shared_prefix")
    need(supported and m["file_format"] in ("parquet", "arrow"), "unsupported")
    k, size, shards, totals = (
        m["num_responses"],
        m["pack_size"],
        m["shards"],
        m["totals"],
    )
    need(k == KINDS[m["kind"]] and k is not True, "manifest")
    check_type(m, MANIFEST)
    tokenizer = m["provenance"].get("tokenizer")
    tokenizer = {} if tokenizer is None else tokenizer
    count(size, 1, 2**31 - 1)
    check_type(tokenizer, TOKENIZER)
    count(tokenizer.get("vocab_size", 1), 1, 2**31 - 1)
    if tokenizer.get("files") is not None:
        check_type(tokenizer["files"], {"*": "text"})
    count(m["provenance"]["settings"].get("pad_to_multiple", 1), 1, 2**31 - 1)
    check_names(m["carry"])
    index, further = m.get("pack_index"), m.get("further_files", [])
    check_files([*shards, *further, *([index] if index else [])])
    for f in further:
        named = f["sha256"][:16] in f["path"].rpartition("/")[2]
        need(f["path"].startswith("data/") and named, "manifest")
    if index:
        limit = 65536 + 4096 * len(shards) + 32 * totals["packs"]
        need(
            index["bytes"] <= limit and not index["path"].endswith(".parquet"),
            "manifest",
        )
    for s in shards:
        g = s["row_groups"]
        n = len(g["rows"])
        need({len(g[name]) for name in GROUPS} == {n}, "manifest")
        need(
            re.fullmatch("[0-9a-f]*", g["crc32"]) and len(g["crc32"]) == 8 * n,
            "manifest",
        )
        need(all(sum(g[name]) == s[name] for name in GROUPS[:3]), "manifest")
        need(0 < s["footer_bytes"] <= min(s["bytes"], 2**24 + 2**16 * n), "manifest")
        need(k is None or s["sequences"] == k * s["examples"], "manifest")
        for rows, examples, tokens, longest in zip(
            *(g[name] for name in GROUPS), strict=True
        ):
            need(0 < rows <= examples and 0 < longest <= tokens, "manifest")
            need(tokens <= rows * size, "manifest")
    for name in SUMS:
        total = sum(s[name] for s in shards)
        need(totals["packs" if name == "rows" else name] == total, "manifest")
    r = m["records"]
    need(r["read"] == r["packed"] + sum(r["dropped"].values()), "manifest")
    need(r["packed"] == totals["examples"], "manifest")
    buckets = {str(1 << n) for n in range(31)}
    need(m["statistics"]["length_histogram"].keys() <= buckets, "manifest")
    need(m["statistics"]["fill_rate"] <= 1, "manifest")


def check_side(side: Json) -> None:
    """Checks the manifest of a side dataset by itself."""
    check_type(
        side, {name: SIDE_MANIFEST[name] for name in ("side_version", "features")}
    )
    need(side["side_version"] == 1 and not side["features"], "unsupported")
    need(side["kind"] in KINDS, "unsupported")
    check_type(side, SIDE_MANIFEST)
    need(all(shard["rows"] for shard in side["shards"]), "manifest")
    need(side["columns"].get("ref_logps", "list<float32>") == "list<float32>", "side")
    check_names(side["columns"])
    check_files(side["shards"])
    need(side["columns"], "manifest")


# ------------------------------------------------------------------------ shards (annex A)


def stored(folder: Path, file: Json, name: str = "bytes") -> bytes:
    """The bytes of a file, its size and hash verified."""
    path = folder / file["path"]
    need(path.is_file() and path.stat().st_size == file["bytes"], name)
    data = path.read_bytes()
    need(hashlib.sha256(data).hexdigest() == file["sha256"], name)
    return data


def known(columns: Json, arrow_type: Callable[[str], str | None]) -> Json:
    """The columns that are not to be skipped, name to type."""
    names = [name for name in columns if not name.startswith("_")]
    return {name: columns[name] for name in names if arrow_type(columns[name])}


def check_schema(
    schema: pa.Schema, types: Json, metadata: Json, name: str = "schema"
) -> None:
    """Compares names, types (None: any) and metadata; no column may be null."""
    need(schema.names == list(types), name)
    texts = {k.encode(): v.encode() for k, v in metadata.items()}
    need((schema.metadata or {}) == texts, name)
    for field, type_ in zip(schema, types.values(), strict=True):
        need(type_ is None or (str(field.type) == type_ and not field.nullable), name)


def check_chunks(metadata: Any, names: Any, name: str = "encoding") -> None:
    """Compression, encodings, sizes, and places of the columns `names`, in all row
    groups.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(i) for i in range(group.num_columns)]
        at = [c.data_page_offset for c in chunks]
        at.append(at[-1] + chunks[-1].total_compressed_size)
        steps = [b - a for a, b in pairwise(at)]
        side_by_side = steps == [c.total_compressed_size for c in chunks]
        read = [c for c in chunks if c.path_in_schema.partition(".")[0] in names]
        need(not any(c.has_dictionary_page for c in read), name)
        need(
            all(
                c.compression in CODECS and set(c.encodings) <= ENCODINGS for c in read
            ),
            name,
        )
        need(side_by_side and all(c.num_values <= 2**27 for c in chunks), name)
        need(sum(c.total_uncompressed_size for c in chunks) <= 2**29, name)


def row_groups(data: bytes, shard: Json, m: Json) -> Iterator[pa.RecordBatch]:
    """The row groups of a shard, verified, with the columns that are not to be
    skipped.
    """
    footer = data[-shard["footer_bytes"] :]
    need(hashlib.sha256(footer).hexdigest() == shard["footer_sha256"], "bytes")
    magic = 6 if m["file_format"] == "arrow" else 4  # ARROW1 or PAR1
    length = int.from_bytes(footer[-magic - 4 : -magic], "little")
    need(len(footer) == length + 4 + magic, "bytes")
    carry = known(m["carry"], SCALARS.get)
    i32, f32, i64 = (LIST.format(t) for t in ("int32", "float", "int64"))
    types: Json = {
        "input_ids": i32,
        "labels": i32,
        "reward": f32,
    }
    types |= {"lengths": i32, "seq_boundaries": i32}
    types |= {"parent_distances": i32} if m["layout"] == "shared_prefix" else {}
    types |= {"example_ids": i64}
    types |= {"num_responses": i32} if KINDS[m["kind"]] is None else {}
    for name in m["carry"]:
        types[name] = LIST.format(SCALARS[carry[name]]) if name in carry else None
    metadata = {"format_version": "1", "kind": m["kind"], "layout": m["layout"]}
    metadata["features"] = ""
    metadata = {f"packstore.{name}": text for name, text in metadata.items()}
    names, crcs = [n for n, t in types.items() if t], shard["row_groups"]["crc32"]
    arrow, buffer = m["file_format"] == "arrow", pa.py_buffer(data)
    try:
        file: Any = (
            pa.ipc.open_file(buffer)
            if arrow
            else pq.ParquetFile(buffer, pre_buffer=False)
        )
        check_schema(file.schema if arrow else file.schema_arrow, types, metadata)
        n = file.num_record_batches if arrow else file.num_row_groups
        need(n == len(shard["row_groups"]["rows"]), "counts")
        if not arrow:
            check_chunks(file.metadata, names)
        for g in range(n):
            if arrow:
                batch = file.get_batch(g)
                crc = arrow_crc32(batch, buffer)
            else:
                group = file.metadata.row_group(g)
                need(group.num_rows == shard["row_groups"]["rows"][g], "counts")
                first, last = group.column(0), group.column(group.num_columns - 1)
                end = last.data_page_offset + last.total_compressed_size
                crc = zlib.crc32(data[first.data_page_offset : end])
            need(f"{crc:08x}" == crcs[8 * g : 8 * g + 8], "bytes")
            if not arrow:
                (batch,) = (
                    file.read_row_group(g, use_threads=False)
                    .combine_chunks()
                    .to_batches()
                )
            batch = batch.select(names)
            batch.validate(full=True)
            for column in batch.columns:
                need(not column.null_count and not column.values.null_count, "schema")
            yield batch
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        SystemError,
    ) as error:  # what pyarrow raises
        raise Refused("encoding") from error


def arrow_crc32(batch: pa.RecordBatch, file: pa.Buffer) -> int:
    """The checksum of a record batch, whose buffers lie in the file unless it is
    compressed.
    """
    crc = 0
    for column in batch.columns:
        crc = zlib.crc32(b"(%d, 0, %d, 0)" % (len(column), len(column.values)), crc)
        for buffer in filter(None, column.buffers()):
            inside = 0 <= buffer.address - file.address <= file.size - buffer.size
            need(inside or not buffer.size, "encoding")
            crc = zlib.crc32(buffer, crc)
    return crc


# ------------------------------- packs (sections 3 to 5, 7 and 9), pack index (annex D)


def check_pack(pack: Json, m: Json) -> None:
    """Every rule."""
    ids, b, lengths = pack["input_ids"], pack["seq_boundaries"], pack["lengths"]
    tokens, examples, reward = len(ids), len(pack["example_ids"]), pack["reward"]
    labels = pack["labels"]
    need(len(labels) == tokens and len(lengths) == len(reward), "columns-agree")
    need(
        all(len(pack[n]) == examples for n in m["carry"] if n in pack), "columns-agree"
    )
    need(len(b) == len(lengths) + 1, "boundaries-count")
    if m["layout"] == "shared_prefix":
        need(len(pack["parent_distances"]) == len(lengths), "parents-count")
    need(b[0] == 0 and b[-1] == tokens, "boundaries-span")
    need(all(0 <= edge <= tokens for edge in b), "boundaries-span")
    need(all(a < z for a, z in pairwise(b)), "segments-nonempty")
    counts = pack.get("num_responses", [KINDS[m["kind"]]] * examples)
    right = len(counts) == examples and min(counts, default=1) >= 1
    need(right and sum(counts) == len(lengths), "responses-count")
    need(examples, "pack-nonempty")
    need(tokens <= m["pack_size"], "pack-size")
    vocab_size = (m["provenance"].get("tokenizer") or {}).get("vocab_size", 2**31 - 1)
    need(all(0 <= i < vocab_size for i in ids), "ids-range")
    need(
        all(x in (i, -100) for x, i in zip(labels, ids, strict=True)), "labels-are-ids"
    )
    need(all(labels[x] == -100 for x in b[:-1]), "first-unsupervised")
    for start, end in pairwise(b):
        is_supervised = any(x != -100 for x in labels[start:end])
        need(is_supervised, "supervised-nonempty")
    need(all(map(math.isfinite, reward)), "reward-finite")
    if m["layout"] == "concat":
        need(not any(offsets_of(pack)), "lengths-concat")
    else:
        check_parents(pack)
    need(sum(lengths) <= m["statistics"]["most_keys"], "pack-keys")


def offsets_of(pack: Json) -> list[int]:
    """The number of leading tokens that each segment leaves out."""
    segments = pairwise(pack["seq_boundaries"])
    return [n - (z - a) for n, (a, z) in zip(pack["lengths"], segments, strict=True)]


def check_parents(pack: Json) -> None:
    """The rules of layout ``shared_prefix``.

    A parent stores the token behind those that its child leaves out, as it leaves out
    fewer itself. So nothing has to be rebuilt.
    """
    ids, b, lengths = pack["input_ids"], pack["seq_boundaries"], pack["lengths"]
    offsets = offsets_of(pack)
    for i, distance in enumerate(pack["parent_distances"]):
        need(0 <= distance <= i, "parent-earlier")
        need((distance == 0) == (offsets[i] == 0), "prefix-whole")
        if distance:
            parent = i - distance
            need(0 <= offsets[i] < lengths[parent], "prefix-inside")
            need(offsets[i] > offsets[parent], "parent-stores")
            repeated = b[parent] + offsets[i] - offsets[parent]
            need(ids[repeated] == ids[b[i]], "prefix-repeats")


def derive(pack: Json) -> Json:
    """The derived values of section 5.

    The keys of a sequence are the places of its tokens in the pack: those that its
    segment leaves out are the first keys of its parent.
    """
    b, lengths = pack["seq_boundaries"], pack["lengths"]
    distances = pack.get("parent_distances", [0] * len(lengths))
    offsets = offsets_of(pack)
    keys: list[list[int]] = []
    segment_ids, position_ids, sequence_labels, ends = [], [], [], [0]
    for i, (start, end) in enumerate(pairwise(b)):
        left_out = keys[i - distances[i]][: offsets[i]] if offsets[i] else []
        keys.append([*left_out, *range(start, end)])
        segment_ids += [i] * (end - start)
        position_ids += range(offsets[i], lengths[i])
        sequence_labels += [-100] * offsets[i] + pack["labels"][start:end]
        ends.append(ends[-1] + lengths[i])
    return {
        "segment_offsets": offsets,
        "segment_ids": segment_ids,
        "position_ids": position_ids,
        "cu_seqlens": b,
        "cu_seqlens_k": ends,
        "kv_index": [place for places in keys for place in places],
        "sequence_labels": sequence_labels,
        "max_seqlen": max(end - start for start, end in pairwise(b)),
        "max_seqlen_k": max(lengths),
    }


def sizes(pack: Json, kind: str) -> Json:
    """Returns the sizes of a pack that the pack index holds."""
    segments = list(pairwise(pack["seq_boundaries"]))
    squares = 0
    for (start, end), length in zip(segments, pack["lengths"], strict=True):
        queries = end - start
        squares += queries * (2 * length - queries)

    num_examples = len(pack["example_ids"])
    out = {
        "tokens": len(pack["input_ids"]),
        "examples": num_examples,
        "squares": squares,
    }
    out |= dict.fromkeys(COUNTS, 0)
    counts = pack.get("num_responses", [KINDS[kind]] * num_examples)
    sequence = 0  # the first one of an example
    for count in counts:
        best = sequence
        if kind == "scored":
            rewards = pack["reward"][sequence : sequence + count]
            highest = max(rewards)
            best += rewards.index(highest)
            out["pairs_best_vs_rest"] += sum(reward < highest for reward in rewards)
            out["pairs_all"] += sum(low < high for low in rewards for high in rewards)
            out["pairs_adjacent"] += len(set(rewards)) - 1
        elif kind == "preference":
            out |= {name: out[name] + 1 for name in COUNTS[1:]}
        start, end = segments[best]
        out["best_tokens"] += sum(label != -100 for label in pack["labels"][start:end])
        sequence += count
    return out


def check_index(folder: Path, m: Json, shards: list[list[Json]]) -> None:
    """Compares the pack index with the packs of each shard."""
    data = stored(folder, m["pack_index"], "pack-index")
    try:
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        fields = [(f.name, str(f.type), f.nullable) for f in file.schema_arrow]
        first = [
            ("tokens", "int32", False),
            ("examples", "int32", False),
            ("squares", "int64", False),
        ]
        counted = fields[3:7] == [(name, "int64", True) for name in COUNTS]
        need(fields[:3] == first, "pack-index")
        need(counted or not {f[0] for f in fields} & set(COUNTS), "pack-index")
        need(file.num_row_groups == len(shards), "pack-index")
        names = [f[0] for f in fields[: 7 if counted else 3]]
        check_chunks(file.metadata, names, "pack-index")
        for g, packs in enumerate(shards):
            need(file.metadata.row_group(g).num_rows == len(packs), "pack-index")
            table = file.read_row_group(g, names, use_threads=False).to_pydict()
            for name, values in table.items():
                real = [sizes(pack, m["kind"])[name] for pack in packs]
                uncounted = name in COUNTS and values == [None] * len(packs)
                need(uncounted or values == real, "pack-index")
    except (pa.ArrowException, OSError) as error:
        raise Refused("pack-index") from error


def check_counts(m: Json, shards: list[list[Json]]) -> None:
    """Compares counts and statistics with the packs."""
    packs = [pack for shard in shards for pack in shard]
    for shard, own in zip(m["shards"], shards, strict=True):
        supervised = sum(i != -100 for pack in own for i in pack["labels"])
        need(shard["sequences"] == sum(len(pack["lengths"]) for pack in own), "counts")
        need(shard["supervised_tokens"] == supervised, "counts")
    lengths = [n for pack in packs for n in pack["lengths"]]
    need(m["totals"]["logical_tokens"] == sum(lengths), "counts")
    tokens, examples = (
        [len(pack[n]) for pack in packs] for n in ("input_ids", "example_ids")
    )
    s, n = m["statistics"], max(len(packs), 1)
    need(abs(s["fill_rate"] - sum(tokens) / (n * m["pack_size"])) <= 1e-6, "counts")
    spread = s["examples_per_pack"]
    need(spread["min"] == min(examples, default=0), "counts")
    need(spread["max"] == max(examples, default=0), "counts")
    need(abs(spread["mean"] - sum(examples) / n) <= 1e-6, "counts")
    need(s["longest_sequence"] == max(lengths, default=0), "counts")
    segments = [len(pack["lengths"]) for pack in packs]
    need(s["most_segments"] == max(segments, default=0), "counts")
    keys = [sum(pack["lengths"]) for pack in packs]
    need(s["most_keys"] == max(keys, default=0), "counts")
    targets = [sum(x != -100 for x in pack["labels"]) for pack in packs]
    need(s["most_targets"] == max(targets, default=0), "counts")
    need(s["shortest_pack"] == min(tokens, default=0), "counts")
    buckets = [str(1 << (length.bit_length() - 1)) for length in lengths]
    need(s["length_histogram"] == {b: buckets.count(b) for b in buckets}, "counts")


def read_shard(folder: Path, shard: Json, m: Json) -> list[Json]:
    """The packs of a shard, checked, with the ids that readers see."""
    data, packs, groups = stored(folder, shard), [], shard["row_groups"]
    for g, batch in enumerate(row_groups(data, shard, m)):
        rows = batch.to_pylist()
        for pack in rows:
            check_pack(pack, m)
            ids = pack["example_ids"]
            need(
                all(0 <= i < 2**63 - shard["example_id_base"] for i in ids),
                "example-ids",
            )
            pack["example_ids"] = [i + shard["example_id_base"] for i in ids]
        real = {
            n: sum(len(p[c]) for p in rows)
            for n, c in (("examples", "example_ids"), ("tokens", "input_ids"))
        }
        real |= {"rows": len(rows)}
        real["longest"] = max(
            z - a for p in rows for a, z in pairwise(p["seq_boundaries"])
        )
        need(all(groups[name][g] == n for name, n in real.items()), "counts")
        packs += rows
    return packs


# ----------------------------------------------------------------- side datasets (annex E)


def fingerprint(m: Json) -> str:
    """The identity of the packs and their order."""
    parts = [
        1,
        m["kind"],
        m["layout"],
        m["pack_size"],
        m["file_format"],
        *m["features"],
    ]
    parts += [f"{s['sha256']}+{s['example_id_base']}" for s in m["shards"]]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def lineage_of(m: Json) -> str:
    """The lineage of a dataset."""
    lineage: str = m["provenance"].get("lineage", fingerprint(m))
    return lineage


def spans_of(side: Json, m: Json) -> list[tuple[int, int]]:
    """The ids that a side dataset covers: first, and end (exclusive)."""
    if side["lineage"] == lineage_of(m):
        return [(0, 2**63)]
    parts = m["provenance"].get("combined_from", [])
    spans, done = [], 0
    for first, end, lineage in runs_of(parts):
        if side["lineage"] == lineage and first >= done:
            at = [sum(p["sources"] for p in parts[:n]) << 40 for n in (first, end)]
            spans.append((at[0], at[1]))
            done = end
    return spans


def runs_of(parts: list[Json]) -> Iterator[tuple[int, int, str]]:
    """The runs of parts: first, end (exclusive) and lineage; one part has two."""
    for first in range(len(parts)):
        for end in range(first + 1, len(parts) + 1):
            run = [[p["lineage"], p["sources"]] for p in parts[first:end]]
            if len(run) == 1:
                yield first, end, run[0][0]
            text = json.dumps({"parts": run}, separators=(",", ":"))
            yield first, end, hashlib.sha256(text.encode()).hexdigest()


def k_of(type_: str) -> int:
    """K of a type of the top k; 0 for any other type."""
    match = re.fullmatch(r"token<top([1-9][0-9]{0,3}),(float16|uint8)>", type_)
    return int(match[1]) if match and int(match[1]) <= 1024 else 0


def side_type(type_: str) -> str | None:
    """The Arrow type of a column of side data; None if this reader does not know it."""
    if k_of(type_):
        return TOP_TYPES[type_.removesuffix(">").partition(",")[2]]
    return SIDE.get(type_)


def check_top(value: Json, k: int) -> None:
    """The rules of a row of the top k, whose log-probabilities are numbers by now."""
    ids, logps = value["ids"], value["logps"]
    need(all(i >= 0 for i in ids), "top-ids")
    need(all(x <= 0 for x in logps), "top-sign")
    for start in range(0, len(ids), k):
        need(len(set(ids[start : start + k])) == k, "top-distinct")
        falls = all(a >= b for a, b in pairwise(logps[start : start + k]))
        need(falls, "top-order")


def sums_of_gaps(gaps: list[int], k: int) -> list[int]:
    """The sum of each token's gaps up to each; a token has k."""
    tokens = [gaps[start : start + k] for start in range(0, len(gaps), k)]
    return [x for token in tokens for x in accumulate(token)]


def side_value(value: Any, type_: str) -> Any:
    """A value of a row, checked; log-probabilities of 8 bits become numbers."""
    k = k_of(type_)
    if not k:
        rule = "token-finite" if type_.startswith("token<") else "side"
        need(type_ not in NUMBERS or all(map(math.isfinite, value)), rule)
        return value

    if "scale" in value:
        scale = value["scale"]
        need(scale > 0 and math.isfinite(scale), "top-scale")
        products = [-scale * x for x in sums_of_gaps(value["logps"], k)]
        value["logps"] = array("f", products).tolist()  # float32
    need(all(map(math.isfinite, value["logps"])), "token-finite")
    same_length = len(value["ids"]) == len(value["logps"])
    need(same_length and len(value["ids"]) % k == 0, "token-count")
    check_top(value, k)
    return {"ids": value["ids"], "logps": value["logps"]}


def read_side(folder: Path, m: Json) -> Json:
    """The known columns of a side dataset, its rows by id, and the ids that it
    covers.
    """
    side = checked(folder, "side", check_side)
    columns, rows = known(side["columns"], side_type), {}
    covered = spans_of(side, m)
    need(side["kind"] == m["kind"] and covered, "side")
    types = {
        "example_ids": "int64",
        **{n: side_type(columns.get(n, "")) for n in side["columns"]},
    }
    names = ["example_ids", *columns]
    try:
        for shard in side["shards"]:
            file = pq.ParquetFile(
                pa.BufferReader(stored(folder, shard, "side")), pre_buffer=False
            )
            check_schema(
                file.schema_arrow, types, {"packstore.side_version": "1"}, "side"
            )
            check_chunks(file.metadata, names, "side")
            need(file.metadata.num_rows == shard["rows"], "side")
            for row in file.read(names, use_threads=False).to_pylist():
                example_id = row.pop("example_ids")
                need(example_id not in rows, "side")
                rows[example_id] = {
                    n: side_value(v, columns[n]) for n, v in row.items()
                }
    except (pa.ArrowException, OSError) as error:
        raise Refused("side") from error
    return {"columns": columns, "rows": rows, "covered": covered}


def side_datasets(folder: Path, m: Json) -> list[Json]:
    """The side dataset in a folder, or the values of parts there."""
    if (folder / "_packstore").is_dir():
        return [read_side(folder, m)]
    lineages = [lineage_of(m)]
    if not (folder / lineages[0]).is_dir():
        parts = m["provenance"].get("combined_from", [])
        lineages = [part["lineage"] for part in parts]
        if not all((folder / lineage).is_dir() for lineage in lineages):
            lineages = [lineage for _, _, lineage in runs_of(parts)]
    names = [name for name in dict.fromkeys(lineages) if (folder / name).is_dir()]
    need(names, "side")
    return [read_side(folder / name, m) for name in names]


def counts_of(pack: Json, kind: str) -> list[tuple[int, int]]:
    """The sequences and the supervised tokens of each example of a pack."""
    segments = [pack["labels"][a:z] for a, z in pairwise(pack["seq_boundaries"])]
    targets = [sum(label != -100 for label in labels) for labels in segments]
    counts = pack.get("num_responses", [KINDS[kind]] * len(pack["example_ids"]))
    edges = pairwise(accumulate(counts, initial=0))
    return [(end - start, sum(targets[start:end])) for start, end in edges]


def check_count(value: Any, type_: str, sequences: int, targets: int) -> None:
    """Lists of an example have a value for each sequence, or for each token."""
    if type_ == "list<float32>":
        need(len(value) == sequences, "side")
    elif type_ in NUMBERS:
        need(len(value) == targets, "token-count")
    elif k_of(type_):
        need(len(value["ids"]) == k_of(type_) * targets, "token-count")


def end_to_end(values: list[Any], type_: str) -> Any:
    """The values of the examples of a pack; lists are joined."""
    if k_of(type_):
        return {n: [x for v in values for x in v[n]] for n in ("ids", "logps")}
    return [x for v in values for x in v] if type_ in NUMBERS else values


def join(packs: list[Json], folders: Sequence[Path], m: Json) -> None:
    """Puts the columns of side datasets into packs, under ``side``."""
    sides = [side for folder in folders for side in side_datasets(folder, m)]
    for name in {n: None for side in sides for n in side["columns"]}:
        types = {side["columns"][name] for side in sides if name in side["columns"]}
        need(len(types) == 1, "side")
        (type_,) = types
        for pack in packs:
            values = []
            counts = counts_of(pack, m["kind"])
            for example_id, count in zip(pack["example_ids"], counts, strict=True):
                rows = [
                    side["rows"].get(example_id - (a if z < 2**63 else 0))
                    for side in sides
                    for a, z in side["covered"]
                    if name in side["columns"] and a <= example_id < z
                ]
                need(len(rows) == 1 and rows[0] is not None, "side")
                check_count(rows[0][name], type_, *count)
                values.append(rows[0][name])
            pack.setdefault("side", {})[name] = end_to_end(values, type_)


def read(folder: Path, sides: Sequence[Path] = ()) -> Json:
    """All of a dataset, checked: packs with derived values and the columns of side
    datasets.
    """
    m = checked(folder, "manifest", check_manifest)
    for file in m.get("further_files", []):
        stored(folder, file)
    shards = [read_shard(folder, shard, m) for shard in m["shards"]]
    packs = [pack for shard in shards for pack in shard]
    ids = [i for pack in packs for i in pack["example_ids"]]
    need(len(set(ids)) == len(ids), "example-ids")
    check_counts(m, shards)
    if m.get("pack_index"):
        check_index(folder, m, shards)
    join(packs, sides, m)
    return {"packs": [pack | derive(pack) for pack in packs]}


def plain(value: Any) -> Any:
    """A value of JSON: numbers that are not finite as texts."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return value


def answer(dataset: str, *sides: str) -> Json:
    """Returns the answer that the kit asks for."""
    try:
        return plain(read(Path(dataset), [Path(side) for side in sides]))
    except Refused as reason:
        return {"refused": str(reason)}


if __name__ == "__main__":
    print(json.dumps(answer(*sys.argv[1:])))
