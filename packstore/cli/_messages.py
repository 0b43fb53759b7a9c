"""Messages of a command on stderr: notes, progress, errors; as text or as JSON
objects.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from packstore.errors import visible, visible_line
from packstore.progress import Progress

QUIET = (
    "fsspec",
    "s3fs",
    "aiobotocore",
    "gcsfs",
    "azure",
    "httpx",
    "httpx2",
    "urllib3",
)
"""Libraries of which warnings are shown only."""

FIRST, SECONDS = 5.0, 60.0
"""When a stage logs its first line, and between two of them."""
SETTLED = 10.0
"""Seconds after which a rate tells the time that is left."""

log = logging.getLogger("packstore")


def add_message_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--debug``, ``--quiet`` and ``--log-format``; absent if not given."""
    group = parser.add_argument_group("messages", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    group.add_argument(
        "--quiet", action="store_true", help="print warnings and errors only"
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="of the lines on stderr (default: text)",
    )


def set_up(args: argparse.Namespace) -> None:
    """Sends log records to stderr, as `args` ask."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if args.log_format == "json" else _Text())
    if args.log_format == "json":
        logging.captureWarnings(True)  # Python would print them as text
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    log.setLevel(logging.WARNING if args.quiet else logging.INFO)
    for other in QUIET:
        logging.getLogger(other).setLevel(logging.WARNING)


def fail(args: argparse.Namespace, text: str) -> None:
    """Prints why a command failed, in one line."""
    line = visible_line(f"packstore: {text}")
    print(
        _object("error", line) if args.log_format == "json" else line, file=sys.stderr
    )


class _Text(logging.Formatter):
    """One line for each message, or for each of its `lines`, whatever is quoted
    in it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        lines = getattr(record, "lines", None) or [super().formatMessage(record)]
        return "\n".join(map(visible_line, lines))

    def formatException(self, info: Any) -> str:
        return visible(super().formatException(info))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _object(record.levelname.lower(), record.getMessage())


def _object(level: str, message: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    value = {"time": now, "level": level, "message": visible(message)}
    return json.dumps(value, ensure_ascii=False)


@contextmanager
def progress_of(command: str, args: argparse.Namespace) -> Iterator[Progress]:
    """Yields a function that shows progress: bars on a terminal, elsewhere log
    lines.
    """
    if not sys.stderr.isatty() or args.log_format == "json" or args.quiet:
        yield _lines(command)
        return
    from rich import progress
    from rich.console import Console

    columns = [
        progress.TextColumn("{task.description:>9}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=False),
    ]
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def report(stage: str, done: int, total: int | None, unit: str) -> None:
            if stage not in tasks:
                name = _name_pass(stage, tasks)
                tasks[stage] = bars.add_task(name, total=total, unit=unit)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _name_pass(stage: str, earlier: Container[str]) -> str:
    """The name of a stage; of two that read the input, with its number."""
    if stage == "compare":
        return "compare (pass 1 of 2)"
    return "read (pass 2 of 2)" if stage == "read" and "compare" in earlier else stage


def _lines(command: str) -> Progress:
    """Returns a function that logs a stage every minute, and its end.

    A total that has changed before is an estimate, and is called so.
    """
    starts: dict[str, tuple[float, int, int | None]] = {}
    due: dict[str, float] = {}
    estimated: set[str] = set()

    def report(stage: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        start, before, first = starts.setdefault(stage, (now, done, total))
        if total != first:
            estimated.add(stage)
        at_end = done == total
        if now < due.setdefault(stage, now + FIRST) and not at_end:
            return
        due[stage] = now + SECONDS
        text = f"{command}: {_name_pass(stage, starts)} {done:,}"
        if total and not at_end:
            text += f" of {'about ' if stage in estimated else ''}{total:,}"
        text += f" {unit}"
        if done > before and now > start:
            rate = (done - before) / (now - start)
            text += f", {rate:,.0f}/s"
            if total and total > done and now > start + SETTLED:
                text += f", {timedelta(seconds=round((total - done) / rate))} left"
        log.info("%s", text)

    return report
