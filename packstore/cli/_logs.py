"""Log lines and errors of commands on stderr, as text or as JSON objects."""

from __future__ import annotations

import argparse
import json
import logging
import sys
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
    for flag, text in (
        ("--debug", "show the traceback of an error"),
        ("--quiet", "print warnings and errors only, besides the result"),
    ):
        parser.add_argument(flag, action="store_true", **{"help": text, **hidden})
    parser.add_argument(
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


def fail(args: argparse.Namespace, text: str, error: BaseException | None = None) -> None:
    """Prints why a command failed, in one line."""
    if args.log_format == "text":
        print(f"packstore: {text}", file=sys.stderr)
        return
    told: dict[str, object] = {"level": "error", "message": text.removeprefix("error: ")}
    if error is not None:
        told["error"] = type(error).__name__
    print(_line(told), file=sys.stderr)


class _Json(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"level": record.levelname.lower(), "message": visible(record.getMessage())}
        return _line({**told, **getattr(record, "figures", {})})


def _line(told: dict[str, object]) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, **told}, ensure_ascii=False)
