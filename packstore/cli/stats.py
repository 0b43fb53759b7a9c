"""``packstore stats``: distributions, computed from the packs, or from side data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packstore.cli import Command
from packstore.cli._arguments import (
    FILE,
    add_dataset,
    add_json,
    add_side,
    check_group_column,
    open_dataset_or_sides,
)
from packstore.cli._messages import show_progress
from packstore.cli._output import (
    figure_table,
    format_value,
    identity_of,
    print_result,
    stdout_console,
)
from packstore.cli._side_stats import (
    ColumnSize,
    SideStatistics,
    column_cells,
    concat_distributions,
    distributions_of_packs,
    require_same_columns,
)
from packstore.cli._stats_page import (
    GroupRanges,
    TableCells,
    dataset_page,
    group_ranges,
    value_charts,
)
from packstore.errors import ConfigError, display
from packstore.format.arrays import SOURCE_SHIFT, Packs
from packstore.pages import frame
from packstore.pages.statistics import statistics_page

if TYPE_CHECKING:
    import polars as pl

    from packstore.io.dataset.dataset import Dataset
    from packstore.io.side.join import SideColumns
    from packstore.io.side.side import Side

PERCENTILES = {
    "min": 0,
    "p1": 1,
    "p10": 10,
    "median": 50,
    "p90": 90,
    "p99": 99,
    "max": 100,
}

MAX_GROUPS = 40
"""Groups in a table, the largest ones."""

Figures = Mapping[str, Mapping[str, float]]
"""A table of numbers: name of a row -> name of a column -> number."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(
        parser,
        versions=True,
        help="folder or URL of a packed dataset, or of a side dataset",
    )
    add_side(parser, help="side dataset whose values to add")
    add_json(parser)
    parser.add_argument(
        "--by", metavar="COLUMN", help="also group by a carried column, or by `file`"
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts")


def _run(args: argparse.Namespace) -> int:
    source = open_dataset_or_sides(args)
    if args.html:
        frame.check_writable(args.html)
    if isinstance(source, list):
        return _run_sides(args, source)
    return _run_dataset(args, source)


def _run_dataset(args: argparse.Namespace, dataset: Dataset) -> int:
    from packstore.io.side.join import SideColumns

    if args.by is not None:
        check_group_column(args.by, dataset.manifest.carried)
    side = SideColumns(dataset, args.side) if args.side else None

    values = _read_values(args, dataset, side)
    summary = {name: _summarize(array) for name, array in values.items() if len(array)}
    groups = _group_figures(dataset, args.by) if args.by else {}
    tables = {}
    if args.by:
        largest_groups = dict(list(groups.items())[:MAX_GROUPS])
        tables[f"By {args.by}"] = _format_cells(largest_groups)
    tables["Percentiles"] = _format_cells(summary)
    if args.html:
        side_types = {} if side is None else side.types
        page = _page(args, dataset, values, tables, side_types)
        frame.write(args.html, page)
    if args.json:
        print_result({**identity_of(dataset), "values": summary, "by": groups})
    else:
        _print_tables(dataset, tables, num_groups=len(groups))
    return 0


def _run_sides(args: argparse.Namespace, sides: Sequence[Side]) -> int:
    """Print the statistics of side datasets alone."""
    if args.by is not None or args.side:
        flag = "--by" if args.by is not None else "--side"
        raise ConfigError(
            f"{flag} needs a packed dataset; found side data, {args.dataset}. Name "
            "its dataset: packstore stats DATASET --side VALUES."
        )
    require_same_columns(sides)
    statistics = SideStatistics(sides)
    with show_progress("stats", args) as progress:
        for number, _ in enumerate(statistics.read(), 1):
            progress("read", number, None, "row groups")
    values = statistics.distributions
    columns = statistics.columns()
    summary = {name: _summarize(array) for name, array in values.items() if len(array)}
    tables = {"Columns": column_cells(columns), "Percentiles": _format_cells(summary)}
    if args.html:
        frame.write(args.html, _side_page(sides, values, tables))
    if args.json:
        print_result(
            {
                "sides": [identity_of(side) for side in sides],
                "examples": statistics.examples,
                "columns": _columns_as_json(columns),
                "values": summary,
            }
        )
    else:
        console = stdout_console()
        console.print(f"side data {display(args.dataset)}")
        console.print(f"examples: {statistics.examples:,}")
        for title, (names, rows) in tables.items():
            console.print(figure_table(title, names, rows))
    return 0


def _columns_as_json(columns: Mapping[str, ColumnSize]) -> dict[str, Any]:
    return {
        name: {**size._asdict(), "bytes_per_value": size.bytes_per_value}
        for name, size in columns.items()
    }


def _read_values(
    args: argparse.Namespace, dataset: Dataset, side: SideColumns | None
) -> dict[str, Any]:
    """Return the values of each distribution, by name, over all packs."""
    parts: list[dict[str, Any]] = []
    side_names = [] if side is None else list(side.types)
    with show_progress("stats", args) as progress:
        for number, packs in enumerate(dataset.iter_packs(), 1):
            m = dataset.manifest
            part = _values_of(packs, m.kind, m.pack_size)
            if side is not None:
                (packs_with_side,) = side.join([packs])
                part |= distributions_of_packs(packs_with_side, side_names)
            parts.append(part)
            progress("read", number, len(dataset.row_groups), "row groups")
    return concat_distributions(parts)


def _values_of(packs: Packs, kind: str, pack_size: int) -> dict[str, Any]:
    """Return the values of each distribution, by name, of one row group.

    They are arrays with a value per sequence, per example, or per pack.
    """
    tokens = np.diff(packs.token_offsets)
    starts = np.cumsum(packs.segment_lengths) - packs.segment_lengths
    supervised = np.add.reduceat(packs.supervised, starts, dtype=np.int32)
    values: dict[str, Any] = {
        "sequence length": packs.lengths,
        "supervised tokens": supervised,
        "unsupervised tokens": packs.lengths - supervised,
        "shared tokens left out": packs.segment_offsets,
        "examples per pack": np.diff(packs.example_offsets),
        "segments per pack": np.diff(packs.sequence_offsets),
        "tokens per pack": tokens,
        "tokens unpacked per pack": packs.keys,
        "supervised tokens per pack": np.add.reduceat(
            supervised, packs.sequence_offsets[:-1]
        ),
        "unused tokens per pack": pack_size - tokens,
        "responses per example": packs.num_responses,
        "reward": packs.reward,
    }
    if kind == "preference":
        # Chosen and rejected sequences alternate.
        values["reward gap"] = packs.reward[0::2] - packs.reward[1::2]
        values["length gap, chosen - rejected"] = supervised[0::2] - supervised[1::2]
    return values


def _summarize(values: Any) -> dict[str, float]:
    percentiles = np.percentile(values, list(PERCENTILES.values())).tolist()
    summary = {"count": len(values), "mean": float(values.mean())}
    return {**summary, **dict(zip(PERCENTILES, percentiles, strict=True))}


def _group_figures(dataset: Dataset, by: str) -> dict[str, dict[str, float]]:
    """Return figures of each group of examples, the largest group first.

    Reads only lengths and rewards, not tokens.
    """
    import polars as pl

    from packstore.io.scan import scan

    examples = scan(dataset)
    rewards = pl.col("rewards")
    columns = examples.select(
        _group_key(dataset, by, examples).cast(pl.String).alias("by"),
        pl.col("lengths").list.sum().cast(pl.Int64).alias("tokens"),
        (rewards.list.first() - rewards.list.last()).alias("gap"),
    )
    tokens = pl.col("tokens")
    figures = {
        "examples": pl.len(),
        "tokens unpacked": tokens.sum(),
        "mean tokens": tokens.mean(),
        "median tokens": tokens.quantile(0.5, "linear"),
        "p99 tokens": tokens.quantile(0.99, "linear"),
        "max tokens": tokens.max(),
    }
    if dataset.manifest.kind == "preference":
        figures["reward gap"] = pl.col("gap").cast(pl.Float64).mean()

    table = columns.group_by("by").agg(**figures).collect(engine="streaming")
    table = table.sort(["examples", "by"], descending=[True, False])
    return {row.pop("by"): row for row in table.iter_rows(named=True)}


def _group_key(dataset: Dataset, by: str, examples: pl.LazyFrame) -> pl.Expr:
    """Return the expression for the group of an example: its file, or a column."""
    import polars as pl

    if by == FILE and FILE not in dataset.manifest.carried:
        source = pl.col("example_id") // (1 << SOURCE_SHIFT)
        return source.replace_strict(
            dict(enumerate(dataset.manifest.source_names)),
            default=pl.concat_str(pl.lit("source "), source),
            return_dtype=pl.String,
        )
    # `scan` renames a carried column that has the name of a column of the format.
    if f"{by}_carried" in examples.collect_schema():
        return pl.col(f"{by}_carried")
    return pl.col(by)


def _format_cells(figures: Figures) -> TableCells:
    """Return the columns and the rows of a table of figures."""
    if not figures:
        return [""], []
    first_row = next(iter(figures.values()))
    rows = [
        [str(name), *(_format_figure(value) for value in row.values())]
        for name, row in figures.items()
    ]
    return ["", *first_row], rows


def _format_figure(value: float) -> str:
    return format_value(int(value) if value == int(value) else value)


def _print_tables(
    dataset: Dataset, tables: Mapping[str, TableCells], num_groups: int
) -> None:
    console = stdout_console()
    console.print(f"dataset {dataset.url}")
    console.print(f"fill: {_describe_fill(dataset)}")
    for title, (columns, rows) in tables.items():
        console.print(figure_table(title, columns, rows))
    if num_groups > MAX_GROUPS:
        console.print(
            f"the largest {MAX_GROUPS} of {num_groups:,} groups; --json has all"
        )


def _describe_fill(dataset: Dataset) -> str:
    """Return the fill rate, also with padding if space is reserved for it."""
    m = dataset.manifest
    # Datasets of other writers may hold any value here, or none.
    multiple = m.statistics.planning.get("pad_to_multiple", 1)
    padded_rate = m.statistics.planning.get("aligned_fill_rate")
    if multiple == 1 or not isinstance(padded_rate, float):
        return f"{m.fill_rate:.2%}"
    return (
        f"{m.fill_rate:.2%}, {padded_rate:.2%} once padded to multiples of {multiple}"
    )


def _side_page(
    sides: Sequence[Side], values: dict[str, Any], tables: Mapping[str, TableCells]
) -> str:
    m = sides[0].manifest
    provenance = {name: format_value(value) for name, value in m.provenance.items()}
    return statistics_page(
        title="Side data",
        subtitle=f"{sides[0].url}: of a dataset of kind {m.kind}, fingerprint "
        f"{m.fingerprint[:12]}",
        facts={
            "Content and origin": {
                "side datasets": format_value(len(sides)),
                "examples": format_value(sum(len(side) for side in sides)),
                **provenance,
            }
        },
        charts={"Values": value_charts(values, m.known_columns)},
        tables=tables,
    )


def _page(
    args: argparse.Namespace,
    dataset: Dataset,
    values: dict[str, Any],
    tables: Mapping[str, TableCells],
    side_types: Mapping[str, str],
) -> str:
    """Return the page; without ``--by`` its groups are the input files, if several."""
    by = args.by
    if by is None and len(dataset.manifest.source_names) > 1:
        by = FILE
    groups: list[GroupRanges] = []
    num_groups = 0
    if by is not None and len(dataset):
        from packstore.io.scan import scan

        examples = scan(dataset)
        key = _group_key(dataset, by, examples)
        groups, num_groups = group_ranges(examples, key, dataset.manifest.kind)
    return dataset_page(
        dataset,
        values,
        groups,
        num_groups=num_groups,
        by=by or "",
        fill=_describe_fill(dataset),
        side_types=side_types,
        tables=tables,
    )


STATS = Command(
    configure=_configure,
    run=_run,
    examples="  packstore stats prefs-8k --json\n"
    "  packstore stats prefs-8k --by lang --html stats.html\n"
    "  packstore stats prefs-8k-ref\n",
)
