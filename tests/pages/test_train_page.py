"""The page of a run: its curves are those of its metrics."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from small_jobs import write_jsonl

from packstore.pages import charts
from packstore.pages.train_page import read_metrics, train_page


def test_every_metric_is_drawn_and_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records: list[dict[str, object]] = [
        {"step": i, "epoch": 0, "loss": 1 / i, "rewards/accuracies": 0.5, "learning_rate": 1e-6}
        for i in range(1, 9)
    ]
    records[4]["loss"] = None
    group = "eval/file=</svg><img src=x>\u202e/loss"
    records.append({"step": 8, "eval/loss": 0.4, group: 0.25})
    write_jsonl(path, records)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "lo')
    found = read_metrics(path)
    assert len(found) == 9
    assert math.isnan(found[4]["loss"])
    page = train_page("run", "model", found)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert "<img" not in page
    assert "\u202e" not in page
    assert page.count("training, step") == 7 + 8
    assert "<td>loss</td><td>1</td><td>0.125</td><td>0.125</td><td>8</td><td>1</td><td>1</td>" in (
        page
    )
    assert "<dd>0.4000 at step 8</dd>" in page


def test_a_curve_goes_through_its_points() -> None:
    chart = charts.curves("some", "step", {"a": [(0, 1), (50, 2), (100, 6)], "b": [(0, math.nan)]})
    (path,) = re.findall(r'points="([^"]*)"', chart)
    places = np.array([pair.split(",") for pair in path.split()], float)
    width, height = places[2] - places[0]
    assert width == charts.WIDTH - charts.LEFT - charts.RIGHT
    assert -height == charts.HEIGHT - charts.TOP - charts.BOTTOM
    assert np.allclose((places[1] - places[0]) / (width, height), (0.5, 0.2), atol=1e-3)
    assert charts.curves("some", "step", {"a": [(0, math.nan)]}) == ""
    for low, high in ((1.0, 1.0000001), (0.0, 0.0), (-3e-9, -3e-9), (-0.57, 0.42), (0.0, 1e9)):
        levels = np.array(charts._ticks(low, high))
        assert 3 <= len(levels) <= 7
        assert levels[0] <= low <= high <= levels[-1]
        assert np.diff(levels).min() > 0
    assert "at the end: a 3" in charts.curves("some", "step", {"a": [(4, 3)]})


def test_many_points_become_means() -> None:
    chart = charts.curves("some", "step", {"a": [(i, i % 2) for i in range(10 * charts.POINTS)]})
    (path,) = re.findall(r'points="([^"]*)"', chart)
    heights = {pair.split(",")[1] for pair in path.split()}
    assert len(path.split()) == charts.POINTS
    assert len(heights) == 1
