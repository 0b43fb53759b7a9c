"""Figures of groups of examples, by a carried column or by input file: ``packstore stats --by``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from packstore.cli.common import number
from packstore.errors import ConfigError, quote, visible
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.scan import scan

if TYPE_CHECKING:
    from polars import DataType, Expr

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
        must = f"--by must be one of: {', '.join(known)}"
        raise ConfigError(f"{must}; found {quote(by)}.")


def grouped(dataset: Dataset, by: str) -> Groups:
    """Returns the figures of each group, the largest group first; reads no token.

    Raises:
        ConfigError: the column holds floating-point numbers.
        PackstoreError: see :func:`packstore.scan`.
    """
    import polars as pl

    tokens, rewards = pl.col("lengths").list.sum(), pl.col("rewards")
    counts = (
        scan(dataset)
        .select(
            _key(dataset, by).alias("by"),
            tokens.cast(pl.Int64).alias("tokens"),
            (rewards.list.first() - rewards.list.last()).cast(pl.Float64).alias("gap"),
        )
        # One row for each length, so that quantiles need no row for each example.
        .group_by("by", "tokens")
        .agg(pl.len().cast(pl.Int64).alias("n"), pl.col("gap").sum())
        .collect(engine="streaming")
    )
    n, tokens = pl.col("n"), pl.col("tokens")
    found = (
        counts.with_columns(_name(dataset, by, counts.schema["by"]))
        .group_by("by", "tokens")
        .agg(n.sum(), pl.col("gap").sum())
        .sort("by", "tokens")
        .with_columns(n.cum_sum().over("by").alias("end"), n.sum().over("by").alias("all"))
        .group_by("by")
        .agg(
            n.sum().alias("examples"),
            (tokens * n).sum().alias("tokens"),
            ((tokens * n).sum() / n.sum()).alias("mean"),
            *(_quantile(p / 100).alias(f"p{p}") for p in (50, 99)),
            tokens.max().alias("max"),
            (pl.col("gap").sum() / n.sum()).alias("reward_gap"),
        )
        .with_columns(
            (pl.col(name) / pl.col(name).sum()).alias(f"{name}_share")
            for name in ("examples", "tokens")
        )
        .sort(["examples", "by"], descending=[True, False])
    )
    pairs = dataset.manifest.kind == "preference"
    names = [name for name in TITLES if pairs or name != "reward_gap"]
    return {row["by"]: {name: row[name] for name in names} for row in found.iter_rows(named=True)}


def _key(dataset: Dataset, by: str) -> Expr:
    """Returns the group of each example of a scan: a carried value, or the number of a file."""
    import polars as pl

    if _by_file(dataset, by):
        return pl.col("example_id") // (1 << SOURCE_SHIFT)
    types = scan(dataset).collect_schema()
    name = f"{by}_carried" if f"{by}_carried" in types else by
    if types[name].is_float():
        raise ConfigError(f"--by must be a column of texts, integers or booleans; {by} is not.")
    return pl.col(name)


def _name(dataset: Dataset, by: str, type_: DataType) -> Expr:
    """Returns the text of each group; files of one name are one group."""
    import polars as pl

    key = pl.col("by")
    if not _by_file(dataset, by):
        text = key.cast(pl.String)
        return text.str.to_titlecase() if type_ == pl.Boolean else text
    names = dataset.manifest.source_names
    unknown = pl.concat_str(pl.lit("source "), key)
    numbers = list(range(len(names)))
    return key.replace_strict(numbers, names, default=unknown, return_dtype=pl.String)


def _by_file(dataset: Dataset, by: str) -> bool:
    return by == FILE and FILE not in dataset.manifest.carry


def _quantile(share: float) -> Expr:
    """Returns the quantile of `tokens` that occur `n` times each, interpolated as numpy does."""
    import polars as pl

    place = (pl.col("all") - 1) * share
    low, high = (
        pl.col("tokens").filter(pl.col("end") > at).min() for at in (place.floor(), place.ceil())
    )
    return low + (high - low) * (place - place.floor()).first()


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


def _text(name: str, value: float) -> str:
    if name.endswith("_share"):
        return f"{value:.1%}"
    return number(value) if isinstance(value, int) else number(float(value))
