"""``packstore evaluate``: accuracy, margins, rewards and loss of a model on a packed dataset."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.table import Table

from packstore.cli import Command
from packstore.cli._model import add_model, loaded, ranks, say
from packstore.cli.common import add_dataset, open_dataset, stdout_console
from packstore.cli.settings import key_values
from packstore.errors import CompatibilityError, ConfigError, sentence


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    add_model(parser)
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument("--ref-model", metavar="PATH", help="reference model, or an adapter")
    reference.add_argument("--ref-logps", metavar="SIDE", help="what `packstore ref-logps` wrote")
    parser.add_argument("--loss", metavar="NAME", help="default: dpo, or sft for kind sft")
    parser.add_argument("--beta", type=float, metavar="X", help="of the loss")
    parser.add_argument(
        "--loss-parameter",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another parameter of the loss (repeatable)",
    )
    parser.add_argument(
        "--by", metavar="COLUMN", help="also by value of a carried column, or by input file: file"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _run(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    kind, carried = dataset.manifest.kind, dataset.manifest.carry
    if args.by not in (None, "file", *carried):
        known = ", ".join(["file", *carried])
        raise ConfigError(f"--by must be a carried column, of {known}; found {args.by!r}.")
    name = args.loss or ("sft" if kind == "sft" else "dpo")
    with ranks(args.device) as device:
        from packstore.torch.evaluate import evaluate
        from packstore.torch.loss import PreferenceLoss

        loss = PreferenceLoss(name, **_parameters(args))
        if kind == "sft" and not loss.only_sft:
            must = "an example must have responses to compare"
            found, do = "a dataset of kind 'sft'", "Use --loss sft"
            raise CompatibilityError(sentence(f"--loss {name}", must, found, do))
        if loss.reference and not (args.ref_model or args.ref_logps):
            raise ConfigError(
                f"loss {name!r} compares with a reference: give --ref-model or --ref-logps."
            )
        wanted = loss.reference and args.ref_model
        figures = evaluate(
            loaded(args, args.model, args.adapter, device),
            dataset,
            loss=loss,
            reference=loaded(args, args.ref_model, None, device) if wanted else None,
            side=[args.ref_logps] if args.ref_logps else (),
            by=args.by,
            packs_per_batch=args.packs_per_batch,
            tokens_per_batch=args.tokens_per_batch,
        )
    if not say():
        return 0
    if args.json:
        json.dump(figures, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    title = f"{args.model} on {dataset.url}"
    stdout_console().print(_table(title, figures["metrics"], figures["by"]))
    return 0


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """``--beta`` and ``--loss-parameter``, as keywords of the loss."""
    texts = key_values(args.loss_parameter, "--loss-parameter")
    try:
        given = {name: float(text) for name, text in texts.items()}
    except ValueError as error:
        raise ConfigError(f"--loss-parameter must have the form NAME=NUMBER; {error}.") from error
    return {**given} if args.beta is None else {**given, "beta": args.beta}


def _table(title: str, metrics: dict[str, float], by: dict[str, dict[str, float]]) -> Table:
    """A row for each metric, a column for all examples and for each value."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("metric", style="cyan", no_wrap=True)
    for name in ("all", *by):
        table.add_column(name, justify="right")
    for name in metrics:
        values = (metrics[name], *(own[name] for own in by.values()))
        table.add_row(name, *(f"{v:,.0f}" if name == "examples" else f"{v:.6g}" for v in values))
    return table


COMMAND = Command(
    help="compute accuracy, margins, rewards and loss of a model on a packed dataset",
    examples="  packstore evaluate held-out-8k --model run/model --ref-model my-sft-model\n"
    "  packstore evaluate held-out-8k --model run/model --ref-logps held-out-ref --by source\n"
    "  packstore evaluate held-out-8k --model run/model --ref-model my-sft-model --by file\n"
    "  packstore evaluate chats-8k --model my-sft-model --json\n"
    "  torchrun --nproc-per-node 8 -m packstore evaluate held-out-8k --model run/model "
    "--ref-logps held-out-ref\n",
    configure=_configure,
    run=_run,
)
