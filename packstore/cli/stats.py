"""``packstore stats``: shows distributions, computed from the packs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from packstore.cli import Command
from packstore.cli._groups import Groups, check_by, group_rows, group_table, grouped
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_dataset, heading, number, open_dataset, stdout_console
from packstore.format.arrays import Packs
from packstore.pages import charts, frame

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

PERCENTILES = (0, 1, 10, 50, 90, 99, 100)
BARS = 40
TITLES = {"p0": "min", "p50": "median", "p100": "max"}


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    add_json(parser)
    parser.add_argument(
        "--by", metavar="COLUMN", help="also group by a carried column, or by input file: file"
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts")


def _run(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    check_by(dataset, args.by)
    if args.html:
        frame.check_writable(args.html)
    with progress_of("stats", args) as progress:
        figures = _collect(dataset, progress)
    summary = {name: _summary(values) for name, values in figures.items() if len(values)}
    by = grouped(dataset, args.by) if args.by else {}
    if args.html:
        groups = [_group_section(args.by, by)] if args.by else []
        frame.write(args.html, _page(dataset, figures, summary, groups))
    if args.json:
        print_result({**summary, "by": by})
        return 0
    console = stdout_console()
    console.print(_percentile_table(dataset, summary))
    console.print(f"fill: {_fill(dataset)}")
    if args.by:
        for part in group_table(args.by, by):
            console.print(part)
    for name in ("examples per pack", "sequence length"):
        console.print(_histogram(name, figures[name]))
    return 0


def _collect(dataset: Dataset, progress: Progress) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for done, packs in enumerate(dataset.iter_packs(), 1):
        parts.append(_figures(packs, dataset.manifest.kind, dataset.manifest.pack_size))
        progress("read", done, len(dataset.row_groups), "row groups")
    names = [*parts[0]] if parts else []
    # A part is dropped as soon as it is joined, so that memory holds the figures once.
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in names}


def _figures(packs: Packs, kind: str, pack_size: int) -> dict[str, Any]:
    tokens = np.diff(packs.token_offsets)
    starts = np.cumsum(packs.segment_lengths) - packs.segment_lengths
    supervised = np.add.reduceat(packs.supervised, starts, dtype=np.int32)
    figures = {
        "sequence length": packs.lengths,
        "supervised tokens": supervised,
        "unsupervised tokens": packs.lengths - supervised,
        "shared tokens left out": packs.segment_offsets,
        "examples per pack": np.diff(packs.example_offsets),
        "segments per pack": np.diff(packs.sequence_offsets),
        "tokens per pack": tokens,
        "unused tokens per pack": pack_size - tokens,
        "responses per example": packs.num_responses,
        "reward": packs.reward,
    }
    if kind == "preference":
        figures["reward gap"] = packs.reward[0::2] - packs.reward[1::2]
        figures["length gap, chosen - rejected"] = supervised[0::2] - supervised[1::2]
    return figures


def _summary(values: Any) -> dict[str, float]:
    points = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}
    return {"count": len(values), "mean": float(values.mean()), **named}


def _percentile_table(dataset: Dataset, summary: dict[str, dict[str, float]]) -> Table:
    title = heading(f"dataset {dataset.url}")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in next(iter(summary.values()), {}):
        table.add_column(TITLES.get(column, column), justify="right")
    for name, values in summary.items():
        table.add_row(name, *(_short(v) for v in values.values()))
    return table


def _fill(dataset: Dataset) -> str:
    """The fill rate of the packs, and with padding if space is reserved for it."""
    m = dataset.manifest
    multiple = m.statistics.planning.get("pad_to_multiple", 1)
    text = f"{m.fill_rate:.2%}"
    if multiple > 1:
        padded = m.statistics.planning["aligned_fill_rate"]
        text += f", {padded:.2%} once sequences are padded to multiples of {multiple}"
    return text


def _page(
    dataset: Dataset,
    figures: dict[str, Any],
    summary: dict[str, dict[str, float]],
    groups: list[str],
) -> str:
    m = dataset.manifest
    rows = [(name, *(_short(v) for v in values.values())) for name, values in summary.items()]
    columns = ("", *(TITLES.get(c, c) for c in next(iter(summary.values()), {})))
    facts = {
        "fill": _fill(dataset),
        "packs": number(len(dataset)),
        "examples": number(m.totals.examples),
        "tokens": number(m.totals.tokens),
        "pack size": number(m.pack_size),
        "layout": m.layout,
        "strategy": str(m.statistics.planning.get("strategy", "")),
    }
    drawn = [charts.histogram(n, v, "") for n, v in figures.items() if len(v) and v.min() < v.max()]
    return frame.page(
        "Packed dataset",
        f"{dataset.url}: kind {m.kind}, fingerprint {m.fingerprint[:12]}",
        [
            frame.section("Figures", frame.facts(facts)),
            *groups,
            frame.section("Distributions", charts.side_by_side(*drawn)),
            frame.section("Percentiles", frame.table(columns, rows)),
        ],
    )


def _group_section(by: str, groups: Groups) -> str:
    titles, rows, note = group_rows(groups)
    return frame.section(f"By {by}", frame.table(titles, rows), frame.paragraph(note))


def _short(value: float) -> str:
    return number(int(value)) if value == int(value) else number(value)


def _histogram(name: str, values: Any) -> Table:
    """A histogram of `values` with at most twelve bars of equal width."""
    low, high = int(values.min()), int(values.max())
    width = max(1, -(-(high - low + 1) // 12))
    edges = np.arange(low, high + width + 1, width)
    counts, _ = np.histogram(values, edges)
    table = Table(title=name, show_header=False, box=None, title_justify="left", title_style="bold")
    table.add_column(justify="right", style="cyan")
    table.add_column(justify="right")
    table.add_column()
    for start, count in zip(edges, counts, strict=False):
        label = f"{start:,}" if width == 1 else f"{start:,}–{start + width - 1:,}"
        table.add_row(label, f"{count:,}", "█" * round(BARS * count / max(counts.max(), 1)))
    return table


COMMAND = Command(
    examples="  packstore stats prefs-8k --json\n"
    "  packstore stats prefs-8k --by lang --html stats.html\n",
    configure=_configure,
    run=_run,
)
