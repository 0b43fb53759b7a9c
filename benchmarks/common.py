"""Shared parts of the scripts: command line, tables, process sizes, results and their
origin.

Only the standard library is loaded at first: peers run in environments without
packstore.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def parser(text: str | None) -> argparse.ArgumentParser:
    """A command line whose help begins with the text of the script as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=raw)


def show(
    columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str | None = None
) -> None:
    """Prints a table, floats with four digits."""
    from rich.console import Console
    from rich.table import Table

    def text(x: Any) -> str:
        if isinstance(x, list | tuple):
            return " ".join(map(text, x))
        return (
            str(x)
            if not isinstance(x, float)
            else f"{x:,.0f}"
            if x >= 1e4
            else f"{x:.4g}"
        )

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(text, row))
    Console(width=160).print(table)


def save(path: Path | str | None, result: dict[str, Any]) -> None:
    """Writes a result as JSON; nowhere without a path, or with "-"."""
    if path and str(path) != "-":
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def records(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines, which may be compressed by gzip."""
    with (gzip.open if path.suffix == ".gz" else open)(
        path, "rt", encoding="utf-8"
    ) as file:
        yield from map(json.loads, file)


def memory(pid: int | str = "self") -> dict[str, int]:
    """Sizes of a process in bytes, by their names in ``/proc/PID/status``; none if it
    has ended.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines() if line.endswith(" kB"))
    return {name: int(size.split()[0]) << 10 for name, _, size in lines}


def provenance(*packages: str) -> dict[str, Any]:
    """Machine, versions, commit and command; a package that is not installed is
    None.
    """
    from packstore.version import VERSION

    commit = None
    with suppress(OSError):  # no git there
        git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(
            git, capture_output=True, text=True, check=False
        ).stdout.strip()
    versions: dict[str, str | None] = {"packstore": VERSION}
    for name in packages:
        versions[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # Of a path of this machine, its last part.
    arguments = [
        Path(text).name if Path(text).is_absolute() else text for text in sys.argv[1:]
    ]
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "commit": commit,
        "command": ["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments],
        "versions": versions,
    }
