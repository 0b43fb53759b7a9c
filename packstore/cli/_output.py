"""Prints the result of a command on stdout: tables for people, JSON for programs.

Texts of a dataset may hold control characters, which a terminal would execute. They are
escaped wherever they are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from packstore.errors import CONTROL, visible

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.manifest.manifest import Records
    from packstore.io.shards.shard import Totals
    from packstore.io.side.side import Side

UNFOLDED_WIDTH = 1 << 20
"""Width of output that is no terminal: no cell is folded, so that text can be found."""


class _VisibleConsole(Console):
    """A console that makes control characters of its input visible."""

    def render(self, *objects: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*objects, **options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=visible(segment.text))


def stdout_console() -> Console:
    """Return a console on stdout that prints its input as it is.

    It interprets no markup, and escapes control characters. If stdout is no terminal,
    it folds no line, even if COLUMNS is set.
    """
    console = _VisibleConsole(
        highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    if not console.is_terminal:
        console.width = UNFOLDED_WIDTH
    return console


def fact_table(title: str, facts: Mapping[str, object]) -> Table:
    """Return a table of names and values."""
    table = _titled_table(title, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(visible(name), Text(format_value(value)))
    return table


def figure_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Return a table of numbers; the first cell of each row is its name."""
    table = _titled_table(title)
    for i, column in enumerate(columns):
        table.add_column(visible(column), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*[visible(cell) for cell in row])
    return table


def _titled_table(title: str, **settings: Any) -> Table:
    """Return an empty table. Its title is not folded if the table is narrower."""
    text = Text(visible(title), no_wrap=True, overflow="ignore")
    return Table(title=text, title_justify="left", title_style="bold", **settings)


def format_value(value: object) -> str:
    """Format a value for people: grouped digits, few decimals."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return visible(str(value))


def print_facts(
    args: argparse.Namespace, title: str, facts: Mapping[str, object], result: Any
) -> None:
    """Print the result of a command.

    Args:
        args: the command line, with ``--json``.
        title: title of the table.
        facts: name -> value in the table for people.
        result: the JSON value for programs.
    """
    if args.json:
        print_result(result)
    else:
        stdout_console().print(fact_table(title, facts))


def print_result(result: Any, indent: int | None = 1) -> None:
    """Print one JSON value; dataclasses become objects, and unknown values text.

    JSON has no NaN or infinity: they become null.
    """
    print_json(json.dumps(_as_json(result), indent=indent, allow_nan=False) + "\n")


def print_outcome(ok: bool, parts: Mapping[str, Any]) -> int:
    """Print the result of a check as JSON; return the exit code."""
    print_result({"ok": ok, **parts})
    return 0 if ok else 1


def print_json(text: str) -> None:
    """Print the text of a JSON value; escape control characters that JSON allows."""
    sys.stdout.write(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def identity_of(dataset: Dataset | Side) -> dict[str, Any]:
    """Return the first fields of the JSON result of every command that takes or makes a
    dataset.
    """
    return {"url": dataset.url, "version": dataset.version}


def print_dataset(
    args: argparse.Namespace,
    datasets: Mapping[str | None, Dataset],
    appended: Mapping[str | None, int] | None = None,
) -> None:
    """Print a dataset that a job has committed.

    Args:
        args: the command line.
        datasets: split -> its dataset; None: there are no splits.
        appended: split -> number of records that were appended to it; None: the job
            appends none.
    """
    dataset = next(iter(datasets.values()))
    m = dataset.manifest
    title = f"{m.kind} dataset {dataset.url}"
    per_pack = m.statistics.examples_per_pack
    facts: dict[str, object] = {"version": dataset.version}
    result = identity_of(dataset)
    if len(datasets) > 1:
        result["splits"] = {
            str(name): _split_as_json(
                split, None if appended is None else appended[name]
            )
            for name, split in datasets.items()
        }
        for name, split in datasets.items():
            num_records = split.manifest.records.packed
            facts[f"{name} split"] = (
                f"{num_records:,} records, version {split.version} of {split.url}"
            )
    if appended is not None:
        num_appended = sum(appended.values())
        facts["records appended"] = num_appended
        result["records_appended"] = num_appended

    facts |= {
        **record_counts(m.records),
        "packs": f"{m.num_packs:,} of {m.pack_size:,} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean "
        f"{per_pack.mean:.2f}",
        "tokens": m.totals.tokens,
        "saved by sharing": _describe_sharing(m.totals),
        "bytes": m.totals.bytes,
        "shards": len(m.shards),
    }
    result |= {
        "shards": len(m.shards),
        "kind": m.kind,
        "layout": m.layout,
        "pack_size": m.pack_size,
        "fill_rate": m.fill_rate,
        "records": m.records,
        "totals": m.totals,
        "fingerprint": m.fingerprint,
    }
    print_facts(args, title, facts, result)


def _split_as_json(dataset: Dataset, num_appended: int | None) -> dict[str, Any]:
    """Return the identity and the counts of one split, by the names that the result of
    a single dataset has.
    """
    result = identity_of(dataset)
    if num_appended is not None:
        result["records_appended"] = num_appended
    manifest = dataset.manifest
    return {**result, "records": manifest.records, "totals": manifest.totals}


def _describe_sharing(totals: Totals) -> str:
    """Describe the tokens that are not stored, as sequences share prefixes."""
    num_saved = totals.logical_tokens - totals.tokens
    share = num_saved / max(totals.logical_tokens, 1)
    return f"{num_saved:,} tokens, {share:.1%} of all sequences"


def record_counts(records: Records) -> dict[str, int]:
    """Return the counts of records, by name: read, packed, dropped and noted."""
    counts = {"records read": records.read, "records packed": records.packed}
    for reason, count in records.dropped.items():
        counts[f"dropped: {reason}"] = count
    for event, count in records.noted.items():
        counts[f"noted: {event}"] = count
    return counts
