"""Progress of a command: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from packstore.build.pipeline import Progress

log = logging.getLogger("packstore")


@contextmanager
def progress_of(stages: str) -> Iterator[Progress]:
    """Reports progress as bars on a terminal, as a log line every few seconds elsewhere."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _LogLines(stages)


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress

    columns = [
        progress.TextColumn("{task.description:>9}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
        progress.TimeElapsedColumn(),
    ]
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def report(stage: str, done: int, total: int | None, unit: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, unit=unit)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


class _LogLines:
    """Logs one line per stage every few seconds, and one when it is complete."""

    SECONDS = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._next: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        due = self._next.setdefault(stage, now + self.SECONDS)
        if now >= due or done == total:
            self._next[stage] = now + self.SECONDS
            of = f" of {total:,}" if total else ""
            log.info("%s: %s %s%s %s", self.name, stage, f"{done:,}", of, unit)
