"""Places of examples in the input: the figures against plain definitions, and what says them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import write_jsonl

import packstore
from packstore.cli import main
from packstore.format.arrays import SOURCE_SHIFT, Int64
from packstore.io.dataset.places import STEP, Places, places_of
from packstore.pack.statistics import design_effect


def cut(ids: Int64, sizes: Int64, every: int = 7) -> list[tuple[Int64, Int64]]:
    """Parts of `every` packs."""
    ends = np.cumsum(sizes)
    cuts = range(0, len(sizes), every)
    return [
        (ids[ends[a] - sizes[a] : ends[min(a + every, len(sizes)) - 1]], sizes[a : a + every])
        for a in cuts
    ]


def some(n: int = 4000, sources: int = 25) -> tuple[Int64, Int64]:
    """Ids with gaps, of sources of different sizes, in input order; and sizes of packs."""
    rng = np.random.default_rng(0)
    source = np.sort(rng.integers(0, sources, n) ** 2 % sources)
    ordinal = np.cumsum(rng.integers(1, 5, n))
    sizes = rng.integers(1, 9, n)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), n))]
    return (source << SOURCE_SHIFT | ordinal)[: sizes.sum()], sizes


@pytest.mark.parametrize("every", [1, 7, 10_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_figures_are_those_of_their_definitions(every: int, shuffled: bool) -> None:
    ids, sizes = some()
    if shuffled:
        ids = np.random.default_rng(1).permutation(ids)
    found = places_of(cut(ids, sizes, every), np.sort(ids))
    ranks = ids.argsort().argsort().astype(np.float64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    assert found.packs == len(sizes)
    assert found.design_effect == pytest.approx(design_effect(ranks, offsets, 1))
    steps = len(sizes) // STEP
    assert steps > 10
    whole = offsets[steps * STEP]
    means = [ranks[a:b].mean() for a, b in itertools.pairwise(offsets[: whole + 1 : STEP])]
    assert len(means) >= steps
    by_step = design_effect(ranks, offsets[: steps * STEP + 1], STEP)
    assert found.step_design_effect == pytest.approx(by_step, rel=0.05)
    source = ids >> SOURCE_SHIFT
    distinct = sum(len(set(source[a:b].tolist())) for a, b in itertools.pairwise(offsets))
    assert found.sources == len(np.unique(source))
    assert found.sources_per_example == distinct / len(ids)
    rng, draws = np.random.default_rng(2), 20
    drawn = sum(len(np.unique(rng.choice(source, size))) for size in sizes for _ in range(draws))
    assert found.sources_of_a_draw == pytest.approx(drawn / draws / len(ids), rel=0.01)
    assert found.neighbours is not shuffled
    if shuffled:
        assert found.design_effect == pytest.approx(1, abs=4 * found.deviation)
        assert found.step_design_effect == pytest.approx(1, abs=4 * found.step_deviation)
        assert found.sources_per_example == pytest.approx(found.sources_of_a_draw, rel=0.03)


def test_what_is_not_defined() -> None:
    none = places_of([], np.empty(0, np.int64))
    assert (none.packs, none.design_effect, none.sources, none.neighbours) == (0, None, 0, False)
    one = places_of([(np.arange(3), np.array([3]))], np.arange(3))
    assert one == Places(
        packs=1, design_effect=None, step_design_effect=None, sources=1,
        sources_per_example=None, sources_of_a_draw=None,
    )  # fmt: skip


def files(folder: Path, n: int = 3000) -> list[str]:
    """Four files, one after another."""
    rng, paths = np.random.default_rng(0), []
    for source in range(4):
        paths.append(str(folder / f"{source}.jsonl"))
        lines = [
            {"prompt": [source + 1] * 3, "chosen": [2] * int(k), "rejected": [3]}
            for k in rng.integers(1, 30, n // 4)
        ]
        write_jsonl(Path(paths[-1]), lines)
    return paths


def test_verify_and_stats_say_how_random_the_places_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = files(tmp_path)
    settings: dict[str, Any] = {"pack_size": 128}
    made = packstore.pack(sources, str(tmp_path / "made"), **settings)
    kept = packstore.pack(sources, str(tmp_path / "kept"), shuffle=False, **settings)
    found = {dataset.url: dataset.verify().places for dataset in (made, kept)}
    for dataset in (made, kept):
        places, ok = found[dataset.url], dataset is made
        assert places is not None
        assert places.sources == 4
        assert places.neighbours is not ok
        assert main(["stats", dataset.url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["places"]
        assert told["design_effect"] == places.design_effect
        assert told["sources_per_example"] == places.sources_per_example
        page = tmp_path / "page.html"
        for command in (["verify"], ["stats", "--html", str(page)]):
            assert main([command[0], dataset.url, *command[1:]]) == 0
            out = capsys.readouterr().out
            assert f"{places.design_effect:.2f}" in out
            assert f"{places.sources_per_example:.3f}" in out
            assert ("hold neighbours of the input" in out) is not ok
        assert f"{places.design_effect:.2f}" in page.read_text(encoding="utf-8")
    mixed, sorted_ = found[made.url], found[kept.url]
    assert mixed is not None
    assert sorted_ is not None
    assert mixed.sources_per_example == pytest.approx(mixed.sources_of_a_draw, rel=0.05)
    assert sorted_.sources_per_example < 0.7 * mixed.sources_per_example
