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

from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import IntegrityError
from packstore.format import PackSizes, to_offsets

SIZES = ("tokens", "examples", "squares")
COUNTS = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")


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


def test_it_lies_beside_the_manifest(ds):
    info = ds.manifest.pack_index
    assert info.path == f"_packstore/packs-000001-{info.sha256[:16]}.index"
    file = pq.ParquetFile(index_path(ds))
    assert file.schema_arrow.names == [*SIZES, *COUNTS]
    rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert rows == [s.rows for s in ds.manifest.shards]
    assert len(rows) > 1
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    columns = file.read().to_pydict()
    sizes = [columns.pop(name) for name in ("tokens", "examples", "squares")]
    assert list(zip(*sizes, strict=True)) == plainly(ds)
    assert list(zip(*columns.values(), strict=True)) == counted(ds)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("kind", ["preference", "sft", "ranked"])
def test_sizes_are_those_of_the_packs(kit, tmp_path, kind, layout, file_format):
    how = {"format": file_format, "layout": layout, "strategy": "pool", "pack_size": 200}
    ds = kit.made(tmp_path / "ds", 90, kind, labels="spans", row_group_tokens=600, **how)
    assert ds.group_rows.max() > 1
    assert told(ds.pack_index) == plainly(ds)
    assert list(map(tuple, ds.pack_index.counts.tolist())) == counted(ds)
    assert told(without_index(ds).pack_index) == plainly(ds)
    assert without_index(ds).pack_index.counts is None
    assert told(pickle.loads(pickle.dumps(ds)).pack_index) == plainly(ds)
    assert ds.verify().ok


def test_shards_are_not_read_where_there_is_an_index(ds):
    expected = plainly(ds)
    for shard in ds.manifest.shards:
        (Path(ds.url) / shard.path).unlink()
    assert told(open_dataset(ds.url).pack_index) == expected


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
        return table.set_column(
            at, table.schema.field(name), pa.array(values, table.schema.field(name).type)
        )

    return apply


def swapped(values):
    values[[0, 1]] = values[0] + 1, values[1] - 1
    return values


def one_more(values):
    values[0] += 1
    return values


@pytest.mark.parametrize("name", ["tokens", "examples", "squares", "best_tokens", "pairs_all"])
def test_verify_compares_every_figure(ds, name):
    wrong = lying(ds, with_column(name, swapped))
    (problem,) = wrong.verify().problems
    what = name if name in ("tokens", "examples", "squares") else "counts"
    assert f"row group 0: must have the {what} of each pack" in problem


def earlier(ds: Dataset) -> Dataset:
    """The dataset with an index as releases before the counts wrote it."""
    return lying(ds, lambda table: table.select(["tokens", "examples", "squares"]))


def test_an_index_without_counts(ds):
    ds = earlier(ds)
    assert told(ds.pack_index) == plainly(ds)
    assert ds.pack_index.counts is ds.sizes(np.arange(3)).counts is None
    assert ds.verify().ok


@pytest.mark.parametrize("name", ["tokens", "examples"])
def test_sums_that_differ_are_refused(ds, name):
    wrong = lying(ds, with_column(name, one_more))
    with pytest.raises(IntegrityError, match="its packs must have"):
        _ = wrong.pack_index


@pytest.mark.parametrize(
    "change",
    [lambda t: t.drop_columns("squares"), lambda t: t.slice(0, 7), lambda t: t.slice(0, 0)],
)
def test_another_shape_is_refused(ds, change):
    wrong = lying(ds, change)
    with pytest.raises(IntegrityError, match=r"have columns tokens, .* a row group for each shard"):
        _ = wrong.pack_index
    assert not wrong.verify().ok


def test_sizes_are_looked_up_shard_by_shard(kit, tmp_path):
    ds = kit.made(tmp_path / "ds", 400, row_group_tokens=1, shard_tokens=1)
    assert len(ds.manifest.shards) == 400  # more than are kept
    everything, again, rng = ds.pack_index, open_dataset(ds.url), np.random.default_rng(0)
    for n in (0, 1, 7, 300):
        packs = rng.integers(0, len(ds), n)
        assert told(again.sizes(packs)) == told(everything.take(packs))
        assert told(without_index(ds).sizes(packs)) == told(everything.take(packs))
