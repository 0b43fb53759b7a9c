"""``where`` and ``select`` from files to the dataset: counts, ids, partitions, reruns, errors."""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_jobs import trained_tokenizer, write_jsonl

import packstore
from packstore.cli import main
from packstore.errors import ConfigError, DatasetExistsError, DropRateError
from packstore.format.arrays import SOURCE_SHIFT

WHERE = "score_gap > 1 AND lang = 'en'"
RECORDS: list[dict[str, Any]] = [
    {
        "prompt": f"What is {i}? ",
        "chosen": f"It is {i}.",
        "rejected": "No idea.",
        "score_gap": [1, 1.5, 2, None][i % 4],
        "lang": ["en", "de"][i % 3 > 1],
    }
    for i in range(600)
]
KEPT = [i for i in range(600) if i % 4 in (1, 2) and i % 3 < 2]

Pack = Callable[..., packstore.Dataset]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained_tokenizer(["What is it? No idea."]).save(str(path))
    return str(path)


@pytest.fixture
def do_pack(tokenizer: str, tmp_path: Path) -> Pack:
    def run(source: Any, out: str = "out", **settings: Any) -> packstore.Dataset:
        how = {"pack_size": 256, "num_workers": 0, **settings}
        return packstore.pack(source, str(tmp_path / out), tokenizer, **how)

    return run


def ids(dataset: packstore.Dataset) -> list[int]:
    return sorted(i for packs in dataset.iter_packs() for i in packs.example_ids.tolist())


def shards(dataset: packstore.Dataset) -> list[str]:
    return [shard.sha256 for shard in dataset.manifest.shards]


def test_filtered_records_are_counted_and_keep_the_lines_of_the_others(
    do_pack: Pack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    with caplog.at_level(logging.WARNING):
        made = do_pack(source, where=WHERE, max_drop_rate=0, rejects=str(tmp_path / "r.jsonl"))
    assert not caplog.records
    records = made.manifest.records
    assert (records.read, records.packed) == (600, len(KEPT))
    assert records.dropped == {"filtered": 600 - len(KEPT)}
    assert records.fields_used["score_gap"] == len(KEPT)
    assert ids(made) == KEPT
    assert made.manifest.provenance["settings"]["where"] == WHERE
    rejects = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["place"] for r in rejects[:2]] == [f"{source}, line 1", f"{source}, line 3"]
    assert [r["detail"][9:] for r in rejects[:3]] == ["false", "false", "null"]
    assert len(rejects) == 600 - len(KEPT)
    assert made.verify().ok
    # The same call is finished; another condition is another dataset.
    assert do_pack(source, where=WHERE).version == made.version
    with pytest.raises(DatasetExistsError, match=r"settings\.where"):
        do_pack(source, where="score_gap > 1")
    grown = packstore.append(made, write_jsonl(tmp_path / "b.jsonl", RECORDS[1:13]), num_workers=0)
    assert grown.manifest.records.packed == len(KEPT) + len([k for k in KEPT if 1 <= k < 13])


def test_every_engine_partition_and_container_chooses_the_same(
    do_pack: Pack, tmp_path: Path
) -> None:
    halves = [RECORDS[:300], RECORDS[300:]]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", half) for n, half in enumerate(halves)]
    new = {"prompt": "lang || ': ' || prompt", "gap": "score_gap * 2"}
    how = {"where": WHERE, "select": new, "carry": ["gap"]}
    one = do_pack(files, "one", **how)
    wanted = [k if k < 300 else (1 << SOURCE_SHIFT) + k - 300 for k in KEPT]
    assert ids(one) == wanted
    assert shards(do_pack(files, "two", num_workers=2, **how)) == shards(one)
    assert ids(do_pack(files, "parts", partitions=3, dedup="pair", **how)) == wanted
    table = pa.Table.from_pylist(RECORDS)
    pq.write_table(table, tmp_path / "a.parquet")
    records = [do_pack(s, f"c{n}", **how) for n, s in enumerate([table, tmp_path / "a.parquet"])]
    # A column of a table has one type; all else is equal.
    carried = [v for p in one.iter_packs() for v in p.columns["gap"].tolist()]
    assert sorted(set(carried)) == [3, 4]
    assert [ids(dataset) for dataset in records] == [KEPT, KEPT]
    assert sum(d.manifest.totals.tokens for d in records) == 2 * one.manifest.totals.tokens
    made = do_pack(RECORDS[:9], "select", select={"prompt": "'x' || prompt"})
    plain = do_pack(RECORDS[:9], "plain")
    assert made.manifest.totals.tokens == plain.manifest.totals.tokens + 2 * 9
    assert made.manifest.provenance["lineage"] != plain.manifest.provenance["lineage"]


def test_cells_of_csv_are_text(do_pack: Pack, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, RECORDS[0])
        writer.writeheader()
        writer.writerows(RECORDS)
    with pytest.raises(ConfigError, match=r"compare string with numeric .*CAST\(score AS DOUBLE\)"):
        do_pack(path, where=WHERE)
    cast = "TRY_CAST(score_gap AS DOUBLE) > 1 AND lang = 'en'"
    assert ids(do_pack(path, where=cast)) == KEPT


def test_fields_that_come_late_or_never(
    do_pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("packstore.io.inputs.files.BLOCK_BYTES", 5000)
    monkeypatch.setattr("packstore.etl.sources.BLOCK_BYTES", 5000)
    monkeypatch.setattr("packstore.etl.sources.open_examples.__defaults__", (5000,), raising=False)
    late = [{**r, **({"late": i} if i >= 500 else {})} for i, r in enumerate(RECORDS)]
    source = write_jsonl(tmp_path / "a.jsonl", late)
    assert ids(do_pack(source, where="late >= 550")) == list(range(550, 600))
    with pytest.raises(ConfigError) as error:
        do_pack(source, "b", where="score_gap > 1 AND lagn = 'en'")
    text = "found 'lagn' at character 19, which no record has. Did you mean 'lang'? The records"
    assert text in str(error.value)
    monkeypatch.setattr("packstore.etl.sources.FIRST_BLOCKS", 2)
    with caplog.at_level(logging.WARNING):
        assert len(ids(do_pack(source, "c", where="late >= 550"))) == 50
    assert "The rest of the input may have it" in caplog.text
    with pytest.raises(DropRateError, match=r"600 filtered .*line 1: where is false"):
        do_pack(source, "d", where="score_gap > 100")


def test_a_hive_folder_gives_fields(do_pack: Pack, tmp_path: Path) -> None:
    root = tmp_path / "hive"
    for lang in ("en", "de", "__HIVE_DEFAULT_PARTITION__"):
        for year in (2023, 2024):
            folder = root / f"lang={lang}" / f"year={year}"
            folder.mkdir(parents=True)
            records = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in RECORDS[:5]]
            pq.write_table(pa.Table.from_pylist(records), folder / "part.parquet")
    made = do_pack(root, where="lang = 'en' AND year > 2023", carry=["lang", "year"])
    assert (made.manifest.records.read, made.manifest.records.packed) == (30, 5)
    (packs,) = made.iter_packs()
    assert set(packs.columns["lang"]) == {"en"}
    assert set(packs.columns["year"].tolist()) == {2024}
    assert made.manifest.carry == {"lang": "string", "year": "int64"}
    nulls = do_pack(root, "null", where="lang IS NULL", partitions=2)
    assert nulls.manifest.records.packed == 10


def test_the_command(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    how = ["--tokenizer", tokenizer, "--pack-size", "256", "--where", WHERE]
    new = ["--select", "prompt=lang || '=' || prompt"]
    assert main(["pack", source, str(tmp_path / "out"), *how, *new]) == 0
    assert f"dropped: filtered │ {600 - len(KEPT)}" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", source, "--tokenizer", tokenizer, "--where", WHERE]) == 0
    with pytest.raises(ConfigError, match="where must be left out"):
        packstore.pack(tmp_path / "out", tmp_path / "again", where=WHERE)


def test_libraries_of_tables_are_imported_only_where_used(tokenizer: str, tmp_path: Path) -> None:
    """Polars serves `where`; pandas comes with `pa.array`, and pyarrow.compute with `flatten`."""
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS[:20])
    code = (
        "import sys, packstore; "
        "heavy = {'pandas', 'pyarrow.compute'}; "
        f"packstore.pack({source!r}, {str(tmp_path / 'out')!r}, {tokenizer!r}, num_workers=0); "
        "print((heavy | {'polars'}) & set(sys.modules)); "
        f"packstore.scan({str(tmp_path / 'out')!r}).collect(); print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout.split() == ["set()", "set()"], done.stderr
