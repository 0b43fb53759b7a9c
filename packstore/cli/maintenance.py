"""``packstore clean`` and ``packstore verify``: look after datasets."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from packstore.cli import Command
from packstore.cli._arguments import (
    add_dataset,
    add_json,
    add_side,
    open_dataset_or_sides,
)
from packstore.cli._messages import show_progress
from packstore.cli._output import (
    identity_of,
    print_outcome,
    print_result,
    stdout_console,
)
from packstore.errors import ConfigError, PackstoreError, visible_line

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.dataset.verify import VerifyReport
    from packstore.io.side.side import Side, SideReport
    from packstore.io.versions.clean import CleanReport

SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

MAX_LISTED = 40
"""Files that `clean` lists without ``--all``."""


def _configure_clean(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser)
    parser.add_argument(
        "--delete",
        action="store_true",
        help="remove the files (default: only list them)",
    )
    parser.add_argument(
        "--keep-versions",
        type=int,
        metavar="N",
        help="keep only the N newest versions (default: all)",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        default="7d",
        help="keep younger files, e.g. 12h (default: 7d)",
    )
    parser.add_argument(
        "--no-writers",
        action="store_true",
        help="promise that no job writes there: allows any age",
    )
    parser.add_argument(
        "--all", action="store_true", help="list every file, not only the first 40"
    )
    add_json(parser)


def _run_clean(args: argparse.Namespace) -> int:
    from packstore.io.manifest.commit import newest_version
    from packstore.io.store.location import Location
    from packstore.io.versions.clean import clean

    report = clean(
        args.dataset,
        delete=args.delete,
        keep_versions=args.keep_versions,
        older_than=_parse_age(args.older_than),
        no_writers=args.no_writers,
        storage_options=args.storage_option,
    )
    if args.json:
        location = Location(args.dataset, args.storage_option)
        version = newest_version(location) or None
        print_result({"url": report.url, "version": version, **asdict(report)})
    else:
        _print_clean_report(report, lists_all=args.all)
    return 0


def _parse_age(text: str) -> float:
    """Return the seconds of an age such as ``7d``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if match is None:
        raise ConfigError(
            f"--older-than must be a number and s, m, h or d; found {text!r}."
        )
    number, unit = match.groups()
    return float(number) * SECONDS_PER_UNIT[unit]


def _print_clean_report(report: CleanReport, lists_all: bool) -> None:
    """Print files that can be removed, why, and which of them are spared."""
    console = stdout_console()
    num_listed = len(report.leftovers) if lists_all else MAX_LISTED
    for item in report.leftovers[:num_listed]:
        spared = f" (spared: {item.spared})" if item.spared else ""
        console.print(
            f"{visible_line(item.path)}  {item.bytes:,} bytes  {item.why}{spared}"
        )
    unlisted = Counter(item.why for item in report.leftovers[num_listed:])
    for why, count in unlisted.items():
        console.print(f"… and {count:,} more: {why}")

    if not report.lists_uploads and "://" in report.url:
        console.print("unfinished uploads: this store does not list them", style="dim")
    if report.writer:
        console.print(
            f"{visible_line(report.writer)} may be writing here: only the age of its "
            "files protects them"
        )

    files = report.removable
    amount = f"{len(files):,} files, {sum(file.bytes for file in files):,} bytes"
    num_spared = len(report.leftovers) - len(files)
    if not report.leftovers:
        console.print("nothing to remove", style="green")
    elif not files:
        noun = "file is" if num_spared == 1 else "files are"
        console.print(f"nothing is removed: {num_spared:,} {noun} spared")
    elif report.deleted:
        console.print(f"removed {amount}", style="green")
    else:
        console.print(f"would remove {amount}; --delete removes them")


CLEAN = Command(
    configure=_configure_clean,
    run=_run_clean,
    examples="  packstore clean s3://bucket/prefs-8k --delete\n"
    "  packstore clean prefs-8k --keep-versions 2 --delete\n"
    "  packstore clean prefs-8k --older-than 0 --no-writers --delete\n",
)


def _configure_verify(parser: argparse.ArgumentParser) -> None:
    add_dataset(
        parser,
        versions=True,
        help="folder or URL of a packed dataset, or of a side dataset",
    )
    add_side(parser, help="side dataset to check against the dataset")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="shards read at the same time (default: by the cores)",
    )
    add_json(parser)


def _run_verify(args: argparse.Namespace) -> int:
    from packstore.io.side.parts import open_sides

    source = open_dataset_or_sides(args)
    if isinstance(source, list):
        return _verify_sides(args, source)

    options = source.location.storage_options
    sides = open_sides(args.side, source.manifest, options)
    with show_progress("verify", args) as progress:
        report = source.verify(progress, jobs=args.jobs)
    side_reports = [side.verify() for side in sides]
    side_problems = _problems_of(side_reports)
    if report.ok and not side_problems:
        side_problems = _check_join(source, sides)
    is_ok = report.ok and not side_problems
    if args.json:
        result = {**identity_of(source), **asdict(report)}
        if sides:
            result["side"] = _sides_as_json(sides, side_problems, side_reports)
        return print_outcome(is_ok, result)

    _print_verdict(report.problems, _describe_dataset(report))
    if sides:
        _print_verdict(side_problems, _describe_sides(side_reports))
    return 0 if is_ok else 1


def _verify_sides(args: argparse.Namespace, sides: Sequence[Side]) -> int:
    """Verify side datasets alone; return the exit code."""
    if args.side:
        raise ConfigError(
            f"--side needs a packed dataset; found side data, {args.dataset}. Name "
            "its dataset first: packstore verify DATASET --side VALUES."
        )
    reports = [side.verify() for side in sides]
    problems = _problems_of(reports)
    if args.json:
        result = _sides_as_json(sides, problems, reports)
        return print_outcome(not problems, result)
    _print_verdict(problems, _describe_sides(reports))
    return 1 if problems else 0


def _problems_of(reports: Sequence[SideReport]) -> list[str]:
    return [problem for report in reports for problem in report.problems]


def _check_join(dataset: Dataset, sides: Sequence[Side]) -> list[str]:
    """Return the problem of side datasets that do not fit their dataset, if any.

    One pass over the packs joins all side datasets, as there may be one for each part.
    """
    from packstore.io.side.join import SideColumns

    if not sides:
        return []
    try:
        columns = SideColumns(dataset, sides)
        for packs in dataset.iter_packs():
            columns.join([packs])
    except PackstoreError as error:
        return [str(error)]
    return []


def _sides_as_json(
    sides: Sequence[Side], problems: Sequence[str], reports: Sequence[SideReport]
) -> dict[str, Any]:
    return {
        "sides": [identity_of(side) for side in sides],
        "problems": problems,
        "examples": sum(report.examples for report in reports),
        "shards": sum(report.shards for report in reports),
    }


def _describe_dataset(report: VerifyReport) -> str:
    totals = report.totals
    return (
        f"{report.shards:,} shards, {totals.packs:,} packs, "
        f"{totals.examples:,} examples, {totals.tokens:,} tokens"
    )


def _describe_sides(reports: Sequence[SideReport]) -> str:
    name = reports[0].url if len(reports) == 1 else f"{len(reports):,} side datasets"
    num_shards = sum(report.shards for report in reports)
    num_examples = sum(report.examples for report in reports)
    return f"{name}, {num_shards:,} shards, values of {num_examples:,} examples"


def _print_verdict(problems: Sequence[str], facts: str) -> None:
    console = stdout_console()
    for problem in problems:
        console.print(problem, style="red")
    verdict = "ok"
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        verdict = f"{len(problems):,} {noun}"
    console.print(f"{verdict}: {facts}", style="red" if problems else "green")


VERIFY = Command(
    configure=_configure_verify,
    run=_run_verify,
    examples="  packstore verify s3://bucket/prefs-8k && train\n"
    "  packstore verify prefs-8k --side prefs-8k-ref\n",
)
