"""Log lines and errors of commands on stderr, as text or as JSON objects."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from packstore.errors import visible

QUIET = ("fsspec", "s3fs", "aiobotocore", "gcsfs", "azure", "urllib3")
"""Libraries of which warnings are shown only."""


def add_log_options(parser: argparse.ArgumentParser, default: bool = True) -> None:
    """Adds ``--debug``, ``--quiet`` and ``--log-format``.

    Args:
        parser: the parser of a command.
        default: False for the parser of a sub-command, which must not override the flag before it.
    """
    hidden: dict[str, Any] = (
        {} if default else {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    )
    group = parser.add_argument_group("messages")
    for flag, text in (
        ("--debug", "show the traceback of an error"),
        ("--quiet", "print warnings and errors only, besides the result"),
    ):
        group.add_argument(flag, action="store_true", **{"help": text, **hidden})
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        **{
            "default": "text",
            "help": "progress, notes and errors as lines of text, or as JSON objects (default: "
            "text)",
            **hidden,
        },
    )


def set_up(args: argparse.Namespace) -> None:
    """Sends log records to stderr, as `args` ask."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if args.log_format == "json" else logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("packstore").setLevel(logging.WARNING if args.quiet else logging.INFO)
    for other in QUIET:
        logging.getLogger(other).setLevel(logging.WARNING)
    if args.log_format == "json":
        logging.captureWarnings(True)  # Python would print them as text


def fail(args: argparse.Namespace, text: str, error: BaseException | None = None) -> None:
    """Prints why a command failed, in one line."""
    name = None if error is None else type(error).__name__
    print(error_line(text, args.log_format == "json", error=name), file=sys.stderr)


def error_line(text: str, as_json: bool, prog: str = "packstore", error: str | None = None) -> str:
    """Returns the line of an error: text, or a JSON object with the class of the error."""
    if not as_json:
        return f"{prog}: {text}"
    told = {"level": "error", "message": text.removeprefix("error: ")}
    return _line({**told, "error": error} if error else {**told})


def wants_json(given: Sequence[str]) -> bool:
    """Returns True if a command line asks for log lines as JSON, also if it cannot be parsed."""
    return "--log-format=json" in given or ("--log-format", "json") in itertools.pairwise(given)


class _Json(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"level": record.levelname.lower(), "message": visible(record.getMessage())}
        return _line({**told, **getattr(record, "figures", {})})


def _line(told: dict[str, object]) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, **told}, ensure_ascii=False)
