"""``packstore estimate``: estimates the result of packing from a sample of the records."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from packstore.cli import Command
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_storage_options, number, stdout_console, storage_options
from packstore.cli.settings import add_settings, read_settings
from packstore.config import PackConfig, TokenizeConfig, WorkConfig
from packstore.errors import ConfigError
from packstore.pages import charts, frame

if TYPE_CHECKING:
    from packstore.etl.estimate import Choice, Estimate

COLUMNS = (
    "pack size",
    "layout",
    "strategy",
    "fill",
    "padded",
    "saved",
    "packs",
    "per pack",
    "too long",
    "steps",
    "per step",
)
NOTE = (
    "padded: fill once sequences are padded (pad_to_multiple); "
    "saved: tokens that the layout leaves out; per pack, per step: examples; "
    "too long: examples that do not fit; steps: optimizer steps of an epoch."
)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="as for packstore pack")
    parser.add_argument("--tokenizer", metavar="PATH", help="as for packstore pack")
    tried = parser.add_argument_group("what is tried (lists: comma-separated)")
    for one, many, metavar, text in (
        ("--pack-size", "--pack-sizes", "N,N,…", "2048 to 32768"),
        ("--layout", "--layouts", "NAME,…", "concat,shared_prefix"),
        ("--strategy", "--strategies", "NAME,…", "pool"),
    ):
        tried.add_argument(many, one, action="append", metavar=metavar, help=f"default: {text}")
    tried.add_argument(
        "--sample", type=int, metavar="N",
        help="records to look at, at most, from all over the input; default: 20000",
    )  # fmt: skip
    tried.add_argument(
        "--seed", type=int, metavar="N", default=argparse.SUPPRESS,
        help="decides the sample and the plans; default: 0",
    )  # fmt: skip
    tried.add_argument(
        "--records", type=int, metavar="N",
        help="records in all, if SOURCE is a part of them: counts are scaled",
    )  # fmt: skip
    training = parser.add_argument_group("how an epoch is cut into steps")
    for name, text in (
        ("world_size", "ranks"),
        ("packs_per_batch", "packs of a batch on one rank"),
        ("accumulation", "batches of an optimizer step"),
    ):
        flag = "--" + name.replace("_", "-")
        training.add_argument(flag, type=int, default=1, metavar="N", help=f"{text}; default: 1")
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts")
    add_json(parser)
    add_storage_options(parser)
    add_settings(parser, "tokenization", TokenizeConfig)
    add_settings(parser, "running", WorkConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.estimate import estimate

    source = args.source[0] if len(args.source) == 1 else args.source
    if args.html:
        frame.check_writable(args.html)
    with progress_of("estimate", args) as progress:
        found = estimate(
            source,
            args.tokenizer,
            **_options(args),
            storage_options=storage_options(args),
            progress=progress,
            **read_settings(args, PackConfig),
        )
    if args.html:
        frame.write(args.html, _page(found, ", ".join(args.source)))
    if args.json:
        best = found.recommended and dataclasses.asdict(found.recommended)
        figures = {
            "kind": found.kind,
            "sample": dataclasses.asdict(found.sample),
            "scale": found.scale,
            "recommended": best,
            "choices": [dataclasses.asdict(c) for c in found.choices],
        }
        print_result(figures)
        return 0
    print_estimate(stdout_console(), found)
    return 0


def print_estimate(console: Console, found: Estimate) -> None:
    """Prints the choices as a table, with a recommendation if there are several."""
    console.print(_summary(found))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for choice in found.choices:
        table.add_row(*_row(choice), style="bold green" if choice is found.recommended else None)
    console.print(table)
    console.print(NOTE)
    if len(found.choices) > 1:
        console.print(_advice(found))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The combinations, the sample and the batch sizes."""
    names = ("sample", "records", "world_size", "packs_per_batch", "accumulation")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name in ("pack_sizes", "layouts", "strategies"):
        if values := getattr(args, name):
            given[name] = tuple(",".join(values).split(","))
    if sizes := given.get("pack_sizes"):
        try:
            given["pack_sizes"] = tuple(map(int, sizes))
        except ValueError:
            found = ",".join(sizes)
            raise ConfigError(
                f"--pack-sizes must be whole numbers, comma-separated; found {found!r}."
            ) from None
    return given


def _summary(found: Estimate) -> str:
    """The size of the sample, how it was drawn, and the error of the counts."""
    tally, sample = found.tally, found.sample
    of_kind = f"records of kind {found.kind}"
    if sample.whole:
        text = f"{number(tally.read)} {of_kind}"
    elif sample.total is None:
        text = f"the first {number(tally.read)} {of_kind}"
    else:
        text = (
            f"sampled {number(tally.read)} of {number(sample.total)} {of_kind} "
            f"from {number(sample.places)} places, seed {sample.seed}"
        )
    text += f", {number(tally.kept)} usable"
    dropped = ", ".join(f"{reason} {number(n)}" for reason, n in tally.dropped.most_common())
    text += f" (dropped: {dropped})" if dropped else ""
    if found.scale > 1:
        text += f"; counts scaled by {found.scale:.4g}"
    return text + _error(found)


def _error(found: Estimate) -> str:
    """The largest error of the table's counts."""
    if found.sample.total is None:
        return "; what follows them is not known, as the input has no length"
    packs = max((c.packs_error or 0) / max(c.packs, 1) for c in found.choices)
    overlong = max(c.overlong_error or 0 for c in found.choices)
    if not packs and not overlong:
        return ""
    return (
        f": packs within {packs:.1%}, too long within {number(overlong)} "
        "(two standard errors, by the differences of neighbouring places)"
    )


def _advice(found: Estimate) -> str:
    from packstore.etl.estimate import ENOUGH_FILL

    best = found.recommended
    if best is None:
        fullest = max(found.choices, key=lambda c: c.fill_rate)
        return (
            "no pack size that was tried fills to 99 % and keeps 99.9 % of the records that can be "
            f"kept; the fullest is {_settings(fullest)}: {fullest.fill_rate:.2%}. Try larger ones."
        )
    fills = "fills to 99 %"
    if best.fill_rate < ENOUGH_FILL:
        fills += f" in all packs but the emptiest ({best.fill_rate:.2%} in all)"
    return (
        f"recommended: {_settings(best)}: the smallest pack size that {fills} and keeps 99.9 % of "
        "the records that any of them keeps."
    )


def _settings(choice: Choice) -> str:
    return f"pack size {choice.pack_size}, layout {choice.layout}, strategy {choice.strategy}"


def _row(choice: Choice) -> tuple[str, ...]:
    return (
        number(choice.pack_size),
        choice.layout,
        choice.strategy,
        f"{choice.fill_rate:.2%}",
        f"{choice.aligned_fill_rate:.2%}",
        f"{choice.tokens_saved:.1%}",
        number(choice.packs),
        f"{choice.examples_per_pack:.1f}",
        number(choice.overlong),
        number(choice.steps),
        f"{choice.examples_per_step:.1f}",
    )


def _page(found: Estimate, source: str) -> str:
    sizes = sorted({c.pack_size for c in found.choices})
    fills = []
    for layout in dict.fromkeys(c.layout for c in found.choices):
        series: dict[str, list[float]] = {}
        for choice in found.choices:
            if choice.layout == layout:
                series.setdefault(choice.strategy, []).append(choice.fill_rate)
        names = [number(n) for n in sizes]
        fills.append(charts.lines(f"Fill, layout {layout}", "by pack size", names, series))
    best = None if found.recommended is None else found.choices.index(found.recommended)
    lengths = [
        charts.histogram(f"Tokens of an example, layout {layout}", values, "tokens")
        for layout, values in found.example_tokens.items()
    ]
    lengths.append(charts.histogram("Tokens of a sequence", found.sequence_tokens, "tokens"))
    return frame.page(
        "Packing estimate",
        f"{source}: {_summary(found)}",
        [
            frame.section("Recommendation", frame.paragraph(_advice(found))),
            frame.section("Fill", charts.side_by_side(*fills)),
            frame.section(
                "Choices",
                frame.table(COLUMNS, map(_row, found.choices), best),
                frame.paragraph(NOTE),
            ),
            frame.section("Lengths", charts.side_by_side(*lengths)),
        ],
    )


COMMAND = Command(
    examples="  packstore estimate prefs.jsonl --tokenizer Qwen3/ --world-size 8 "
    "--html estimate.html\n",
    configure=_configure,
    run=_run,
)
