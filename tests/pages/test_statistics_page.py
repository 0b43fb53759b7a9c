"""Charts of ``packstore stats``: they show the stored numbers, for any dataset."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from page_tables import assert_closed, assert_shows, tables_of
from small_jobs import write_jsonl

import packstore
from packstore import Dataset
from packstore.cli import main
from packstore.format.arrays import TopK
from packstore.io.side import SideWriter

RNG = np.random.default_rng(0)


def pair(chosen: int, rejected: int, source: str, reward: float = 1) -> dict[str, Any]:
    return {
        "prompt": [5, 6, 7],
        "chosen": [1] * chosen,
        "rejected": [2] * rejected,
        "chosen_reward": reward,
        "rejected_reward": reward - 2,
        "source": source,
    }


def page_of(dataset: Dataset, folder: Path, *flags: str) -> str:
    """Return the page; every drawing is closed and has no number that is none."""
    file = folder / "page.html"
    assert main(["stats", dataset.url, "--html", str(file), *flags]) == 0
    page = file.read_text(encoding="utf-8")
    assert_closed(page)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert re.search(r"\b(nan|inf)\b", page, re.IGNORECASE) is None
    return page


def section_of(page: str, heading: str) -> str:
    (section,) = re.findall(
        rf"<section><h2>{re.escape(heading)}</h2>(.*?)</section>", page, re.DOTALL
    )
    return section


def figure_of(page: str, caption: str) -> str:
    (figure,) = re.findall(
        rf"<figure><figcaption>{re.escape(caption)}</figcaption>(.*?)</figure>",
        page,
        re.DOTALL,
    )
    return figure


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, Any]]:
    records = []
    for i in range(300):
        chosen, rejected = RNG.integers(1, 40, 2).tolist()
        source = ("<b>web", "books")[i % 3 == 0]
        records.append(pair(chosen, rejected, source, reward=i / 100))
    return records


@pytest.fixture(scope="module")
def made(
    pairs: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    folder = tmp_path_factory.mktemp("statistics")
    overlong = [pair(400, 3, "web") for _ in range(7)]
    identical = [{**pair(3, 3, "web"), "rejected": [1] * 3} for _ in range(11)]
    source = write_jsonl(folder / "pairs.jsonl", [*pairs, *overlong, *identical])
    return packstore.pack(source, folder / "made", pack_size=256, carry=("source",))


def test_each_axis_has_a_title(made: Dataset, tmp_path: Path) -> None:
    page = page_of(made, tmp_path)
    length = figure_of(page, "sequence length")
    assert {">tokens, with the prompt<", ">sequences<"} <= set(
        re.findall(">[^<>]+<", length)
    )
    for drawing in re.findall(r'<svg[^>]*role="img".*?</svg>', page, re.DOTALL):
        assert re.search(r'text-anchor="end">[a-z, -]+</text>', drawing)
        assert re.search(r'x="0.0" y="12.0" text-anchor="start">[a-z, ]+<', drawing)


def test_each_pair_is_in_a_square_of_its_lengths(
    made: Dataset, pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    figure = figure_of(
        page_of(made, tmp_path), "Length of the chosen and of the rejected response"
    )
    squares = {}
    for text in re.findall(r"<title>(.*?)</title>", figure):
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        *edges, count = numbers
        squares[tuple(edges)] = count
    lengths = [(len(record["chosen"]), len(record["rejected"])) for record in pairs]
    expected = Counter(
        edges
        for chosen, rejected in lengths
        for edges in squares
        if edges[0] <= chosen < edges[1] and edges[2] <= rejected < edges[3]
    )
    assert squares == expected
    assert sum(squares.values()) == len(pairs)
    longer = np.mean([chosen > rejected for chosen, rejected in lengths])
    assert f"chosen longer in {longer:.1%} of the pairs" in figure


def test_reasons_of_dropped_records_are_bars(made: Dataset, tmp_path: Path) -> None:
    figure = figure_of(page_of(made, tmp_path), "Records dropped, by reason")
    rows = re.findall(
        r'<span dir="auto">(.*?)</span> <strong>(.*?)</strong>.*?width="([0-9.]+)"',
        figure,
    )
    dropped = made.manifest.records.dropped
    assert {name: int(count) for name, count, _ in rows} == dropped
    assert sorted(dropped.values()) == [7, 11]
    widths = [float(width) for *_, width in rows]
    assert widths[1] / widths[0] == pytest.approx(7 / 11, rel=1e-3)


def test_lengths_and_rewards_of_sources(
    made: Dataset, pairs: list[dict[str, Any]], tmp_path: Path
) -> None:
    page = page_of(made, tmp_path, "--by", "source")
    section = section_of(page, "Lengths and rewards by source")
    assert "<b>web" not in section
    figures = dict(
        re.findall(
            r"<figcaption>(Length|Reward)</figcaption>(.*?)</figure>",
            section,
            re.DOTALL,
        )
    )
    for caption, number_of in {
        "Length": lambda record, side: 3 + len(record[side]),
        "Reward": lambda record, side: record[f"{side}_reward"],
    }.items():
        table = f"<section><h2>{caption}</h2>\n{figures[caption]}</section>"
        rows = tables_of(table)[caption]
        assert list(rows)[1:] == ["<b>web (200 examples)", "books (100 examples)"]
        for name, cells in list(rows.items())[1:]:
            expected = []
            for side in ("chosen", "rejected"):
                numbers = [
                    number_of(record, side)
                    for record in pairs
                    if name.startswith(record["source"])
                ]
                expected += np.percentile(numbers, [10, 50, 90]).tolist()
            for shown, number in zip(cells, expected, strict=True):
                assert_shows(shown, number)


@pytest.mark.parametrize("kind", ["sft", "scored", "one pair", "no reward", "files"])
def test_a_page_of_any_dataset(kind: str, tmp_path: Path) -> None:
    """Without pairs, without differences, and with many files of long names."""
    answers = {"prompt": [1], "responses": [[2], [3] * 4, [4]], "scores": [1, 0.5, 0]}
    records: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": [1, 2], "response": [3] * n} for n in range(1, 9)],
        "scored": [answers, {**answers, "prompt": [7, 8, 9]}],
        "one pair": [pair(2, 2, "web")],
        "no reward": [
            {"prompt": [i], "chosen": [1] * (i + 1), "rejected": [2]} for i in range(9)
        ],
    }
    if kind == "files":
        sources = [
            write_jsonl(
                tmp_path / f"{'long name ' * 15}{i}.jsonl", [pair(i + 1, 2, "")]
            )
            for i in range(30)
        ]
    else:
        sources = [write_jsonl(tmp_path / "records.jsonl", records[kind])]
    dataset = packstore.pack(sources, tmp_path / "made", pack_size=64)
    page = page_of(dataset, tmp_path)
    assert ("Chosen against rejected" in page) == (kind not in ("sft", "scored"))
    assert "No record was dropped" in page
    assert ("Lengths and rewards by file" in page) == (kind == "files")
    if kind == "files":
        section = unescape(section_of(page, "Lengths and rewards by file"))
        assert section.count("(1 example)</span>") == 12
        assert "the 12 largest of 30 groups" in section
    page_of(dataset, tmp_path, "--by", "file")


def test_values_of_side_data_have_units(made: Dataset, tmp_path: Path) -> None:
    side = tmp_path / "teacher"
    columns = {"teacher": "token<top1,float16>", "difficulty": "float32"}
    with SideWriter(str(side), made, columns) as writer:
        for packs in made.iter_packs():
            ids = packs.signed_ids[packs.supervised][:, None]
            logps = np.linspace(-8, 0, len(ids))[:, None]
            difficulty = np.arange(len(packs.example_ids), dtype=np.float32)
            values = {"teacher": TopK(ids, logps), "difficulty": difficulty}
            writer.write(packs.example_ids, values, num_targets=packs.num_targets)

    file = tmp_path / "side.html"
    assert main(["stats", str(side), "--html", str(file)]) == 0
    of_side = file.read_text(encoding="utf-8")
    of_both = page_of(made, tmp_path, "--side", str(side))
    for page in (of_side, of_both):
        assert ">nats<" in figure_of(page, "teacher: entropy")
        mass = figure_of(page, "teacher: mass")
        assert {">probability<", ">supervised tokens<"} <= set(
            re.findall(">[^<>]+<", mass)
        )
        assert ">examples<" in figure_of(page, "difficulty")
    assert ">nats<" in figure_of(of_both, "teacher: log-prob of the token")
