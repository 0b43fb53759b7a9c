from __future__ import annotations

import errno
import os
import resource
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.errors import (
    DatasetNotFoundError,
    FormatError,
    IntegrityError,
    StorageError,
)
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.commit import with_hash, without_hash
from packstore.io.manifest.manifest import commit_manifest
from packstore.io.shards.checksums import batch_crc32, crc32_of
from packstore.io.store.local import map_part
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
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


def test_no_space_for_the_manifest_leaves_shards_to_clean(kit, written, monkeypatch):
    def full(self, path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Location, "create_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        written.dataset([kit.some_packs(60)], shard_tokens=1)
    with pytest.raises(DatasetNotFoundError):
        open_dataset(written.location.url)
    left = all_files(written.location.url)
    assert not [name for name in left if "manifest" in name or name.startswith(".")]


def test_a_failing_job_keeps_what_was_there(kit, place):
    made = kit.Written(place)
    ds = made.dataset([kit.some_packs(60)], shard_tokens=1)
    before = shard_bytes(ds)
    with pytest.raises(KeyboardInterrupt), made.writer(shard_tokens=1) as writer:  # noqa: PT012
        writer.write(kit.some_packs(60, seed=1))
        raise KeyboardInterrupt
    assert {e.name for e in made.location.files("data")} >= {p.split("/")[1] for p in before}
    assert open_dataset(place).verify().ok


def test_an_unwritable_place(kit, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="found a file where a folder must be"):
        kit.Written(str(tmp_path / "file" / "ds")).dataset([kit.some_packs(3)])
    with pytest.raises(StorageError, match="cannot write; found no such file or folder"):
        kit.Written("/proc/nowhere/ds").dataset([kit.some_packs(3)])


def test_a_missing_temporary_folder(kit, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    made = kit.Written("memory://spill/x")
    writer = ShardWriter(made.location, made.shape, made.config(), "run")
    with pytest.raises(StorageError, match="cannot write; found no such file"):
        writer.write(kit.some_packs(40))
    writer.abort()


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
@LABELS
def test_every_flipped_bit_is_noticed(kit, tmp_path, format_, labels):
    """By the reader wherever it could matter, and by verify everywhere."""
    packs = kit.some_packs(60)
    made = kit.Written(str(tmp_path / "ds"))
    ds = made.dataset([packs], format=format_, labels=labels, shard_tokens=100_000)
    shard = ds.manifest.shards[0]
    path = str(tmp_path / "ds" / shard.path)
    silent = 0
    for position in range(0, shard.bytes, 17):
        original = damaged(path, flipped(position, position % 8))
        fresh = open_dataset(str(tmp_path / "ds"))
        try:
            kit.assert_packs_equal(kit.joined(list(fresh.iter_packs())), packs)
            silent += 1
        except IntegrityError as error:
            assert f"{shard.path}, row group " in str(error)  # noqa: PT017
        if position % 221 == 0:
            assert not fresh.verify().ok
        del fresh
        Path(path).write_bytes(original)
    # Parquet: nothing but the magic word in front; Arrow: padding and the schema, kept twice.
    assert silent <= (1 if format_ == "parquet" else shard.bytes // 17 // 3)
    assert ds.verify().ok


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


def test_one_shard_in_the_place_of_another(kit, written):
    ds = written.dataset([kit.some_packs(60)], shard_tokens=1)
    a, b = (f"{written.location.url}/{s.path}" for s in ds.manifest.shards[:2])
    Path(a).write_bytes(Path(b).read_bytes())
    with pytest.raises(IntegrityError, match="row group 0"):
        open_dataset(written.location.url).read_packs(0)


def test_the_file_must_have_the_schema_of_the_manifest(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    path = f"{written.location.url}/_packstore/manifest-000001.json"
    old, new = b'"features": []', b'"features": ["label_spans"]'
    damaged(path, lambda data: with_hash(without_hash(data, path).replace(old, new)))
    with pytest.raises(IntegrityError, match="its schema must be the one that the manifest"):
        open_dataset(ds.url).read_packs(0)


def test_unfinished_is_not_found(kit, written):
    with written.writer() as writer:
        writer.write(kit.some_packs(60))
        writer.finish()
    with pytest.raises(DatasetNotFoundError, match=r"no _packstore/manifest"):
        open_dataset(written.location.url)


def test_a_failing_job_keeps_the_shards_of_an_equal_one_that_is_about_to_commit(kit, place):
    made = kit.Written(place)
    with made.writer() as first:
        first.write(kit.some_packs(60))
        manifest = made.manifest(first)
        with pytest.raises(KeyboardInterrupt), made.writer() as second:  # noqa: PT012
            second.write(kit.some_packs(60))
            second.finish()
            raise KeyboardInterrupt
        commit_manifest(made.location, manifest)
    assert open_dataset(place).verify().ok


def test_a_checksum_covers_lengths_too(kit, written):
    """A damaged message may declare fewer rows over the same buffers."""
    batch = next(written.dataset([kit.some_packs(20)]).iter_batches())
    assert batch_crc32(batch.slice(0, len(batch) - 1)) != batch_crc32(batch)


def test_a_part_of_a_file_is_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    for start, end in ((0, 1), (5000, 9000), (4096, 16384)):
        assert bytes(map_part(str(path), start, end)) == path.read_bytes()[start:end]
    with pytest.raises(IntegrityError, match="found only 16384 bytes"):
        map_part(str(path), 16000, 16385)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_crc32_is_that_of_zlib(a, b):
    assert crc32_of(b, crc32_of(a)) == zlib.crc32(a + b)
