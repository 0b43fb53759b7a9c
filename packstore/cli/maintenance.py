"""``packstore clean`` and ``verify``: look after datasets."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter

from packstore.cli import command, common
from packstore.cli._messages import progress_of
from packstore.errors import ConfigError, visible_line

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SHOWN = 40


def _configure_clean(parser: argparse.ArgumentParser) -> None:
    flags = {
        "--delete": "remove the files; else list them",
        "--keep-versions N": "keep the N newest versions only",
        "--older-than AGE": "spare what is younger (7d)",
        "--no-writers": "no job writes there, anywhere: any age is allowed",
        "--all": "list every file",
    }
    common.add_dataset(parser)
    common.add_flags(parser, flags, older_than="7d")
    common.add_json(parser)


@command(
    _configure_clean,
    "  packstore clean s3://bucket/prefs-8k --delete\n"
    "  packstore clean prefs-8k --keep-versions 2 --delete\n"
    "  packstore clean prefs-8k --older-than 0 --no-writers --delete\n",
)
def _clean(args: argparse.Namespace) -> int:
    from packstore.io.versions.clean import clean

    age = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", args.older_than)
    if age is None:
        raise ConfigError(
            "--older-than must be a number and s, m, h or d; found "
            f"{args.older_than!r}."
        )
    report = clean(
        args.dataset,
        delete=args.delete,
        keep_versions=args.keep_versions,
        older_than=float(age[1]) * _UNITS[age[2]],
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
        console.print(
            f"{visible_line(item.path)}  {item.bytes:,} bytes  {item.why}{spared}"
        )
    for why, count in Counter(
        item.why for item in report.leftovers[len(shown) :]
    ).items():
        console.print(f"… and {count:,} more: {why}")
    if not report.lists_uploads and "://" in report.url:
        console.print("unfinished uploads: this store does not list them", style="dim")
    if report.writer:
        console.print(
            f"{visible_line(report.writer)} may be writing here: only its age spares "
            "what it wrote"
        )
    files = report.removable
    amount = f"{len(files):,} files, {sum(item.bytes for item in files):,} bytes"
    if not files:
        console.print("nothing to remove", style="green")
    elif report.deleted:
        console.print(f"removed {amount}", style="green")
    else:
        console.print(f"would remove {amount}; --delete does")
    return 0


def _configure_verify(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    common.add_flags(
        parser, {"--jobs N": "shards read at once (default: by the cores)"}
    )
    common.add_json(parser)


@command(_configure_verify, "  packstore verify s3://bucket/prefs-8k && train\n")
def _verify(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    with progress_of("verify", args) as progress:
        report = dataset.verify(progress, jobs=args.jobs)
    if args.json:
        return common.print_outcome(report.ok, dataclasses.asdict(report))
    console = common.stdout_console()
    for problem in report.problems:
        console.print(problem, style="red")
    totals = report.totals
    console.print(
        f"{'ok' if report.ok else f'{len(report.problems):,} problems'}: "
        f"{report.shards:,} shards, "
        f"{totals.packs:,} packs, {totals.examples:,} examples, {totals.tokens:,} "
        "tokens",
        style="green" if report.ok else "red",
    )
    return 0 if report.ok else 1
