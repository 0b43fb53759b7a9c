"""``packstore verify``: checks every hash, rule and count of a dataset."""

from __future__ import annotations

import argparse
import dataclasses

from packstore.cli import Command, common
from packstore.cli._messages import progress_of


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="shards read at once (default: by the cores)"
    )
    common.add_json(parser)


def _run(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    with progress_of("verify", args) as progress:
        report = dataset.verify(progress, jobs=args.jobs)
    if args.json:
        common.print_result({"ok": report.ok, **dataclasses.asdict(report)})
        return 0 if report.ok else 1
    console = common.stdout_console()
    for problem in report.problems:
        console.print(problem, style="red")
    counts = (
        f"{report.shards:,} shards, {report.totals.packs:,} packs, "
        f"{report.totals.examples:,} examples, {report.totals.tokens:,} tokens"
    )
    if report.ok:
        console.print(f"ok: {counts}", style="green")
        return 0
    console.print(f"{len(report.problems):,} problems: {counts}", style="red")
    return 1


COMMAND = Command("  packstore verify s3://bucket/prefs-8k && train\n", _configure, _run)
