"""``packstore evaluate``: accuracy, margins, rewards and loss of a model on a packed dataset."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from packstore.cli import Command
from packstore.cli._groups import check_by
from packstore.cli._model import add_model, loaded, ranks, say
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_dataset, heading, open_dataset, stdout_console
from packstore.cli.settings import key_values
from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.pages import charts, frame

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.torch.losses.figures import Figures
    from packstore.torch.losses.loss import PreferenceLoss

_FACTS = (
    "examples", "loss", "perplexity", "rewards/accuracies", "rewards/margins", "rewards/chosen",
    "rewards/rejected",
)  # fmt: skip


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    add_model(parser)
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument(
        "--reference-model", metavar="PATH", help="reference model, or a LoRA adapter"
    )
    reference.add_argument(
        "--ref-logps", metavar="SIDE", help="side dataset from `packstore ref-logps`"
    )
    parser.add_argument("--loss", metavar="NAME", help="default: dpo, or sft for kind sft")
    parser.add_argument("--beta", type=float, metavar="X", help="beta of the loss")
    parser.add_argument(
        "--loss-parameter",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another parameter of the loss (repeatable)",
    )
    parser.add_argument(
        "--by", metavar="COLUMN", help="also group by a carried column, or by input file: file"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page with charts; by file without --by"
    )
    parser.add_argument(
        "--examples",
        metavar="FILE",
        help="also write a Parquet file with a row for each example: log-probs, loss, margins, "
        "carried columns",
    )
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    kind = dataset.manifest.kind
    check_by(dataset, args.by)
    for path in filter(None, (args.html, args.examples)):
        frame.check_writable(path)
    name = args.loss or ("sft" if kind == "sft" else "dpo")
    with ranks(args.device) as device:
        from packstore.torch.losses.loss import PreferenceLoss
        from packstore.torch.training.evaluate import evaluate

        loss = PreferenceLoss(name, **_parameters(args))
        if kind == "sft" and not loss.only_sft:
            must = "an example must have responses to compare"
            found, do = "a dataset of kind 'sft'", "Use --loss sft"
            raise CompatibilityError(sentence(f"--loss {name}", must, found, do))
        if loss.reference and not (args.reference_model or args.ref_logps):
            raise ConfigError(
                f"loss {name!r} compares with a reference: give --reference-model or --ref-logps."
            )
        wanted = loss.reference and args.reference_model
        figures = evaluate(
            loaded(args, args.model, args.adapter, device),
            dataset,
            loss=loss,
            reference=loaded(args, args.reference_model, None, device) if wanted else None,
            side=[args.ref_logps] if args.ref_logps else (),
            by=args.by or ("file" if args.html else None),
            rows=bool(args.html or args.examples),
            mixed_precision=args.mixed_precision,
            packs_per_batch=args.packs_per_batch,
            tokens_per_batch=args.tokens_per_batch,
        )
    if not say():
        return 0
    rows = figures.pop("rows", None)
    if args.examples and rows is not None:
        pq.write_table(rows, args.examples)
    if args.html:
        frame.write(args.html, _page(args, dataset, loss, figures, rows))
    if args.json:
        print_result(figures)
        return 0
    title = f"{args.model} on {dataset.url}"
    stdout_console().print(_table(title, figures["metrics"], figures["by"]))
    return 0


def _page(
    args: argparse.Namespace,
    dataset: Dataset,
    loss: PreferenceLoss,
    figures: Figures,
    rows: pa.Table | None,
) -> str:
    metrics, by = figures["metrics"], figures["by"]
    facts = {name: metrics[name] for name in _FACTS if name in metrics}
    shown = {name: _text(name, value) for name, value in facts.items()}
    sections = [frame.section("Figures", frame.facts(shown))]
    if rows is not None and "rewards/margins" in rows.column_names:
        names = ("rewards/margins", "rewards/chosen", "rewards/rejected")
        drawn = {name: rows[name].to_numpy() for name in names}
        drawn = {name: values[~np.isnan(values)] for name, values in drawn.items()}  # with pairs
        margins = drawn["rewards/margins"]
        pictures = (
            charts.histogram(n, v, "") for n, v in drawn.items() if len(v) and v.min() < v.max()
        )
        wrong = int((margins <= 0).sum())
        note = f"{wrong:,} of {len(margins):,} examples have a margin of 0 or less."
        sections.append(
            frame.section("Margins", frame.paragraph(note), charts.side_by_side(*pictures))
        )
    if by:
        groups = [(group, *(_text(n, own[n]) for n in facts)) for group, own in by.items()]
        title = f"By {args.by or 'file'}"
        sections.append(frame.section(title, frame.table(("", *facts), groups)))
    every = [(name, _text(name, value)) for name, value in metrics.items()]
    sections.append(frame.section("All metrics", frame.table(("metric", "all"), every)))
    reference = args.reference_model or args.ref_logps
    against = f" against {reference}" if reference and loss.reference else ""
    return frame.page(
        f"Evaluation of {args.model}",
        f"{dataset.url}, fingerprint {dataset.manifest.fingerprint[:12]}: {loss}{against}",
        sections,
    )


def _text(name: str, value: float) -> str:
    if name == "examples":
        return f"{value:,.0f}"
    return f"{value:.2%}" if name == "rewards/accuracies" else f"{value:.5g}"


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """Parses ``--beta`` and ``--loss-parameter`` to keywords of the loss."""
    texts = key_values(args.loss_parameter, "--loss-parameter")
    try:
        given = {name: float(text) for name, text in texts.items()}
    except ValueError as error:
        raise ConfigError(f"--loss-parameter must have the form NAME=NUMBER; {error}.") from error
    if args.beta is None:
        return {**given}
    if "beta" in given:
        raise ConfigError("give --beta or --loss-parameter beta, not both.")
    return {**given, "beta": args.beta}


def _table(title: str, metrics: dict[str, float], by: dict[str, dict[str, float]]) -> Table:
    """A table with one row per metric, and columns for all examples and for each group."""
    table = Table(title=heading(title), title_justify="left", title_style="bold")
    table.add_column("metric", style="cyan", no_wrap=True)
    for name in ("all", *by):
        table.add_column(name, justify="right")
    for name in metrics:
        values = (metrics[name], *(own[name] for own in by.values()))
        table.add_row(name, *(f"{v:,.0f}" if name == "examples" else f"{v:.6g}" for v in values))
    return table


COMMAND = Command(
    examples="  packstore evaluate held-out-8k --model run/model --ref-logps held-out-ref "
    "--by source\n"
    "  packstore evaluate held-out-8k --model run/model --reference-model sft --by file\n"
    "  packstore evaluate held-out-8k --model run/model --ref-logps ref --html evaluation.html\n"
    "  packstore evaluate chats-8k --model my-sft-model --json\n"
    "  torchrun --nproc-per-node 8 -m packstore evaluate prefs-8k --model run --ref-logps ref\n",
    configure=_configure,
    run=_run,
)
