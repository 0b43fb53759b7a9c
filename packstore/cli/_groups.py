"""Figures of groups of examples, by a carried column or by input file: ``packstore stats --by``."""

from __future__ import annotations

from rich.table import Table

from packstore.cli.common import number
from packstore.errors import ConfigError, quote, visible
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.places import source_names
from packstore.io.dataset.scan import scan

FILE = "file"
"""Groups by input file, unless a column has this name."""

TITLES = {
    "examples": "examples",
    "examples_share": "share",
    "tokens": "tokens",
    "tokens_share": "share",
    "mean": "mean",
    "p50": "median",
    "p99": "p99",
    "max": "max",
    "reward_gap": "reward gap",
}
NOTE = (
    "tokens: of all sequences, each whole; mean, median, p99 and max: tokens of an example; reward "
    "gap: mean of chosen - rejected."
)
MOST = 40
"""Groups of a table, the largest."""

Groups = dict[str, dict[str, float]]


def check_by(dataset: Dataset, by: str | None) -> None:
    """Refuses a `by` that is no carried column of `dataset`, and not ``file``.

    Raises:
        ConfigError: see above.
    """
    known = [FILE, *dataset.manifest.carry]
    if by not in (None, *known):
        must = f"--by must be a carried column, of {', '.join(known)}"
        raise ConfigError(f"{must}; found {quote(by)}.")


def grouped(dataset: Dataset, by: str) -> Groups:
    """Returns the figures of each group, the largest group first; reads no token.

    Raises:
        ConfigError: the column holds floating-point numbers.
        PackstoreError: see :func:`packstore.scan`.
    """
    import polars as pl

    frame = scan(dataset)
    types = frame.collect_schema()
    column = f"{by}_carried" if f"{by}_carried" in types else by
    files = by == FILE and FILE not in dataset.manifest.carry
    if not files and types[column].is_float():
        raise ConfigError(f"--by must be a column of texts, integers or booleans; {by} is not.")
    rewards, tokens = pl.col("rewards"), pl.col("lengths").list.sum()
    gap = [rewards.list.get(0) - rewards.list.get(1)] if _pairs(dataset) else []
    found = (
        frame.select(
            (pl.col("example_id") // (1 << SOURCE_SHIFT) if files else pl.col(column)).alias("by"),
            tokens.cast(pl.Int64).alias("tokens"),
            *(g.cast(pl.Float64).alias("gap") for g in gap),
        )
        .group_by("by")
        .agg(
            pl.len().alias("examples"),
            pl.col("tokens").sum(),
            pl.col("tokens").mean().alias("mean"),
            *(pl.col("tokens").quantile(p / 100, "linear").alias(f"p{p}") for p in (50, 99)),
            pl.col("tokens").max().alias("max"),
            *(pl.col("gap").mean().alias("reward_gap") for _ in gap),
        )
        .with_columns(
            (pl.col(name) / pl.col(name).sum()).alias(f"{name}_share")
            for name in ("examples", "tokens")
        )
        .sort(["examples", "by"], descending=[True, False])
        .collect(engine="streaming")
    )
    named = dict(enumerate(source_names(dataset.manifest))) if files else {}
    names = [name for name in TITLES if name in found.columns]
    return {
        str(named.get(row["by"], row["by"])): {name: row[name] for name in names}
        for row in found.iter_rows(named=True)
    }


def group_rows(groups: Groups) -> tuple[list[str], list[tuple[str, ...]], str]:
    """Returns the titles, the rows of the largest groups, and a note on what they show."""
    names = [*next(iter(groups.values()), {})]
    shown = list(groups.items())[:MOST]
    rows = [(group, *(_text(name, own[name]) for name in names)) for group, own in shown]
    left = len(groups) - len(shown)
    note = NOTE if "reward_gap" in names else NOTE.partition("; reward")[0] + "."
    more = f"the largest {MOST} of {number(len(groups))} groups; " if left else ""
    return ["", *(TITLES[name] for name in names)], rows, more + note


def group_table(by: str, groups: Groups) -> tuple[Table, str]:
    """Returns the same as a table for the terminal, with its note."""
    titles, rows, note = group_rows(groups)
    table = Table(title=f"by {by}", title_justify="left", title_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(visible, row))  # rich would leave out control characters
    return table, note


def _pairs(dataset: Dataset) -> bool:
    return dataset.manifest.kind == "preference"


def _text(name: str, value: float) -> str:
    if name.endswith("_share"):
        return f"{value:.1%}"
    return number(value) if isinstance(value, int) else number(float(value))
