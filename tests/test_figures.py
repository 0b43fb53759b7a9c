"""The figures of the pages about what packing saves are those of the results file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEASURED = json.loads((ROOT / "benchmarks/results/why_pack.json").read_text(encoding="utf-8"))[
    "results"
]
WAYS = {
    "padded, 16 pairs a batch, random order": "padded_random_16",
    "padded, 4 pairs": "padded_random_4",
    "padded, 1 pair": "padded_random_1",
    "padded, 16 pairs of like length (`group_by_length`)": "length_grouped_16",
    "padding-free": "padding_free",
}


def span(value: Callable[[Any], float], digits: int = 2) -> str:
    """The least and the largest of a figure over the files."""
    found = [value(r) for r in MEASURED]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def rows(page: str) -> dict[str, list[str]]:
    """First cell of each table row of a page -> the other cells."""
    lines = re.findall(r"^\| (.+) \|$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return {first: cells for first, *cells in (line.split(" | ") for line in lines)}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_headline_gives_every_baseline(page: str) -> None:
    told = rows(page)
    for name, way in WAYS.items():
        expected = [
            span(lambda r, w=way, k=k: r[k][w]) for k in ("over_packs", "over_shared_packs")
        ]
        assert told[name] == expected, (page, name)


def test_concepts_give_every_set() -> None:
    told = rows("docs/concepts.md")
    for name, way in WAYS.items():
        expected = [
            f"{r['over_packs'][way]:.2f}, {r['over_shared_packs'][way]:.2f}" for r in MEASURED
        ]
        assert told[name] == expected, name


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_price_of_the_other_ways_and_the_weights(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    variance = span(lambda r: r["price"]["length_grouped_variance_over_random"], 0)
    largest = span(lambda r: r["price"]["padding_free_largest_step_over_mean"], 1)
    assert f"{variance} times" in text
    assert f"{largest} times the mean" in text
    shared = span(lambda r: r["over_shared_packs"]["padding_free"])
    assert f"{shared} times against padding-free batches" in text or page == "README.md"
    assert weights("first_fit_decreasing") in text


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md", "docs/losses.md"])
def test_the_weights_under_a_mean_per_pack(page: str) -> None:
    assert weights("first_fit_shuffle") in (ROOT / page).read_text(encoding="utf-8")


def weights(strategy: str) -> str:
    """The least and the largest weight of a pair, over the files."""
    found = [r["pack_mean_weight"][strategy] for r in MEASURED]
    return f"{min(w[0] for w in found):.1f} to {max(w[-1] for w in found):.1f}"
