"""Every format with every compression: the same records, cut anywhere, and what is
broken.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import packstore
from packstore.errors import InputError, RecordError
from packstore.format import BrokenLine
from packstore.io.inputs import (
    COMPRESSIONS,
    FORMATS,
    SUFFIXES,
    InputReader,
    ReadOptions,
)

pytestmark = pytest.mark.usefixtures("no_collector")

Record = dict[str, Any]
NESTED = [
    {"messages": [{"role": "user", "content": f"é\n{i}"}], "n": None}
    for i in range(2500)
]
FLAT = [
    {"prompt": f"{i}", "chosen": 'é\n",\t', "rejected": "", "chosen_reward": i / 4}
    for i in range(2500)
]


def as_jsonl(records: list[Record]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def as_json(records: list[Record]) -> bytes:
    return json.dumps(records, ensure_ascii=False, indent=1).encode()


def as_parquet(records: list[Record]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=900)
    return sink.getvalue().to_pybytes()


def as_arrow(records: list[Record]) -> bytes:
    return ipc(pa.Table.from_pylist(records), pa.ipc.new_file)


def ipc(table: pa.Table, kind: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return bytes(sink.getvalue().to_pybytes())


def as_csv(records: list[Record], delimiter: str = ",") -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return sink.getvalue().encode()


WRITERS: dict[str, Callable[[list[Record]], bytes]] = {
    "jsonl": as_jsonl,
    "json": as_json,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "csv": as_csv,
    "tsv": lambda records: as_csv(records, "\t"),
}


def compress(data: bytes, compression: str | None) -> bytes:
    if compression is None:
        return data
    if compression == "gzip":  # two members: as `cat a.gz b.gz` makes them
        return gzip.compress(data[:99]) + gzip.compress(data[99:])
    if compression in ("bz2", "xz"):
        return bz2.compress(data) if compression == "bz2" else lzma.compress(data)
    return bytes(pa.Codec(compression).compress(data, asbytes=True))


def pieces(name: str, data: bytes, block_bytes: int = 1 << 20) -> list[tuple[Any, Any]]:
    """Ordinals and values, piece by piece."""
    form = FORMATS.load(name)
    options = ReadOptions(
        block_bytes=block_bytes, json_columns=frozenset({"chosen_reward"})
    )
    read = list(form.read(io.BytesIO(data), "x", options))
    parts = [form.parse(piece.payload, "x", piece.first) for piece in read]
    assert [piece.num_records for piece in read] == [len(values) for _, values in parts]
    return parts


def flat(parts: list[tuple[Any, Any]]) -> tuple[list[int], list[object]]:
    return [o for part in parts for o in part[0]], [
        v for part in parts for v in part[1]
    ]


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS.values()])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(suffix: str, compression: str | None, tmp_path: Path) -> None:
    name = SUFFIXES[suffix]
    records = FLAT if name in ("csv", "tsv") else NESTED
    ending = next((s for s, c in COMPRESSIONS.items() if c == compression), "")
    path = tmp_path / f"x{suffix}{ending}".upper()  # in any case
    path.write_bytes(compress(WRITERS[name](records), compression))
    for block_bytes in (1000, 8 << 20):
        reader = InputReader(path, block_bytes=block_bytes)
        rows = [b.parse() for b in reader]
        assert [v for r in rows for v in r.values] == records
        assert [o for r in rows for o in r.ordinals] == list(range(len(records)))
        (source,) = reader.sources
        assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (source["bytes"], source["records"]) == (
            path.stat().st_size,
            len(records),
        )


@pytest.mark.parametrize("name", ["jsonl", "json", "csv"])
def test_byte_order_mark(name: str) -> None:
    data = b"\xef\xbb\xbf" + WRITERS[name](FLAT)
    assert flat(pieces(name, data, 100))[1] == FLAT


@pytest.mark.parametrize("name", FORMATS)  # a writer for each
def test_memory_is_bounded_by_the_block(name: str) -> None:
    limit = 4000
    form = FORMATS.load(name)
    stream = io.BytesIO(WRITERS[name](FLAT))
    before = 0
    for piece in form.read(stream, "x", ReadOptions(block_bytes=limit)):
        assert form.check or stream.tell() <= before + 20_000
        before = stream.tell()
        assert len(pickle.dumps(piece)) < limit + 1000


def test_a_large_row_group_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"text": [f"{i:07d}" * 1000 for i in range(6000)]})
    pq.write_table(
        table, path, row_group_size=6000, compression="none", use_dictionary=False
    )
    del table
    assert path.stat().st_size > 40_000_000
    tracemalloc.start()  # what Arrow reads through a Python file is Python's memory
    try:
        assert (
            sum(len(b.parse().values) for b in InputReader(path, block_bytes=1 << 20))
            == 6000
        )
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


blank = st.sampled_from([b"", b" ", b"\r", b"\t\x0b", b"\x0c "])
json_lines = blank | st.sampled_from([b'{"a": 1}', b'{"b": "\\n"}\r', b'[1, "x"]'])


@given(st.lists(json_lines), st.integers(1, 40), st.booleans())
def test_jsonl_cut_anywhere(lines: list[bytes], block_bytes: int, ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    kept = [i for i, line in enumerate(lines) if line.strip()]
    parts = pieces("jsonl", data, block_bytes)
    assert flat(parts) == (kept, [json.loads(lines[i]) for i in kept])
    assert all(values for _, values in parts)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 10**6)
    | st.text(max_size=4)
    | st.just(1.5e30),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=5,
)


@given(
    st.lists(json_values), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans()
)
@example([12], 1, None, False)
@example([{"0": None}], 1, None, False)
@example([{"0": {"a": 1}}], 1, None, False)
def test_json_cut_anywhere(
    records: list[object], block_bytes: int, indent: int | None, escape: bool
) -> None:
    if records:
        records = [0, *records]  # the first may else be refused as a whole table
    text = json.dumps(records, indent=indent, ensure_ascii=escape)
    parts = pieces("json", f" {text}\n ".encode(), block_bytes)
    assert flat(parts) == (list(range(len(records))), records)

    objects = [{"a": record} for record in records]
    if objects:  # one after another, without an array
        text = "\n".join(json.dumps(record) for record in objects)
        assert flat(pieces("json", text.encode(), 7))[1] == objects


cells = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5
)


@given(st.lists(st.tuples(cells, cells), max_size=8), st.integers(1, 40))
def test_csv_cut_anywhere(rows: list[tuple[str, str]], block_bytes: int) -> None:
    sink = io.StringIO(newline="")
    csv.writer(sink, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    expected = [{"a": a, "b": b} for a, b in rows]
    parts = pieces("csv", sink.getvalue().encode(), block_bytes)
    assert flat(parts) == (list(range(len(rows))), expected)


@given(st.lists(st.lists(st.text(max_size=9), max_size=4)), st.integers(1, 400))
def test_arrow_cut_anywhere(lists: list[list[str]], block_bytes: int) -> None:
    table = pa.table({"l": pa.array(lists, pa.list_(pa.string()))})
    for kind in (pa.ipc.new_file, pa.ipc.new_stream):
        parts = pieces("arrow", ipc(table, kind), block_bytes)
        assert flat(parts) == (list(range(len(lists))), [{"l": v} for v in lists])


def test_types_that_other_formats_do_not_have() -> None:
    import polars as pl

    frame = pl.DataFrame({"s": ["a", "b"] * 900, "l": [["x"], []] * 900})
    frame = frame.with_columns(pl.col("s").cast(pl.Categorical).alias("c"))
    frame = frame.with_columns(pl.lit("2026-01-02").str.to_datetime().alias("t"))
    sink = io.BytesIO()
    frame.write_ipc(sink)  # string views
    sizes = [len(values) for _, values in pieces("arrow", sink.getvalue(), 4000)]
    assert len(sizes) > 3
    first = flat(pieces("arrow", sink.getvalue()))[1][0]
    assert first == {"s": "a", "l": ["x"], "c": "a", "t": "2026-01-02 00:00:00.000000"}


def test_lone_surrogates_and_infinities_are_left_to_the_policies() -> None:
    lines = b'{"a": "\\ud800"}\n{"a": -Infinity}\n'
    expected = [{"a": "\ud800"}, {"a": float("-inf")}]
    assert flat(pieces("jsonl", lines))[1] == expected
    assert flat(pieces("json", lines))[1] == expected


def test_csv_cells_are_text_unless_their_column_cannot_be() -> None:
    text = (
        'prompt,chosen_reward,when\n007,2.50,1e5\n\n"",,"[1]"\nnan,[1.5],\n'
        "True,good,null\n"
    )
    assert flat(pieces("csv", text.encode())) == (
        [0, 1, 2, 3],
        [
            {"prompt": "007", "chosen_reward": 2.5, "when": "1e5"},
            {"prompt": "", "chosen_reward": None, "when": "[1]"},
            {"prompt": "nan", "chosen_reward": [1.5], "when": ""},
            {"prompt": "True", "chosen_reward": "good", "when": "null"},
        ],
    )


LINES = as_jsonl(FLAT)
GOOD_LINE = b'{"prompt": [1], "chosen": [2], "rejected": [3]}\n'
BROKEN_17 = b"".join([GOOD_LINE * 16, b'{"prompt": "x", }\n', GOOD_LINE])
PARQUET, FEATHER = as_parquet(NESTED), as_arrow(NESTED)
HALF = {c: compress(LINES, c)[:-50] for c in COMPRESSIONS.values()}
DEEP = b"[" * 100_000
TWICE = pa.table([[1], [2]], names=["a", "a"])
BAD_TEXT = pa.table({"a": pa.array([b"\xff"]).view(pa.string())})

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "truncated gzip": ("x.jsonl.gz", HALF["gzip"], "gzip"),
    "truncated zstd": ("x.csv.zst", HALF["zstd"], "zstd"),
    "not gzip": ("x.jsonl.gz", LINES, "gzip"),
    "garbage after gzip": ("x.json.gz", gzip.compress(b"[]") + b"rest", "gzip"),
    "invalid UTF-8 in JSON": ("x.json", b'[{"a":\n"\xff"}]', "item 1 or later"),
    "invalid UTF-8 in CSV": ("x.csv", b"a\n\xff\n", "after line"),
    "empty": ("x.jsonl", b"", ""),
    "blank lines": ("x.jsonl", b"\n \r\n", ""),
    "empty array": ("x.json", b"[ ]", ""),
    "header alone": ("x.csv", b"a,b\n", ""),
    "no rows": ("x.parquet", as_parquet([{"a": 1}][:0] or [{}]), ""),
    "deep document": ("x.json", DEEP, "item 1"),
    "a scalar": ("x.json", b' "hi"', "item 1"),
    "broken array": ("x.json", b'[{"a": 1},\n {"a": }]', "item 2"),
    "no comma": ("x.json", b'[{"a": 1}\n {"a": 2}]', "item 2"),
    "open array": ("x.json", b'[{"a": 1}\n', "item 2"),
    "trailing comma": ("x.json", b"[1, ]", "item 2"),
    "comma alone": ("x.json", b"[,1]", "item 1"),
    "text after the array": ("x.json", b"[1] 2", "item 2"),
    "bracket after a record": ("x.json", b'{"a": 1} ]', "item 2"),
    "records inside of an object": (
        "x.json",
        b'{"version": 1, "data": [{"prompt": "a"}]}',
        "'data'",
    ),
    "xz named json": ("x.json", b"\xfd7zXZ\0\xff", ".xz"),
    "gzip named csv": ("x.csv", gzip.compress(b"a\n1\n"), ".gz"),
    "cut short": ("x.json", b'[{"a": "xyz', "item 1"),
    "names alike in JSON": ("x.json", b'[{"a" : {"b" :1, "b" :true}}]', "'b'"),
    "ragged CSV": ("x.csv", b'a,b\n"1\n",2\n1,2,3\n', "row 2"),
    "open quote": ("x.csv", b'a,b\n1,"2\n', "line 2"),
    "columns alike": ("x.csv", b"a,b,a\n1,2,3\n", "'a'"),
    "columns alike in Arrow": ("x.arrow", ipc(TWICE, pa.ipc.new_file), "'a'"),
    "garbage parquet": ("x.parquet", b"PAR1 nope", "Parquet"),
    "truncated parquet": ("x.parquet", PARQUET[:-100], "Parquet"),
    "empty parquet": ("x.parquet", b"", "Parquet"),
    "garbage arrow": ("x.arrow", b"no arrow at all", "Arrow"),
    "truncated arrow": ("x.ipc", FEATHER[:-100], "Arrow"),
    "invalid UTF-8 in Arrow": ("x.arrow", ipc(BAD_TEXT, pa.ipc.new_file), ""),
}
"""Name, bytes, and what the error mentions beside the name."""


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data, mentioned = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        [block.parse() for block in InputReader(name)]
    message = str(caught.value)
    assert mentioned in message
    assert message.startswith(name)
    assert message.isprintable()


BROKEN_LINES: dict[str, tuple[str, bytes, int, str]] = {
    "line 17 of a gzip": ("x.jsonl.gz", compress(BROKEN_17, "gzip"), 17, "near"),
    "invalid UTF-8": ("x.jsonl", b'\n{"prompt": "\xff"}\n', 2, "0xff"),
    "deep line": ("x.jsonl", DEEP, 1, "1000 levels"),
    "deep line with NaN": ("x.jsonl", b"[NaN," + DEEP, 1, "1000 levels"),
    "gzip without its suffix": (
        "x.jsonl",
        gzip.compress(b"{}"),
        1,
        "End its name in .gz",
    ),
    "a document named jsonl": ("x.jsonl", as_json(NESTED), 1, "must be named .json"),
    "a huge number": ("x.jsonl", b"9" * 5000, 1, "digits"),
    "names alike": ("x.jsonl", b'{"a": 1, "b": 2, "a": 3}\n', 1, "'a'"),
}
"""Name, bytes, the number of the line, and what the report of it mentions."""


@pytest.mark.parametrize("case", BROKEN_LINES)
def test_a_line_that_is_no_json_is_left_to_the_job(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it stops; see ``tests/etl/test_broken_lines.py``."""
    name, data, number, mentioned = BROKEN_LINES[case]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    assert any(block.num_records for block in InputReader(name))
    with pytest.raises(RecordError, match=rf"^{name}, line {number}: ") as caught:
        packstore.pack(name, "out", kind="preference", num_workers=0)
    assert mentioned in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "b": 2, "a": 1}',  # one value, whichever is taken
        b'{"a": "say \\"b\\": \\"b\\": 1", "b" : [{"a": 1}, {"a": 2}]}',
        b'{"a": [1, {"b": 1}, {"b": 2}], "b": "\\ud800"}',
    ],
)
def test_names_that_only_seem_to_stand_twice(text: bytes) -> None:
    assert pieces("jsonl", text) == [([0], [json.loads(text)])]


def test_the_limit_of_nesting_is_not_that_of_the_interpreter() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        ((_, (value,)),) = pieces("jsonl", b"[" * 2000 + b"]" * 2000)
        assert isinstance(value, BrokenLine)
    finally:
        sys.setrecursionlimit(limit)
