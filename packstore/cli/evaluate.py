"""``packstore ref-logps`` and ``packstore evaluate``: run a model over a packed
dataset.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pyarrow.parquet as pq

from packstore.cli import Command
from packstore.cli._arguments import (
    add_dataset,
    add_json,
    add_settings,
    check_group_column,
    open_dataset,
)
from packstore.cli._messages import show_progress
from packstore.cli._model import (
    add_model,
    inference_settings,
    is_main_rank,
    load_on_device,
    process_group,
)
from packstore.cli._output import (
    fact_table,
    figure_table,
    identity_of,
    print_facts,
    print_result,
    stdout_console,
)
from packstore.config.training import TrainModelConfig
from packstore.errors import ConfigError, DatasetNotFoundError
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.parts import open_sides
from packstore.io.side.side import Side, open_side
from packstore.io.store.storage_errors import as_storage_errors
from packstore.pages.frame import check_writable

GROUP_TYPES = ("string", "int64", "bool")
"""Types of columns whose values make groups."""

MAX_GROUPS = 20
"""Groups in the table, the largest ones."""

GROUP_METRICS = (
    "examples",
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "perplexity",
    "agreement",
)
"""Metrics of a group in the table, if the loss has them; JSON has all."""


def _configure_ref_logps(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    parser.add_argument("out", metavar="OUT", help="folder or URL of the side dataset")
    add_model(parser)
    tokens = parser.add_argument_group("values of tokens")
    tokens.add_argument(
        "--per-token",
        action="store_true",
        help="also write log-probs of supervised tokens",
    )
    tokens.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="also write the K most probable ids for each of these",
    )
    tokens.add_argument(
        "--top-k-dtype",
        choices=("float16", "uint8"),
        default="float16",
        help="dtype of their log-probs (default: float16)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing side dataset"
    )
    add_json(parser)


def _run_ref_logps(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    with process_group(args) as device:
        from packstore.torch.reference.reference import (
            Outputs,
            check_outputs,
            write_ref_logps,
        )

        check_outputs(Outputs(args.per_token, args.top_k, args.top_k_dtype))
        sides = [] if args.overwrite else _existing_sides(args)
        model = load_on_device(args, args.model, device, dataset, sides)
        with show_progress("ref-logps", args) as progress:
            side = write_ref_logps(
                model,
                dataset,
                args.out,
                per_token=args.per_token,
                top_k=args.top_k,
                top_k_dtype=args.top_k_dtype,
                overwrite=args.overwrite,
                storage_options=args.storage_option,
                progress=progress,
                **inference_settings(args),
            )
    if is_main_rank():
        columns = side.manifest.columns
        facts = {"examples": len(side), **columns, **side.manifest.provenance}
        result = {
            "url": side.url,
            "version": side.version,
            "dataset": identity_of(dataset),
            **facts,
        }
        print_facts(args, f"side dataset {side.url}", facts, result)
    return 0


def _existing_sides(args: argparse.Namespace) -> Iterator[Side]:
    """Yield the side dataset at the destination, if one is there."""
    with suppress(DatasetNotFoundError):
        yield open_side(args.out, args.storage_option)


REF_LOGPS = Command(
    configure=_configure_ref_logps,
    run=_run_ref_logps,
    examples="  torchrun --nproc-per-node 8 -m packstore ref-logps prefs-8k ref-8k "
    "--model my-sft-model\n"
    "The same command continues a run that was killed.\n",
)


def _configure_evaluate(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    add_model(parser)
    references = parser.add_mutually_exclusive_group()
    references.add_argument(
        "--reference-model", metavar="PATH", help="reference model, or a LoRA adapter"
    )
    references.add_argument(
        "--ref-logps",
        metavar="SIDE",
        action="append",
        default=[],
        help="side dataset of `packstore ref-logps` (repeatable)",
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="a loss of docs/losses.md (default: dpo; kind sft: sft)",
    )
    parser.add_argument(
        "--side",
        metavar="SIDE",
        action="append",
        default=[],
        help="more side data, such as a teacher's (repeatable)",
    )
    parser.add_argument(
        "--by",
        metavar="COLUMN",
        help="also group by a carried or joined column, or by `file`",
    )
    parser.add_argument(
        "--examples", metavar="FILE", help="also write Parquet, a row for each example"
    )
    add_json(parser)
    add_settings(parser, "loss", TrainModelConfig, ("loss_parameters",))


def _run_evaluate(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    if args.by is not None:
        _check_group_column(args, dataset)
    if args.examples:
        check_writable(args.examples)
    default_loss = "sft" if dataset.manifest.kind == "sft" else "dpo"
    loss_name = args.loss or default_loss

    with process_group(args) as device:
        from packstore.torch.losses.named import make_loss
        from packstore.torch.training.evaluate import evaluate, warn_about_unused

        loss: Any = make_loss(loss_name, getattr(args, "loss_parameters", {}))
        loss.check_data(dataset)
        if loss.reference and not (args.reference_model or args.ref_logps):
            raise ConfigError(
                f"loss {loss_name!r} compares with a reference: give the model "
                "that training began with as --reference-model, or --ref-logps. A "
                "reward model is evaluated with --loss bradley_terry."
            )
        warn_about_unused(loss, args.reference_model, *args.ref_logps)
        urls = args.ref_logps if loss.reference else ()
        policy = load_on_device(
            args,
            args.model,
            device,
            dataset,
            sides=(open_side(url, args.storage_option) for url in urls),
            needs_scores=loss.scores,
        )
        reference = None
        if loss.reference and args.reference_model:
            reference = load_on_device(args, args.reference_model, device, dataset)
        with show_progress("evaluate", args) as progress:
            result: Any = evaluate(
                policy,
                dataset,
                loss=loss,
                reference=reference,
                side=[*args.ref_logps, *args.side],
                by=args.by,
                rows=bool(args.examples),
                progress=progress,
                **inference_settings(args),
            )

    if is_main_rank():
        if args.examples:
            with as_storage_errors("write", args.examples, {}):
                pq.write_table(result["rows"], args.examples)
        _print_evaluation(args, dataset, result["metrics"], result["by"])
    return 0


def _check_group_column(args: argparse.Namespace, dataset: Dataset) -> None:
    """Raise ConfigError if no column has the name in ``--by``, or its values make no
    groups.

    Otherwise the error would come after the model is loaded.
    """
    types = dict(dataset.manifest.carried)
    urls = [*args.ref_logps, *args.side]
    for side in open_sides(urls, dataset.manifest, args.storage_option):
        types |= side.manifest.known_columns
    names = [name for name, type_name in types.items() if type_name in GROUP_TYPES]
    check_group_column(args.by, names)


def _print_evaluation(
    args: argparse.Namespace,
    dataset: Dataset,
    metrics: Mapping[str, float],
    groups: Mapping[str, Mapping[str, float]],
) -> None:
    """Print metrics of all examples and of each group.

    Args:
        args: the command line.
        dataset: the dataset that was evaluated.
        metrics: name -> mean over all examples.
        groups: value of the column in ``--by`` -> the same, the largest group first.
    """
    if args.json:
        print_result({**identity_of(dataset), "metrics": metrics, "by": groups})
        return

    facts = {name: _format_metric(name, value) for name, value in metrics.items()}
    console = stdout_console()
    console.print(fact_table(f"{args.model} on {dataset.url}", facts))
    if not groups:
        return
    columns = [name for name in GROUP_METRICS if name in metrics]
    largest_groups = list(groups.items())[:MAX_GROUPS]
    rows = [
        [name, *(_format_metric(column, group[column]) for column in columns)]
        for name, group in largest_groups
    ]
    console.print(figure_table(f"By {args.by}", [args.by, *columns], rows))
    if len(groups) > MAX_GROUPS:
        console.print(
            f"the largest {MAX_GROUPS} of {len(groups):,} groups; --json has all"
        )


def _format_metric(name: str, value: float) -> str:
    if name == "examples":
        return f"{value:,.0f}"
    if name == "rewards/accuracies":
        return f"{value:.2%}"
    return f"{value:.6g}"


EVALUATE = Command(
    configure=_configure_evaluate,
    run=_run_evaluate,
    examples="  packstore evaluate held-out-8k --model run --ref-logps held-out-ref\n"
    "  packstore evaluate held-out-8k --model run --ref-logps ref --examples "
    "rows.parquet\n"
    "  packstore evaluate held-out-8k --model run --ref-logps ref --by source\n"
    "  packstore evaluate chats-8k --model my-sft-model --json\n"
    "  packstore evaluate held-out-8k --model student --loss distill --side teacher\n"
    "  torchrun --nproc-per-node 8 -m packstore evaluate prefs-8k --model run "
    "--ref-logps ref\n",
)
