"""``packstore doctor``, ``estimate`` and ``check``: look at records and places before a job."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from packstore.cli import Command, common
from packstore.cli._messages import progress_of
from packstore.config import CHECK_RETRIES, PackConfig, TokenizeConfig, WorkConfig
from packstore.errors import display
from packstore.pages import charts, frame

if TYPE_CHECKING:
    from packstore.etl.reports.doctor import Diagnosis
    from packstore.etl.reports.estimate import Choice, Estimate
    from packstore.etl.reports.preflight import Trial

NOTE = (
    "padded: fill once sequences are padded (pad_to_multiple); saved: tokens that the layout "
    "leaves out; per pack, per step: examples; too long: examples that do not fit; steps: "
    "optimizer steps of an epoch."
)
NUMBERS = {
    "sample": "most records to look at, from all over (20000)",
    "records": "records in all, if SOURCE is a part of them",
    "world_size": "ranks that share a step (1)",
    "packs_per_batch": "packs of a batch on one rank (1)",
    "accumulation": "batches of an optimizer step (1)",
    "examples_per_step": "most examples of a step, instead",
}
"""Argument of :func:`packstore.estimate` -> help of its flag."""

_MARKS = {True: ("ok", None), False: ("FAILED", "red"), None: ("–", "dim")}


def _configure_doctor(parser: argparse.ArgumentParser) -> None:
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


def _doctor(args: argparse.Namespace) -> int:
    from packstore.etl.reports.doctor import doctor

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
    from packstore.etl.notes import meaning

    console = common.stdout_console()
    console.print(f"{diagnosis.records:,} records of kind {diagnosis.kind}")
    for shape, records in diagnosis.shapes.items():
        console.print(Text(f"  {records:,} {shape}"))
    table = Table(
        Column("check", no_wrap=True),
        Column("records", justify="right"),
        Column("share", justify="right"),
        Column("for example", overflow="fold"),
    )
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


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("must be whole numbers, comma-separated") from None


def _configure_estimate(parser: argparse.ArgumentParser) -> None:
    common.add_source(parser)
    parser.add_argument("--tokenizer", metavar="PATH", help="as for packstore pack")
    tried = parser.add_argument_group("what is tried", argument_default=argparse.SUPPRESS)
    for one, many, usual in (
        ("--pack-size", "--pack-sizes", "2048 to 32768"),
        ("--layout", "--layouts", "concat,shared_prefix"),
        ("--strategy", "--strategies", "pool"),
    ):
        read = _sizes if one == "--pack-size" else partial(str.split, sep=",")
        text = f"comma-separated ({usual})"
        tried.add_argument(many, one, type=read, metavar="LIST", help=text)
    tried.add_argument("--seed", type=int, metavar="N", help="of the sample and the plans (0)")
    for name, text in NUMBERS.items():
        flags = ["--" + name.replace("_", "-")] + ["--ranks"] * (name == "world_size")
        tried.add_argument(*flags, type=int, metavar="N", help=text)
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts")
    common.add_json(parser)
    common.add_storage_options(parser)
    common.add_settings(parser, "tokenization", TokenizeConfig)
    common.add_settings(parser, "running", WorkConfig)


def _estimate(args: argparse.Namespace) -> int:
    from packstore.etl.reports.estimate import estimate

    if args.html:
        frame.check_writable(args.html)
    named = ("pack_sizes", "layouts", "strategies", *NUMBERS)
    options: dict[str, Any] = {n: value for n, value in vars(args).items() if n in named}
    with progress_of("estimate", args) as progress:
        result = estimate(
            common.source_of(args.source),
            args.tokenizer,
            **options,
            storage_options=args.storage_option,
            progress=progress,
            **common.read_settings(args, PackConfig),
        )
    if args.html:
        frame.write(args.html, _page(result, ", ".join(map(display, args.source))))
    if args.json:
        names = ("kind", "sample", "scale", "recommended", "choices")
        common.print_result({name: getattr(result, name) for name in names})
    else:
        print_estimate(result)
    return 0


def print_estimate(result: Estimate) -> None:
    """Prints the choices as a table, with a recommendation if there are several."""
    console = common.stdout_console()
    console.print(_summary(result))
    columns = [Column(c, justify="right", no_wrap=True) for c in _cells(result.choices[0])]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for choice in result.choices:
        style = "bold green" if choice is result.recommended else None
        table.add_row(*_cells(choice).values(), style=style)
    console.print(table)
    console.print(NOTE)
    if len(result.choices) > 1:
        console.print(_advice(result))


def _summary(result: Estimate) -> str:
    """Returns the size of the sample, how it was drawn, and the error of the counts."""
    tally, sample = result.tally, result.sample
    of_kind = f"records of kind {result.kind}"
    if sample.whole:
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
    if result.scale > 1:
        text += f"; counts scaled by {result.scale:.4g}"
    if sample.total is None:
        return f"{text}; what follows them is not known, as the input has no length"
    packs = max((c.packs_error or 0) / max(c.packs, 1) for c in result.choices)
    overlong = max(c.overlong_error or 0 for c in result.choices)
    if packs or overlong:
        text += (
            f": packs within {packs:.1%}, too long within {overlong:,} "
            "(two standard errors, by the differences of neighbouring places)"
        )
    return text


def _advice(result: Estimate) -> str:
    from packstore.etl.reports.estimate import ENOUGH_FILL

    best = result.best
    choice = f"pack size {best.pack_size}, layout {best.layout}, strategy {best.strategy}"
    if result.recommended is None:
        return (
            "no pack size that was tried fills to 99 % and keeps 99.9 % of the records that can be "
            f"kept; the fullest is {choice}: {best.fill_rate:.2%}. Try larger ones."
        )
    fills = "fills to 99 %"
    if best.fill_rate < ENOUGH_FILL:
        fills += f" in all packs but the emptiest ({best.fill_rate:.2%} in all)"
    return (
        f"recommended: {choice}: the smallest pack size that {fills} and keeps 99.9 % of "
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


def _page(result: Estimate, source: str) -> str:
    fills: dict[str, list[tuple[float, float]]] = {}
    for choice in result.choices:
        name = f"{choice.layout}, {choice.strategy}"
        fills.setdefault(name, []).append((choice.pack_size, choice.fill_rate))
    cells = [_cells(choice) for choice in result.choices]
    lengths = {f"an example, layout {name}": n for name, n in result.example_tokens.items()}
    lengths["a sequence"] = result.sequence_tokens
    return charts.charts_page(
        "Packing estimate",
        f"{source}: {_summary(result)}",
        note=_advice(result),
        charts=[
            charts.curves("Fill", "pack size", fills),
            *(charts.histogram(f"Tokens of {of}", n, "tokens") for of, n in lengths.items()),
        ],
        tables={"Choices": ([*cells[0]], [[*row.values()] for row in cells])},
    )


def _configure_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="folder or URL: of a dataset, or for a new one")
    common.add_json(parser)
    common.add_storage_options(parser)


def _check(args: argparse.Namespace) -> int:
    from packstore.etl.reports.preflight import preflight
    from packstore.io.store.location import Location

    findings = preflight(Location(args.url, {**CHECK_RETRIES, **args.storage_option}))
    if not args.json:
        return print_findings(findings)
    results = list(findings)
    common.print_result([finding._asdict() for finding in results])
    return int(any(finding.ok is False for finding in results))


def print_findings(findings: Iterable[Trial]) -> int:
    """Prints each finding as soon as it is known; returns the exit code."""
    console, failed = common.stdout_console(), False
    for finding in findings:
        mark, style = _MARKS[finding.ok]
        console.print(f"{mark:6} {finding.what:12} {finding.text}", style=style)
        failed = failed or finding.ok is False
    return int(failed)


DOCTOR = Command(
    "  packstore doctor chats.jsonl --tokenizer Qwen3/ --pack-size 4096 --strict\n",
    _configure_doctor,
    _doctor,
)
ESTIMATE = Command(
    "  packstore estimate prefs.jsonl --tokenizer Qwen3/ --ranks 8 --examples-per-step 64\n",
    _configure_estimate,
    _estimate,
)
CHECK = Command(
    "  packstore check s3://bucket/new --storage-option endpoint_url=https://s3.example:9000\n",
    _configure_check,
    _check,
)
