"""``packstore check``: tests a storage location before a job uses it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from packstore.cli import Command, common
from packstore.config import CHECK_RETRIES

if TYPE_CHECKING:
    from packstore.io.maintain.preflight import Trial

_MARKS = {True: ("ok", None), False: ("FAILED", "red"), None: ("–", "dim")}


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="folder or URL: of a dataset, or for a new one")
    common.add_json(parser)
    common.add_storage_options(parser)


def _run(args: argparse.Namespace) -> int:
    from packstore.io.maintain.preflight import preflight
    from packstore.io.store.location import Location

    findings = preflight(Location(args.url, {**CHECK_RETRIES, **args.storage_option}))
    if not args.json:
        return print_findings(findings)
    results = list(findings)
    common.print_result([finding._asdict() for finding in results])
    return int(any(finding.ok is False for finding in results))


def print_findings(findings: Iterable[Trial]) -> int:
    """Prints each finding as soon as it is known; returns the exit code."""
    console, failed = common.stdout_console(), False
    for finding in findings:
        mark, style = _MARKS[finding.ok]
        console.print(f"{mark:6} {finding.what:12} {finding.text}", style=style)
        failed = failed or finding.ok is False
    return int(failed)


COMMAND = Command(
    "  packstore check s3://bucket/new --storage-option endpoint_url=https://s3.example:9000\n",
    _configure,
    _run,
)
