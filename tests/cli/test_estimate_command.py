"""``packstore estimate`` gives the figures that packing then has; its page needs no other file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from page_tables import assert_closed, assert_shows, tables_of
from small_jobs import write_jsonl

import packstore
from packstore.cli import main
from packstore.cli.estimate import COLUMNS
from packstore.errors import ConfigError, InputError
from packstore.etl.estimate import estimate
from packstore.pages import charts

RNG = random.Random(0)
RECORDS = [
    {
        "prompt": [RNG.randrange(100) for _ in range(RNG.randrange(5, 60))],
        "chosen": [RNG.randrange(100) for _ in range(RNG.randrange(1, 30))],
        "rejected": [RNG.randrange(100) for _ in range(RNG.randrange(1, 30))],
    }
    for _ in range(300)
]
RECORDS.append({"prompt": [1] * 90, "chosen": [2] * 20, "rejected": [3] * 25})  # 235 tokens


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "ids.jsonl"
    write_jsonl(path, RECORDS)
    return path


def test_the_figures_are_those_of_packing(source: Path, tmp_path: Path) -> None:
    found = estimate(source, pack_sizes=(200, 400), strategies=("pool", "first_fit_decreasing"))
    assert len(found.choices) == 8
    for i, choice in enumerate(found.choices):
        packed = packstore.pack(
            source,
            tmp_path / str(i),
            pack_size=choice.pack_size,
            layout=choice.layout,
            strategy=choice.strategy,
        )
        assert (choice.packs, choice.examples) == (len(packed), packed.manifest.totals.examples)
        assert choice.fill_rate == pytest.approx(packed.manifest.fill_rate)
        assert choice.overlong == (choice.layout == "concat" and choice.pack_size == 200)


def test_counts_are_scaled_and_cut_into_steps(source: Path) -> None:
    found = estimate(
        source,
        pack_sizes=(400,),
        layouts=("concat",),
        strategies=("pool",),
        sample=100,
        records=3010,
        world_size=2,
        packs_per_batch=3,
        accumulation=2,
    )
    assert found.scale == pytest.approx(3010 / found.tally.read)
    (choice,) = found.choices
    assert choice.steps == choice.packs // 12
    assert choice.examples_per_step == pytest.approx(12 * choice.examples_per_pack)
    assert choice.examples == pytest.approx(3010, rel=0.01)


def test_the_smallest_pack_that_loses_little_is_recommended(source: Path) -> None:
    layouts = {"layouts": ("concat",), "strategies": ("pool",)}
    found = estimate(source, pack_sizes=(100, 200, 400, 4000), **layouts)
    assert found.recommended is not None
    assert found.recommended.pack_size == 400  # 200 loses a record in 300
    assert estimate(source, pack_sizes=(40,), **layouts).recommended is None


@pytest.mark.parametrize("name", ["sample", "world_size", "packs_per_batch", "accumulation"])
def test_numbers_out_of_range_are_named(source: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {name}: must be at least 1; found 0"):
        estimate(source, **{name: 0})
    with pytest.raises(ConfigError, match="values of layout: must be at least one"):
        estimate(source, layouts=())


def test_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="doctor"):
        estimate([{"prompt": [1], "chosen": [], "rejected": []}])


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    arguments = ["estimate", str(source), "--pack-sizes", "200,400", "--html", str(page)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "recommended: pack size" in out
    assert "shared_prefix" in out
    text = page.read_text(encoding="utf-8")
    assert "Tokens of a sequence" in text
    assert "<script" not in text
    assert_closed(text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert main([*arguments, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    titles, *rows = tables_of(text)["Choices"].values()
    names = ("fill_rate", "aligned_fill_rate", "tokens_saved", "packs", "examples_per_pack")
    names += ("overlong", "steps", "examples_per_step")
    assert titles[2:] == [*COLUMNS[3:]]
    for choice, row in zip(choices, rows, strict=True):
        assert row[:2] == [choice["layout"], choice["strategy"]]
        for name, shown in zip(names, row[2:], strict=True):
            assert_shows(shown, choice[name])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pack-sizes", "many"], "whole numbers"),
        (["--pack-sizes", "0"], "at least 2"),
        (["--strategies", "first_fit_dec"], "first_fit_decreasing"),
        (["--layouts", "wide"], "concat"),
        (["--html", "/nowhere/page.html"], "cannot be written"),
    ],
)
def test_wrong_arguments_get_a_sentence(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["estimate", str(source), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("packstore: error: ")
    assert error.count("\n") == 1
    assert says in error


def test_the_page_of_a_dataset(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packstore.pack(source, tmp_path / "packed", pack_size=400)
    page = tmp_path / "stats.html"
    command = ["stats", str(tmp_path / "packed"), "--by", "file", "--json", "--html", str(page)]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    assert_closed(text)
    tables = tables_of(text)
    assert len(tables["Percentiles"]) == 13
    for table, own in (("Percentiles", found), ("By file", found["by"])):
        for name, row in tables[table].items():
            for shown, value in zip(row, own[name].values() if name else (), strict=bool(name)):
                assert_shows(shown, value)
    assert "examples per pack" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


@pytest.mark.parametrize(
    ("values", "marks", "note"),
    [
        (np.array([7, 8, 9, 9, 21]), ["7", "11", "14", "17", "21"], "largest 21"),
        (np.array([0] * 500 + [721]), ["0", "176", "352", "544", "720"], "largest 721"),
        (
            np.append(np.arange(500).repeat(9), 9000),
            ["0", "121", "242", "374", "495"],
            "the last bar holds all from 495 on",
        ),
        (np.array([0.0, 1.0]), ["0", "0.25", "0.5", "0.75", "1"], "largest 1"),
    ],
)
def test_a_histogram_is_marked_with_values_that_it_has(
    values: np.ndarray, marks: list[str], note: str
) -> None:
    drawn = charts.histogram("some", values, "")
    assert note in drawn
    shown = re.findall(r'text-anchor="middle">([^<]*)<', drawn)
    assert shown == marks
