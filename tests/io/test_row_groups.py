"""Row groups encoded in threads: the bytes of one writer, and nothing is left of a failure."""

from __future__ import annotations

import errno
import io
import os
import re
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest

from packstore.errors import StorageError
from packstore.io import open_shard, row_groups
from packstore.io.row_groups import parquet_writer
from packstore.io.writer import ShardWriter


def paths(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def written(kit, tmp_path):
    return kit.Written(str(tmp_path / "dataset"))


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
@pytest.mark.parametrize("labels", ["plain", "spans"])
def test_a_shard_is_what_pyarrow_writes(kit, tmp_path, compression, labels):
    packs = kit.some_packs(300, "ranked")
    packs.columns["source"] = np.array([f"ü{i}" for i in range(len(packs.example_ids))], object)
    how = {"compression": compression, "labels": labels, "shard_bytes": 40_000}
    made = kit.Written(str(tmp_path / "dataset"), "ranked", carry={"source": "string"})
    ds = made.dataset([packs], **how)
    numbers = [len(shard.row_groups) for shard in ds.manifest.shards]
    assert len(numbers) > 1
    assert max(numbers) > 15
    for shard in ds.manifest.shards:
        path = tmp_path / "dataset" / shard.path
        file, sink = pq.ParquetFile(path), io.BytesIO()
        with parquet_writer(sink, file.schema_arrow, made.config(**how)) as writer:
            for number in range(file.num_row_groups):
                writer.write_table(file.read_row_group(number), row_group_size=1 << 20)
        assert path.read_bytes() == sink.getvalue()
    assert ds.verify().ok


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_bytes_do_not_depend_on_threads(kit, tmp_path, monkeypatch, format_):
    packs, encode, late = kit.some_packs(200), open_shard.encode, threading.Event()

    def last_first(batches, config):
        """The first row group is done when another one is."""
        group = encode(batches, config)
        if threading.current_thread().name.endswith("_0"):
            late.wait(60)
        late.set()
        return group

    monkeypatch.setattr("packstore.io.writer.encode", last_first)
    found = []
    for threads in (1, 2, 8):
        made, late = kit.Written(str(tmp_path / str(threads))), threading.Event()
        with ShardWriter(
            made.location, made.shape, made.config(format=format_), "run", threads=threads
        ) as writer:
            writer.write(packs)
            found.append([shard.sha256 for shard in writer.close()])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), StorageError("full")])
def test_nothing_is_left_of_a_failure_in_a_thread(kit, written, tmp_path, monkeypatch, error):
    calls, encode = iter(range(1000)), open_shard.encode

    def failing(batches, config):
        if next(calls) == 20:
            raise error
        return encode(batches, config)

    monkeypatch.setattr("packstore.io.writer.encode", failing)
    with pytest.raises(type(error)), written.writer() as writer:
        writer.write(kit.some_packs(300))
    # Shards that were put stay for `clean`: a run elsewhere may name them.
    assert all(re.fullmatch(r"dataset/data/[\w-]+\.parquet", path) for path in paths(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("packstore-write")]


def test_a_full_disk_while_threads_encode(kit, written, tmp_path, monkeypatch):
    put = row_groups.ParquetShard._put

    def full(shard, data):
        if shard.size > 4000:
            with row_groups.guarded("write", shard.path, {}):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(shard, data)

    monkeypatch.setattr(row_groups.ParquetShard, "_put", full)
    with (
        pytest.raises(StorageError, match="no space left"),
        written.writer(shard_bytes=1 << 20) as writer,
    ):
        writer.write(kit.some_packs(300))
    # Shards that were put stay for `clean`: a run elsewhere may name them.
    assert all(re.fullmatch(r"dataset/data/[\w-]+\.parquet", path) for path in paths(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("packstore-write")]
