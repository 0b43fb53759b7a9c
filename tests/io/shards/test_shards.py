from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore import open as open_dataset
from packstore.errors import (
    FormatError,
    IntegrityError,
    StorageError,
)
from packstore.io.manifest.commit import with_hash, without_hash
from packstore.io.shards import parquet
from packstore.io.shards.arrow_file import batch_crc32
from packstore.io.shards.parquet import byte_range, check_group
from packstore.io.write.shard_writer import ShardFile
from packstore.pack.fill import fill
from packstore.testing import random_examples

FORMATS = pytest.mark.parametrize("format_", ["parquet", "arrow"])
LABELS = pytest.mark.parametrize("labels", ["plain", "spans"])


def shard_bytes(ds) -> dict[str, bytes]:
    return {s.path: ds.location.read_bytes(s.path) for s in ds.manifest.shards}


def all_files(folder) -> list[str]:
    root = Path(folder)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@FORMATS
@LABELS
@pytest.mark.parametrize("kind", ["preference", "sft", "ranked"])
def test_round_trip(kit, place, format_, labels, kind):
    packs = kit.some_packs(80, kind)
    how = {"format": format_, "labels": labels, "shard_tokens": 1}
    ds = kit.Written(place, kind).dataset([packs], **how)
    assert len(ds) == len(packs) == ds.manifest.totals.packs
    assert len(ds.manifest.shards) > 1
    kit.assert_packs_equal(kit.joined(list(ds.iter_packs())), packs)
    for batch in ds.iter_batches():
        assert batch.schema.equals(ds.schema)
        assert "labels" in batch.schema.names
    assert ("label_spans" in ds.manifest.features) == (labels == "spans")


@FORMATS
@LABELS
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_both_layouts(kit, written, format_, labels, layout):
    examples = random_examples(90, kind="preference", max_prompt=9, max_response=5)
    packs = fill(examples, np.arange(0, 91, 2), layout)
    made = kit.Written(written.location.url, layout=layout)
    ds = made.dataset([packs], format=format_, labels=labels)
    kit.assert_packs_equal(kit.joined(list(ds.iter_packs())), packs)
    assert ds.verify().ok
    assert ds.manifest.layout == layout
    totals = ds.manifest.totals
    assert totals.logical_tokens == examples.num_tokens
    assert (totals.tokens < totals.logical_tokens) == (layout == "shared_prefix")


def test_carried_columns(kit, written):
    packs = kit.some_packs(30)
    n = len(packs.example_ids)
    packs.columns.update(
        source=np.array([f"ü{i}" for i in range(n)], object),
        weight=np.linspace(0, 1, n),
        turns=np.arange(n),
        good=np.arange(n) % 2 == 0,
    )
    carry = {"source": "string", "weight": "float64", "turns": "int64", "good": "bool"}
    for format_ in ("parquet", "arrow"):
        made = kit.Written(f"{written.location.url}-{format_}", carry=carry)
        ds = made.dataset([packs], format=format_)
        kit.assert_packs_equal(kit.joined(list(ds.iter_packs())), packs)
        assert ds.verify().ok


@FORMATS
@LABELS
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, 70), max_size=6))
def test_bytes_do_not_depend_on_the_portions(kit, tmp_path, format_, labels, cuts):
    packs = kit.some_packs(70)
    how = {"format": format_, "labels": labels, "overwrite": True}
    whole = kit.Written(str(tmp_path / "a")).dataset([packs], **how)
    parts = kit.Written(str(tmp_path / "b")).dataset(kit.split(packs, cuts), **how)
    assert shard_bytes(whole) == shard_bytes(parts)
    assert whole.manifest.to_json() == parts.manifest.to_json()


def test_same_bytes_on_every_store(kit, written):
    packs = kit.some_packs(70)
    local = written.dataset([packs])
    memory = kit.Written(f"memory://same/{os.getpid()}").dataset([packs])
    assert shard_bytes(local) == shard_bytes(memory)
    assert local.manifest.to_json() == memory.manifest.to_json()


def test_row_groups_are_as_large_as_they_may_be(kit, written):
    packs = kit.some_packs(80)
    ds = written.dataset([packs], row_group_tokens=200)
    tokens = np.diff(packs.token_offsets)
    first = np.cumsum(ds.group_rows)[:-1]
    assert (ds.row_groups.tokens <= 200).all()
    assert (ds.row_groups.tokens[:-1] + tokens[first] > 200).all()
    single = kit.Written(written.location.url + "1").dataset([packs], row_group_tokens=1)
    assert (single.group_rows == 1).all()


def test_nothing_at_all(kit, written):
    ds = written.dataset([])
    assert len(ds) == len(ds.row_groups) == 0
    assert list(ds.iter_batches()) == []
    assert ds.verify().ok
    assert ds.manifest.fill_rate == 0


def test_bad_packs_are_refused(kit, written):
    packs = kit.some_packs(30)
    packs.signed_ids[-1] = 50
    with pytest.raises(FormatError, match=r"row 29: token ids .* \[ids-range\]"):
        written.dataset(kit.split(packs, [10, 20]), row_group_tokens=20, shard_tokens=10_000)
    assert all_files(written.location.url) == []


def damaged(path: str, change) -> bytes:
    data = Path(path).read_bytes()
    Path(path).write_bytes(change(bytearray(data)))
    return data


def flipped(position: int, bit: int):
    def flip(data: bytearray) -> bytearray:
        data[position] ^= 1 << bit
        return data

    return flip


@FORMATS
@pytest.mark.parametrize("size", [0, 3, 100, 4000, -1])
def test_a_truncated_shard(kit, written, format_, size):
    ds = written.dataset([kit.some_packs(60)], format=format_)
    shard = ds.manifest.shards[0]
    damaged(f"{written.location.url}/{shard.path}", lambda data: data[:size])
    with pytest.raises(IntegrityError, match=rf"{shard.path}, row group 0: .*copy the dataset"):
        ds.read_packs(0)
    report = open_dataset(written.location.url).verify()
    assert shard.path in report.problems[0]


@FORMATS
def test_a_missing_shard(kit, place, format_):
    made = kit.Written(place)
    ds = made.dataset([kit.some_packs(60)], format=format_, shard_tokens=1)
    lost = ds.manifest.shards[1].path
    made.location.remove(lost)
    with pytest.raises(
        StorageError,
        match=rf"(?s){lost}: cannot read; .*{lost}, row group [0-9]+",
    ):
        ds.read_packs(1)
    ds.read_packs(0)
    problems = ds.verify().problems
    assert len(problems) == 1
    assert lost in problems[0]


def test_the_file_must_have_the_schema_of_the_manifest(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    path = f"{written.location.url}/_packstore/manifest-000001.json"
    old, new = b'"features": []', b'"features": ["label_spans"]'
    damaged(path, lambda data: with_hash(without_hash(data, path).replace(old, new)))
    with pytest.raises(IntegrityError, match="its schema must be the one that the manifest"):
        open_dataset(ds.url).read_packs(0)


def test_a_checksum_covers_lengths_too(kit, written):
    """A damaged message may declare fewer rows over the same buffers."""
    batch = next(written.dataset([kit.some_packs(20)]).iter_batches())
    assert batch_crc32(batch.slice(0, len(batch) - 1)) != batch_crc32(batch)


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_a_shard_ends_behind_the_row_group_that_fills_it(kit, tmp_path, format_):
    """Whatever a codec makes of it: so its release does not decide where shards end."""
    made = kit.Written(str(tmp_path / "dataset"))
    how = {"format": format_, "shard_tokens": 1000}
    groups = [
        s.row_groups.tokens for s in made.dataset([kit.some_packs(300)], **how).manifest.shards
    ]
    assert len(groups) > 3
    assert all(tokens.sum() >= 1000 for tokens in groups[:-1])
    assert all(tokens[:-1].sum() < 1000 for tokens in groups)
    other = kit.Written(str(tmp_path / "other")).dataset([kit.some_packs(300)], shard_tokens=1000)
    expected = [s.row_groups.tokens.tolist() for s in other.manifest.shards]
    assert [tokens.tolist() for tokens in groups] == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), StorageError("full")])
def test_nothing_is_left_of_a_failure_in_the_thread(kit, written, tmp_path, monkeypatch, error):
    calls, append = iter(range(1000)), ShardFile.append

    def failing(shard, batches):
        if next(calls) == 20:
            raise error
        append(shard, batches)

    monkeypatch.setattr(ShardFile, "append", failing)
    with pytest.raises(type(error)):
        written.dataset([kit.some_packs(300)])
    # Shards that were put stay for `clean`: a run elsewhere may name them.
    assert all(re.fullmatch(r"ds/data/[\w-]+\.parquet", path) for path in all_files(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("packstore-write")]


def row_group(**how):
    """The row group of a footer, for three lists of ten numbers."""
    sink, table = io.BytesIO(), pa.table({"x": [[7] * 10] * 3})
    pq.write_table(table, sink, **{"use_dictionary": False, **how})
    return pq.read_metadata(sink).row_group(0)


def test_limits_are_compared_with_the_footer(monkeypatch):
    group = row_group()
    check_group(group, 3, 30)
    with pytest.raises(IntegrityError, match="must have 4 rows; its footer declares 3"):
        check_group(group, 4, 30)
    with pytest.raises(IntegrityError, match="at most 29 values a column; its footer declares 30"):
        check_group(group, 3, 29)
    with pytest.raises(IntegrityError, match="must have no dictionary"):
        check_group(row_group(use_dictionary=True), 3, 30)
    with pytest.raises(IntegrityError, match=r"its bytes 4 to .* must lie in the file"):
        byte_range(group, 20)
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 40)
    with pytest.raises(IntegrityError, match="at most 40 bytes when decompressed"):
        check_group(group, 3, 30)


def test_a_wrong_crc32_of_isal_is_not_used(kit, written, tmp_path):
    """What was written with the right one is read in a process that finds a broken isal."""
    ds = written.dataset([kit.some_packs(20)])
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").touch()
    broken = "import zlib\ndef crc32(data, before=0):\n    return zlib.crc32(data, before) ^ 1\n"
    (tmp_path / "isal" / "isal_zlib.py").write_text(broken)
    code = "import packstore, sys; assert packstore.open(sys.argv[1]).verify().ok"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    how = {"env": {**os.environ, "PYTHONPATH": paths}, "check": True}
    subprocess.run([sys.executable, "-c", code, ds.url], **how)
