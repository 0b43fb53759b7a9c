"""The pack index: sizes of every pack without opening a shard, and what becomes of it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import write_jsonl

import packstore
from packstore.errors import FormatError, IntegrityError, StorageError
from packstore.format.arrays import PackSizes, to_offsets
from packstore.io.dataset import pack_index
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.pack_index import SCHEMA, SizeTable
from packstore.io.shards.shard import PackShape
from packstore.pack.fill import fill
from packstore.testing import random_examples


def plainly(dataset: Dataset) -> list[tuple[int, int, int]]:
    """Tokens, examples and squares of each pack, one pack at a time."""
    out = []
    for batch in dataset.iter_batches():
        for row in batch.to_pylist():
            bounds = row["seq_boundaries"]
            steps = [b - a for a, b in pairwise(bounds)]
            squares = sum(n * n for n in steps)
            out.append((len(row["input_ids"]), len(row["example_ids"]), squares))
    return out


def told(sizes: PackSizes) -> list[tuple[int, int, int]]:
    columns = (sizes.tokens, sizes.examples, sizes.squares)
    assert {c.dtype for c in columns} == {np.dtype(np.int64)}
    return list(zip(*(c.tolist() for c in columns), strict=True))


def counted(dataset: Dataset) -> list[tuple[int, ...]]:
    """Supervised tokens of the best sequences and pairs of each pack, one example at a time."""
    kind, out = dataset.manifest.kind, []
    for packs in dataset.iter_packs():
        for pack in map(packs.row, range(len(packs))):
            total = np.zeros(4, np.int64)
            ends = np.cumsum(pack.num_responses)
            for first, last in zip(ends - pack.num_responses, ends, strict=True):
                rewards = pack.reward[first:last].tolist()
                ranked = sorted(rewards, reverse=True)
                best = first + (rewards.index(ranked[0]) if kind == "ranked" else 0)
                cut = slice(*pack.seq_boundaries[best : best + 2])
                pairs = [int(kind == "preference")] * 3
                if kind == "ranked":
                    pairs = [
                        sum(r < ranked[0] for r in ranked),
                        sum(a > b for a, b in combinations(ranked, 2)),
                        sum(a > b for a, b in pairwise(ranked)),
                    ]
                total += [(pack.labels[cut] != -100).sum(), *pairs]
            out.append(tuple(total.tolist()))
    return out


def without_index(dataset: Dataset) -> Dataset:
    return Dataset(dataset.location, replace(dataset.manifest, pack_index=None), dataset.version)


def index_path(dataset: Dataset) -> Path:
    return Path(dataset.url) / dataset.manifest.pack_index.path


def test_it_lies_beside_the_manifest(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    info = ds.manifest.pack_index
    assert info.path == f"_packstore/packs-000001-{info.sha256[:16]}.index"
    file = pq.ParquetFile(index_path(ds))
    assert file.schema_arrow.equals(SCHEMA)
    rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert rows == [s.rows for s in ds.manifest.shards]
    assert len(rows) > 1
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    columns = file.read().to_pydict()
    sizes = [columns.pop(name) for name in ("tokens", "examples", "squares")]
    assert list(zip(*sizes, strict=True)) == plainly(ds)
    assert list(zip(*columns.values(), strict=True)) == counted(ds)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["preference", "sft", "ranked"]),
    layout=st.sampled_from(["concat", "shared_prefix"]),
    file_format=st.sampled_from(["parquet", "arrow"]),
    labels=st.sampled_from(["plain", "spans"]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=25),
    seed=st.integers(0, 99),
)
def test_sizes_are_those_of_the_packs(
    kit, tmp_path_factory, kind, layout, file_format, labels, counts, seed
):
    made = kit.Written(str(tmp_path_factory.mktemp("index") / "ds"), kind, layout=layout)
    made.shape = PackShape(kind=kind, layout=layout, pack_size=600, carry={}, vocab_size=50)
    examples = random_examples(sum(counts), seed=seed, kind=kind)
    examples.reward[:] = np.round(examples.reward)  # some are equal
    how = {"format": file_format, "labels": labels, "layout": layout, "pack_size": 600}
    ds = made.dataset([fill(examples, to_offsets(np.array(counts)), layout)], **how)
    assert ds.verify().ok
    assert told(ds.pack_index) == plainly(ds)
    assert list(map(tuple, ds.pack_index.counts.tolist())) == counted(ds)
    assert told(without_index(ds).pack_index) == plainly(ds)
    assert without_index(ds).pack_index.counts is None
    assert told(pickle.loads(pickle.dumps(ds)).pack_index) == plainly(ds)


def test_anywhere(kit, place):
    ds = kit.Written(place).dataset([kit.some_packs(60)])
    assert told(ds.pack_index) == told(without_index(ds).pack_index) == plainly(ds)
    assert ds.verify().ok


def test_nothing_is_read_before_it_is_asked_for(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    index_path(ds).unlink()
    again = open_dataset(ds.url)
    assert len(list(again.iter_packs())) == len(again.row_groups)
    with pytest.raises(StorageError, match=r"packs-.*\.index"):
        _ = again.pack_index


def test_shards_are_not_read_where_there_is_an_index(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    expected = plainly(ds)
    for shard in ds.manifest.shards:
        (Path(ds.url) / shard.path).unlink()
    assert told(open_dataset(ds.url).pack_index) == expected


def test_the_same_bytes_however_packs_are_handed_in(kit, tmp_path):
    packs = kit.some_packs(60)
    first = kit.Written(str(tmp_path / "a")).dataset([packs])
    second = kit.Written(str(tmp_path / "b")).dataset(kit.split(packs, [1, 7, 8, 40]))
    assert first.manifest.pack_index == second.manifest.pack_index
    assert index_path(first).read_bytes() == index_path(second).read_bytes()


def test_pack_writes_one_for_any_number_of_workers(tmp_path):
    texts = [{"prompt": [1, 2], "chosen": [3] * (1 + i % 7), "rejected": [4]} for i in range(200)]
    lines = tmp_path / "pairs.jsonl"
    write_jsonl(lines, texts)
    how = {"pack_size": 32, "row_group_tokens": 100, "shard_tokens": 200}
    found = [
        packstore.pack(str(lines), str(tmp_path / f"{n}"), num_workers=n, **how) for n in (1, 2)
    ]
    assert found[0].manifest.pack_index == found[1].manifest.pack_index is not None
    assert told(found[0].pack_index) == plainly(found[0])
    again = packstore.pack(found[0].url, str(tmp_path / "again"), pack_size=64)
    assert told(again.pack_index) == plainly(again)


def test_an_empty_dataset_has_none(kit, written):
    ds = written.dataset([kit.some_packs(0)])
    assert ds.manifest.pack_index is None
    assert len(ds.pack_index) == 0


def test_memory_of_the_writer_is_one_shard(kit, written, monkeypatch):
    """The sizes that wait for the index are those of one shard at most."""
    portions = []
    table = pack_index._table

    def spy(sizes):
        portions.append(len(sizes))
        return table(sizes)

    monkeypatch.setattr(pack_index, "_table", spy)
    ds = written.dataset([kit.some_packs(200)])
    assert portions == [s.rows for s in ds.manifest.shards]


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_every_damage_is_found(kit, written, place):
    ds = written.dataset([kit.some_packs(60)])
    data = bytearray(index_path(ds).read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    index_path(ds).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"packs-.*\.index: must have sha256"):
        _ = ds.pack_index
    (problem,) = ds.verify().problems
    assert "must have sha256" in problem


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda d: d[:-9], "found"), (lambda d: d + b"x", r"found \d+"), (lambda d: b"", "found 0")],
)
def test_another_size(kit, written, change, found):
    ds = written.dataset([kit.some_packs(60)])
    index_path(ds).write_bytes(change(index_path(ds).read_bytes()))
    with pytest.raises(IntegrityError, match=rf"must have \d+ bytes; {found}"):
        _ = ds.pack_index
    assert not ds.verify().ok


def lying(ds: Dataset, change) -> Dataset:
    """The dataset with an index of other content, which its manifest names rightly."""
    table = change(pq.read_table(index_path(ds)))
    rows = [s.rows for s in ds.manifest.shards]
    with pq.ParquetWriter(index_path(ds), table.schema, use_dictionary=False) as writer:
        for start, size in zip(to_offsets(np.array(rows)), rows, strict=False):
            if start < table.num_rows:
                writer.write_table(table.slice(start, size))
    info = type(ds.manifest.pack_index).of(ds.manifest.pack_index.path, str(index_path(ds)))
    return Dataset(ds.location, replace(ds.manifest, pack_index=info), ds.version)


def with_column(name: str, change):
    def apply(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        values = change(table.column(name).to_numpy().copy())
        return table.set_column(at, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))

    return apply


def swapped(values):
    values[[0, 1]] = values[0] + 1, values[1] - 1
    return values


def one_more(values):
    values[0] += 1
    return values


@pytest.mark.parametrize("name", ["tokens", "examples", "squares", "best_tokens", "pairs_all"])
def test_verify_compares_every_figure(kit, written, name):
    ds = written.dataset([kit.some_packs(60)])
    wrong = lying(ds, with_column(name, swapped))
    (problem,) = wrong.verify().problems
    what = name if name in ("tokens", "examples", "squares") else "counts"
    assert f"row group 0: must have the {what} of each pack" in problem


def earlier(ds: Dataset) -> Dataset:
    """The dataset with an index as releases before the counts wrote it."""
    return lying(ds, lambda table: table.select(["tokens", "examples", "squares"]))


def test_an_index_without_counts(kit, written):
    ds = earlier(written.dataset([kit.some_packs(60)]))
    assert told(ds.pack_index) == plainly(ds)
    assert ds.pack_index.counts is ds.sizes(np.arange(3)).counts is None
    assert ds.verify().ok


def test_what_was_never_counted_stays_unknown(kit, tmp_path):
    """A dataset with and one without counts as one: null where nobody counted."""
    old = kit.Written(str(tmp_path / "old")).dataset([kit.some_packs(60)])
    index = earlier(old).manifest.pack_index
    (manifest,) = Path(old.url, "_packstore").glob("manifest-*.json")
    value = json.loads(manifest.read_text())
    del value["sha256"]
    value["pack_index"] = {"path": index.path, "bytes": index.bytes, "sha256": index.sha256}
    manifest.write_text(json.dumps(value))
    new = kit.Written(str(tmp_path / "new")).dataset([kit.some_packs(40)])
    both = packstore.concat([old.url, new.url], str(tmp_path / "both"))
    assert both.verify().ok
    assert both.pack_index.counts is both.sizes(np.array([0, 70])).counts is None
    assert both.sizes(np.arange(60, 100)).counts.tolist() == new.pack_index.counts.tolist()


@pytest.mark.parametrize("name", ["tokens", "examples"])
def test_sums_that_differ_are_refused(kit, written, name):
    wrong = lying(written.dataset([kit.some_packs(60)]), with_column(name, one_more))
    with pytest.raises(IntegrityError, match="its packs must have"):
        _ = wrong.pack_index


@pytest.mark.parametrize(
    "change",
    [lambda t: t.drop_columns("squares"), lambda t: t.slice(0, 7), lambda t: t.slice(0, 0)],
)
def test_another_shape_is_refused(kit, written, change):
    wrong = lying(written.dataset([kit.some_packs(60)]), change)
    with pytest.raises(IntegrityError, match=r"have columns tokens, .* a row group for each shard"):
        _ = wrong.pack_index
    assert not wrong.verify().ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../../etc/passwd"}, "a path must be relative and stay inside"),
        ({"path": "/etc/passwd"}, "a path must be relative and stay inside"),
        ({"path": "s3://bucket/index"}, "a path must be relative and stay inside"),
        ({"bytes": 1 << 40}, "its bytes must be few for its packs"),
        ({"sha256": "0"}, r"field pack_index.sha256: must be 64 hexadecimal digits"),
        (None, "must be a JSON object"),
    ],
)
def test_a_manifest_that_names_a_bad_one(kit, written, change, message):
    value = json.loads(written.dataset([kit.some_packs(60)]).manifest.to_json())
    value["pack_index"] = change and {**value["pack_index"], **change}
    with pytest.raises(FormatError, match=message):
        packstore.io.manifest.manifest.Manifest.from_json(json.dumps(value).encode())


def test_it_must_not_be_a_shard(kit, written):
    value = json.loads(written.dataset([kit.some_packs(60)]).manifest.to_json())
    value["pack_index"]["path"] = value["shards"][0]["path"]
    with pytest.raises(FormatError, match="it must not be a shard"):
        packstore.io.manifest.manifest.Manifest.from_json(json.dumps(value).encode())


def test_the_fingerprint_does_not_know_it(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    assert without_index(ds).manifest.fingerprint == ds.manifest.fingerprint


def test_without_an_index_damage_is_found(kit, written):
    ds = without_index(written.dataset([kit.some_packs(60)]))
    path = Path(ds.url) / ds.manifest.shards[0].path
    good = path.read_bytes()
    for place in (len(good) - 30, len(good) - 2):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(IntegrityError, match="its footer must have the sha256"):
            SizeTable(ds.location, ds.manifest).all()
    path.unlink()
    with pytest.raises(StorageError, match="data/"):
        SizeTable(ds.location, ds.manifest).all()


def test_sizes_are_looked_up_shard_by_shard(kit, written, monkeypatch):
    ds = written.dataset([kit.some_packs(400)])
    shards = len(ds.manifest.shards)
    assert shards > 3
    everything = ds.pack_index
    loaded = []
    load = pack_index.PackIndex.shard
    monkeypatch.setattr(
        pack_index.PackIndex, "shard", lambda self, n: loaded.append(n) or load(self, n)
    )
    monkeypatch.setattr(pack_index, "KEPT_SHARDS", shards - 1)
    again = open_dataset(ds.url)
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 300):
        packs = rng.integers(0, len(ds), n)
        assert told(again.sizes(packs)) == told(everything.take(packs))
    loaded.clear()
    last = np.arange(len(ds) - ds.manifest.shards[-1].rows, len(ds))
    again.sizes(last)
    again.sizes(last[::-1])
    assert loaded in ([], [shards - 1])
    for _ in range(2):
        again.sizes(np.arange(len(ds)))
    assert again._sizes.shard.cache_info().currsize == shards - 1
    bare = without_index(ds)
    assert told(bare.sizes(last)) == told(everything.take(last))
