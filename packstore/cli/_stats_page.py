"""The page that ``packstore stats --html`` writes of a packed dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packstore.cli._output import format_value
from packstore.cli._side_stats import unit_of
from packstore.pages import charts, rows
from packstore.pages.rows import Range
from packstore.pages.statistics import paragraph, statistics_page

if TYPE_CHECKING:
    import polars as pl

    from packstore.io.dataset.dataset import Dataset
    from packstore.io.manifest.manifest import Records

MAX_ROWS = 12
"""Groups in a chart, the largest ones."""

TableCells = tuple[list[str], list[list[str]]]
"""A table as texts: names of the columns; and rows, which begin with their name."""

LENGTHS = "Lengths"
PAIRS = "Chosen against rejected"
REWARDS = "Rewards"
PACKS = "Packs"
RECORDS = "Records"


class GroupRanges(NamedTuple):
    """Percentiles of a group of examples, by series: ``chosen``, …"""

    name: str
    num_examples: int
    lengths: dict[str, Range]
    rewards: dict[str, Range]


CHARTS = {
    "sequence length": (LENGTHS, "tokens, with the prompt", "sequences"),
    "supervised tokens": (LENGTHS, "tokens", "sequences"),
    "unsupervised tokens": (LENGTHS, "tokens", "sequences"),
    "shared tokens left out": (LENGTHS, "tokens", "sequences"),
    "responses per example": (LENGTHS, "responses", "examples"),
    "length gap, chosen - rejected": (PAIRS, "supervised tokens", "pairs"),
    "reward": (REWARDS, "reward", "sequences"),
    "reward gap": (REWARDS, "reward, chosen - rejected", "pairs"),
    "examples per pack": (PACKS, "examples", "packs"),
    "segments per pack": (PACKS, "segments", "packs"),
    "tokens per pack": (PACKS, "tokens", "packs"),
    "tokens unpacked per pack": (PACKS, "tokens", "packs"),
    "supervised tokens per pack": (PACKS, "tokens", "packs"),
    "unused tokens per pack": (PACKS, "tokens", "packs"),
}
"""Distribution -> heading of its chart, title of its axis, and the counted things."""

SIDE_DATA = "Side data"

QUANTITIES = {
    "mass": "probability",
    "entropy": "nats",
    "log-prob of the token": "nats",
    "share of tokens in it": "1 if the token is among the k",
}
"""Distribution of a top k, after the name of its column -> title of its axis."""


def dataset_page(
    dataset: Dataset,
    values: Mapping[str, Any],
    groups: Sequence[GroupRanges],
    *,
    num_groups: int,
    by: str,
    fill: str,
    side_types: Mapping[str, str],
    tables: Mapping[str, TableCells],
) -> str:
    """Return the page of a packed dataset.

    Args:
        dataset: the dataset.
        values: distribution -> its values.
        groups: the largest groups, as of :func:`group_ranges`; empty: no chart.
        num_groups: the number of all groups.
        by: the column or ``file`` that makes the groups.
        fill: the fill rate, as text.
        side_types: column of side data -> its type.
        tables: heading -> table.
    """
    m = dataset.manifest
    groups_heading = f"Lengths and rewards by {by}"
    drawings: dict[str, list[str]] = {
        heading: []
        for heading in (PAIRS, LENGTHS, REWARDS, groups_heading, RECORDS, PACKS)
    }
    if m.kind == "preference":
        drawings[PAIRS].append(_length_pairs(values["supervised tokens"]))
    side_values: dict[str, Any] = {}
    for name, array in values.items():
        if name not in CHARTS:
            side_values[name] = array
            continue
        heading, x_title, y_title = CHARTS[name]
        drawing = _histogram(name, array, x_title=x_title, y_title=y_title)
        drawings[heading].append(drawing)
    drawings[SIDE_DATA] = value_charts(side_values, side_types)
    if groups:
        has_rewards = _has_varied_rewards(values["reward"], m.kind)
        drawings[groups_heading] = _group_charts(groups, num_groups, has_rewards)
    drawings[RECORDS].append(_dropped_records(m.records))
    return statistics_page(
        title="Packed dataset",
        subtitle=f"{dataset.url}: kind {m.kind}, fingerprint {m.fingerprint[:12]}",
        facts={
            "Size and fill": {
                "fill": fill,
                "packs": format_value(len(dataset)),
                "examples": format_value(m.totals.examples),
                "tokens": format_value(m.totals.tokens),
                "tokens unpacked": format_value(m.totals.logical_tokens),
                "pack size": format_value(m.pack_size),
                "layout": m.layout,
                "strategy": m.strategy,
            }
        },
        charts=drawings,
        tables=tables,
    )


def value_charts(values: Mapping[str, Any], types: Mapping[str, str]) -> list[str]:
    """Return a histogram of each distribution of side data.

    Args:
        values: distribution -> its values.
        types: column -> its type; a distribution is named after its column.
    """
    drawings = []
    for column, type_name in types.items():
        y_title = f"{unit_of(type_name)}s"
        titles = {f"{column}: {name}": title for name, title in QUANTITIES.items()}
        for name, x_title in {column: column, **titles}.items():
            if name in values:
                drawing = _histogram(
                    name, values[name], x_title=x_title, y_title=y_title
                )
                drawings.append(drawing)
    return drawings


def _histogram(name: str, array: Any, *, x_title: str, y_title: str) -> str:
    """Return a histogram; a sentence if all numbers are equal, or there are none."""
    if not len(array):
        return paragraph(f"{name}: no values")
    low = array.min()
    if low == array.max():
        value = format_value(low.item())
        return paragraph(f"{name}: {value} for all {len(array):,} {y_title}")
    return charts.histogram(name, array, x_title=x_title, y_title=y_title)


def _has_varied_rewards(rewards: Any, kind: str) -> bool:
    """Return True if rewards differ, for pairs within the chosen or the rejected."""
    sides = [rewards[0::2], rewards[1::2]] if kind == "preference" else [rewards]
    return any(len(side) and side.min() < side.max() for side in sides)


def _length_pairs(supervised: Any) -> str:
    """Return the lengths of both responses of each pair as a chart.

    Args:
        supervised: `[2 n]`, supervised tokens; chosen and rejected alternate.
    """
    if not len(supervised):
        return paragraph("lengths: no pairs")
    chosen = supervised[0::2]
    rejected = supervised[1::2]
    return charts.pair_histogram(
        "Length of the chosen and of the rejected response",
        chosen,
        rejected,
        x_title="chosen, supervised tokens",
        y_title="rejected, supervised tokens",
        count_title="pairs",
        note=f"chosen longer in {np.mean(chosen > rejected):.1%} of the pairs (below "
        f"the dashed line), as long in {np.mean(chosen == rejected):.1%}",
    )


def _dropped_records(records: Records) -> str:
    totals = f"{records.read:,} read, {records.packed:,} packed"
    if not any(records.dropped.values()):
        return paragraph(f"No record was dropped: {totals}.")
    in_order = dict(sorted(records.dropped.items()))
    largest_first = Counter(in_order).most_common()
    title = "Records dropped, by reason"
    return rows.bars(title, dict(largest_first), note=f"records: {totals}")


def group_ranges(
    examples: pl.LazyFrame, key: pl.Expr, kind: str
) -> tuple[list[GroupRanges], int]:
    """Return percentiles of lengths and rewards of the largest groups.

    Args:
        examples: as of :func:`packstore.scan`.
        key: the group of an example.
        kind: kind of the dataset; for ``preference``, chosen and rejected are apart.

    Returns:
        The largest groups first, and the number of all groups.
    """
    import polars as pl

    columns = examples.select(key.cast(pl.String).alias("group"), "lengths", "rewards")
    percentiles = {**_percentiles("lengths", kind), **_percentiles("rewards", kind)}
    groups = columns.group_by("group").agg(pl.len().alias("examples"), **percentiles)
    table = groups.collect(engine="streaming")
    largest = table.sort(["examples", "group"], descending=[True, False]).head(MAX_ROWS)
    ranges = [
        GroupRanges(
            name=str(row["group"]),
            num_examples=row["examples"],
            lengths=_ranges_of(row, "lengths", kind),
            rewards=_ranges_of(row, "rewards", kind),
        )
        for row in largest.iter_rows(named=True)
    ]
    return ranges, len(table)


def _percentiles(column: str, kind: str) -> dict[str, pl.Expr]:
    """Return the percentiles of a column of lists, named as :func:`_ranges_of` reads
    them.
    """
    import polars as pl

    percentiles: dict[str, pl.Expr] = {}
    for index, series in enumerate(_series_of(kind)):
        numbers = pl.col(column).list.explode()
        if kind == "preference":
            numbers = pl.col(column).list.get(index)
        for name, fraction in zip(Range._fields, (0.1, 0.5, 0.9), strict=True):
            percentile = numbers.cast(pl.Float64).quantile(fraction, "linear")
            percentiles[f"{column} {series} {name}"] = percentile
    return percentiles


def _ranges_of(row: Mapping[str, Any], column: str, kind: str) -> dict[str, Range]:
    """Return the percentiles of a group by series."""
    ranges = {}
    for series in _series_of(kind):
        numbers = [row[f"{column} {series} {name}"] for name in Range._fields]
        ranges[series] = Range(*numbers)
    return ranges


def _series_of(kind: str) -> tuple[str, ...]:
    return ("chosen", "rejected") if kind == "preference" else ("responses",)


def _group_charts(
    groups: Sequence[GroupRanges], num_groups: int, has_rewards: bool
) -> list[str]:
    """Return the charts of lengths and rewards by group."""
    note = "lines from the 10th to the 90th percentile, marks at the median"
    if num_groups > len(groups):
        note += f"; the {len(groups)} largest of {num_groups:,} groups"
    names = []
    for group in groups:
        unit = "example" if group.num_examples == 1 else "examples"
        names.append(f"{group.name} ({group.num_examples:,} {unit})")
    lengths = {name: group.lengths for name, group in zip(names, groups, strict=True)}
    drawings = [
        rows.ranges("Length", lengths, x_title="tokens, with the prompt", note=note)
    ]
    if not has_rewards:
        text = "Rewards are not drawn: they are the same in every group."
        return [*drawings, paragraph(text)]
    rewards = {name: group.rewards for name, group in zip(names, groups, strict=True)}
    return [*drawings, rows.ranges("Reward", rewards, x_title="reward", note=note)]
