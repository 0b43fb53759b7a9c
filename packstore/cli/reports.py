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
    from packstore.etl.reports.projection import Choice, Report

NOTE = (
    "padded: fill once sequences are padded (pad_to_multiple); saved: tokens that the "
    "layout "
    "leaves out; per pack, per step: examples; too long: examples that do not fit; "
    "steps: "
    "optimizer steps of an epoch."
)
TRIED = {
    "--pack-sizes --pack-size N,N,…": "2048 to 32768",
    "--layouts --layout NAME,NAME,…": "concat,shared_prefix",
    "--strategies --strategy NAME,NAME,…": "pool",
    "--sample N": "most records to look at, from all over (20000)",
    "--records N": "records in all, if SOURCE is a part of them",
    "--world-size --ranks N": "ranks that share a step (1)",
}
"""Argument of :func:`packstore.estimate` that is no setting -> its help, with the
default.
"""

STEPS = ("packs_per_batch", "gradient_accumulation_steps", "examples_per_step")

DIAGNOSIS = ("kind", "records", "findings", "forms")
ESTIMATE_OF = ("kind", "sample", "scale", "recommended", "choices")
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
    common.add_settings(parser, "planning", PlanConfig, ("seed",))
    _add_settings(parser)


@command(
    _configure_estimate,
    "  packstore estimate prefs.jsonl --tokenizer Qwen3/ --ranks 8 --examples-per-step "
    "64\n",
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
    """Prints the choices as a table, with a recommendation if there are several."""
    console = common.stdout_console()
    console.print(_summary(report))
    columns = [
        Column(c, justify="right", no_wrap=True) for c in _cells(report.choices[0])
    ]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for choice in report.choices:
        style = "bold green" if choice is report.recommended else None
        table.add_row(*_cells(choice).values(), style=style)
    console.print(table)
    console.print(NOTE)
    if len(report.choices) > 1:
        console.print(_advice(report))


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
    packs = max((c.packs_error or 0) / max(c.packs, 1) for c in report.choices)
    overlong = max(c.overlong_error or 0 for c in report.choices)
    if packs or overlong:
        text += (
            f": packs within {packs:.1%}, too long within {overlong:,} "
            "(two standard errors, by the differences of neighbouring places)"
        )
    return text


def _advice(report: Report) -> str:
    from packstore.etl.reports.projection import ENOUGH_FILL

    best = report.best
    choice = (
        f"pack size {best.pack_size}, layout {best.layout}, strategy {best.strategy}"
    )
    if report.recommended is None:
        return (
            "no pack size that was tried fills to 99 % and keeps 99.9 % of the records "
            "that can be "
            f"kept; the fullest is {choice}: {best.fill_rate:.2%}. Try larger ones."
        )
    fills = "fills to 99 %"
    if best.fill_rate < ENOUGH_FILL:
        fills += f" in all packs but the emptiest ({best.fill_rate:.2%} in all)"
    return (
        f"recommended: {choice}: the smallest pack size that {fills} and keeps 99.9 % "
        "of "
        "the records that any of them keeps."
    )


def _cells(choice: Choice) -> dict[str, str]:
    """Returns the row of a choice, by column."""
    return {
        "pack size": common.number(choice.pack_size),
        "layout": choice.layout,
        "strategy": choice.strategy,
        "fill": f"{choice.fill_rate:.2%}",
        "padded": f"{choice.aligned_fill_rate:.2%}",
        "saved": f"{choice.tokens_saved:.1%}",
        "packs": common.number(choice.packs),
        "per pack": f"{choice.examples_per_pack:.1f}",
        "too long": common.number(choice.overlong),
        "steps": common.number(choice.steps),
        "per step": f"{choice.examples_per_step:.1f}",
    }


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
