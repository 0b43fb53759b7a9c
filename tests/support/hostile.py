"""Datasets whose values are hostile although every hash fits, read by everything that reads packs.

A case is a pure function of its number: a golden dataset, of which a shard was written anew with
some values changed, its checksums, hashes and counts made to fit. Run as a script it reads the
cases FIRST to LAST, tells the number of each before it begins, so that a crash has a name, and
prints every error that is not one of packstore's. `tests/fuzz` runs some of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import PackConfig, WriteConfig
from packstore.errors import PackstoreError
from packstore.io.checksums import row_group_crc32
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.manifest import Manifest
from packstore.io.parquet import parquet_writer
from packstore.io.shard import FileHashes, ShardInfo

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden" / "v1"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
NUMBERS = [0, 1, 2, -1, -2, 7, 1000, 3_000_000, 2**31 - 1, -(2**31), 2**30]
MEMORY_BYTES = 1 << 30


def make(number: int, folder: Path) -> str:
    """Writes case `number` into `folder`; returns what was done to it."""
    rng = random.Random(number)
    name = rng.choice(NAMES)
    shutil.copytree(GOLDEN / name, folder)
    file = folder / "_packstore" / "manifest-000001.json"
    manifest = Manifest.from_json(file.read_bytes())
    shard = rng.randrange(len(manifest.shards))
    info = manifest.shards[shard]
    batches = read_batches(folder / info.path)
    group = rng.randrange(len(batches))
    told = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        batches[group], done = changed(batches[group], rng, manifest.file_format == "arrow")
        told.append(done)
    shards = list(manifest.shards)
    shards[shard] = rewritten(folder, info, batches, manifest)
    index = manifest.pack_index if rng.random() < 0.5 else None
    totals = {n: sum(getattr(s, n) for s in shards) for n in ("tokens", "examples", "sequences")}
    with contextlib.suppress(PackstoreError):  # a manifest that contradicts itself is refused
        new = replace(
            manifest,
            shards=tuple(shards),
            pack_index=index,
            totals=replace(manifest.totals, bytes=sum(s.bytes for s in shards), **totals),
        )
        file.write_bytes(new.to_json())
    return f"{name}, shard {shard}, row group {group}: {'; '.join(told)}"


def read_batches(path: Path) -> list[pa.RecordBatch]:
    """The row groups of a shard."""
    data = path.read_bytes()
    if data.startswith(b"ARROW1"):
        file = pa.ipc.open_file(io.BytesIO(data))
        return [file.get_batch(i) for i in range(file.num_record_batches)]
    parquet = pq.ParquetFile(io.BytesIO(data))
    groups = (parquet.read_row_group(i) for i in range(parquet.num_row_groups))
    return [group.combine_chunks().to_batches()[0] for group in groups]


def changed(batch: pa.RecordBatch, rng: random.Random, raw: bool) -> tuple[pa.RecordBatch, str]:
    """A batch with a value, or a border between rows, that was not there; and what it was."""
    light = [n for n in batch.schema.names if n not in ("input_ids", "labels")]
    name = rng.choice(light if rng.random() < 0.8 else batch.schema.names)
    at = batch.schema.get_field_index(name)
    column = batch.column(at)
    offsets = np.array(column.offsets.to_pylist(), np.int32)
    values = column.values
    how = rng.choice(("value", "value", "value", "border", "offset" if raw else "border"))
    place = rng.randrange(max(len(offsets if how != "value" else values), 1))
    new = rng.choice(NUMBERS)
    if how == "value" and len(values):
        if pa.types.is_string(values.type):
            if not raw:
                return batch, "nothing"
            buffers = values.buffers()
            ends = np.frombuffer(buffers[1], np.int32).copy()
            ends[place % len(ends)] = new
            values = pa.Array.from_buffers(
                values.type, len(values), [None, pa.py_buffer(ends.tobytes()), buffers[2]]
            )
        else:
            if rng.random() < 0.5 and name != "reward":
                new = values[place].as_py() + rng.choice((-3, -1, 1, 5))
            listed = values.to_pylist()
            listed[place] = bool(new) if pa.types.is_boolean(values.type) else new
            if pa.types.is_floating(values.type):
                listed[place] = rng.choice((float("nan"), float("inf"), -1e38, 0.0))
            try:
                values = pa.array(listed, values.type)
            except (pa.ArrowInvalid, OverflowError):
                return batch, "nothing"
    elif how == "offset":
        offsets[place] = new
    elif len(offsets) > 2:
        inner = 1 + place % (len(offsets) - 2)
        offsets[inner] = rng.randint(int(offsets[inner - 1]), int(offsets[inner + 1]))
    buffers = [None, pa.py_buffer(offsets.tobytes())]
    try:
        array = pa.Array.from_buffers(column.type, len(column), buffers, children=[values])
    except pa.ArrowInvalid:  # it looks at the first offset and the last
        return batch, "nothing"
    columns = list(batch.columns)
    columns[at] = array
    made = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
    return made, f"{how} {place} of {name} is {new}"


def rewritten(
    folder: Path, info: ShardInfo, batches: list[pa.RecordBatch], manifest: Manifest
) -> ShardInfo:
    """Writes the shard; returns what a manifest would say of it."""
    path, schema = folder / info.path, batches[0].schema
    if manifest.file_format == "arrow":
        with open(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    else:
        with open(path, "wb") as sink, parquet_writer(sink, schema, WriteConfig()) as writer:
            for batch in batches:
                writer.write_table(pa.Table.from_batches([batch]), max(batch.num_rows, 1))
    with open(path, "rb") as file:
        hashes = FileHashes.of(file)
    groups = info.row_groups
    counted = {
        "rows": [b.num_rows for b in batches],
        "examples": [len(b.column("example_ids").values) for b in batches],
        "tokens": [len(b.column("input_ids").values) for b in batches],
    }
    figures = {name: np.array(values, np.int64) for name, values in counted.items()}
    groups = replace(groups, crc32=row_group_crc32(str(path)), **figures)
    sums = {name: sum(values) for name, values in counted.items()}
    return replace(info, row_groups=groups, **sums, **asdict(hashes))


def consumers(url: str) -> dict[str, Callable[[], object]]:
    """All that reads packs."""
    import packstore
    import packstore.torch as pt
    from packstore.exchange import export_dataset

    def dataset() -> Dataset:
        return open_dataset(url)

    def load(**how: Any) -> None:
        for batch in pt.PackedDataLoader(pt.PackedDataset(url, **how), tail="uneven"):
            _ = batch.weights, batch.target_index, batch.segment_ids, batch.layout
            for style in ("hf", "flash", "padded"):
                with contextlib.suppress(PackstoreError):
                    batch.model_inputs(style)

    def export(form: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            export_dataset(form, url, f"{folder}/out")

    anew = PackConfig(pack_size=32, max_drop_rate=1.0)
    shared = replace(anew, layout="shared_prefix")
    return {
        "loader": load,
        "by tokens": lambda: load(shuffle=False),
        "online packs": lambda: load(repack=anew),
        "online packs, shared": lambda: load(repack=shared),
        "iter_packs": lambda: list(dataset().iter_packs()),
        "verify": lambda: dataset().verify(),
        "jsonl": lambda: export("jsonl"),
        "nemo": lambda: export("nemo"),
        "pack": lambda: packstore.pack(url, f"memory://hostile/{random.random()}", config=anew),
        "show": lambda: _show(url),
    }


def _show(url: str) -> None:
    from packstore.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["show", url, "--pack", "0"])


def run(numbers: range, tell: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """Every error of the cases that is none of packstore's."""
    for number in numbers:
        tell(number)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "ds")
            done = make(number, folder)
            for name, read in consumers(str(folder)).items():
                try:
                    read()
                except PackstoreError:
                    continue
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"[:300]
                    yield {"case": number, "change": done, "by": name, "error": found}


def main(first: int, last: int) -> None:
    """Reads the cases `first` to `last` (exclusive) in at most 1 GiB; prints JSON lines."""
    import packstore.torch  # noqa: F401  what it maps does not count

    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for problem in run(range(first, last), functools.partial(print, flush=True)):
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
