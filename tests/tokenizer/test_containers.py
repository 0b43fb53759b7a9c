"""The same records from any container give the same ids: nulls of tables, JSON at any
depth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packstore

TEMPLATE = (
    "{{ tools | tojson(sort_keys=true) }}"
    "{% for m in messages %}[{{ m | tojson(sort_keys=true) }}]<e>{% endfor %}"
    "{% if add_generation_prompt %}[{% endif %}"
)
TEXTS = st.text('abé"\\{}[] null', max_size=4)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from("abc"), values, min_size=1, max_size=3)


def typed(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that Arrow can hold: every name has values of one type."""
    members: dict[str, st.SearchStrategy[Any]] = {
        "text": TEXTS,
        "number": st.integers(-9, 9),
        "flags": st.lists(st.booleans(), max_size=2),
    }
    if depth:
        members |= {
            "object": typed(depth - 1),
            "objects": st.lists(typed(depth - 1), max_size=2),
        }
    return st.fixed_dictionaries({"name": TEXTS}, optional=members)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda values: st.lists(values, max_size=2) | objects(values),
    max_leaves=5,
)
"""JSON of any types, with nulls of its own."""


def records(members: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Chats with tools and calls."""
    function = st.fixed_dictionaries({"name": st.just("f"), "parameters": members})
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": function})
    call = st.fixed_dictionaries({"name": st.just("f"), "arguments": members})
    made = st.lists(st.fixed_dictionaries({"function": call}), min_size=1, max_size=2)
    begin = [{"role": "user", "content": "Q"}]

    def record(tools: Any, calls: Any, content: str) -> dict[str, Any]:
        answer = {"role": "assistant", "content": content}
        return {
            "messages": [*begin, {**answer, "tool_calls": calls}, *begin, answer],
            "tools": tools,
        }

    chats = st.builds(
        record, st.lists(tool, min_size=1, max_size=3), made, st.just("A")
    )
    return st.lists(chats, min_size=1, max_size=4)


def frames(table: Any, folder: Path) -> dict[str, Any]:
    """The same table as files, and as every kind of frame."""
    parquet, arrow, stream = (
        str(folder / name) for name in ("p.parquet", "f.arrow", "s.arrow")
    )
    pq.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(stream, table.schema) as file:
        file.write_table(table)
    frame = pl.read_parquet(parquet)
    return {
        "parquet": parquet,
        "arrow": arrow,
        "stream": stream,
        "table": table,
        "reader": table.to_reader(),
        "polars": frame,
        "lazy": pl.scan_parquet(parquet),
        "arrow of polars": pa.table(frame),
    }


@pytest.fixture(scope="module")
def ids(pack, byte_level):
    """Packs a container with a template that prints all that it gets; gives the
    sequences.
    """
    source = byte_level(template=TEMPLATE)

    def run(container: Any) -> list[Any]:
        out, tokenizer = f"memory://{os.urandom(8).hex()}", source.file
        dataset = packstore.pack(
            container,
            out,
            tokenizer,
            chat_template=TEMPLATE,
            pack_size=65536,
            num_workers=0,
        )
        frame = packstore.scan(dataset, tokens=True).collect().sort("example_id")
        return [*frame.select("example_id", "input_ids", "labels").iter_rows()]

    return run


@settings(max_examples=3, deadline=None)
@given(chats=records(typed(2)))
def test_nulls_that_tables_add_are_absent(chats, ids, tmp_path_factory):
    """Arrow gives every struct the members of all, null where a record has none."""
    folder = tmp_path_factory.mktemp("typed")
    expected = ids(chats)
    dataset = datasets.Dataset.from_list(chats)
    table = dataset.with_format("arrow")[:]
    others = {
        **frames(table, folder),
        "pandas": pd.DataFrame(chats),
        "dataset": dataset,
        "iterable dataset": dataset.to_iterable_dataset(),
    }
    for name, container in others.items():
        assert ids(container) == expected, name


@settings(max_examples=3, deadline=None)
@given(chats=records(objects(ANY)), depth=st.integers(0, 3))
def test_json_in_tables_is_read_at_any_depth(chats, depth, ids, tmp_path_factory):
    """Fields of the type ``Json()`` of datasets, arrow.json: their nulls stay."""
    folder = tmp_path_factory.mktemp("json")
    expected = ids(chats)
    dataset = datasets.Dataset.from_list(chats, features=features(depth))
    dataset.to_parquet(folder / "d.parquet")
    dataset.save_to_disk(folder / "saved")
    others = {
        **frames(pq.read_table(folder / "d.parquet"), folder),
        "datasets's parquet": str(folder / "d.parquet"),
        "saved": str(folder / "saved"),
        "dataset": dataset,
        "iterable dataset": dataset.to_iterable_dataset(),
    }
    for name, container in others.items():
        assert ids(container) == expected, name


def test_class_labels_are_their_names(byte_level, tmp_path):
    """Their numbers may be of any order; -1 is none. Polars keeps no names: they are
    given back.
    """
    text = datasets.Value("string")
    label = datasets.ClassLabel(names=["chosen", "rejected"])
    columns = {"prompt": ["Q"] * 3, "completion": ["x", "y", "z"], "label": [0, 1, -1]}
    typed = datasets.Features({"prompt": text, "completion": text, "label": label})
    dataset = datasets.Dataset.from_dict(columns, features=typed)
    table = dataset.with_format("arrow")[:]
    dataset.save_to_disk(tmp_path / "saved")
    held = {
        n: c
        for n, c in frames(table, tmp_path).items()
        if n in ("parquet", "stream", "table")
    }
    named = pl.col("label").replace_strict(dict(enumerate(label.names)), default=None)
    held["named"] = pl.from_arrow(table).with_columns(named)
    for container in (*held.values(), str(tmp_path / "saved"), dataset):
        out = f"memory://{os.urandom(8).hex()}"
        how = {"on": {"missing_field": "drop"}, "max_drop_rate": 1, "num_workers": 0}
        how["fields"] = {
            "score": "label"
        }  # else a record without a label is of another kind
        packed = packstore.pack(container, out, byte_level().file, pack_size=256, **how)
        rewards = (
            packstore.scan(packed).collect().sort("example_id")["rewards"].to_list()
        )
        assert rewards == [[1], [0]]
        assert packed.manifest.records.dropped == {"missing_field": 1}


def features(depth: int) -> datasets.Features:
    """Features whose tools and calls are JSON from a depth on."""
    text, json_ = datasets.Value("string"), datasets.Json()
    function = json_ if depth < 3 else {"name": text, "parameters": json_}
    tool = json_ if depth < 2 else {"type": text, "function": function}
    called = json_ if depth < 3 else {"name": text, "arguments": json_}
    call = json_ if depth < 2 else {"function": called}
    turn = {"role": text, "content": text, "tool_calls": datasets.List(call)}
    turns = datasets.List(json_ if depth < 2 else turn)
    top = {"messages": turns, "tools": datasets.List(tool)}
    return datasets.Features(top if depth else dict.fromkeys(top, json_))


SCRIPT = """
import sys
import polars as pl, pyarrow as pa
import packstore
frame = pl.read_parquet(sys.argv[1])
for n, given in enumerate((frame, frame.lazy(), pa.table(frame), sys.argv[1])):
    out = packstore.pack(given, f"{sys.argv[2]}-{n}", sys.argv[3], num_workers=0,
                         chat_template=sys.argv[4], pack_size=65536)
    print(packstore.scan(out, tokens=True).collect()["input_ids"].to_list())
"""


@pytest.mark.slow
@pytest.mark.parametrize("perturb", ["0", "90", "165"])
def test_no_memory_is_read_that_is_not_the_data_s(perturb, byte_level, tmp_path):
    """Freed and fresh memory is filled with a byte: what reads it gives other ids."""
    question, answer = (
        {"role": role, "content": "Q"} for role in ("user", "assistant")
    )
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"a" * i: i}}}
        for i in range(40)
    ]
    rows = [{"messages": [question, answer], "tools": tools[:n]} for n in range(1, 40)]
    turn = dict.fromkeys(("role", "content"), datasets.Value("string"))
    kinds = {"messages": datasets.List(turn), "tools": datasets.List(datasets.Json())}
    path, tokenizer = str(tmp_path / "d.parquet"), tmp_path / "tokenizer.json"
    datasets.Dataset.from_list(rows, features=datasets.Features(kinds)).to_parquet(path)
    byte_level().file.save(str(tokenizer))
    out = packstore.pack(
        rows, f"memory://{perturb}", tokenizer, chat_template=TEMPLATE, pack_size=65536
    )
    expected = packstore.scan(out, tokens=True).collect()["input_ids"].to_list()
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            path,
            str(tmp_path / "out"),
            str(tokenizer),
            TEMPLATE,
        ],
        env={
            **os.environ,
            "MALLOC_PERTURB_": perturb,
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [*map(json.loads, result.stdout.splitlines())] == [expected] * 4
