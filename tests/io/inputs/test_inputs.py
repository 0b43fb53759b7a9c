"""From what the user names to blocks: paths, globs, folders, URLs, tables,
iterables.
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import hashlib
import io
import itertools
import json
import lzma
import math
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packstore.config import PackConfig
from packstore.errors import InputError, StorageError
from packstore.io.inputs import InputReader
from packstore.io.store import Location

RECORDS: list[dict[str, Any]] = [
    {"prompt": f"p{i}", "chosen": "é\nx", "rejected": "007", "chosen_reward": i / 10}
    for i in range(300)
]
TABLE = pa.Table.from_pylist(RECORDS)
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()


def load(source: Any, **how: Any) -> list[Any]:
    return [
        value for block in InputReader(source, **how) for value in block.parse().values
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "_b.jsonl", ".c.jsonl"):
        Path(name).write_bytes(LINES)
    Path("a.parquet").write_bytes(b"")
    Path("sub").mkdir()
    Path("odd[1]?.jsonl").write_bytes(LINES)
    Path("sub/d.jsonl").write_bytes(LINES)
    Path("sub/dataset_infos.json").write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("b.jsonl", ["b.jsonl"]),
        (Path("b.jsonl"), ["b.jsonl"]),
        (["b.jsonl", "a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl", "b.jsonl"]),
        (("b.jsonl", "a.*"), ["b.jsonl", "a.jsonl", "a.parquet"]),
        ("./?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/[bd].jsonl", ["b.jsonl", "sub/d.jsonl"]),
        (".", ["./a.jsonl", "./a.parquet", "./b.jsonl", "./odd[1]?.jsonl"]),
        ("sub/", ["sub/d.jsonl"]),
        ("odd[1]?.jsonl", ["odd[1]?.jsonl"]),
    ],
)
def test_paths_are_recorded_as_given(
    folder: Path, source: Any, paths: list[str]
) -> None:
    assert InputReader(source).paths == dict(enumerate(paths))


def test_links_are_followed_and_what_is_no_file_is_refused(folder: Path) -> None:
    """As download caches and shared folders consist of them; none of them vanishes."""
    for name in ("linked/deep", "store/more"):
        Path(name).mkdir(parents=True)
    for name in ("store/x.jsonl", "store/more/y.jsonl", "linked/a.jsonl"):
        Path(name).write_bytes(LINES)
    Path("linked/b.jsonl").symlink_to("../store/x.jsonl")
    Path("linked/deep/c").symlink_to("../../store/more")
    Path("way").symlink_to("linked")
    for source, paths in {
        "linked": ["linked/a.jsonl", "linked/b.jsonl"],
        "way": ["way/a.jsonl", "way/b.jsonl"],
        "linked/*.jsonl": ["linked/a.jsonl", "linked/b.jsonl"],
        "linked/*/*/*.jsonl": ["linked/deep/c/y.jsonl"],
        "w*/**/y.jsonl": ["way/deep/c/y.jsonl"],
        "linked/**/*.jsonl": [
            "linked/a.jsonl",
            "linked/b.jsonl",
            "linked/deep/c/y.jsonl",
        ],
    }.items():
        assert list(InputReader(source).paths.values()) == paths
        assert len(load(source)) == 300 * len(paths)
    os.mkfifo("pipe.jsonl")
    everywhere = "linked/**/*.jsonl"
    for link, target, sources in (
        ("d.jsonl", "nowhere", ("linked", "linked/*.jsonl", everywhere)),
        ("d.jsonl", "d.jsonl", ("linked", "linked/*.jsonl", everywhere)),
        ("d.jsonl", "../pipe.jsonl", ("linked", "linked/*.jsonl", everywhere)),
        ("deep/c/up", "../..", (everywhere,)),
    ):
        Path("linked", link).symlink_to(target)
        for source in sources:
            with pytest.raises(StorageError, match=Path(link).name):
                load(source)
        Path("linked", link).unlink()


def test_what_lies_beside_the_records_of_a_folder(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Is named once, records that are not read first; a compression must be one that is
    read.
    """
    Path("sub/more").mkdir()
    for name in ("_x.jsonl", ".y.jsonl", ".hidden", "h.txt"):
        Path("sub", name).write_bytes(LINES)
    for name in ("d.jsonl.bz2", "D.NDJSON"):
        data = bz2.compress(LINES[:50_00]) + bz2.compress(LINES[50_00:])
        Path("sub", name).write_bytes(data if name.endswith("2") else LINES)
    Path("sub/e.jsonl.xz").write_bytes(
        lzma.compress(LINES) + bytes(8) + lzma.compress(LINES) + bytes(4)
    )
    reader = InputReader("sub")
    assert [r for block in reader for r in block.parse().values] == 5 * RECORDS
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "left out of sub: '.y.jsonl'; '_x.jsonl'; 'h.txt'; 'more', a folder"
    for name in ("f.jsonl.lz4", "f.json.zip"):
        Path("sub", name).write_bytes(b"")
        with pytest.raises(InputError, match=name):
            load("sub")
        Path("sub", name).unlink()
    whole = lzma.compress(LINES)
    for data in (
        b"\xfd7zXZ\0",
        whole[:-9],
        b"x" * 99,
        whole + b"rest",
        whole + whole[:-9],
    ):
        Path("sub/e.jsonl.xz").write_bytes(data)
        with pytest.raises(InputError, match="xz"):
            load("sub")


@pytest.mark.parametrize("name", ["a::b.jsonl", "memory::b.jsonl", "::c.jsonl"])
def test_only_a_name_with_a_scheme_is_a_chain(folder: Path, name: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(LINES)
    assert load(name) == load("a.jsonl")
    assert Location(name).local_path == str(folder / name)


@pytest.mark.parametrize(
    ("source", "mentioned"),
    [
        ("nowhere.jsonl", "nowhere.jsonl"),
        (["a.jsonl", "nowhere.jsonl"], "nowhere.jsonl"),
        ("trl-lib/kto", "hf://datasets/trl-lib/kto"),
        ("no*.jsonl", "no*.jsonl"),
        ("notes.txt", "notes.txt"),
        ("data.gz", "data.gz"),
        ("*.txt", "notes.txt"),
        ("none", "none"),
        ("packed", "packed"),
        ({"prompt": "p"}, "dict"),
        (7, "int"),
        (None, "NoneType"),
        (b"x", "bytes"),
        ([], "<iterable>"),
        (TABLE[:0], "<table>"),
        ("memory://bucket/none.jsonl", "memory://bucket/none.jsonl"),
        ("memory://bucket/none*.jsonl", "memory://bucket/none*.jsonl"),
    ],
)
def test_what_is_no_input(folder: Path, source: Any, mentioned: str) -> None:
    for name in ("none", "packed/_packstore"):
        Path(name).mkdir(parents=True)
    Path("data.gz").write_bytes(b"")
    with pytest.raises(InputError, match=re.escape(mentioned)) as caught:
        load(source)
    assert str(caught.value).isprintable()


def test_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again for minutes, as other stores are."""
    # The variable of the environment is read at the import, which was before.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
        load("hf://datasets/trl-lib/kto/data/train-*.parquet")


def test_a_file_that_vanishes(folder: Path) -> None:
    reader = InputReader("a.jsonl")
    Path("a.jsonl").unlink()
    with pytest.raises(StorageError, match=r"^a\.jsonl"):
        list(reader)


def test_sources(folder: Path) -> None:
    Path("c.jsonl.gz").write_bytes(gzip.compress(LINES) + gzip.compress(b"\n\n"))
    Path("empty.jsonl").write_bytes(b"\n")
    reader = InputReader(["c.jsonl.gz", "empty.jsonl", "a.jsonl"])
    assert [block.source for block in reader] == [0, 2]
    for source, records in zip(reader.sources, [300, 0, 300], strict=True):
        data = Path(source["path"]).read_bytes()
        assert source["sha256"] == hashlib.sha256(data).hexdigest()
        assert (source["bytes"], source["records"]) == (len(data), records)


def test_urls() -> None:
    """A password in one is not recorded."""
    store = fsspec.filesystem("memory")
    pq.write_table(TABLE, sink := pa.BufferOutputStream())
    store.pipe_file("/inputs/a.jsonl", LINES)
    store.pipe_file("/inputs/b.parquet", sink.getvalue().to_pybytes())
    store.pipe_file("/me:secret@host/a.jsonl", LINES)
    try:
        for source in ("memory://inputs/a.jsonl", "memory://inputs/b.parquet"):
            reader = InputReader(source)
            assert [v for b in reader for v in b.parse().values] == RECORDS
            (told,) = reader.sources
            assert (told["path"], told["bytes"]) == (source, store.size(source))
        assert load("memory://inputs/*") == load("memory://inputs") == RECORDS * 2
        reader = InputReader("memory://me:secret@host/a.jsonl")
        assert "secret" not in "".join(b.path for b in reader) + str(reader.sources)
    finally:
        store.rm("/inputs", recursive=True)
        store.rm("/me:secret@host", recursive=True)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: RECORDS,
    "generator": lambda: iter(RECORDS),
    "arrow table": lambda: TABLE,
    "arrow reader": lambda: TABLE.to_reader(7),
    "polars frame": lambda: pl.DataFrame(RECORDS),
    "polars lazy frame": lambda: pl.DataFrame(RECORDS).lazy(),
    "datasets.Dataset": lambda: hugging_face(),
    "with format torch": lambda: hugging_face().with_format("torch"),
    "with format pandas": lambda: hugging_face().with_format("pandas"),
    "streamed": lambda: hugging_face().to_iterable_dataset().with_format("torch"),
    "with a transform": lambda: hugging_face().with_transform(lambda batch: batch),
    "a dict of one split": lambda: splits("train"),
}


def hugging_face() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(RECORDS)


def splits(*names: str) -> Any:
    return pytest.importorskip("datasets").DatasetDict(
        dict.fromkeys(names, hugging_face())
    )


@pytest.mark.parametrize("name", SOURCES)
def test_tables_and_iterables_give_the_same_records_and_fingerprint(name: str) -> None:
    reader = InputReader(SOURCES[name](), block_bytes=1000)
    blocks = [block.parse() for block in reader]
    assert [v for rows in blocks for v in rows.values] == RECORDS
    assert [o for rows in blocks for o in rows.ordinals] == list(range(len(RECORDS)))
    (source,) = reader.sources
    lines = "".join(
        json.dumps(r, separators=(",", ":")) + "\n" for r in RECORDS
    ).encode()
    assert source["sha256"] == hashlib.sha256(lines).hexdigest()
    assert (source["bytes"], source["records"]) == (len(lines), 300)


def test_folders_of_save_to_disk(folder: Path) -> None:
    """The files that its state names; not what lies beside, nor a view that only
    `datasets` has.
    """
    hugging_face().select(range(299, -1, -1)).save_to_disk("one", num_shards=2)
    Path("one/cache-7.arrow").write_bytes(b"left by a map")
    assert load("one") == RECORDS[::-1]
    splits("train").save_to_disk("single")
    assert load("single") == RECORDS
    splits("train", "test").save_to_disk("several")
    assert load("several/test") == RECORDS
    hugging_face().with_format("torch", columns=["prompt"]).save_to_disk("view")
    state = Path("single/train/state.json")
    old = {
        **json.loads(state.read_text(encoding="utf-8")),
        "_indices_files": [{"filename": "indices.arrow"}],
    }
    state.write_text(json.dumps(old), encoding="utf-8")
    Path("several/test/state.json").write_text(
        '{"_data_files": [{"filename": "../one/x.arrow"}]}', encoding="utf-8"
    )
    for name, split in {"up": "..", "here": "."}.items():
        Path("single/train", name).mkdir()
        Path("single/train", name, "dataset_dict.json").write_text(
            f'{{"splits": ["{split}"]}}', encoding="utf-8"
        )
    for name in ("test_sft-00000-of-00001.jsonl", "train_sft-00000-of-00001.jsonl"):
        Path("sub", name).write_bytes(LINES)
    for source, mentioned in {
        "sub": "train_sft, test_sft",
        "several": "train, test",
        "several/test": "state.json",
        "single/train/up": "dataset_dict.json",
        "single/train/here": "dataset_dict.json",
        "view": "view/state.json",
        "single": "single/train/state.json",
    }.items():
        with pytest.raises(InputError, match=re.escape(mentioned)):
            load(source)
    with pytest.raises(InputError, match="train, test"):
        load(splits("train", "test"))


def test_a_lazy_frame_whose_query_fails(folder: Path) -> None:
    def refuse(value: int) -> int:
        raise ValueError("refused")

    frame = pl.LazyFrame({"a": range(9)})
    failing = frame.with_columns(
        pl.col("a").map_elements(refuse, return_dtype=pl.Int64)
    )
    with pytest.raises(InputError, match="refused"):
        load(failing)
    # Polars 2.1 panics at this type, and its collect_batches then ends like a query
    # that is done.
    table = pa.table({"a": pa.array([Decimal(9)], pa.decimal256(60, 0))})
    with pa.ipc.new_file("panic.arrow", table.schema) as writer:
        writer.write_table(table)
    panicking = pl.concat([frame, pl.scan_ipc("panic.arrow").cast(pl.Int64)])
    with pytest.raises(InputError, match="<table>"):
        load(panicking)


def test_iterables_are_not_read_ahead() -> None:
    reader = InputReader(itertools.repeat({"a": 1}), block_bytes=1000)
    assert next(iter(reader)).parse().values[0] == {"a": 1}


def test_values_of_other_libraries_become_plain_and_others_are_left_to_policies() -> (
    None
):
    day = datetime.date(2026, 1, 2)
    odd = {
        "ids": np.arange(3),
        "score": np.float32(0.5),
        "n": np.int64(2),
        "t": (1, 2),
        "d": day,
    }
    plain = {"ids": [0, 1, 2], "score": 0.5, "n": 2, "t": [1, 2], "d": "2026-01-02"}
    assert load([odd]) == [plain]
    table = pa.table(
        {"d": [day], "s": pa.array(["x"]).dictionary_encode(), "n": [None]}
    )
    assert load(table) == [{"d": "2026-01-02", "s": "x", "n": None}]
    records = ["text", None, {"a": "\ud800"}, {"a": math.inf}]
    assert load(records) == records
    nan = {
        "reward": math.nan,
        "a": math.nan,
        "b": {"reward": math.nan},
        "c": [math.nan],
    }
    (loaded,) = load(
        [nan]
    )  # a reward that is none is told; pandas writes the others for null
    assert math.isnan(loaded["reward"])
    assert math.isnan(loaded["c"][0])
    assert loaded.keys() == {"reward", "b", "c"}
    assert loaded["b"] == {}


def test_rows_of_pandas_have_the_nulls_of_their_table() -> None:
    """Arrow gives pandas its structs in arrays of objects, with a null or NaN for what
    is none.
    """
    calls = [
        {"n": 1, "x": [0.5, None]},
        {"s": "a", "deep": {"t": True}},
        {"deep": {"u": None}},
    ]
    table = pa.table(
        {"messages": [[{"role": "user", "calls": calls}], [{"calls": calls[:1]}]]}
    )
    frame = table.to_pandas()
    expected = load(table)
    assert expected[0]["messages"][0]["calls"][0] == {"n": 1, "x": [0.5, None]}
    assert load(frame) == expected
    assert load(frame.to_dict("records")) == expected
    structs = [
        {"system": "s", "meta": {"a": 1.5, "b": "x"}},
        {"system": None, "meta": {"a": None}},
    ]
    given = pa.Table.from_pylist(structs).to_pandas().to_dict("records")
    given[1]["meta"]["a"] = math.nan
    (_, second) = load(given)
    assert second.get("system") is None
    assert second["meta"].get("a") is None


def test_maps_are_mappings_with_json_inside() -> None:
    texts = pa.array(['{"y": null}', "[1]"])
    json_ = pa.ExtensionArray.from_storage(pa.json_(), texts)
    maps = pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), json_)
    table = pa.table(
        {"arguments": maps, "in": pa.ListArray.from_arrays([0, 2, 2], maps)}
    )
    assert load(table) == [
        {"arguments": {"a": {"y": None}}, "in": [{"a": {"y": None}}, {"b": [1]}]},
        {"arguments": {"b": [1]}, "in": []},
    ]
    with pytest.raises(InputError, match="'a'"):
        load(
            pa.table(
                {
                    "m": pa.array(
                        [[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())
                    )
                }
            )
        )


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"


@pytest.mark.parametrize(
    "suffix",
    ["jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "parquet.zst", "csv.xz"],
)
def test_a_pointer_of_git_lfs(folder: Path, suffix: str) -> None:
    name = f"a.{suffix}"
    Path(name).write_bytes(POINTER)
    with pytest.raises(InputError, match=rf"{name}.*Git LFS"):
        load(name)
    with pytest.raises(InputError, match="Git LFS"):
        load(io.BytesIO(POINTER))


TURNS = [{"role": "user", "content": "x"}]
BY_COLUMN: list[Any] = [
    {"prompt": ["p", "q"], "chosen": ["a", "b"], "reward": [1, None]},
    {"messages": [TURNS, TURNS]},
    {"chosen": [[4], [5]], "rejected": [[6], [7]]},
    {"prompt": {"0": "p", "1": "q"}, "chosen": {"0": "a", "1": "b"}},
    {"messages": {"3": TURNS}},
    {"0": {"prompt": "p"}, "1": {"prompt": "q"}},
    {"columns": ["prompt"], "index": [0], "data": [["p"]]},
]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("value", BY_COLUMN, ids=str)
def test_a_table_by_column(folder: Path, value: Any, suffix: str) -> None:
    Path(f"a.{suffix}").write_text(json.dumps(value) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"a\.{suffix}"):
        load(f"a.{suffix}")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS, "chosen": TURNS, "rejected": TURNS},
        {"prompt": [5], "chosen": [6], "rejected": [7]},
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"responses": ["a", "b"], "scores": [1, 2]},
        {"messages": {"role": "user"}, "0": 1},
        {"prompt": [], "chosen": []},
        {},
    ],
    ids=str,
)
def test_records_made_of_lists_are_no_table(folder: Path, record: Any) -> None:
    Path("a.json").write_text(json.dumps([record]), encoding="utf-8")
    assert load("a.json") == [record]


@pytest.mark.parametrize("value", [b"raw", {1, 2}, object()])
def test_values_that_json_has_no_word_for(value: object) -> None:
    with pytest.raises(InputError, match="<iterable>, item 2"):
        load([{"prompt": "p"}, {"prompt": value}])


def test_columns_that_are_not_text(folder: Path) -> None:
    Path("x.csv").write_text("q,r,weight,note\n1,2,3,4\n", encoding="utf-8")
    config = PackConfig(
        fields={"prompt": "q", "chosen_reward": "r"},
        carry=("weight:float64", "note:string"),
    )
    assert load("x.csv", config=config) == [
        {"q": "1", "r": 2, "weight": 3, "note": "4"}
    ]
