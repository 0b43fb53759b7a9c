"""``packstore verify``: checks every hash, rule and count of a dataset."""

from __future__ import annotations

import argparse
import dataclasses

from packstore.cli import Command
from packstore.cli._messages import progress_of
from packstore.cli.common import (
    add_dataset,
    add_json,
    number,
    open_dataset,
    print_result,
    stdout_console,
)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="shards read at once (default: by the cores)"
    )
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    with progress_of("verify", args) as progress:
        report = dataset.verify(progress, jobs=args.jobs)
    if args.json:
        print_result({"ok": report.ok, **dataclasses.asdict(report)})
        return 0 if report.ok else 1
    console = stdout_console()
    for problem in report.problems:
        console.print(problem, style="red")
    counts = (
        f"{number(report.shards)} shards, {number(report.totals.packs)} packs, "
        f"{number(report.totals.examples)} examples, {number(report.totals.tokens)} tokens"
    )
    if report.ok:
        console.print(f"ok: {counts}", style="green")
        return 0
    console.print(f"{number(len(report.problems))} problems: {counts}", style="red")
    return 1


COMMAND = Command(
    examples="  packstore verify s3://bucket/prefs-8k && train\n",
    configure=_configure,
    run=_run,
)
