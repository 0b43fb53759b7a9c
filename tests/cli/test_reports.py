"""The figures of ``estimate`` and ``stats`` are those of packing; the page of ``stats``
shows what is printed.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from page_tables import assert_closed, assert_shows, tables_of
from small_jobs import write_jsonl

import packstore
from packstore.cli import main

RNG = random.Random(0)
RECORDS: list[dict[str, Any]] = [
    {
        "prompt": [RNG.randrange(100) for _ in range(RNG.randrange(5, 60))],
        "chosen": [RNG.randrange(100) for _ in range(RNG.randrange(1, 30))],
        "rejected": [RNG.randrange(100) for _ in range(RNG.randrange(1, 30))],
        "lang": RNG.choice(("en", "de", "zh")),
        "entropy": RNG.random(),
    }
    for _ in range(300)
]
RECORDS.append(
    {**RECORDS[0], "prompt": [1] * 190, "chosen": [2] * 20, "rejected": [3] * 25}
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("reports") / "ids.jsonl", RECORDS)


def figures(capsys: pytest.CaptureFixture[str], *command: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, command), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_of_an_estimate_are_those_of_packing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", source, "--pack-sizes", "200,400", "--packs-per-batch", 1]
    result = figures(capsys, *command)
    assert len(result["choices"]) == 6
    for i, choice in enumerate(result["choices"]):
        names = ("pack_size", "layout", "share_prefixes")
        settings = {name: choice[name] for name in names}
        packed = packstore.pack(source, tmp_path / str(i), **settings)
        assert (choice["packs"], choice["examples"]) == (
            len(packed),
            packed.manifest.pairs,
        )
        assert choice["dropped"] == packed.manifest.records.dropped.get("overlong", 0)
        totals = packed.manifest.totals
        stored_rate = totals.tokens / totals.logical_tokens
        if choice["share_prefixes"] == "example":
            assert choice["fill_rate"] == pytest.approx(packed.manifest.fill_rate)
            assert choice["stored_rate"] == pytest.approx(stored_rate)
        else:  # a pack may share more than was planned
            assert choice["stored_rate"] >= stored_rate
        assert choice["steps"] == len(packed)
    assert main([*map(str, command)]) == 0
    table = capsys.readouterr().out
    for choice in result["choices"]:
        assert f"{choice['fill_rate']:.2%}" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pack-sizes", "0"], "at least 2"),
        (["--sample", "0"], "must be at least 1; found 0"),
    ],
)
def test_wrong_arguments_get_a_sentence(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["estimate", str(source), *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("packstore: error: ")
    assert says in line


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    made: packstore.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in (tmp_path, tmp_path / "none" / "page.html"):
        assert main(["stats", made.url, "--html", str(page)]) == 1
        told = capsys.readouterr()
        assert str(page) in told.err
        assert "row groups" not in told.err
        assert not told.out


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> packstore.Dataset:
    folder = tmp_path_factory.mktemp("made")
    more = write_jsonl(folder / "more.jsonl", RECORDS[:50])
    settings: dict[str, Any] = {"layout": "shared_prefix", "carry": ("lang",)}
    return packstore.pack([source, more], folder / "made", pack_size=512, **settings)


def test_tokens_of_packs_are_counted_as_stored_and_unpacked(
    made: packstore.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    result = figures(capsys, "stats", made.url)["values"]
    totals = made.manifest.totals
    statistics = made.manifest.statistics
    left_out = totals.logical_tokens - totals.tokens
    assert left_out > 0
    for name, total in {
        "tokens per pack": totals.tokens,
        "tokens unpacked per pack": totals.logical_tokens,
        "supervised tokens per pack": totals.supervised_tokens,
        "shared tokens left out": left_out,
    }.items():
        assert result[name]["mean"] * result[name]["count"] == pytest.approx(total)
    assert result["tokens unpacked per pack"]["max"] == statistics.most_keys
    assert result["supervised tokens per pack"]["max"] == statistics.most_targets


@pytest.mark.parametrize("by", ["lang", "file"])
def test_groups_equal_a_loop_over_the_packs(
    made: packstore.Dataset, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: dict[str, list[int]] = {}
    gaps: dict[str, list[float]] = {}
    for packs in made.iter_packs():
        for i, example_id in enumerate(packs.example_ids.tolist()):
            file = ("ids.jsonl", "more.jsonl")[example_id >> 40]
            group = packs.columns["lang"][i] if by == "lang" else file
            tokens.setdefault(group, []).append(
                int(packs.lengths[2 * i : 2 * i + 2].sum())
            )
            gaps.setdefault(group, []).append(
                float(packs.reward[2 * i] - packs.reward[2 * i + 1])
            )
    page = tmp_path / "stats.html"
    result = figures(capsys, "stats", made.url, "--by", by, "--html", page)
    assert list(result["by"]) == sorted(tokens, key=lambda g: (-len(tokens[g]), g))
    for group, values in tokens.items():
        expected = {
            "examples": len(values),
            "tokens unpacked": sum(values),
            "mean tokens": np.mean(values),
            "median tokens": np.percentile(values, 50),
            "p99 tokens": np.percentile(values, 99),
            "max tokens": max(values),
            "reward gap": np.mean(gaps[group]),
        }
        assert result["by"][group] == pytest.approx(expected, rel=1e-6)
    text = page.read_text(encoding="utf-8")
    assert_closed(text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    tables = tables_of(text)
    for title, named in (("Percentiles", result["values"]), (f"By {by}", result["by"])):
        for name, row in tables[title].items():
            for shown, value in zip(
                row, named[name].values() if name else (), strict=bool(name)
            ):
                assert_shows(shown, value)
