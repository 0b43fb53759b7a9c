"""``packstore estimate``, and how reports on records and places are printed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from packstore.cli import command, common
from packstore.cli._messages import progress_of
from packstore.config import (
    BatchConfig,
    PackConfig,
    PlanConfig,
    TokenizeConfig,
    WorkConfig,
)

if TYPE_CHECKING:
    from packstore.etl.reports.place import Finding
    from packstore.etl.reports.projection import Report

NOTE = (
    "fill: tokens in percent of the packs' capacity; steps: optimizer steps of an "
    "epoch, on one rank; dropped: records that are dropped, mostly as too long."
)
TRIED = {
    "--pack-sizes --pack-size N,N,…": "pack sizes to try (2048 to 32768)",
    "--layouts --layout NAME,NAME,…": "layouts to try (concat,shared_prefix)",
    "--sample N": "maximum records to read, from all of the input (20000)",
    "--records N": "number of all records, if SOURCE is a part of them",
}
"""Argument of :func:`packstore.estimate` that is no setting -> its help, with the
default.
"""

STEPS = ("packs_per_batch", "gradient_accumulation_steps", "examples_per_step")

DIAGNOSIS = ("kind", "records", "findings", "forms")
ESTIMATE_OF = ("kind", "sample", "scale", "choices")
"""Parts of a report that are printed as JSON, of a dry run and of an estimate."""

_STYLES = {"ok": None, "remark": "yellow", "problem": "red"}


def _add_settings(parser: argparse.ArgumentParser) -> None:
    common.add_json(parser)
    common.add_storage_options(parser)
    common.add_settings(parser, "tokenization", TokenizeConfig)
    common.add_settings(parser, "running", WorkConfig)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "source": common.source_of(args.source),
        "tokenizer": args.tokenizer,
        "storage_options": args.storage_option,
        **common.read_settings(args, PackConfig),
    }


def parts_of(report: Report, names: Iterable[str]) -> dict[str, Any]:
    """Returns the parts of a report that are named, for JSON."""
    return {name: getattr(report, name) for name in names}


def print_diagnosis(report: Report) -> None:
    """Print what lint found in the records."""
    console = common.stdout_console()
    console.print(f"{report.records:,} records of kind {report.kind}")
    for form, records in report.forms.items():
        console.print(f"  {records:,} {form}")
    print_findings(report.findings, report.records)
    if not report.findings:
        console.print("nothing to remark", style="green")


def _configure_estimate(parser: argparse.ArgumentParser) -> None:
    common.add_source(parser)
    common.add_flags(parser, {"--tokenizer PATH": "as for packstore pack"})
    tried = parser.add_argument_group(
        "what is tried", argument_default=argparse.SUPPRESS
    )
    common.add_flags(tried, TRIED)
    common.add_settings(parser, "steps", BatchConfig, STEPS)
    common.add_settings(parser, "planning", PlanConfig, ("strategy", "seed"))
    _add_settings(parser)


@command(
    _configure_estimate,
    "  packstore estimate prefs.jsonl --tokenizer Qwen3/ --examples-per-step 64\n",
)
def _estimate(args: argparse.Namespace) -> int:
    from packstore.etl.reports.records import estimate

    names = [flags.split()[0].strip("-").replace("-", "_") for flags in TRIED]
    given = {name: getattr(args, name) for name in names if name in args}
    given |= {**_given(args), **common.read_settings(args, BatchConfig)}
    with progress_of("estimate", args) as progress:
        report = estimate(**given, progress=progress)
    if args.json:
        common.print_result(parts_of(report, ESTIMATE_OF))
    else:
        print_estimate(report)
    return 0


def print_estimate(report: Report) -> None:
    """Print the choices as a table."""
    console = common.stdout_console()
    console.print(_summary(report))
    names = ("pack size", "layout", "fill", "packs", "steps", "dropped")
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for choice in report.choices:
        table.add_row(
            common.number(choice.pack_size),
            choice.layout,
            f"{choice.fill_rate:.2%}",
            common.number(choice.packs),
            common.number(choice.steps),
            common.number(choice.dropped),
        )
    console.print(table)
    console.print(NOTE)


def _summary(report: Report) -> str:
    """Returns the size of the sample, how it was drawn, and the error of the counts."""
    tally, sample = report.tally, report.sample
    assert sample is not None
    of_kind = f"records of kind {report.kind}"
    if sample.is_complete:
        text = f"{tally.read:,} {of_kind}"
    elif sample.total is None:
        text = f"the first {tally.read:,} {of_kind}"
    else:
        text = (
            f"sampled {tally.read:,} of {sample.total:,} {of_kind} "
            f"from {sample.places:,} places, seed {sample.seed}"
        )
    text += f", {tally.kept:,} usable"
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in tally.dropped.most_common())
    text += f" (dropped: {dropped})" if dropped else ""
    if report.scale > 1:
        text += f"; counts scaled by {report.scale:.4g}"
    if sample.total is None:
        return f"{text}; what follows them is not known, as the input has no length"
    packs_error = max((c.packs_error or 0) / max(c.packs, 1) for c in report.choices)
    dropped_error = max(c.dropped_error or 0 for c in report.choices)
    if packs_error or dropped_error:
        text += (
            f": packs within {packs_error:.1%}, dropped within {dropped_error:,} "
            "(two standard errors, by the differences of neighbouring places)"
        )
    return text


def print_findings(findings: Iterable[Finding], records: int = 0) -> int:
    """Prints findings as soon as each is known; returns the exit code."""
    console, failed = common.stdout_console(), False
    for finding in findings:
        text = finding.text
        if finding.records is not None:
            share = finding.records / max(records, 1)
            text = f"{finding.records:,} records, {share:.1%}" + (
                f": {text}" if text else ""
            )
        lines = (f"{finding.level:8}{finding.check:24} {text}", *finding.examples)
        console.print("\n        ".join(lines), style=_STYLES[finding.level])
        failed = failed or not finding.ok
    return int(failed)
