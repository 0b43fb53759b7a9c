"""Messages of a command on stderr: notes, progress, errors; as text or as JSON objects."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from packstore.errors import visible, visible_line
from packstore.progress import Progress

QUIET = ("fsspec", "s3fs", "aiobotocore", "gcsfs", "azure", "httpx", "httpx2", "urllib3")
"""Libraries of which warnings are shown only."""

SECONDS = 5.0
"""Between two log lines on the progress of a stage."""

log = logging.getLogger("packstore")


def add_message_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--debug``, ``--quiet`` and ``--log-format``; absent if not given."""
    group = parser.add_argument_group("messages", argument_default=argparse.SUPPRESS)
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    group.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    group.add_argument(
        "--log-format", choices=("text", "json"), help="of the lines on stderr (default: text)"
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
    print(_object("error", line) if args.log_format == "json" else line, file=sys.stderr)


class _Text(logging.Formatter):
    """One line for each message, whatever is quoted in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible_line(super().formatMessage(record))

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
    """Yields a function that shows progress: bars on a terminal, elsewhere log lines."""
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
                tasks[stage] = bars.add_task(stage, total=total, unit=unit)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _lines(command: str) -> Progress:
    """Returns a function that logs a line per stage every few seconds, and one at its end."""
    starts: dict[str, tuple[float, int]] = {}
    due: dict[str, float] = {}

    def report(stage: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        start, before = starts.setdefault(stage, (now, done))
        if now < due.setdefault(stage, now + SECONDS) and done != total:
            return
        due[stage] = now + SECONDS
        text = f"{command}: {stage} {done:,}{f' of {total:,}' if total else ''} {unit}"
        if done > before and now > start:
            rate = (done - before) / (now - start)
            text += f", {rate:,.0f}/s"
            if total and total > done:
                text += f", {timedelta(seconds=round((total - done) / rate))} left"
        log.info("%s", text)

    return report
