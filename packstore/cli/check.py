"""``packstore check``: tests a storage location before a job uses it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from packstore.cli import Command
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_storage_options, stdout_console, storage_options
from packstore.config import CHECK_RETRIES

if TYPE_CHECKING:
    from packstore.io.maintain.preflight import Finding


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="folder or URL: of a dataset, or for a new one")
    add_json(parser)
    add_storage_options(parser)


def _run(args: argparse.Namespace) -> int:
    from packstore.io.maintain.preflight import preflight
    from packstore.io.store.location import Location

    findings = preflight(Location(args.url, {**CHECK_RETRIES, **storage_options(args)}))
    if args.json:
        found = list(findings)
        print_result([finding._asdict() for finding in found])
        return int(any(finding.ok is False for finding in found))
    return print_findings(stdout_console(), findings)


def print_findings(console: Console, findings: Iterable[Finding]) -> int:
    """Prints each finding as soon as it is known; returns the exit code."""
    failed = 0
    for finding in findings:
        mark, style = _MARKS[finding.ok]
        console.print(f"{mark:6} {finding.what:12} {finding.text}", style=style, markup=False)
        failed += finding.ok is False
    return 1 if failed else 0


_MARKS = {True: ("ok", None), False: ("FAILED", "red"), None: ("–", "dim")}

COMMAND = Command(
    examples="  packstore check s3://bucket/new --storage-option "
    "endpoint_url=https://s3.example:9000\n",
    configure=_configure,
    run=_run,
)
