"""``verify`` finds every kind of damage, whichever window or thread meets it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forged import fit
from places import edit_manifest
from small_jobs import pack, pairs, write_jsonl

from packstore import Dataset, concat
from packstore import open as open_dataset
from packstore.cli import main
from packstore.errors import ConfigError, IntegrityError, PackstoreError


@pytest.fixture(params=["parquet", "arrow"])
def stored(kit: Any, tmp_path: Path, request: Any) -> Dataset:
    how = {"row_group_tokens": 150, "shard_tokens": 500, "format": request.param}
    data: Dataset = kit.made(tmp_path / "ds", 75, **how)
    assert len(data.manifest.shards) > 2
    return data


def paths(data: Dataset) -> list[Path]:
    return [Path(url) for url in data.shard_urls]


def spoil(which: int, change: Any) -> Any:
    """Changes the bytes of a shard."""

    def damage(data: Dataset) -> None:
        path = paths(data)[which]
        path.write_bytes(change(path.read_bytes()))

    return damage


def flipped(data: bytes, place: int) -> bytes:
    spoiled = bytearray(data)
    spoiled[place] ^= 1
    return bytes(spoiled)


def swap(data: Dataset) -> None:
    first, second, *_ = paths(data)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def edit(change: Any) -> Any:
    return lambda data: edit_manifest(data.url, change)


DAMAGES = {
    "a bit": spoil(1, lambda b: flipped(b, len(b) // 2)),
    "a bit of a footer": spoil(1, lambda b: flipped(b, -60)),
    "bytes that no reader looks at": spoil(0, lambda b: b"?" + b[1:]),
    "a cut file": spoil(0, lambda b: b[:-100]),
    "an empty file": spoil(0, lambda b: b""),
    "two files for each other": swap,
    "no file": lambda data: paths(data)[1].unlink(),
    "the longest segment": edit(
        lambda m: m["shards"][0]["row_groups"]["longest"].__setitem__(0, 1)
    ),
    "the order of the shards": edit(
        lambda m: (
            m["shards"][0].update(path=m["shards"][1]["path"])
            or m["shards"][1].update(path="data/x.parquet")
        )
    ),
}
"""Beside those of the conformance kit."""


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(stored: Dataset, name: str) -> None:
    report = stored.verify(jobs=2)
    assert report.ok
    assert report.totals == stored.manifest.totals
    try:
        DAMAGES[name](stored)
        report = open_dataset(stored.url).verify(jobs=3)
    except PackstoreError:
        return  # the manifest itself is refused
    assert not report.ok
    assert main(["verify", stored.url, "--jobs", "2"]) == 1


@pytest.mark.parametrize("name", ["the longest segment", "the longest sequence"])
def test_lengths_that_models_are_checked_by_are_compared(
    stored: Dataset, name: str
) -> None:
    """By the longest sequence, training refuses a model with fewer positions."""
    lower = edit(lambda m: m["statistics"].update(longest_sequence=9))
    (lower if name == "the longest sequence" else DAMAGES[name])(stored)
    with pytest.raises(IntegrityError, match="longest"):
        list(open_dataset(stored.url).iter_packs())


def test_the_footer_of_a_shard_without_row_groups(kit: Any, tmp_path: Path) -> None:
    data = kit.made(tmp_path / "ds", 20, shard_tokens=1 << 20, row_group_tokens=1 << 20)
    path = paths(data)[0]
    empty = io.BytesIO()
    pq.write_table(pq.read_table(path).slice(0, 0), empty)

    def emptied(m: Any) -> None:
        m.pop("pack_index")
        shard, counts = m["shards"][0], ("rows", "examples", "sequences", "tokens")
        shard |= dict.fromkeys((*counts, "supervised_tokens"), 0)
        shard["row_groups"] = {name: [] for name in shard["row_groups"]} | {"crc32": ""}
        fit(shard, path.read_bytes())
        shard["footer_sha256"] = "0" * 64
        m["totals"] = dict.fromkeys(m["totals"], 0) | {"bytes": shard["bytes"]}
        m["records"] |= {"read": 0, "packed": 0}
        statistics = m["statistics"]
        m["statistics"] = dict.fromkeys(statistics, 0) | {
            "examples_per_pack": {"min": 0, "mean": 0.0, "max": 0},
            "length_histogram": {},
            "planning": {},
        }

    path.write_bytes(empty.getvalue())
    edit(emptied)(data)
    (problem,) = open_dataset(data.url).verify().problems
    assert "footer" in problem


def test_any_number_of_jobs_finds_the_same(stored: Dataset) -> None:
    DAMAGES["a bit"](stored)
    swap(stored)
    told: list[tuple[object, ...]] = []
    reports = [
        stored.verify(lambda *p: told.append(p), jobs=jobs) for jobs in (1, 2, 8, None)
    ]
    assert len({r.problems for r in reports}) == 1
    shards = len(stored.manifest.shards)
    assert told == [("verify", n + 1, shards, "shards") for n in range(shards)] * 4
    with pytest.raises(ConfigError, match="jobs"):
        stored.verify(jobs=0)


def _by_pandas(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({**table.schema.metadata, "pandas": "{}"})


def _with_nulls(table: pa.Table) -> pa.Table:
    fields = [pa.field(f.name, f.type, nullable=True) for f in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _without_a_key(table: pa.Table) -> pa.Table:
    metadata = {**table.schema.metadata}
    del metadata[b"packstore.kind"]
    return table.replace_schema_metadata(metadata)


def _unchanged(table: pa.Table) -> pa.Table:
    return table


@pytest.mark.parametrize(
    ("change", "options", "mentioned"),
    [
        (_by_pandas, {}, "pandas"),
        (_without_a_key, {}, "no key packstore.kind"),
        (_with_nulls, {}, "input_ids"),
        (lambda t: t.select([*reversed(t.column_names)]), {}, "input_ids"),
        (_unchanged, {"compression": "snappy"}, "SNAPPY"),
        (_unchanged, {"use_dictionary": True}, "DICTIONARY"),
    ],
)
def test_the_files_of_another_writer_are_named_once_by_their_difference(
    kit: Any, tmp_path: Path, change: Any, options: Any, mentioned: str
) -> None:
    data = kit.made(tmp_path / "ds", 60, row_group_tokens=150)
    path = paths(data)[0]
    by_hand = {"compression": "zstd", "use_dictionary": False, **options}
    pq.write_table(change(pq.read_table(path)), path, row_group_size=1 << 20, **by_hand)

    def fit_first(manifest: Any) -> None:
        shard = manifest["shards"][0]
        before = shard["bytes"]
        fit(shard, path.read_bytes())
        shard["row_groups"] = _joined(shard["row_groups"])
        manifest["totals"]["bytes"] += shard["bytes"] - before

    edit_manifest(data.url, fit_first)
    (problem,) = open_dataset(data.url).verify().problems
    assert mentioned in problem
    # Neither another copy nor `packstore verify`, which this is, would help.
    assert "writer" in problem
    assert "copy" not in problem
    assert "verify" not in problem
    with pytest.raises(IntegrityError, match=mentioned):
        open_dataset(data.url).read_packs(0)


def _joined(groups: dict[str, Any]) -> dict[str, Any]:
    """The entry of one row group with the packs of all of them."""
    joined = {name: [sum(groups[name])] for name in ("rows", "examples", "tokens")}
    return {**joined, "longest": [max(groups["longest"])], "crc32": "0" * 8}


def test_only_readers_recommend_to_verify(stored: Dataset) -> None:
    spoil(0, lambda data: flipped(data, len(data) // 3))(stored)
    problems = stored.verify().problems
    assert problems
    assert all("packstore verify" not in problem for problem in problems)
    with pytest.raises(IntegrityError, match="packstore verify"):
        for _ in open_dataset(stored.url).iter_packs():
            pass


def test_ids_of_sources_that_do_not_exist(tmp_path: Path) -> None:
    """Combined with others, they would meet the ids of these."""
    files = [write_jsonl(tmp_path / f"{n}.jsonl", pairs(9, 9 * n)) for n in (0, 1)]
    one, two = (pack(tmp_path / name, files) for name in "ab")
    both = concat([one, two], str(tmp_path / "c"))
    assert all(data.verify().ok for data in (one, both))
    edit_manifest(one.url, lambda m: m["provenance"]["sources"].pop())
    edit_manifest(both.url, lambda m: m["shards"][-1].update(example_id_base=9 << 40))
    for url, source in ((one.url, 1), (both.url, 10)):
        problems = open_dataset(url).verify().problems
        assert f"of source {source}" in problems[0]
    # A base without combined_from hides the source, and some writers list none.
    edit_manifest(one.url, lambda m: m["provenance"].update(sources=[]))
    edit_manifest(both.url, lambda m: m["provenance"].pop("combined_from"))
    assert open_dataset(one.url).verify().ok
    assert open_dataset(both.url).verify().ok
