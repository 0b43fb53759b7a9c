"""Progress of a job: how many records are read, of about how many."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_jobs import stopping, trained_tokenizer

import packstore

RECORDS = 1500
Calls = list[tuple[int, int | None]]


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    names = ("prompt", "chosen", "rejected")
    ids = {name: [rng.integers(1, 999, n).tolist() for n in rng.integers(1, 40, RECORDS)]
           for name in names}  # fmt: skip
    return pl.DataFrame(ids)


def text(frame: pl.DataFrame, path: Path) -> None:
    frame.select(
        pl.all().list.eval(pl.element().cast(pl.String)).list.join(" ")
    ).write_csv(path)


def compressed(frame: pl.DataFrame, path: Path) -> None:
    path.write_bytes(gzip.compress(frame.write_ndjson().encode()))


def stream(frame: pl.DataFrame, path: Path) -> None:
    table = frame.to_arrow()
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=100)


WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    "lines.jsonl": lambda frame, path: frame.write_ndjson(path),
    "lines.jsonl.gz": compressed,
    "array.json": lambda frame, path: frame.write_json(path),
    "cells.csv": text,
    "one-group.parquet": lambda frame, path: pq.write_table(frame.to_arrow(), path),
    "groups.parquet": lambda frame, path: pq.write_table(frame.to_arrow(), path, 100),
    "one-batch.arrow": lambda frame, path: frame.write_ipc(path),
    "stream.arrow": stream,
}


def calls(stage: str, source: Any, out: Path, **settings: Any) -> Calls:
    seen: Calls = []

    def progress(now: str, done: int, total: int | None, unit: str) -> None:
        if now == stage:
            assert unit == "records"
            seen.append((done, total))

    packstore.pack(
        source, out, pack_size=1024, progress=progress, num_workers=0, **settings
    )
    return seen


def check(seen: Calls) -> None:
    """The total is about right from half of the records on, and reached at the end
    alone.
    """
    *before, end = [(done, total) for done, total in seen if done]
    assert end == (RECORDS, RECORDS)
    assert before
    for done, total in before:
        assert total is not None
        assert done < total < 2 * RECORDS
        if done > RECORDS // 2:
            assert abs(total - RECORDS) < RECORDS / 10


FAST = {"lines.jsonl", "groups.parquet"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in WRITERS],
)
def test_the_number_of_records_is_estimated_while_a_file_is_read(
    frame: pl.DataFrame, tmp_path: Path, name: str
) -> None:
    tokenizer = (
        {"tokenizer": trained_tokenizer(["0123456789 "])} if name == "cells.csv" else {}
    )
    WRITERS[name](frame, tmp_path / name)
    settings = {
        "partitions": 3,
        "dedup": "pair",
        **tokenizer,
    }  # blocks are small for partitions
    for stage in ("read", "compare") if name == "lines.jsonl" else ("read",):
        check(calls(stage, str(tmp_path / name), tmp_path / stage, **settings))


def test_the_number_of_records_is_known_of_lists_frames_and_datasets(
    frame: pl.DataFrame, tmp_path: Path
) -> None:
    for number, source in enumerate([frame.to_dicts(), frame, frame.to_arrow()]):
        seen = calls("read", source, tmp_path / str(number))
        assert seen[-1] == (RECORDS, RECORDS)
    check(calls("read", packstore.open(tmp_path / "0"), tmp_path / "again"))


def test_a_rerun_counts_the_partitions_that_it_takes_over(
    frame: pl.DataFrame, tmp_path: Path
) -> None:
    frame.write_ndjson(tmp_path / "in.jsonl")
    settings: dict[str, Any] = {"partitions": 4}
    with pytest.raises(KeyboardInterrupt):
        packstore.pack(
            str(tmp_path / "in.jsonl"), tmp_path / "out", pack_size=1024, num_workers=0,
            progress=stopping("write", 20), **settings,
        )  # fmt: skip
    check(calls("read", str(tmp_path / "in.jsonl"), tmp_path / "out", **settings))


def test_records_of_an_iterator_are_counted_without_a_total(
    frame: pl.DataFrame, tmp_path: Path
) -> None:
    *before, end = calls("read", iter(frame.to_dicts()), tmp_path / "out")
    assert end == (RECORDS, RECORDS)
    assert {total for _, total in before} == {None}
