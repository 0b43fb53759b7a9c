"""``packstore estimate``: tokens, fill, packs and steps of several pack sizes and
layouts.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from packstore.cli import Command
from packstore.cli._arguments import (
    add_json,
    add_settings,
    add_source,
    add_storage_options,
    read_settings,
    source_of,
)
from packstore.cli._messages import show_progress
from packstore.cli._output import (
    format_value,
    identity_of,
    print_result,
    stdout_console,
)
from packstore.config import (
    BatchConfig,
    PackConfig,
    PlanConfig,
    TokenizeConfig,
    WorkConfig,
)

if TYPE_CHECKING:
    from packstore.etl.reports.projection import Report

LEGEND = (
    "shares: where sequences share prefixes (share_prefixes); stored: tokens in "
    "percent of all sequences; fill: tokens in percent of the packs' capacity; steps: "
    "optimizer steps of an epoch, on one rank, of 64 examples unless the flags of "
    "steps say otherwise; dropped: records that are dropped, mostly as too long."
)

SAMPLED_SHARING = (
    "With `pack`, a sample shows the least that is saved: more records have more in "
    "common."
)

SAMPLE_ARGUMENTS = ("pack_sizes", "layouts", "sample", "records")
"""Arguments of :func:`packstore.estimate` that are no settings."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--tokenizer", metavar="PATH", help="as for packstore pack")
    group = parser.add_argument_group(
        "choices and sample", argument_default=argparse.SUPPRESS
    )
    group.add_argument(
        "--pack-sizes",
        "--pack-size",
        type=_integers,
        metavar="N,N,…",
        help="pack sizes to try (default: 2048 to 32768)",
    )
    group.add_argument(
        "--layouts",
        "--layout",
        type=_names,
        metavar="NAME,NAME,…",
        help="layouts to try (default: concat,shared_prefix)",
    )
    group.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="maximum records to read (default: 20000)",
    )
    group.add_argument(
        "--records",
        type=int,
        metavar="N",
        help="number of all records, if SOURCE is only a part",
    )
    step_names = (
        "packs_per_batch",
        "gradient_accumulation_steps",
        "examples_per_step",
    )
    add_settings(parser, "steps", BatchConfig, step_names)
    add_settings(parser, "planning", PlanConfig, ("strategy", "seed"))
    add_json(parser)
    add_storage_options(parser)
    add_settings(parser, "tokenization", TokenizeConfig)
    add_settings(parser, "running", WorkConfig)


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            "must be whole numbers, comma-separated"
        ) from None


def _names(text: str) -> list[str]:
    return text.split(",")


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.reports.records import estimate
    from packstore.io.dataset.dataset import find_dataset

    arguments: dict[str, Any] = {
        name: getattr(args, name) for name in SAMPLE_ARGUMENTS if name in args
    }
    source = source_of(args.source)
    dataset = find_dataset(source, args.storage_option)
    if dataset is not None:
        source = dataset
    with show_progress("estimate", args) as progress:
        report = estimate(
            source,
            args.tokenizer,
            storage_options=args.storage_option,
            progress=progress,
            **arguments,
            **read_settings(args, PackConfig),
            **read_settings(args, BatchConfig),
        )
    if args.json:
        print_result(
            {
                **({} if dataset is None else identity_of(dataset)),
                "kind": report.kind,
                "sample": report.sample,
                "scale": report.scale,
                "choices": report.choices,
            }
        )
    else:
        print_estimate(report)
    return 0


def print_estimate(report: Report) -> None:
    """Print the choices as a table."""
    console = stdout_console()
    console.print(_describe_sample(report))
    names = (
        "pack size",
        "layout",
        "shares",
        "stored",
        "fill",
        "packs",
        "steps",
        "dropped",
    )
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for choice in report.choices:
        table.add_row(
            format_value(choice.pack_size),
            choice.layout,
            "" if choice.layout == "concat" else choice.share_prefixes,
            f"{choice.stored_rate:.1%}",
            f"{choice.fill_rate:.2%}",
            format_value(choice.packs),
            format_value(choice.steps),
            format_value(choice.dropped),
        )
    console.print(table)
    console.print(LEGEND)
    is_sample = report.sample is not None and not report.sample.is_complete
    if is_sample and any(c.share_prefixes == "pack" for c in report.choices):
        console.print(SAMPLED_SHARING)


def _describe_sample(report: Report) -> str:
    """Describe the sample: its size, how it was drawn, and the errors of counts."""
    tally = report.tally
    sample = report.sample
    assert sample is not None

    records = f"records of kind {report.kind}"
    if sample.is_complete:
        text = f"{tally.read:,} {records}"
    elif sample.total is None:
        text = f"the first {tally.read:,} {records}"
    else:
        text = (
            f"sampled {tally.read:,} of {sample.total:,} {records} "
            f"from {sample.places:,} places, seed {sample.seed}"
        )
    text += f", {tally.kept:,} usable"
    if tally.dropped:
        counts = [f"{reason} {n:,}" for reason, n in tally.dropped.most_common()]
        text += f" (dropped: {', '.join(counts)})"
    if report.scale > 1:
        text += f"; counts scaled by {report.scale:.4g}"

    if sample.total is None:
        return f"{text}; the records after them are unknown, as the input has no length"
    packs_error = max((c.packs_error or 0) / max(c.packs, 1) for c in report.choices)
    dropped_error = max(c.dropped_error or 0 for c in report.choices)
    if packs_error or dropped_error:
        text += (
            f": packs within {packs_error:.1%}, dropped within {dropped_error:,} "
            "(two standard errors, from the differences of neighbouring places)"
        )
    return text


ESTIMATE = Command(
    configure=_configure,
    run=_run,
    examples="  packstore estimate prefs.jsonl --tokenizer Qwen3/ --pack-sizes "
    "4096,8192\n",
)
