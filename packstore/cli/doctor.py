"""``packstore doctor``: lints records before they are packed."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from packstore.cli import Command
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_storage_options, number, stdout_console, storage_options
from packstore.cli.settings import add_settings, read_settings
from packstore.config import PackConfig, TokenizeConfig, WorkConfig

if TYPE_CHECKING:
    from packstore.etl.doctor import Diagnosis


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="as for packstore pack")
    parser.add_argument("--tokenizer", metavar="PATH", required=True, help="as for packstore pack")
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="records to look at, at most, from all over the input; default: all",
    )
    parser.add_argument(
        "--strict", action="store_true", help="count remarks as problems in the exit code"
    )
    add_json(parser)
    add_storage_options(parser)
    add_settings(parser, "tokenization", TokenizeConfig)
    add_settings(parser, "running", WorkConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.doctor import doctor

    source = args.source[0] if len(args.source) == 1 else args.source
    with progress_of("doctor", args) as progress:
        diagnosis = doctor(
            source,
            args.tokenizer,
            sample=args.sample,
            storage_options=storage_options(args),
            progress=progress,
            **read_settings(args, PackConfig),
        )
    code = 0 if diagnosis.ok and not (args.strict and diagnosis.findings) else 1
    if args.json:
        print_result({"ok": diagnosis.ok, **dataclasses.asdict(diagnosis)})
        return code
    print_diagnosis(stdout_console(), diagnosis)
    return code


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints the findings as a table."""
    from packstore.etl.doctor import meaning

    console.print(f"{number(diagnosis.records)} records of kind {diagnosis.kind}")
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("records", justify="right")
    table.add_column("share", justify="right")
    table.add_column("for example", overflow="fold")
    for finding in diagnosis.findings:
        share = f"{finding.records / max(diagnosis.records, 1):.1%}"
        texts = (meaning(finding.check), *finding.examples)
        style = "red" if finding.level == "problem" else "yellow"
        table.add_row(
            Text(f"{finding.level}: {finding.check}", style),
            number(finding.records),
            share,
            "\n".join(t for t in texts if t),
        )
    if diagnosis.findings:
        console.print(table)
    else:
        console.print("nothing to remark", style="green")


COMMAND = Command(
    examples="  packstore doctor chats.jsonl --tokenizer Qwen3/ --pack-size 4096 --strict\n",
    configure=_configure,
    run=_run,
)
