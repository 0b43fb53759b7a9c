"""Reading records: every format and codec, whatever the source, and what is wrong with it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packstore.errors import InputError, StorageError
from packstore.io import inputs
from packstore.io.formats import FORMATS, ReadOptions
from packstore.io.inputs import InputReader

RECORDS: list[dict[str, Any]] = [
    {"prompt": f"p{i}", "chosen": "é\nx", "rejected": "007", "chosen_reward": 1.5 * i}
    for i in range(3000)
]
TABLE = pa.Table.from_pylist(RECORDS)
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()


def load(source: Any) -> list[object]:
    return [value for block in InputReader(source) for value in block.parse().values]


def write_zstd(path: Path, data: bytes) -> None:
    with pa.output_stream(path, compression="zstd") as file:
        file.write(data)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(LINES)
    Path("bom.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    Path("crlf.jsonl").write_bytes(LINES.replace(b"\n", b"\r\n")[:-2])
    Path("two.jsonl.gz").write_bytes(gzip.compress(LINES[:999]) + gzip.compress(LINES[999:]))
    write_zstd(Path("a.ndjson.zst"), LINES)
    Path("a.json").write_text(json.dumps(RECORDS))
    Path("a.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS).encode()))
    pq.write_table(TABLE, "a.parquet")
    Path("a.parquet.gz").write_bytes(gzip.compress(Path("a.parquet").read_bytes()))
    pa.feather.write_feather(TABLE, "a.arrow", compression="uncompressed")
    with pa.OSFile("stream.arrow", "wb") as f, pa.ipc.new_stream(f, TABLE.schema) as writer:
        writer.write_table(TABLE)
    pa.csv.write_csv(TABLE, "a.csv")
    pa.csv.write_csv(TABLE, "a.tsv", pa.csv.WriteOptions(delimiter="\t"))
    return tmp_path


NAMES = [
    "a.jsonl", "bom.jsonl", "crlf.jsonl", "two.jsonl.gz", "a.ndjson.zst", "a.json", "a.json.gz",
    "a.parquet", "a.parquet.gz", "a.arrow", "stream.arrow", "a.csv", "a.tsv",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_records(files: Path, name: str) -> None:
    reader = InputReader(name)
    blocks = list(reader)
    assert [value for block in blocks for value in block.parse().values] == RECORDS
    ordinals = [o for block in blocks for o in block.parse().ordinals]
    assert ordinals == list(range(len(RECORDS)))
    (source,) = reader.sources()
    assert (source["path"], source["bytes"]) == (name, Path(name).stat().st_size)
    assert source["sha256"] == inputs.hashlib.sha256(Path(name).read_bytes()).hexdigest()


def test_tables_frames_and_iterables() -> None:
    import polars as pl

    frame = pl.DataFrame(RECORDS)
    for source in (TABLE, TABLE.to_reader(), frame, frame.lazy(), RECORDS, iter(RECORDS)):
        assert load(source) == RECORDS


def test_paths_globs_folders_and_lists(files: Path) -> None:
    def paths(source: Any) -> list[str]:
        return [Path(i.path).name for i in inputs.expand(source)]

    assert paths(["a.parquet", "a.jsonl"]) == ["a.parquet", "a.jsonl"]
    assert paths("a.j*") == ["a.json", "a.json.gz", "a.jsonl"]
    Path("notes.txt").write_text("not an input")
    assert paths(files) == sorted(NAMES)
    sources = {b.source for b in InputReader(["a.jsonl", "a.parquet"])}
    assert sources == {0, 1}
    Path("odd[1].jsonl").write_bytes(LINES)
    assert paths("odd[1].jsonl") == ["odd[1].jsonl"]


def test_a_url() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/bucket/a.jsonl", LINES)
    reader = InputReader("memory://bucket/a.jsonl")
    assert sum(len(b.parse().values) for b in reader) == len(RECORDS)


lines = st.lists(st.sampled_from([b"", b" ", b'{"a": 1}', b'{"b": "\\n"}', b'[1, "x"]']))


@given(lines, st.integers(1, 40), st.booleans())
def test_blocks_are_cut_anywhere_with_the_same_result(
    rows: list[bytes], block_bytes: int, ends: bool
) -> None:
    import io

    data = b"\n".join(rows) + (b"\n" if ends and rows else b"")
    format_ = FORMATS.load("jsonl")
    first, ordinals, values = 0, [], []
    for payload in format_.read(io.BytesIO(data), ReadOptions("x", block_bytes)):
        o, v = format_.parse(payload.content, "x", first)
        ordinals += list(o)
        values += list(v)
        first += payload.ordinals
    kept = [i for i, row in enumerate(rows) if row.strip()]
    assert ordinals == kept
    assert values == [json.loads(rows[i]) for i in kept]


def test_lone_surrogates_and_nan_are_left_to_the_policies() -> None:
    parse = FORMATS.load("jsonl").parse
    assert parse(b'{"a": "\\ud800"}', "x", 0)[1] == [{"a": "\ud800"}]
    assert parse(b'{"a": Infinity}', "x", 0)[1] == [{"a": float("inf")}]


def test_csv_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('prompt,chosen,rejected,chosen_reward,q\n1,007,"a\nb",2.5,3\nnan,,null,1,4\n')
    assert load(path) == [
        {"prompt": "1", "chosen": "007", "rejected": "a\nb", "chosen_reward": 2.5, "q": 3},
        {"prompt": "nan", "chosen": "", "rejected": "null", "chosen_reward": 1.0, "q": 4},
    ]
    (first, *_) = [v for b in InputReader(path, text_columns=["q"]) for v in b.parse().values]
    assert first["q"] == "3"  # type: ignore[index]


def test_reading_is_lazy(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1000)
    blocks = iter(InputReader(["a.jsonl", "missing-later.jsonl"][:1]))
    first = next(blocks)
    assert 0 < len(first.content) <= 1000

    def endless() -> Iterator[dict[str, int]]:
        while True:
            yield {"a": 1}

    assert next(iter(InputReader(endless()))).parse().values[0] == {"a": 1}


half = len(gzip.compress(LINES)) // 2
BROKEN: dict[str, tuple[str, bytes, str]] = {
    "truncated gzip": (
        "t.jsonl.gz",
        gzip.compress(LINES)[:half],
        r"t\.jsonl\.gz: .* the end in the middle of the compressed stream",
    ),
    "no gzip": ("n.jsonl.gz", b"text", r"n\.jsonl\.gz: it must be a whole gzip file"),
    "no zstd": ("n.jsonl.zst", b"text" * 9, r"n\.jsonl\.zst: it must be a whole zstd file"),
    "garbage parquet": ("g.parquet", b"PAR1 nope", r"g\.parquet: it must be a Parquet file"),
    "garbage arrow": ("g.arrow", b"no arrow at all", r"g\.arrow: it must be an Arrow IPC file"),
    "empty": ("e.jsonl", b"", r"e\.jsonl: there must be records"),
    "blank": ("e.jsonl", b"\n \n", r"e\.jsonl: there must be records"),
    "empty csv": ("e.csv", b"", r"e\.csv: there must be records"),
    "ragged csv": ("r.csv", b"a,b\n1,2\n1,2,3\n", r"Row #3: Expected 2 columns, got 3"),
    "broken line": ("j.jsonl", b'{"a": 1}\n{"a": }\n', r"j\.jsonl, line 2: .* at column 7"),
    "invalid UTF-8": ("u.jsonl", b'\n{"p": "\xff"}\n', r"u\.jsonl, line 2: .* byte 0xff"),
    "deep nesting": ("d.jsonl", b"[" * 100_000, r"d\.jsonl, line 1: .* too deeply nested"),
    "deep json": ("d.json", b"[" * 100_000, r"d\.json: .* too deeply nested"),
    "no array": ("x.json", b'"hi"', r"x\.json: a \.json file must hold an array of records"),
    "lines named json": ("x.json", b'{"a":1}\n{"a":2}\n', r"x\.json, line 2: .* Name it \.jsonl"),
    "a huge number": ("h.jsonl", b'{"a": ' + b"9" * 5000 + b"}", r"h\.jsonl, line 1: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data, text = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(InputError, match=text) as caught:
        load(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("nowhere.jsonl", "no such file"),
        ("no*.jsonl", "the pattern must match files"),
        ("notes.docx", r"its suffix must be one of: \.jsonl"),
        ("empty", "the folder must hold files of a known kind"),
        ([], "no records"),
        ({"prompt": "p"}, "an iterable of dicts"),
        (7, "an iterable of dicts"),
    ],
)
def test_what_is_no_input(
    source: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.docx").write_text("x")
    Path("empty").mkdir()
    with pytest.raises((InputError, StorageError), match=text):
        load(source)


def test_a_line_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packstore.io.formats import jsonl

    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b" " * 3000)
    with pytest.raises(InputError, match="line 2: a line must have at most"):
        load(path)


COUNTS = {
    "pairs/hh_harmless_raw.jsonl.gz": 2312,
    "pairs/chat_zh.jsonl": 300,
    "ranked/oasst_k2_6.jsonl": 211,
    "sft/reason_tool.jsonl": 50,
}


@pytest.mark.parametrize("name", COUNTS)
def test_real_files(shared_data: Path, name: str) -> None:
    assert len(load(shared_data / name)) == COUNTS[name]
