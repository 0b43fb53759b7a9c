"""``--dry-run`` of ``packstore pack`` and ``append``: lint and plan a sample, and try
the destination.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from packstore.cli._messages import show_progress
from packstore.cli._output import print_outcome, stdout_console
from packstore.cli.estimate import print_estimate

if TYPE_CHECKING:
    from packstore.etl.reports.place import Finding
    from packstore.etl.reports.projection import Report

STYLES = {"ok": None, "remark": "yellow", "problem": "red"}
"""Level of a finding -> style of its line."""


def try_job(args: argparse.Namespace, job: dict[str, Any]) -> int:
    """Print the report of a dry run; return the exit code.

    The report has findings on a sample of the records, an estimate of the packs, and
    findings on the destination.

    Args:
        args: the command line.
        job: arguments of ``packstore.pack``.
    """
    from packstore.etl.reports.records import dry_run

    with show_progress("dry run", args) as progress:
        report, findings = dry_run(**job, progress=progress)
    if not args.json:
        _print_report(report)
        stdout_console().print(
            "The first line has the settings of the job; the others are alternatives."
        )
    return _print_findings_of_job(args, report, findings)


def try_append(args: argparse.Namespace, arguments: dict[str, Any]) -> int:
    """Print the report of a dry run of an append; return the exit code.

    Args:
        args: the command line, with ``--allow-empty``.
        arguments: arguments of ``packstore.append``.
    """
    from packstore.etl.reports.records import dry_run_of_append
    from packstore.io.inputs.files import NoRecordsError

    try:
        with show_progress("dry run", args) as progress:
            report, findings = dry_run_of_append(
                **arguments, allow_empty=args.allow_empty, progress=progress
            )
    except NoRecordsError as error:
        if not args.allow_empty:
            raise
        if args.json:
            return print_outcome(True, {"diagnosis": None, "findings": []})
        stdout_console().print(f"nothing to append: {error}")
        return 0
    if not args.json:
        _print_report(report)
    return _print_findings_of_job(args, report, findings)


def _print_report(report: Report) -> None:
    _print_diagnosis(report)
    print_estimate(report)


def _print_findings_of_job(
    args: argparse.Namespace, report: Report, findings: Sequence[Finding]
) -> int:
    """Print the findings, or everything as JSON; return the exit code."""
    ok = all(finding.ok for finding in findings)
    if args.json:
        diagnosis = {
            "kind": report.kind,
            "records": report.records,
            "findings": report.findings,
            "forms": report.forms,
        }
        return print_outcome(
            ok,
            {
                "diagnosis": diagnosis,
                "estimate": report.choices[0],
                "alternatives": report.choices[1:],
                "findings": findings,
            },
        )
    _print_findings(findings)
    return 0 if ok else 1


def _print_diagnosis(report: Report) -> None:
    from packstore.tokenizer.records.read import OWN

    console = stdout_console()
    console.print(f"{report.records:,} records of kind {report.kind}")
    for form, num_records in report.forms.items():
        name = "packstore's own field names" if form == OWN else form
        console.print(f"  {num_records:,} read by {name}")
    _print_findings(report.findings, report.records)
    if not report.findings:
        console.print("no findings", style="green")


def _print_findings(findings: Iterable[Finding], num_records: int = 0) -> None:
    """Print a line for each finding, and its examples below it.

    Args:
        findings: the findings.
        num_records: records of the sample, for the share of those with a finding.
    """
    console = stdout_console()
    for finding in findings:
        text = finding.text
        if finding.records is not None:
            share = finding.records / max(num_records, 1)
            separator = ": " if text else ""
            text = f"{finding.records:,} records, {share:.1%}{separator}{text}"
        lines = [f"{finding.level:8}{finding.check:24} {text}", *finding.examples]
        console.print("\n        ".join(lines), style=STYLES[finding.level])
