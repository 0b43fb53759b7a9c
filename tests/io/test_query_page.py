"""The queries of ``docs/query.md`` on Parquet files alone: on random datasets, packed at
once or grown, they give what ``packstore.scan`` gives.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl
import pytest
from random_datasets import KINDS, LAYOUTS, random_dataset, random_records

import packstore

PAGE = Path(__file__).parents[2] / "docs" / "query.md"
ENGINES = ("DuckDB", "Polars", "pandas")
IGNORED = -100
GROWN = ("appended", "concatenated", "folded")
CASES = [("packed", layout) for layout in LAYOUTS]
CASES += [(history, "trees") for history in GROWN]
"""How a dataset came about, and its layout."""


def code_of_section(title: str) -> str:
    """Return the Python of a section of the page."""
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", text, re.M | re.S)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S))


def block_that_sets(engine: str, name: str) -> str:
    """Return the block of an engine's section that sets a variable, without the lines
    that make data or print.
    """
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {engine}\n(.*?)(?=^## )", text, re.M | re.S)
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    (block,) = (code for code in blocks if re.search(rf"^{name} = ", code, re.M))
    lines = block.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"print|\w+\.show", line))


def run_query(engine: str, name: str, files: list[str]) -> list[dict[str, Any]]:
    """Run a query of the page on shards, and return its rows."""
    imports = {
        "DuckDB": "import duckdb\npacks = duckdb.read_parquet(files)\n",
        "Polars": "import polars as pl\npacks = pl.scan_parquet(files)\n",
        "pandas": "import pandas as pd\npacks = pd.read_parquet(files)\n",
    }
    code = block_that_sets(engine, name)
    code = re.sub(r"^(import|packs = ).*\n", "", code, flags=re.M)
    variables: dict[str, Any] = {"files": files}
    exec(imports[engine] + code, variables)
    result = variables[name]
    if engine == "DuckDB":
        rows = result.pl().to_dicts()
    elif engine == "Polars":
        rows = result.to_dicts()
    else:
        rows = result.to_dict("records")
    assert isinstance(rows, list)
    return rows


def dataset_with_history(
    folder: Path, kind: str, layout: str, history: str, *, seed: int = 0
) -> packstore.Dataset:
    """Return a random dataset that was packed at once, or grew as a history says.

    In an appended and a concatenated one, ids inside the shards are not distinct.
    """
    dataset = random_dataset(folder / "first", kind, layout, seed=seed)
    if history == "packed":
        return dataset
    if history == "concatenated":
        second = random_dataset(folder / "second", kind, layout, seed=seed + 100)
        dataset = packstore.concat([dataset, second], str(folder / "both"))
    else:
        dataset = packstore.append(dataset, random_records(kind, 60, seed + 100))
    assert len({shard.example_id_base for shard in dataset.manifest.shards}) == 2
    if history == "folded":
        return packstore.pack(
            dataset, dataset.url, pack_size=320, overwrite=True, **LAYOUTS[layout]
        )
    return dataset


def newest_shards(dataset: packstore.Dataset) -> dict[str, int]:
    """Return the shards and the bases of their ids by the function on the page."""
    code = code_of_section("Which list belongs to what")
    (function,) = re.findall(r"^def newest_shards.*?(?=^\S)", code, re.M | re.S)
    variables = {"json": json, "Path": Path}
    exec(function, variables)
    return dict(variables["newest_shards"](dataset.url))  # type: ignore[operator]


def examples(dataset: packstore.Dataset) -> list[dict[str, Any]]:
    return packstore.scan(dataset, tokens=True).collect().to_dicts()


def assert_rows_equal(rows: list[dict[str, Any]], expected: Any) -> None:
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        assert row.keys() == values.keys()
        for name, value in values.items():
            is_mean = isinstance(value, float)
            assert row[name] == (pytest.approx(value) if is_mean else value), name


@pytest.mark.parametrize(("history", "layout"), CASES)
def test_pairs_by_source_and_lengths_by_side(
    tmp_path: Path, history: str, layout: str
) -> None:
    dataset = dataset_with_history(tmp_path, "preference", layout, history)
    files = list(newest_shards(dataset))
    rows = examples(dataset)

    by_source = []
    for source in sorted({row["source"] for row in rows}):
        rewards = [row["rewards"] for row in rows if row["source"] == source]
        by_source.append(
            {
                "source": source,
                "pairs": len(rewards),
                "chosen": fmean(chosen for chosen, _ in rewards),
                "rejected": fmean(rejected for _, rejected in rewards),
            }
        )

    by_side = []
    for i, side in enumerate(("chosen", "rejected")):
        lengths = [row["lengths"][i] for row in rows]
        by_side.append(
            {
                "side": side,
                "sequences": len(rows),
                "mean": fmean(lengths),
                "longest": max(lengths),
            }
        )

    for engine in ENGINES:
        assert_rows_equal(run_query(engine, "by_source", files), by_source)
        assert_rows_equal(run_query(engine, "by_side", files), by_side)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("history", "layout"), CASES)
def test_supervised_tokens_and_the_longest_prompts(
    tmp_path: Path, history: str, kind: str, layout: str
) -> None:
    dataset = dataset_with_history(tmp_path, kind, layout, history)
    files = list(newest_shards(dataset))
    counts: Counter[int] = Counter()
    prompts = []
    for row in examples(dataset):
        for labels in row["labels"]:
            counts.update(label for label in labels if label != IGNORED)
            first_supervised = next(i for i, x in enumerate(labels) if x != IGNORED)
            prompts.append(first_supervised)

    most_frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
    top_tokens = [
        {"id": token, "times": times, "share": times / counts.total()}
        for token, times in most_frequent
    ]
    for engine in ENGINES:
        assert_rows_equal(run_query(engine, "top_tokens", files), top_tokens)

    longest_prompts = [{"prompt": n} for n in sorted(prompts, reverse=True)[:3]]
    assert run_query("DuckDB", "longest_prompts", files) == longest_prompts


@pytest.mark.parametrize(("history", "layout"), CASES)
def test_the_best_of_k_answers(tmp_path: Path, history: str, layout: str) -> None:
    dataset = dataset_with_history(tmp_path, "scored", layout, history)
    code = block_that_sets("DuckDB", "best_rewards")
    query = code[code.index("packs = ") :]
    variables: dict[str, Any] = {"bases": newest_shards(dataset)}
    exec("import duckdb\n" + query, variables)
    expected = (
        packstore.scan(dataset)
        .select(
            "example_id",
            answers=pl.col("rewards").list.len().cast(pl.Int64),
            best=pl.col("rewards").list.max(),
        )
        .sort("example_id")
        .collect()
    )
    assert variables["best_rewards"].pl().to_dicts() == expected.to_dicts()


def test_older_versions_are_not_counted(tmp_path: Path) -> None:
    """The folder still holds shards of the first version."""
    first = random_dataset(tmp_path / "ds", "preference", "concat")
    packstore.pack(
        first, tmp_path / "ds", pack_size=320, layout="concat", overwrite=True
    )
    dataset = packstore.open(str(tmp_path / "ds"))
    files = list(newest_shards(dataset))
    assert len(list((tmp_path / "ds" / "data").iterdir())) > len(files)
    (chosen, rejected) = run_query("DuckDB", "by_side", files)
    assert chosen["sequences"] == rejected["sequences"] == 60
