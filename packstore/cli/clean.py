"""``packstore clean``: removes files that no version of a dataset references."""

from __future__ import annotations

import argparse
import re
from collections import Counter

from packstore.cli import Command, common
from packstore.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SHOWN = 40


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser)
    parser.add_argument("--delete", action="store_true", help="remove the files; else list them")
    parser.add_argument(
        "--keep-versions", type=int, metavar="N", help="keep the N newest versions only"
    )
    parser.add_argument(
        "--older-than", default="7d", metavar="AGE", help="spare what is younger (7d)"
    )
    parser.add_argument(
        "--no-writers",
        action="store_true",
        help="no job writes there, anywhere: any age is allowed",
    )
    parser.add_argument("--all", action="store_true", help="list every file")
    common.add_json(parser)


def _run(args: argparse.Namespace) -> int:
    from packstore.io.maintain.clean import clean

    report = clean(
        args.dataset,
        delete=args.delete,
        keep_versions=args.keep_versions,
        older_than=_seconds(args.older_than),
        no_writers=args.no_writers,
        storage_options=args.storage_option,
    )
    if args.json:
        common.print_result(report)
        return 0
    console = common.stdout_console()
    shown = report.leftovers if args.all else report.leftovers[:_SHOWN]
    for item in shown:
        spared = f" (spared: {item.spared})" if item.spared else ""
        console.print(f"{item.path}  {item.bytes:,} bytes  {item.why}{spared}")
    for why, count in Counter(item.why for item in report.leftovers[len(shown) :]).items():
        console.print(f"… and {count:,} more: {why}")
    if not report.lists_uploads and "://" in report.url:
        console.print("unfinished uploads: this store does not list them", style="dim")
    if report.writer:
        console.print(f"{report.writer} may be writing here: only its age spares what it wrote")
    files = report.removable
    amount = f"{len(files):,} files, {sum(item.bytes for item in files):,} bytes"
    if not files:
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
    "  packstore clean s3://bucket/prefs-8k --delete\n"
    "  packstore clean prefs-8k --keep-versions 2 --delete\n"
    "  packstore clean prefs-8k --older-than 0 --no-writers --delete\n",
    _configure,
    _run,
)
