"""The page of a training run, from its ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packstore.pages import charts, frame

Record = Mapping[str, float]

CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("training", "loss"), ("validation", "eval/loss"))),
    (
        "Accuracy",
        (("training", "rewards/accuracies"), ("validation", "eval/rewards/accuracies")),
    ),
    ("Margin", (("training", "rewards/margins"), ("validation", "eval/rewards/margins"))),
    (
        "Rewards",
        (
            ("chosen", "rewards/chosen"),
            ("rejected", "rewards/rejected"),
            ("chosen, validation", "eval/rewards/chosen"),
            ("rejected, validation", "eval/rewards/rejected"),
        ),
    ),
    ("Gradient norm", (("gradient norm", "grad_norm"),)),
    ("Learning rate", (("learning rate", "learning_rate"),)),
    ("Tokens per second", (("tokens per second", "tokens_per_second"),)),
    (
        "Fill, and fraction of the time that waits for data",
        (("fill", "fill"), ("data wait", "data_wait")),
    ),
)
"""Title -> name and metric of each curve."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads a ``metrics.jsonl``; null becomes NaN, and an incomplete last line is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            break
        records.append({n: math.nan if v is None else float(v) for n, v in found.items()})
    return records


def train_page(title: str, subtitle: str, records: Sequence[Record]) -> str:
    """Returns the page of a run.

    Args:
        title: heading.
        subtitle: model, dataset and loss.
        records: lines of its ``metrics.jsonl``, in order.
    """
    figures = [
        charts.curves(name, "step", {curve: points(records, metric) for curve, metric in named})
        for name, named in CHARTS
    ]
    sections = [
        frame.section("Figures", frame.facts(_facts(records))),
        frame.section("Curves", charts.side_by_side(*figures)),
    ]
    rows = [row for name in _names(records) if (row := _row(name, points(records, name)))]
    head = ("metric", "first", "last", "lowest", "at step", "highest", "at step")
    sections.append(frame.section("All metrics", frame.table(head, rows)))
    return frame.page(title, subtitle, sections)


def points(records: Iterable[Record], metric: str) -> list[tuple[float, float]]:
    """Returns step and value of each record that has the metric."""
    return [(record["step"], record[metric]) for record in records if metric in record]


def _facts(records: Sequence[Record]) -> dict[str, str]:
    """The figures above the curves."""
    if not records:
        return {"steps": "0"}
    found = {"steps": f"{max(record['step'] for record in records):,.0f}"}
    for name, metric, how in (
        ("last loss", "loss", ".4f"),
        ("last accuracy", "rewards/accuracies", ".1%"),
        ("last validation loss", "eval/loss", ".4f"),
        ("last validation accuracy", "eval/rewards/accuracies", ".1%"),
    ):
        if values := points(records, metric):
            found[name] = f"{values[-1][1]:{how}}"
    finite = [(loss, step) for step, loss in points(records, "eval/loss") if math.isfinite(loss)]
    if finite:
        loss, step = min(finite)
        found["lowest validation loss"] = f"{loss:.4f} at step {step:,.0f}"
    for name, metric in (("pairs", "pairs"), ("tokens", "tokens")):
        if values := points(records, metric):
            found[name] = f"{sum(value for _, value in values):,.0f}"
    return found


def _names(records: Iterable[Record]) -> list[str]:
    """All metrics, in the order of their first record."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if name not in ("step", "epoch")]


def _row(name: str, values: list[tuple[float, float]]) -> tuple[str, ...] | None:
    finite = [(value, step) for step, value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    ends = (finite[0][0], finite[-1][0])
    extremes = (f"{low[0]:.5g}", f"{low[1]:,.0f}", f"{high[0]:.5g}", f"{high[1]:,.0f}")
    return (name, *(f"{value:.5g}" for value in ends), *extremes)
