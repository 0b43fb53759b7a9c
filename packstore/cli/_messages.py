"""Messages of a command on stderr, as text or as JSON objects: notes, progress,
errors.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from packstore.errors import visible, visible_line
from packstore.progress import Progress

VERBOSE_LIBRARIES = (
    "fsspec",
    "s3fs",
    "aiobotocore",
    "botocore",
    "gcsfs",
    "azure",
    "httpx",
    "httpx2",
    "urllib3",
)
"""Libraries that log requests, or their settings: only their warnings are shown."""

# In a log, each stage of a job ("read", "write", …) has a line of progress at times.

FIRST_LINE_SECONDS = 5.0
LINE_SECONDS = 60.0
"""Seconds from the start of a stage to its first line, and between lines."""

SETTLED_SECONDS = 10.0
"""Seconds from which on a line also predicts the end of its stage: earlier, the rate
may still change much.
"""

log = logging.getLogger("packstore")


def add_message_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--debug``, ``--quiet`` and ``--log-format``; absent if not given."""
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
        help="format of the lines on stderr (default: text)",
    )


def set_up_messages(args: argparse.Namespace) -> None:
    """Send log records to stderr, in the format and from the level of `args`."""
    handler = logging.StreamHandler(sys.stderr)
    if args.log_format == "json":
        handler.setFormatter(_JsonFormatter())
        logging.captureWarnings(True)  # Python would print them as text
    else:
        handler.setFormatter(_TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    log.setLevel(logging.WARNING if args.quiet else logging.INFO)
    for name in VERBOSE_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def fail(args: argparse.Namespace, text: str) -> None:
    """Print the reason why a command failed, on one line."""
    line = visible_line(f"packstore: {text}")
    if args.log_format == "json":
        line = _json_line("error", line)
    print(line, file=sys.stderr)


class _TextFormatter(logging.Formatter):
    """Formats a message as one line, or as the attribute `lines` of its record.

    A warning says so: it has the form of an error, but the command goes on.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        lines = getattr(record, "lines", None) or [super().formatMessage(record)]
        text = "\n".join(visible_line(line) for line in lines)
        return f"warning: {text}" if record.levelno == logging.WARNING else text

    def formatException(self, info: Any) -> str:
        return visible(super().formatException(info))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _json_line(record.levelname.lower(), record.getMessage())


def _json_line(level: str, message: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    value = {"time": now, "level": level, "message": visible(message)}
    return json.dumps(value, ensure_ascii=False)


@contextmanager
def show_progress(command: str, args: argparse.Namespace) -> Iterator[Progress]:
    """Yield a function that shows progress: bars on a terminal, elsewhere log lines."""
    if not sys.stderr.isatty() or args.log_format == "json" or args.quiet:
        yield _log_progress(command)
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

        def report(stage: str, completed: int, total: int | None, unit: str) -> None:
            if stage not in tasks:
                name = _stage_name(stage, is_second_pass="compare" in tasks)
                tasks[stage] = bars.add_task(name, total=total, unit=unit)
            bars.update(tasks[stage], completed=completed, total=total)

        yield report


def _stage_name(stage: str, is_second_pass: bool) -> str:
    """Return the name of a stage, with a number if the job reads its input twice.

    For `dedup` it does: stage ``compare`` looks for duplicates, before stage ``read``.
    """
    if stage == "compare":
        return "compare (pass 1 of 2)"
    if stage == "read" and is_second_pass:
        return "read (pass 2 of 2)"
    return stage


@dataclass
class _Stage:
    """A stage of which progress is logged.

    Attributes:
        start: monotonic time of its first report, in seconds.
        completed_at_start: units completed by then; above 0 if a job resumes.
        total_at_start: total of units at that time; None: unknown.
        next_line: monotonic time at which the next line is due.
        is_estimate: True once the total has changed: it is an estimate.
    """

    start: float
    completed_at_start: int
    total_at_start: int | None
    next_line: float
    is_estimate: bool = False


def _log_progress(command: str) -> Progress:
    """Return a function that logs each stage once a minute, and when it ends."""
    stages: dict[str, _Stage] = {}

    def report(stage_name: str, completed: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        if stage_name not in stages:
            stages[stage_name] = _Stage(
                start=now,
                completed_at_start=completed,
                total_at_start=total,
                next_line=now + FIRST_LINE_SECONDS,
            )
        stage = stages[stage_name]
        if total != stage.total_at_start:
            stage.is_estimate = True
        if now < stage.next_line and completed != total:
            return
        stage.next_line = now + LINE_SECONDS
        name = _stage_name(stage_name, is_second_pass="compare" in stages)
        amount = _describe_amount(stage, completed, total)
        speed = _describe_speed(stage, now, completed, total)
        log.info("%s", f"{command}: {name} {amount} {unit}{speed}")

    return report


def _describe_amount(stage: _Stage, completed: int, total: int | None) -> str:
    """Return ``325 of about 1,100``; without the total if it is reached or unknown."""
    if not total or completed == total:
        return f"{completed:,}"
    if stage.is_estimate:
        return f"{completed:,} of about {total:,}"
    return f"{completed:,} of {total:,}"


def _describe_speed(
    stage: _Stage, now: float, completed: int, total: int | None
) -> str:
    """Return ``, 5/s, 0:02:15 left``; or without the time; or "" without any rate."""
    seconds = now - stage.start
    if completed <= stage.completed_at_start or seconds <= 0:
        return ""
    rate = (completed - stage.completed_at_start) / seconds
    text = f", {rate:,.0f}/s"
    if total and total > completed and seconds > SETTLED_SECONDS:
        text += f", {timedelta(seconds=round((total - completed) / rate))} left"
    return text
