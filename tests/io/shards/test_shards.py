from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.errors import (
    FormatError,
    IntegrityError,
    StorageError,
)
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.commit import with_hash, without_hash
from packstore.io.shards.checksums import batch_crc32
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


@FORMATS
def test_a_full_disk_leaves_nothing(kit, written, format_):
    """The limit on file sizes makes the system refuse real writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write; found .*File too large"):
            written.dataset([kit.some_packs(200)], format=format_)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all_files(written.location.url) == []


def test_a_failing_job_keeps_what_was_there(kit, place):
    made = kit.Written(place)
    ds = made.dataset([kit.some_packs(60)], shard_tokens=1)
    before = shard_bytes(ds)
    with pytest.raises(KeyboardInterrupt), made.writer(shard_tokens=1) as writer:  # noqa: PT012
        writer.write(kit.some_packs(60, seed=1))
        raise KeyboardInterrupt
    assert {e.name for e in made.location.files("data")} >= {p.split("/")[1] for p in before}
    assert open_dataset(place).verify().ok


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
