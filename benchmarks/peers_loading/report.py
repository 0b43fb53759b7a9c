"""The tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Rows = dict[str, dict[str, Any]]
COLUMNS = (
    "reader",
    "packs/s",
    "M tok/s",
    "CPU us",
    "first ms",
    "peak MB",
    "resume 50 % ms",
    "95 % ms",
    "exact",
    "MB",
    "write CPU s",
)


def show(rows: Rows, console: Console) -> None:
    """Prints the table."""
    table = Table(title="packs of 4096 tokens, shuffled, in batches of 8")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "reader" else "right")
    for name, row in rows.items():
        table.add_row(name, *_cells(row))
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    def text(key: str, digits: int = 0, scale: float = 1) -> str:
        return f"{row[key] * scale:,.{digits}f}" if row.get(key) is not None else "-"

    seconds = [f"{1000 * x:,.0f}" for x in row.get("resume_seconds", [])]
    exact = ["yes" if x else "no" for x in row.get("resume_exact", [])]
    return [
        text("samples_per_second"),
        text("tokens_per_second", 1, 1e-6),
        text("cpu_us", 1),
        text("first_seconds", 0, 1000),
        text("memory", 0, 1e-6),
        *(seconds or ["-", "-"]),
        " ".join(exact) or "-",
        text("bytes", 0, 1e-6),
        text("write_cpu_seconds", 1),
    ]
