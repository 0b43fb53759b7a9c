"""``packstore inspect`` and ``stats``: the manifest, and distributions, computed from
the packs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from packstore.cli import command, common
from packstore.cli._messages import progress_of
from packstore.config.job import job_of, to_yaml
from packstore.format.arrays import SOURCE_SHIFT, Packs
from packstore.io.manifest.commit import with_hash
from packstore.pages import charts, frame
from packstore.registry import choice

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset

PERCENTILES = {
    "min": 0,
    "p1": 1,
    "p10": 10,
    "median": 50,
    "p90": 90,
    "p99": 99,
    "max": 100,
}
GROUPS = 40
"""Groups of a table, the largest."""

FILE = "file"
"""Groups by input file, unless a column has this name."""

Figures = dict[str, dict[str, float]]


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the manifest itself")
    shown.add_argument(
        "--as-config",
        action="store_true",
        help="print the job that made it, for pack --config",
    )


@command(
    _configure_inspect,
    "  packstore inspect s3://bucket/prefs-8k --json > manifest.json\n"
    "  packstore inspect prefs-8k --as-config > job.yaml\n",
)
def _inspect(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    m = dataset.manifest
    if args.json:
        common.print_json(with_hash(m.to_json()).decode())
        return 0
    if args.as_config:
        sys.stdout.write(to_yaml(job_of(m.provenance, dataset.url)))
        return 0
    console = common.stdout_console()
    stats, totals = m.statistics, m.totals
    per_pack = stats.examples_per_pack
    rows: dict[str, object] = {
        "version": dataset.version,
        "kind": f"{m.kind} (K = {m.num_responses or 'stored per example'})",
        "layout": m.layout,
        "packs": f"{totals.packs:,} of {m.pack_size:,} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "strategy": f"{m.strategy}, packs {m.pack_order}, seed {m.seed}",
        "examples": totals.examples,
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean "
        f"{per_pack.mean:.2f}",
        "sequences": totals.sequences,
        "tokens": totals.tokens,
        "tokens unpacked": totals.logical_tokens,
        "supervised tokens": f"{totals.supervised_tokens:,} "
        f"({totals.supervised_tokens / max(totals.tokens, 1):.1%})",
        "longest sequence": stats.longest_sequence,
        "shortest pack": stats.shortest_pack,
        "most segments": stats.most_segments,
        "files": f"{len(m.shards)} {m.file_format}, {totals.bytes:,} bytes, "
        f"{8 * totals.bytes / max(totals.tokens, 1):.1f} bits per token",
        "features": ", ".join(m.features) or "none",
        "fingerprint": m.fingerprint,
    }
    console.print(common.two_columns(f"dataset {dataset.url}", rows))
    every = max(m.records.read, 1)
    shares = [
        (what, common.number(count), f"{count / every:.1%}")
        for what, count in common.counts_of(m.records).items()
    ]
    console.print(common.figures_table("records", ("what", "records", "share"), shares))
    console.print(common.two_columns("planning", _flat(stats.planning)))
    tokenizer = dict(m.provenance.get("tokenizer") or {})
    if template := tokenizer.get("chat_template"):
        tokenizer["chat_template"] = f"{len(template)} characters"
    provenance = {**m.provenance, "tokenizer": tokenizer}
    console.print(common.two_columns("provenance", _flat(provenance)))
    return 0


def _flat(value: Any, prefix: str = "") -> dict[str, object]:
    """Flattens nested mappings and lists to dotted names."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(i): entry for i, entry in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {
            prefix: ", ".join(map(str, value)) if isinstance(value, list) else value
        }
    flat: dict[str, object] = {}
    for name, entry in value.items():
        flat |= _flat(entry, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _configure_stats(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    common.add_json(parser)
    parser.add_argument(
        "--by", metavar="COLUMN", help="also by a carried column, or by file"
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts")


@command(
    _configure_stats,
    "  packstore stats prefs-8k --json\n  packstore stats prefs-8k --by lang --html "
    "stats.html\n",
)
def _stats(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    known = (FILE, *dataset.manifest.carried)
    if args.by is not None:
        choice("--by", args.by, known)
    if args.html:
        frame.check_writable(args.html)
    parts: list[dict[str, Any]] = []
    with progress_of("stats", args) as progress:
        for done, packs in enumerate(dataset.iter_packs(), 1):
            parts.append(
                _values(packs, dataset.manifest.kind, dataset.manifest.pack_size)
            )
            progress("read", done, len(dataset.row_groups), "row groups")
    names = [*parts[0]] if parts else []
    # A part is dropped as soon as it is joined, so that memory holds the values once.
    values = {
        name: np.concatenate([part.pop(name) for part in parts]) for name in names
    }
    summary = {name: _summary(array) for name, array in values.items() if len(array)}
    groups = _grouped(dataset, args.by) if args.by else {}
    tables = {"Percentiles": _cells(summary)}
    if args.by:
        tables = {
            f"By {args.by}": _cells(dict(list(groups.items())[:GROUPS])),
            **tables,
        }
    if args.html:
        frame.write(args.html, _page(dataset, values, tables))
    if args.json:
        common.print_result({**summary, "by": groups})
        return 0
    console = common.stdout_console()
    console.print(f"dataset {dataset.url}")
    console.print(f"fill: {_fill(dataset)}")
    for title, (columns, rows) in tables.items():
        console.print(common.figures_table(title, columns, rows))
    if len(groups) > GROUPS:
        console.print(f"the largest {GROUPS} of {len(groups):,} groups; --json has all")
    return 0


def _values(packs: Packs, kind: str, pack_size: int) -> dict[str, Any]:
    tokens = np.diff(packs.token_offsets)
    starts = np.cumsum(packs.segment_lengths) - packs.segment_lengths
    supervised = np.add.reduceat(packs.supervised, starts, dtype=np.int32)
    values = {
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
        values["reward gap"] = packs.reward[0::2] - packs.reward[1::2]
        values["length gap, chosen - rejected"] = supervised[0::2] - supervised[1::2]
    return values


def _summary(values: Any) -> dict[str, float]:
    points = np.percentile(values, [*PERCENTILES.values()]).tolist()
    mean = float(values.mean())
    return {
        "count": len(values),
        "mean": mean,
        **dict(zip(PERCENTILES, points, strict=True)),
    }


def _grouped(dataset: Dataset, by: str) -> Figures:
    """Returns figures of each group of examples, the largest first; reads no token."""
    import polars as pl

    from packstore.io.dataset.scan import scan

    examples, key = scan(dataset), pl.col(by)
    if by == FILE and FILE not in dataset.manifest.carried:
        names = dict(enumerate(dataset.manifest.source_names))
        source = pl.col("example_id") // (1 << SOURCE_SHIFT)
        other = pl.concat_str(pl.lit("source "), source)
        key = source.replace_strict(names, default=other, return_dtype=pl.String)
    elif f"{by}_carried" in examples.collect_schema():
        key = pl.col(f"{by}_carried")
    tokens, rewards = pl.col("lengths").list.sum().cast(pl.Int64), pl.col("rewards")
    columns = [key.cast(pl.String).alias("by"), tokens.alias("tokens")]
    columns += [(rewards.list.first() - rewards.list.last()).alias("gap")]
    figures = {
        "examples": pl.len(),
        "tokens": pl.col("tokens").sum(),
        "mean": pl.col("tokens").mean(),
        "median": pl.col("tokens").quantile(0.5, "linear"),
        "p99": pl.col("tokens").quantile(0.99, "linear"),
        "max": pl.col("tokens").max(),
    }
    if dataset.manifest.kind == "preference":
        figures["reward gap"] = pl.col("gap").cast(pl.Float64).mean()
    table = (
        examples.select(columns)
        .group_by("by")
        .agg(**figures)
        .collect(engine="streaming")
    )
    rows = table.sort(["examples", "by"], descending=[True, False]).iter_rows(
        named=True
    )
    return {row.pop("by"): row for row in rows}


def _cells(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and the rows of a table of figures."""
    columns = ["", *next(iter(figures.values()), {})]
    rows = [
        [
            str(name),
            *(common.number(int(v) if v == int(v) else v) for v in row.values()),
        ]
        for name, row in figures.items()
    ]
    return columns, rows


def _fill(dataset: Dataset) -> str:
    """Returns the fill rate of the packs, and with padding if space is reserved
    for it.
    """
    m = dataset.manifest
    plan = m.statistics.planning  # anything, if another writer made it
    multiple, padded = plan.get("pad_to_multiple", 1), plan.get("aligned_fill_rate")
    if multiple == 1 or not isinstance(padded, float):
        return f"{m.fill_rate:.2%}"
    return f"{m.fill_rate:.2%}, {padded:.2%} once padded to multiples of {multiple}"


def _page(dataset: Dataset, values: dict[str, Any], tables: Any) -> str:
    m = dataset.manifest
    return charts.charts_page(
        "Packed dataset",
        f"{dataset.url}: kind {m.kind}, fingerprint {m.fingerprint[:12]}",
        facts={
            "fill": _fill(dataset),
            "packs": common.number(len(dataset)),
            "examples": common.number(m.totals.examples),
            "tokens": common.number(m.totals.tokens),
            "pack size": common.number(m.pack_size),
            "layout": m.layout,
            "strategy": m.strategy,
        },
        charts=[
            charts.histogram(name, array)
            for name, array in values.items()
            if len(array) and array.min() < array.max()
        ],
        tables=tables,
    )
