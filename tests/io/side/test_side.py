"""Side datasets: written whole or not at all, read back exactly, joined by
example id.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import Files, edit_manifest
from small_jobs import write_jsonl

import packstore
from packstore import Dataset, clean
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetBusyError,
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    IntegrityError,
    StorageError,
)
from packstore.format import Packs
from packstore.torch import PackedDataset, SideWriter, open_side

TYPES = ("string", "int64", "float64", "bool", "float32")
SEQUENCES = {"advantage": "list<float32>", "ref_logps": "list<float32>"}
COLUMNS = {**{name: name for name in TYPES}, **SEQUENCES}
SHARD_ROWS = "packstore.io.side.side.SHARD_ROWS"  # a million, too many for a test
PROVENANCE = {
    "model": "none",
    "dtype": "float32",
    "layers": 2,
    "checked": True,
    "note": None,
}


def values_of(ids: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """A value of every type that follows from the id."""
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return {
        "string": np.array([f"naïve {i}" * (i % 3) for i in ids], object),
        "int64": ids * 2**30 - 1,
        "float64": ids / 3,
        "bool": ids % 3 == 0,
        "float32": (ids / 7).astype(np.float32),
        "advantage": (np.repeat(ids, counts) % 5 + place / 8).astype(np.float32),
        "ref_logps": (-np.repeat(ids, counts) - place / 8).astype(np.float32),
    }


def derived(
    url: str, ds: Dataset, columns: dict[str, str] | None = None, **how: Any
) -> str:
    """A side dataset of all examples of `ds`, written in another order than that of the
    ids.
    """
    columns = columns or COLUMNS
    with SideWriter(url, ds, columns, provenance=PROVENANCE, **how) as writer:
        for packs in reversed(list(ds.iter_packs())):
            every = values_of(packs.example_ids, packs.num_responses)
            chosen = {name: every[name] for name in columns}
            writer.write(packs.example_ids, chosen, packs.num_responses)
    return url


def plainly(url: str) -> dict[int, dict[str, Any]]:
    rows = [row for batch in open_side(url).iter_batches() for row in batch.to_pylist()]
    found = {row["example_ids"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def joined(ds: Dataset, url: str) -> list[Packs]:
    return list(PackedDataset(ds, rank=0, world_size=1, side=[url]))


def assert_joined(ds: Dataset, url: str) -> None:
    packs = joined(ds, url)
    for pack in packs:
        for name, expected in values_of(pack.example_ids, pack.num_responses).items():
            every = {
                **pack.columns,
                **pack.sequence_columns,
                "ref_logps": pack.ref_logps,
            }
            found = every[name]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, name)
    assert sum(len(pack.example_ids) for pack in packs) == ds.manifest.totals.examples


@pytest.fixture
def ds(kit: Any, tmp_path: Path) -> Dataset:
    return kit.made(tmp_path / "source", 90, strategy="pool", pack_size=128)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("shard_rows", [1, 7, 50])
@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_there_and_back(kit, tmp_path, monkeypatch, kind, shard_rows, mapped) -> None:
    monkeypatch.setattr(SHARD_ROWS, shard_rows)
    monkeypatch.setattr(
        "packstore.io.side.table.MAPPED_BYTES", 0 if mapped else 1 << 20
    )
    ds = kit.made(tmp_path / "ds", 20, kind)
    url = derived(str(tmp_path / "side"), ds)
    side = open_side(url)
    assert len(side) == 20
    assert [s.rows for s in side.manifest.shards][:-1] == [shard_rows] * (
        19 // shard_rows
    )
    for batch in side.iter_batches():
        ids = batch.column("example_ids").to_pylist()
        assert ids == sorted(ids)
    assert_joined(ds, url)


def test_anywhere(ds, place) -> None:
    url = derived(place, ds)
    with pytest.raises(DatasetExistsError):
        derived(url, ds)
    derived(url, ds, overwrite=True)
    assert open_side(url).version == 2
    assert plainly(url).keys() == {
        i for p in ds.iter_packs() for i in p.example_ids.tolist()
    }


def test_it_is_no_dataset_and_a_dataset_is_none(ds, tmp_path) -> None:
    url = derived(str(tmp_path / "side"), ds)
    with pytest.raises(DatasetNotFoundError, match="dataset"):
        packstore.open(url)
    with pytest.raises(DatasetNotFoundError, match="side"):
        open_side(ds.url)
    with pytest.raises(DatasetNotFoundError, match="version 7"):
        open_side(url, version=7)


def test_bases_of_shards_are_in_the_ids(kit, ds, tmp_path) -> None:
    other = kit.made(
        tmp_path / "other", kit.records(30, seed=1), strategy="pool", pack_size=128
    )
    both = packstore.concat([ds, other], str(tmp_path / "both"))
    url = derived(str(tmp_path / "side"), both)
    assert_joined(both, url)
    assert max(plainly(url)) > 1 << 40


@pytest.mark.parametrize("shard_rows", [5, 1000])
@pytest.mark.parametrize("too_many", [False, True])
def test_a_failed_job_leaves_shards_to_clean(
    ds, place, monkeypatch, too_many, shard_rows
) -> None:
    monkeypatch.setattr(SHARD_ROWS, shard_rows)
    writer = SideWriter(place, ds, {"float64": "float64"})
    others = ds.iter_packs() if too_many else [ds.read_packs(1)]
    for packs in (ds.read_packs(0), *others):
        writer.write(packs.example_ids, {"float64": packs.example_ids / 3})
    with pytest.raises(ConfigError, match="90 examples"):
        writer.__exit__(None, None, None)
    left = Files(place).names()
    assert bool(left) == (shard_rows == 5)
    assert all(name.startswith("data/") for name in left)
    with pytest.raises(DatasetNotFoundError):
        open_side(place)


def test_the_writer_that_commits_first_wins(ds, place, caplog) -> None:
    writer = SideWriter(place, ds, {"int64": "int64"})
    with pytest.raises(DatasetBusyError, match="side data"):
        clean(place, delete=True, older_than=0, no_writers=True)
    with caplog.at_level(logging.WARNING, "packstore"):
        late = SideWriter(place, ds, {"float64": "float64"})
    assert "another job may be writing here ('side data', process" in caplog.text
    for packs in ds.iter_packs():
        writer.write(packs.example_ids, {"int64": packs.example_ids})
        late.write(packs.example_ids, {"float64": packs.example_ids.astype(float)})
    writer.commit()
    with pytest.raises(DatasetExistsError):
        late.commit()
    late.abort()
    clean(place, delete=True, older_than=0, no_writers=True)
    with pytest.raises(DatasetExistsError):
        SideWriter(place, ds, {"int64": "int64"})
    assert len(plainly(place)) == 90
    assert clean(place).leftovers == []


@pytest.mark.parametrize(
    ("columns", "provenance", "name"),
    [
        ({"x": "float16"}, {}, "float16"),
        ({"_x": "float32"}, {}, "_x"),
        ({"x": "float32"}, {"model": object()}, "model"),
    ],
)
def test_columns_that_may_not_be(ds, tmp_path, columns, provenance, name) -> None:
    with pytest.raises(FormatError, match=name):
        SideWriter(str(tmp_path / "side"), ds, columns, provenance=provenance)
    assert not (tmp_path / "side").exists()


@pytest.mark.parametrize(
    ("columns", "values", "error"),
    [
        ({"x": "float32"}, {"y": [1.0, 2.0]}, ConfigError),
        ({"x": "float32"}, {"x": [1.0]}, ConfigError),
        ({"x": "float32"}, {"x": [[1.0], [2.0]]}, ConfigError),
        ({"x": "int64"}, {"x": ["a", "b"]}, ConfigError),
        ({"x": "string"}, {"x": ["a", None]}, ConfigError),
        ({"ref_logps": "list<float32>"}, {"ref_logps": [1.0, 2]}, ConfigError),
        (
            {"ref_logps": "list<float32>"},
            {"ref_logps": [-1, -2, np.nan, -4]},
            FormatError,
        ),
    ],
)
def test_values_that_do_not_fit(ds, tmp_path, columns, values, error) -> None:
    writer = SideWriter(str(tmp_path / "side"), ds, columns)
    (name,) = columns
    with pytest.raises(error, match=name):
        writer.write(
            np.array([0, 1]), {name: np.array(v) for name, v in values.items()}
        )


def test_examples_of_several_responses_need_their_counts(kit, tmp_path) -> None:
    ds = kit.made(tmp_path / "ds", 9, "scored")
    writer = SideWriter(str(tmp_path / "side"), ds, {"x": "int64"})
    with pytest.raises(ConfigError, match="num_responses"):
        writer.write(np.array([0]), {"x": np.array([1])})
    counts = np.concatenate([p.num_responses for p in ds.iter_packs()])
    with SideWriter(str(tmp_path / "b"), ds, {"ref_logps": "list<float32>"}) as writer:
        values = np.zeros(int(counts.sum()), np.float32)
        writer.write(np.arange(9), {"ref_logps": values}, np.roll(counts, 1))
    with pytest.raises(CompatibilityError, match="ref_logps"):
        joined(ds, str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("ids", "error", "first"),
    [
        ({3: 5, 70: 5}, IntegrityError, 5),
        ({4: -1}, CompatibilityError, 4),
        ({89: -1}, CompatibilityError, 89),  # the last one
    ],
)
def test_ids_that_repeat_or_are_missing(ds, tmp_path, ids, error, first) -> None:
    with SideWriter(str(tmp_path / "side"), ds, {"x": "int64"}) as writer:
        every = np.array([ids.get(i, i) for i in range(90)])
        writer.write(every, {"x": every})
    with pytest.raises(error, match=rf"\b{first}\b"):
        joined(ds, str(tmp_path / "side"))


def test_what_is_refused_before_anything_is_read(kit, ds, tmp_path) -> None:
    url = derived(str(tmp_path / "side"), ds)
    other = kit.made(tmp_path / "other", kit.records(90, seed=1))
    with pytest.raises(CompatibilityError, match="lineage"):
        joined(other, url)
    with pytest.raises(CompatibilityError, match="kind"):
        joined(kit.made(tmp_path / "sft", 90, "sft"), url)
    shorter = packstore.pack(
        ds, str(tmp_path / "less"), pack_size=30, max_drop_rate=0.9
    )
    some = derived(str(tmp_path / "some"), shorter)
    with pytest.raises(CompatibilityError, match="90 examples"):
        joined(ds, some)


def test_a_shard_that_is_gone(ds, tmp_path) -> None:
    side = derived(str(tmp_path / "side"), ds)
    Files(side).remove(open_side(side).manifest.shards[0].path)
    with pytest.raises(StorageError, match="-00000-"):
        plainly(side)


def test_lineage(tmp_path) -> None:
    """The same for all that has the same ids, tokens and labels, and for nothing
    else.
    """
    records = [
        {"prompt": [1, 2, i % 7], "chosen": [3] * (1 + i % 9), "rejected": [4], "n": i}
        for i in range(40)
    ]
    lines = tmp_path / "pairs.jsonl"
    write_jsonl(lines, records)
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(lines.read_bytes())
    more = tmp_path / "more.jsonl"
    more.write_bytes(lines.read_bytes() * 2)

    def lineage(source: Any, **how: Any) -> str:
        out = str(tmp_path / f"ds-{len(list(tmp_path.iterdir()))}")
        return str(
            packstore.pack(source, out, **{"pack_size": 32, **how}).manifest.lineage
        )

    first = packstore.pack(str(lines), str(tmp_path / "first"), pack_size=32)
    same = {
        first.manifest.lineage,
        lineage(str(moved)),
        lineage(
            str(lines), pack_size=64, layout="shared_prefix", seed=7, strategy="none"
        ),
        lineage(
            str(lines),
            kind="preference",
            num_workers=2,
            carry=("n:int64",),
            format="arrow",
        ),
        lineage(str(lines), max_length=12, max_drop_rate=0.9),
        lineage(first.url, pack_size=12, max_drop_rate=0.9),
        lineage(first, layout="shared_prefix"),
    }
    assert len(same) == 1
    others = [
        lineage(str(more)),
        lineage([str(more), str(lines)]),
        lineage(str(lines), append_eos=False),
        lineage(str(lines), supervised_turns="last"),
        lineage(str(lines), fields={"chosen": "rejected", "rejected": "chosen"}),
        lineage(str(lines), on={"overlong": "truncate_response"}, max_length=8),
        lineage(str(lines), on={"overlong": "truncate_response"}, max_length=9),
    ]
    assert len({*same, *others}) == 1 + len(others)


def test_lineage_of_a_dataset_that_tells_none(ds, tmp_path) -> None:
    edit_manifest(ds.url, lambda m: m["provenance"].pop("lineage"))
    ds = packstore.open(ds.url)
    again = packstore.pack(ds, str(tmp_path / "a"), pack_size=128)
    once_more = packstore.pack(again, str(tmp_path / "b"), pack_size=64)
    lineages = {d.manifest.lineage for d in (ds, again, once_more)}
    assert lineages == {ds.manifest.fingerprint}
