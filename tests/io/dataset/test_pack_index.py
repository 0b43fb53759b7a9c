"""The pack index: sizes of every pack without opening a shard, and what becomes of it."""

from __future__ import annotations

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

from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import IntegrityError
from packstore.format import PackSizes, to_offsets
from packstore.io.dataset import pack_index
from packstore.io.dataset.pack_index import SCHEMA
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


def test_shards_are_not_read_where_there_is_an_index(kit, written):
    ds = written.dataset([kit.some_packs(60)])
    expected = plainly(ds)
    for shard in ds.manifest.shards:
        (Path(ds.url) / shard.path).unlink()
    assert told(open_dataset(ds.url).pack_index) == expected


def test_an_empty_dataset_has_none(kit, written):
    ds = written.dataset([kit.some_packs(0)])
    assert ds.manifest.pack_index is None
    assert len(ds.pack_index) == 0


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


def test_sizes_are_looked_up_shard_by_shard(kit, written, monkeypatch):
    ds = written.dataset([kit.some_packs(400)])
    shards = len(ds.manifest.shards)
    assert shards > 3
    everything = ds.pack_index
    monkeypatch.setattr(pack_index, "KEPT_SHARDS", shards - 1)
    again = open_dataset(ds.url)
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 300):
        packs = rng.integers(0, len(ds), n)
        assert told(again.sizes(packs)) == told(everything.take(packs))
        assert told(without_index(ds).sizes(packs)) == told(everything.take(packs))
