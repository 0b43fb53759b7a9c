"""``packstore doctor``: lints records before they are packed."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from packstore.cli import Command, common
from packstore.cli._messages import progress_of
from packstore.config import PackConfig, TokenizeConfig, WorkConfig

if TYPE_CHECKING:
    from packstore.etl.doctor import Diagnosis


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_source(parser)
    parser.add_argument("--tokenizer", metavar="PATH", required=True, help="as for packstore pack")
    flags = {
        "--sample N": "most records to look at, from all over (all)",
        "--strict": "remarks count as problems",
    }
    common.add_flags(parser, flags)
    common.add_json(parser)
    common.add_storage_options(parser)
    common.add_settings(parser, "tokenization", TokenizeConfig)
    common.add_settings(parser, "running", WorkConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.doctor import doctor

    with progress_of("doctor", args) as progress:
        diagnosis = doctor(
            common.source_of(args.source),
            args.tokenizer,
            sample=args.sample,
            storage_options=args.storage_option,
            progress=progress,
            **common.read_settings(args, PackConfig),
        )
    if args.json:
        common.print_result({"ok": diagnosis.ok, **dataclasses.asdict(diagnosis)})
    else:
        print_diagnosis(diagnosis)
    return 0 if diagnosis.ok and not (args.strict and diagnosis.findings) else 1


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints the findings as a table."""
    from packstore.etl.doctor import meaning

    console = common.stdout_console()
    console.print(f"{diagnosis.records:,} records of kind {diagnosis.kind}")
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("records", justify="right")
    table.add_column("share", justify="right")
    table.add_column("for example", overflow="fold")
    for finding in diagnosis.findings:
        style = "red" if finding.level == "problem" else "yellow"
        table.add_row(
            Text(f"{finding.level}: {finding.check}", style),
            common.number(finding.records),
            f"{finding.records / max(diagnosis.records, 1):.1%}",
            "\n".join(filter(None, (meaning(finding.check), *finding.examples))),
        )
    if diagnosis.findings:
        console.print(table)
    else:
        console.print("nothing to remark", style="green")


DOCTOR = Command(
    "  packstore doctor chats.jsonl --tokenizer Qwen3/ --pack-size 4096 --strict\n",
    _configure,
    _run,
)
