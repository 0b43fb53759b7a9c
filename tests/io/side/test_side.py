"""Side datasets: written whole or not at all, read back exactly, found by example id."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import write_jsonl

import packstore
from packstore import Dataset, clean
from packstore import open as open_dataset
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
from packstore.io.manifest.side_manifest import SIDE_TYPES, check_side
from packstore.io.side import side as module
from packstore.io.side.side import SideTable, SideWriter
from packstore.testing import random_examples
from packstore.torch import open_side

COLUMNS = {name if "list" not in name else "ref_logps": name for name in SIDE_TYPES}
PROVENANCE = {"model": "none", "dtype": "float32", "layers": 2, "checked": True, "note": None}


def values_of(ids: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """A value of every type that follows from the id."""
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return {
        "string": np.array([f"naïve {i}" * (i % 3) for i in ids], object),
        "int64": ids * 2**30 - 1,
        "float64": ids / 3,
        "bool": ids % 3 == 0,
        "float32": (ids / 7).astype(np.float32),
        "ref_logps": (-np.repeat(ids, counts) - place / 8).astype(np.float32),
    }


def derived(url: str, ds: Dataset, columns: dict[str, str] | None = None, **how: Any) -> str:
    """A side dataset of all examples of `ds`, written in another order than that of the ids."""
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


def assert_joined(table: SideTable, ids: np.ndarray, counts: np.ndarray) -> None:
    rows = table.find(ids)
    for name, expected in values_of(ids, counts).items():
        found = table.ref_logps(rows, counts) if name == "ref_logps" else table.column(name, rows)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, name)


@pytest.fixture
def ds(kit: SimpleNamespace, tmp_path: Path) -> Dataset:
    packs = kit.concat_packs(random_examples(90, max_prompt=6, max_response=6), 2)
    return kit.Written(str(tmp_path / "source")).dataset([packs])


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["preference", "sft", "ranked"]),
    n=st.integers(1, 40),
    seed=st.integers(0, 99),
    shard_rows=st.integers(1, 50),
    mapped=st.booleans(),
)
def test_there_and_back(kit, tmp_path_factory, kind, n, seed, shard_rows, mapped) -> None:
    folder = tmp_path_factory.mktemp("side")
    ds = kit.Written(str(folder / "ds"), kind).dataset([kit.some_packs(n, kind, seed)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD_ROWS", shard_rows)
        patch.setattr(module, "MAPPED_BYTES", 0 if mapped else 1 << 20)
        url = derived(str(folder / "side"), ds)
        side = open_side(url)
        table = SideTable(pickle.loads(pickle.dumps(side)))
    assert len(side) == ds.manifest.totals.examples == n
    assert [s.rows for s in side.manifest.shards][:-1] == [shard_rows] * ((n - 1) // shard_rows)
    for batch in side.iter_batches():
        ids = batch.column("example_ids").to_pylist()
        assert ids == sorted(ids)
    rng = np.random.default_rng(seed)
    packs = kit.joined(list(ds.iter_packs()))
    for count in (0, 1, n, 3 * n):
        picked = rng.integers(0, n, count)
        assert_joined(table, packs.example_ids[picked], packs.num_responses[picked])


def test_anywhere(kit, ds, place) -> None:
    url = derived(place, ds)
    with pytest.raises(DatasetExistsError):
        derived(url, ds)
    derived(url, ds, overwrite=True)
    assert open_side(url).version == 2
    assert plainly(url).keys() == {i for p in ds.iter_packs() for i in p.example_ids.tolist()}


def test_it_is_no_dataset_and_a_dataset_is_none(ds, tmp_path) -> None:
    url = derived(str(tmp_path / "side"), ds)
    with pytest.raises(DatasetNotFoundError, match="must be a dataset"):
        open_dataset(url)
    with pytest.raises(DatasetNotFoundError, match="must be a side dataset"):
        open_side(ds.url)
    with pytest.raises(DatasetNotFoundError, match="must have version 7"):
        open_side(url, version=7)


def test_bases_of_shards_are_in_the_ids(kit, written, tmp_path) -> None:
    ds = written.dataset([kit.some_packs(60)])
    shards = [replace(s, example_id_base=1000 * n) for n, s in enumerate(ds.manifest.shards)]
    based = Dataset(ds.location, replace(ds.manifest, shards=tuple(shards)), 1)
    table = SideTable(open_side(derived(str(tmp_path / "side"), based)))
    for packs in based.iter_packs():
        assert_joined(table, packs.example_ids, packs.num_responses)
    assert max(plainly(str(tmp_path / "side"))) > 1000


def files_of(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize("shard_rows", [5, 1000])
def test_a_failed_job_leaves_shards_to_clean(ds, place, monkeypatch, shard_rows) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", shard_rows)
    writer = SideWriter(place, ds, {"float64": "float64"})
    packs = ds.read_packs(0)
    writer.write(packs.example_ids, {"float64": packs.example_ids / 3})
    with pytest.raises(ConfigError, match=r"each of 90 examples of its dataset once; got \d+"):
        writer.__exit__(None, None, None)
    assert bool(writer._location.files("data")) == (shard_rows == 5)
    assert not writer._location.files("_packstore")
    with pytest.raises(DatasetNotFoundError):
        open_side(place)


def test_the_writer_that_commits_first_wins(ds, place, caplog) -> None:
    writer = SideWriter(place, ds, {"int64": "int64"})
    with pytest.raises(DatasetBusyError, match=r"found 'side data', process \d+ of this machine"):
        clean(place, delete=True, older_than=0, no_writers=True)
    with caplog.at_level(logging.WARNING, "packstore"):
        late = SideWriter(place, ds, {"float64": "float64"})
    assert "another job may be writing here ('side data', process" in caplog.text
    for packs in ds.iter_packs():
        writer.write(packs.example_ids, {"int64": packs.example_ids})
        late.write(packs.example_ids, {"float64": packs.example_ids.astype(float)})
    writer.commit()
    with pytest.raises(DatasetExistsError, match="only one writer may commit at a time"):
        late.commit()
    late.abort()
    clean(place, delete=True, older_than=0, no_writers=True)
    with pytest.raises(DatasetExistsError):
        SideWriter(place, ds, {"int64": "int64"})
    assert len(plainly(place)) == 90
    assert clean(place).leftovers == []


@pytest.mark.parametrize(
    ("columns", "provenance", "message"),
    [
        ({}, {}, "it must have a column"),
        ({"reward": "float32"}, {}, "its name must be its own"),
        ({"x": "float16"}, {}, "its type must be one of"),
        ({"x": "list<float32>"}, {}, "and no other column"),
        ({"ref_logps": "float32"}, {}, "and no other column"),
        ({"x": "float32"}, {"model": object()}, "must be a text, a number, a boolean or null"),
    ],
)
def test_columns_that_may_not_be(ds, tmp_path, columns, provenance, message) -> None:
    with pytest.raises(FormatError, match=message):
        SideWriter(str(tmp_path / "side"), ds, columns, provenance=provenance)
    assert not (tmp_path / "side").exists()


@pytest.mark.parametrize(
    ("columns", "values", "error", "message"),
    [
        ({"x": "float32"}, {"y": [1.0, 2.0]}, ConfigError, "columns x got y"),
        ({"x": "float32"}, {"x": [1.0]}, ConfigError, r"x must have shape \(2,\); found \(1,\)"),
        ({"x": "float32"}, {"x": [[1.0], [2.0]]}, ConfigError, r"found \(2, 1\)"),
        ({"x": "int64"}, {"x": ["a", "b"]}, ConfigError, "x must hold values of type int64"),
        ({"x": "string"}, {"x": ["a", None]}, ConfigError, "a value for each example; found None"),
        ({"ref_logps": "list<float32>"}, {"ref_logps": [1.0, 2]}, ConfigError, r"shape \(4,\)"),
        (
            {"ref_logps": "list<float32>"},
            {"ref_logps": [-1, -2, np.nan, -4]},
            FormatError,
            "log-probs must be finite",
        ),
    ],
)
def test_values_that_do_not_fit(ds, tmp_path, columns, values, error, message) -> None:
    writer = SideWriter(str(tmp_path / "side"), ds, columns)
    with pytest.raises(error, match=message):
        writer.write(np.array([0, 1]), {name: np.array(v) for name, v in values.items()})


def test_ranked_examples_need_their_counts(kit, tmp_path) -> None:
    ds = kit.Written(str(tmp_path / "ds"), "ranked").dataset([kit.some_packs(9, "ranked")])
    writer = SideWriter(str(tmp_path / "side"), ds, {"x": "int64"})
    with pytest.raises(ConfigError, match="need num_responses"):
        writer.write(np.array([0]), {"x": np.array([1])})


def test_an_id_that_repeats_is_found(ds, tmp_path) -> None:
    with SideWriter(str(tmp_path / "side"), ds, {"x": "int64"}) as writer:
        ids = np.arange(90)
        ids[[3, 70]] = 5
        writer.write(ids, {"x": ids})
    with pytest.raises(IntegrityError, match="distinct; found 2 that repeat, the first of them 5"):
        SideTable(open_side(str(tmp_path / "side")))


def test_missing_ids_and_other_counts(ds, tmp_path) -> None:
    table = SideTable(open_side(derived(str(tmp_path / "side"), ds)))
    for missing in (-1, 90, 2**62):
        with pytest.raises(
            CompatibilityError, match=f"none for 1 of 3, the first of them {missing}"
        ):
            table.find(np.array([3, missing, 4]))
    rows = table.find(np.array([3, 4]))
    with pytest.raises(
        CompatibilityError, match="example 4: it must have ref_logps of 3 sequences"
    ):
        table.ref_logps(rows, np.array([2, 3]))


def test_what_is_refused_before_anything_is_read(kit, ds, tmp_path) -> None:
    side = open_side(derived(str(tmp_path / "side"), ds)).manifest
    check_side(side, ds.manifest, "here")
    for change, message in (
        (
            {"kind": "ranked"},
            "here: its kind must be that of the dataset, 'preference'; found 'ranked'",
        ),
        ({"lineage": "0" * 64}, "here: its lineage must be that of the dataset"),
        ({"shards": ()}, "here: it must have values for each of 90 examples; found 0"),
    ):
        with pytest.raises(CompatibilityError, match=message):
            check_side(replace(side, **change), ds.manifest, "here")


def test_a_shard_that_is_gone_or_another(ds, tmp_path) -> None:
    side = open_side(derived(str(tmp_path / "side"), ds))
    other = open_side(derived(str(tmp_path / "other"), ds, {"int64": "int64"}))
    path, wrong = (Path(s.url) / s.manifest.shards[0].path for s in (side, other))
    shard = replace(
        side.manifest.shards[0],
        **{name: getattr(other.manifest.shards[0], name) for name in ("bytes", "sha256")},
    )
    path.write_bytes(wrong.read_bytes())
    side.manifest = replace(side.manifest, shards=(shard,))
    with pytest.raises(IntegrityError, match="rows of the columns that the manifest tells"):
        SideTable(side)
    side.manifest = replace(side.manifest, shards=(replace(shard, rows=91),))
    with pytest.raises(IntegrityError, match="must have 91 rows"):
        SideTable(side)
    path.unlink()
    with pytest.raises(StorageError, match="-00000-"):
        SideTable(side)


def test_lineage(tmp_path) -> None:
    """The same for all that has the same ids and tokens, and for nothing else."""
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
        return str(packstore.pack(source, out, **{"pack_size": 32, **how}).manifest.lineage)

    first = packstore.pack(str(lines), str(tmp_path / "first"), pack_size=32)
    same = {
        first.manifest.lineage,
        lineage(str(moved)),
        lineage(str(lines), pack_size=64, layout="shared_prefix", seed=7, strategy="none"),
        lineage(str(lines), kind="preference", num_workers=2, carry=("n:int64",), format="arrow"),
        lineage(str(lines), max_length=12, max_drop_rate=0.9),
        lineage(first.url, pack_size=12, max_drop_rate=0.9),
        lineage(first, layout="shared_prefix", labels="spans"),
    }
    assert len(same) == 1
    others = [
        lineage(str(more)),
        lineage([str(more), str(lines)]),
        lineage(str(lines), append_eos=False),
        lineage(str(lines), fields={"chosen": "rejected", "rejected": "chosen"}),
        lineage(str(lines), overlong="truncate_response", max_length=8),
        lineage(str(lines), overlong="truncate_response", max_length=9),
    ]
    assert len({*same, *others}) == 1 + len(others)


def test_lineage_of_a_dataset_that_tells_none(kit, written, tmp_path) -> None:
    ds = written.dataset([kit.some_packs(20)])
    assert "lineage" not in ds.manifest.provenance
    again = packstore.pack(ds, str(tmp_path / "a"), pack_size=128)
    once_more = packstore.pack(again, str(tmp_path / "b"), pack_size=64)
    lineages = {d.manifest.lineage for d in (ds, again, once_more)}
    assert lineages == {ds.manifest.fingerprint}
