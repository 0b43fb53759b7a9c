"""``packstore clean``: removes files that no version of a dataset references."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter

from packstore.cli import Command
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_dataset, number, stdout_console, storage_options
from packstore.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SHOWN = 40


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser)
    parser.add_argument(
        "--delete", action="store_true", help="remove the files; default: only list them"
    )
    parser.add_argument(
        "--keep-versions",
        type=int,
        metavar="N",
        help="keep the N newest versions only (default: all)",
    )
    parser.add_argument(
        "--older-than",
        default="7d",
        metavar="AGE",
        help="spare what is younger, e.g. 90m, 12h, 30d: a job may be about to commit it "
        "(default: 7d; below 1h only with --no-writers)",
    )
    parser.add_argument(
        "--no-writers",
        action="store_true",
        help="no job writes there, on any machine: allows any --older-than. If one does, this "
        "removes what it has written, and the version that it commits lacks files",
    )
    parser.add_argument("--all", action="store_true", help="list every file")
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    from packstore.io.maintain.clean import clean

    report = clean(
        args.dataset,
        delete=args.delete,
        keep_versions=args.keep_versions,
        older_than=_seconds(args.older_than),
        no_writers=args.no_writers,
        storage_options=storage_options(args),
    )
    if args.json:
        print_result(dataclasses.asdict(report))
        return 0
    console = stdout_console()
    shown = report.leftovers if args.all else report.leftovers[:_SHOWN]
    for item in shown:
        spared = f" (spared: {item.spared})" if item.spared else ""
        console.print(f"{item.path}  {number(item.bytes)} bytes  {item.why}{spared}", markup=False)
    if len(shown) < len(report.leftovers):
        rest = Counter(item.why for item in report.leftovers[len(shown) :])
        for why, count in rest.items():
            console.print(f"… and {number(count)} more: {why}", markup=False)
    going = report.removable
    amount = f"{number(len(going))} files, {number(sum(item.bytes for item in going))} bytes"
    if not report.lists_uploads and "://" in report.url:
        console.print("unfinished uploads: this store does not list them", style="dim")
    if report.writer:
        text = f"{report.writer} may be writing here: only its age spares what it has written"
        console.print(text, markup=False)
    if not going:
        console.print("nothing to remove", style="green")
    elif report.deleted:
        console.print(f"removed {amount}", style="green")
    else:
        console.print(f"would remove {amount}; --delete does")
    return 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if match is None:
        raise ConfigError(f"--older-than must be a number and s, m, h or d; found {text!r}.")
    return float(match[1]) * _UNITS[match[2] or "s"]


COMMAND = Command(
    examples="  packstore clean s3://bucket/prefs-8k --delete\n"
    "  packstore clean prefs-8k --keep-versions 2 --delete\n"
    "  packstore clean prefs-8k --older-than 0 --no-writers --delete\n",
    configure=_configure,
    run=_run,
)
