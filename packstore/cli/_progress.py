"""Progress of a command: bars on a terminal, log lines elsewhere; with rate and time left."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from packstore.progress import Progress

log = logging.getLogger("packstore")


@contextmanager
def progress_of(stages: str, args: argparse.Namespace) -> Iterator[Progress]:
    """Reports progress as bars on a terminal, as a log line every few seconds elsewhere.

    Args:
        stages: the word before each log line, the name of the command.
        args: of the command; with `quiet` nothing is drawn, with log format `json` no bars.
    """
    if sys.stderr.isatty() and args.log_format == "text" and not args.quiet:
        with _bars() as report:
            yield report
    else:
        yield _LogLines(stages)


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich import progress

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            rate = task.finished_speed or task.speed
            return f"{rate:,.0f}/s" if rate and task.completed else ""

    columns = [
        progress.TextColumn("{task.description:>9}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
        Rate(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=False),
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
        self._begun: dict[str, tuple[float, int]] = {}
        self._next: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        start, before = self._begun.setdefault(stage, (now, done))
        due = self._next.setdefault(stage, now + self.SECONDS)
        if now < due and done != total:
            return
        self._next[stage] = now + self.SECONDS
        figures: dict[str, object] = {"stage": stage, "done": done, "total": total, "unit": unit}
        text = f"{self.name}: {stage} {done:,}{f' of {total:,}' if total else ''} {unit}"
        if done > before and now > start:
            rate = (done - before) / (now - start)
            figures["per_second"] = round(rate, 1)
            text += f", {rate:,.0f}/s"
            if total and total > done:
                figures["seconds_left"] = round((total - done) / rate)
                text += f", {_clock((total - done) / rate)} left"
        log.info("%s", text, extra={"figures": figures})


def _clock(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds: 1:02:03 or 2:03."""
    hours, rest = divmod(round(seconds), 3600)
    text = f"{rest // 60:02}:{rest % 60:02}"
    return f"{hours}:{text}" if hours else text.removeprefix("0")
