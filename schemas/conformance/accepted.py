"""Datasets that a reader must read, beside those that packstore writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from case import Case, Files, Row
from footers import join, split, with_bit_packed_levels
from golden import CARRY, IGNORE_INDEX, Golden, carried, row
from writer import dataset, index_table, lists, put_index, side

CASES = Path(__file__).parents[1] / "cases"
LATER = ("later:times", pa.timestamp("ms"))
NESTED = ("list<float32>", lists(pa.float32()))
GROUPS = [[1, 1], [1]]


def rows_of(
    kind: str = "sft", layout: str = "concat", carry: bool = False
) -> list[Row]:
    """Three packs of some examples, with carried columns if asked for."""
    made = []
    for numbers in ([0, 1], [2], [3, 4, 8]):
        pack = row(Golden(kind, layout), numbers)
        pack = {name: values for name, values in pack.items() if name not in CARRY}
        made.append(pack | (carried(numbers) if carry else {}))
    return made


def good(name: str, about: str, rows: list[Row] | None = None, **how: Any) -> Case:
    """A dataset that decodes to its rows, with their bases and without columns to be
    skipped.
    """
    rows = rows_of() if rows is None else rows
    kind, layout, carry = (
        how.get("kind", "sft"),
        how.get("layout", "concat"),
        how.get("carry", {}),
    )
    skipped = {
        n for n, t in carry.items() if not isinstance(t, str) or n.startswith("_")
    }
    shards = [sum(groups) for groups in how.get("shards", [[len(rows)]])]
    bases = [
        b
        for n, b in zip(shards, how.get("bases", [0] * len(shards)), strict=True)
        for _ in range(n)
    ]
    expect = [{n: v for n, v in r.items() if n not in skipped} for r in rows]
    for r, base in zip(expect, bases, strict=True):
        r["example_ids"] = [base + i for i in r["example_ids"]]
    refuse = ("unsupported",) if how.get("form") == "arrow" else ()
    return Case(
        name, about, kind, layout, dataset(rows, **how), expect=expect, refuse=refuse
    )


def accepted() -> Iterator[Case]:
    """All of them."""
    yield from from_table()
    yield from files()
    yield from columns()
    yield from keys()
    yield from manifests()
    yield from indexes()
    yield from sides()


def from_table() -> Iterator[Case]:
    """The packs of ``cases/valid.json``: edges of layouts and kinds."""
    for case in json.loads((CASES / "valid.json").read_text(encoding="utf-8"))["cases"]:
        rows = case["rows"]
        how = {
            n: case[n] for n in ("kind", "layout", "carry", "vocab_size") if n in case
        }
        size = case.get("pack_size", 96)
        about = case.get("about", "a pack of cases/valid.json")
        yield good(f"pack-{case['name']}", about, rows, pack_size=size, **how)


def files() -> Iterator[Case]:
    """Whatever annex A lets writers do."""
    names = [*rows_of(carry=True)[0]]
    integers = [n for n in names if n not in ("reward", "source", "weight", "checked")]
    delta = {f"{n}.list.element": "DELTA_BINARY_PACKED" for n in integers}
    split = {
        f"{n}.list.element": "BYTE_STREAM_SPLIT"
        for n in (*integers, "reward", "weight")
    }
    options: dict[str, tuple[str, Row]] = {
        "lz4": ("compressed with LZ4_RAW", {"compression": "lz4"}),
        "uncompressed": ("not compressed", {"compression": "none"}),
        "delta": ("integers as DELTA_BINARY_PACKED", {"column_encoding": delta}),
        "byte-stream-split": (
            "numbers as BYTE_STREAM_SPLIT",
            {"column_encoding": split},
        ),
        "rle": (
            "booleans as RLE",
            {
                "column_encoding": {"checked.list.element": "RLE"},
                "data_page_version": "2.0",
            },
        ),
        "pages-v2": ("pages of version 2", {"data_page_version": "2.0"}),
        "many-pages": (
            "pages of some bytes",
            {"data_page_size": 16, "write_batch_size": 4},
        ),
        "statistics": (
            "statistics, page index, no checksums of pages",
            {
                "write_statistics": True,
                "write_page_index": True,
                "write_page_checksum": False,
            },
        ),
        "arrow-schema": ("with ARROW:schema", {"store_schema": True}),
    }
    for name, (about, how) in options.items():
        yield good(
            f"file-{name}",
            about,
            rows_of(carry=True),
            carry=CARRY,
            shards=GROUPS,
            how=how,
        )
    about = "a footer that lists BIT_PACKED, an encoding of levels"
    yield good("file-bit-packed", about, shards=[[3]], data=with_bit_packed_levels)
    # A footer may have 16 MiB, and 64 KiB for each row group besides.
    name = "x" * 33_000
    rows = [{**r, name: [0] * len(r["example_ids"])} for r in rows_of()]
    about = "a footer of more than 64 KiB for one row group"
    yield good("file-footer", about, rows, carry={name: "int64"})
    about = "a shard without row groups, between others"
    yield good("file-no-row-groups", about, shards=[[2], [], [1]])
    how = {"carry": CARRY, "shards": [[3]], "form": "arrow"}
    yield good("arrow-carried", "carried columns in Arrow", rows_of(carry=True), **how)
    how = {
        "form": "arrow",
        "how": {
            "options": pa.ipc.IpcWriteOptions(
                metadata_version=pa.ipc.MetadataVersion.V4
            )
        },
    }
    yield good("arrow-v4", "Arrow metadata of version V4", **how)
    yield good("arrow-bitmaps", "Arrow with a validity bitmap", form="arrow", **BITMAPS)


def null_reward(table: pa.Table) -> pa.Table:
    """The same table, whose first reward is null, though its schema says that
    none is.
    """
    i = table.schema.get_field_index("reward")
    (chunk,) = table.column(i).chunks
    _, offsets, _, values = chunk.buffers()
    n, m = len(chunk), len(chunk.values)
    bits = pa.py_buffer(b"\xfe" + b"\xff" * (m // 8))
    child = pa.Array.from_buffers(pa.float32(), m, [bits, values])
    column = pa.Array.from_buffers(chunk.type, n, [None, offsets], children=[child])
    return table.set_column(i, table.field(i), column)


def without_null(data: bytes) -> bytes:
    """The same file, whose one null is none: its count is 0, and its bit in the bitmap
    1.
    """
    file = pa.py_buffer(data)
    column = pa.ipc.open_file(file).get_batch(0).column("reward")
    node, at = (
        struct.pack("<qq", len(column.values), 1),
        column.values.buffers()[0].address,
    )
    at -= file.address
    assert data.count(node) == 1
    data = data[:at] + bytes([data[at] | 1]) + data[at + 1 :]
    return data.replace(node, struct.pack("<qq", len(column.values), 0))


BITMAPS = {"table": null_reward, "data": without_null}
"""packstore and Arrow write no bitmap where nothing is null, but MAY find one."""


def equal_sequences(count: int, length: int) -> Row:
    """A pack of equal sequences, each an example; only the first stores all tokens."""
    ids = list(range(length))
    labels = [IGNORE_INDEX] * (length - 1) + ids[-1:]
    children = count - 1
    return {
        "input_ids": ids + ids[-2:] * children,
        "labels": labels + labels[-2:] * children,
        "reward": [1.0] * count,
        "lengths": [length] * count,
        "seq_boundaries": [0, *range(length, length + 2 * count, 2)],
        "parent_distances": list(range(count)),
        "example_ids": list(range(count)),
    }


def keys() -> Iterator[Case]:
    """Packs of far more keys than tokens."""
    about = "a pack of 16 times as many keys as pack_size, the least limit of a reader"
    how = {"layout": "shared_prefix"}
    yield good("keys-16-times", about, [equal_sequences(32, 62)], pack_size=124, **how)
    about = "a pack of more keys than that, which a reader may refuse"
    more = good("keys-more", about, [equal_sequences(33, 62)], pack_size=126, **how)
    yield dataclasses.replace(more, refuse=("unsupported",))


def columns() -> Iterator[Case]:
    """Kinds, layouts, ids, and carried columns."""
    one = [{**r, "num_responses": [1] * len(r["example_ids"])} for r in rows_of()]
    yield good("scored-one", "kind scored, a single response each", one, kind="scored")
    how = {"kind": "scored", "layout": "shared_prefix"}
    mixed = rows_of("scored", "shared_prefix")
    mixed[1] = {**rows_of()[1], "num_responses": [1], "parent_distances": [0]}
    yield good(
        "scored-mixed", "kind scored, 1 to 4 responses", mixed, shards=GROUPS, **how
    )
    far = [
        {**r, "example_ids": [2**53 + 2 * i + 1 for i in r["example_ids"]]}
        for r in rows_of()
    ]
    bases = (5, 2**62 + 3)
    yield good(
        "bases", "bases, and ids that no double holds", far, shards=GROUPS, bases=bases
    )
    high = [{**r, "input_ids": list(r["input_ids"])} for r in rows_of()]
    for r in high:
        r["input_ids"][0] = 2**31 - 2
    yield good("largest-id", "the largest token id, without a vocabulary", high)
    odd = rows_of()
    for r, x in zip(odd, (float("nan"), float("inf"), float("-inf")), strict=True):
        n = len(r["example_ids"])
        r["score"], r["big"] = [x] * n, [-(2**63), 2**63 - 1, 0][:n]
        r["text"] = ["\0", "", "\U0001f600"][:n]
    carry = {"score": "float64", "big": "int64", "text": "string"}
    yield good("carried-extremes", "NaN, infinity, 64-bit integers", odd, carry=carry)
    later = rows_of(carry=True)
    for r in later:
        n = len(r["example_ids"])
        r |= {"when": [1] * n, "scores": [[0.5, 0.25]] * n, "_weight": [0.5] * n}
    carry = {"when": LATER, **CARRY, "scores": NESTED, "_weight": "float64"}
    yield good("carried-later", "columns of a later release", later, carry=carry)
    how = {"form": "arrow", "carry": carry}
    yield good(
        "carried-later-arrow", "columns of a later release, in Arrow", later, **how
    )


def later_fields(manifest: Row) -> None:
    """Fields of a later release everywhere, and what only writers must understand."""
    shard = manifest["shards"][0]
    for place in (manifest, shard, shard["row_groups"], manifest["provenance"]):
        place["later"] = {"sha256": None, "n": [1.5, -(2**63)]}
    for name in ("totals", "statistics", "records"):
        manifest[name]["later"] = "\u2028"
    manifest["provenance"]["sources"][0]["later"] = {}
    manifest["writer_features"] = ["later"]
    data = b"anything"
    sha256 = hashlib.sha256(data).hexdigest()
    info = {
        "path": f"data/later-{sha256[:16]}.bin",
        "bytes": len(data),
        "sha256": sha256,
    }
    manifest["further_files"] = [info | {"later": 1}]


def manifests() -> Iterator[Case]:
    """Names, versions, and texts of manifests."""
    yield good("empty", "no packs", [], kind="preference")
    yield good("no-index", "no pack index, several shards", shards=[[1], [1], [1]])
    two = good("second-version", "the second of two versions", number=2)
    two.files |= dataset(rows_of()[:1], manifest=lambda m: m.update(seed=1))
    yield two

    def stray(out: Files) -> None:
        for name in (
            "-0000002.json",
            "-000000.json",
            "-2.json",
            "-000002.json~",
            ".json",
        ):
            out[f"_packstore/manifest{name}"] = b"{}"
        out |= {
            "_packstore/side-000003.json": b"{}",
            "_packstore/.manifest-000004.json": b"{",
        }
        out["data/0123456789ab-00000-0000000000000000.parquet"] = b"PAR1"

    yield good("stray-names", "files that are none of the dataset", files=stray)
    bare = lambda m: json.dumps(dict(reversed(m.items()))).encode()  # noqa: E731
    yield good("no-hash", "a manifest without its hash, on one line", seal=bare)

    def further(out: Files) -> None:
        (name,) = (f["path"] for f in json.loads(out[MANIFEST])["further_files"])
        out[name] = b"anything"

    yield good(
        "later-fields",
        "fields and files of a later release",
        manifest=later_fields,
        files=further,
    )

    def rounded(manifest):
        manifest["statistics"]["fill_rate"] += 9e-7

    yield good("rounded", "a fraction that was rounded", manifest=rounded)
    real = lambda m: m.update(pack_size=float(m["pack_size"]))  # noqa: E731
    about = "a whole number with a point, which not every reader can tell"
    either = good("whole-with-point", about, manifest=real)
    yield dataclasses.replace(either, refuse=("manifest",))


MANIFEST = "_packstore/manifest-000001.json"


def largest_index(data: bytes) -> bytes:
    """The same index, as large as that of two shards and three packs may be: bytes that
    no footer names stand before the footer.
    """
    before, footer = split(data)
    missing = 65_536 + 4_096 * 2 + 32 * 3 - len(data)
    return join(before + bytes(missing), footer)


def indexes() -> Iterator[Case]:
    """Pack indexes that packstore does not write."""
    yield good("index-sizes", "a pack index without counts", index=True, shards=GROUPS)

    def indexed(
        name: str, about: str, more: Mapping[str, pa.Array], **how: Any
    ) -> Case:
        table, out = index_table(rows_of()), {}
        for column, values in more.items():
            table = table.append_column(column, values)

        def put(manifest: Row) -> None:
            put_index(manifest, out, table, [2, 1], **how)

        return good(
            name, about, shards=GROUPS, manifest=put, files=lambda f: f.update(out)
        )

    names = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
    nulls = {name: pa.nulls(3, pa.int64()) for name in names}
    about = "a pack index with counts that nobody counted, and further columns"
    yield indexed("index-nulls", about, {**nulls, "_weights": pa.array([1.5, 2, 3])})
    about = "an index whose footer lists BIT_PACKED, an encoding of levels"
    yield indexed("index-bit-packed", about, {}, data=with_bit_packed_levels)
    about = "an index of as many bytes as it may have"
    yield indexed("index-largest", about, {}, data=largest_index)
    later = {"later": pa.array(["a", "b", "c"])}
    yield indexed("index-later", "sizes and a further column", later, compression="lz4")


REF = {"ref_logps": "list<float32>"}


def ref(rows: list[Row], base: int = 0) -> list[Row]:
    """Rows of a side dataset for these packs, with the ids that readers see less
    `base`.
    """
    made = []
    for r in rows:
        n = len(r["lengths"]) // len(r["example_ids"])
        for i in r["example_ids"]:
            made.append(
                {
                    "example_ids": i - base,
                    "ref_logps": [-(i % 64) - k / 4 for k in range(n)],
                }
            )
    return made


def combined_rows() -> list[Row]:
    """Packs of three parts of one source each."""
    return [
        {**r, "example_ids": [(p << 40) + e for e in range(len(r["example_ids"]))]}
        for p, r in enumerate(rows_of("preference"))
    ]


LINEAGES = ["a" * 64, "b" * 64, "c" * 64]


def whole(first: int, end: int) -> str:
    """The lineage of a run of parts of one source each."""
    if end - first == 1:
        return LINEAGES[first]
    parts = ",".join(f'["{one}",1]' for one in LINEAGES[first:end])
    return hashlib.sha256(f'{{"parts":[{parts}]}}'.encode()).hexdigest()


def combined(manifest: Row) -> None:
    """Says that the dataset was combined."""
    manifest["provenance"] |= {
        "sources": [{"path": f"{p}.jsonl", "records": 9} for p in range(3)],
        "lineage": whole(0, 3),
        "combined_from": [
            {
                "path": p,
                "fingerprint": "d" * 64,
                "lineage": p[0] * 64,
                "sources": 1,
                "shards": 1,
            }
            for p in "abc"
        ],
    }


def parts_case(name: str, about: str, runs: list[tuple[int, int]], **more: Any) -> Case:
    """A combined dataset, and side data of runs of its parts."""
    rows = combined_rows()
    bases = [p << 40 for p in range(3)]
    stored = [{**r, "example_ids": list(range(len(r["example_ids"])))} for r in rows]
    how = {
        "kind": "preference",
        "shards": [[1]] * 3,
        "bases": bases,
        "manifest": combined,
    }
    case = good(name, about, stored, **how)
    for first, end in runs:
        values = ref(rows[first:end], first << 40)
        side_name = f"{name}-{'abc'[first:end]}"
        case.beside(
            side_name, side(values, REF, "preference", whole(first, end), **more)
        )
    for r in case.expect or []:
        r["side"] = {"ref_logps": [x for v in ref([r]) for x in v["ref_logps"]]}
    return case


def with_side(
    name: str, about: str, values: list[Row], columns: Row, expect: Any, **how: Any
) -> Case:
    """A dataset of pairs and its side data; `expect` gives the columns of a pack,
    joined.
    """
    lineage = lambda m: m["provenance"].update(lineage=LINEAGES[0])  # noqa: E731
    case = good(name, about, rows_of("preference"), kind="preference", manifest=lineage)
    for r in case.expect or []:
        r["side"] = expect(r)
    return case.beside(name, side(values, columns, "preference", LINEAGES[0], **how))


def sides() -> Iterator[Case]:
    """Side datasets."""
    joined = lambda r: {"ref_logps": [x for v in ref([r]) for x in v["ref_logps"]]}  # noqa: E731
    values = ref(rows_of("preference"))
    more = [{"example_ids": 2**62, "ref_logps": [0.0]}, *reversed(values)]
    about = "side data of more examples, in another order"
    yield with_side("side-more", about, more, REF, joined)
    wide = [
        v | {"_x": 1.5, "later": v["ref_logps"], "advantage": [1.0, -1.0]}
        for v in values
    ]
    columns = {"_x": "float64", **REF, "later": ("later", lists(pa.float64()))}
    columns |= {"advantage": "list<float32>"}
    both = lambda r: joined(r) | {"advantage": [1.0, -1.0] * len(r["example_ids"])}  # noqa: E731
    about = "side data with columns of a later release"
    yield with_side(
        "side-later", about, wide, columns, both, manifest=lambda m: m.update(later=1)
    )
    about = "side data whose footer lists BIT_PACKED, an encoding of levels"
    how = {"data": with_bit_packed_levels}
    yield with_side("side-bit-packed", about, values, REF, joined, **how)
    about = "side data of each part"
    yield parts_case("side-parts", about, [(0, 1), (1, 2), (2, 3)])
    yield parts_case("side-runs", "side data of a part, and of two", [(0, 1), (1, 3)])
    yield parts_case("side-whole", "side data of all parts", [(0, 3)])
