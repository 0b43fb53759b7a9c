"""``packstore ref-logps`` and ``packstore evaluate``: run a model over a packed
dataset.
"""

from __future__ import annotations

import argparse
from typing import Any

import pyarrow.parquet as pq

from packstore.cli import command, common
from packstore.cli._messages import progress_of
from packstore.cli._model import (
    add_model,
    inference_settings,
    is_main_rank,
    loaded,
    process_group,
)
from packstore.config.training import TrainModelConfig
from packstore.errors import ConfigError
from packstore.io.store.storage_errors import as_storage_errors
from packstore.pages.frame import check_writable


def _configure_ref_logps(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    parser.add_argument("out", metavar="OUT", help="folder or URL of the side dataset")
    add_model(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is at OUT"
    )
    common.add_json(parser)


@command(
    _configure_ref_logps,
    "  torchrun --nproc-per-node 8 -m packstore ref-logps prefs-8k ref-8k --model "
    "my-sft-model\n"
    "The same command again continues a run that was killed.\n",
)
def _ref_logps(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    with process_group(args) as device:
        from packstore.torch.reference.reference import write_ref_logps

        model = loaded(args, args.model, device)
        with progress_of("ref-logps", args) as progress:
            side = write_ref_logps(
                model,
                dataset,
                args.out,
                overwrite=args.overwrite,
                storage_options=args.storage_option,
                progress=progress,
                **inference_settings(args),
            )
    if not is_main_rank():
        return 0
    facts = {"examples": len(side), **side.manifest.provenance}
    common.print_table(
        args, f"side dataset {side.url}", facts, {"url": side.url, **facts}
    )
    return 0


def _configure_evaluate(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    add_model(parser)
    references = parser.add_mutually_exclusive_group()
    common.add_flags(
        references, {"--reference-model PATH": "reference model, or a LoRA adapter"}
    )
    help = "of `packstore ref-logps` (repeatable, by part)"
    references.add_argument(
        "--ref-logps", metavar="SIDE", action="append", default=[], help=help
    )
    flags = {
        "--loss NAME": "default: dpo, or sft for kind sft",
        "--examples FILE": "also write Parquet, a row for each example",
    }
    common.add_flags(parser, flags)
    common.add_json(parser)
    common.add_settings(parser, "loss", TrainModelConfig, ("loss_parameters",))


@command(
    _configure_evaluate,
    "  packstore evaluate held-out-8k --model run --ref-logps held-out-ref\n"
    "  packstore evaluate held-out-8k --model run --ref-logps ref --examples "
    "rows.parquet\n"
    "  packstore evaluate chats-8k --model my-sft-model --json\n"
    "  torchrun --nproc-per-node 8 -m packstore evaluate prefs-8k --model run "
    "--ref-logps ref\n",
)
def _evaluate(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    kind = dataset.manifest.kind
    if args.examples:
        check_writable(args.examples)
    name = args.loss or ("sft" if kind == "sft" else "dpo")
    with process_group(args) as device:
        from packstore.torch.losses.loss import PreferenceLoss
        from packstore.torch.training.evaluate import evaluate, warn_about_unused

        loss = PreferenceLoss(name, **getattr(args, "loss_parameters", {}))
        loss.check_data(dataset)
        if loss.reference and not (args.reference_model or args.ref_logps):
            remedy = "give --reference-model or --ref-logps"
            raise ConfigError(f"loss {name!r} compares with a reference: {remedy}.")
        warn_about_unused(loss, args.reference_model, *args.ref_logps)
        wanted = loss.reference and args.reference_model
        policy = loaded(args, args.model, device, loss.scores)
        reference = loaded(args, args.reference_model, device) if wanted else None
        with progress_of("evaluate", args) as progress:
            result: Any = evaluate(
                policy,
                dataset,
                loss=loss,
                reference=reference,
                side=args.ref_logps,
                rows=bool(args.examples),
                progress=progress,
                **inference_settings(args),
            )
    if not is_main_rank():
        return 0
    metrics = result["metrics"]
    if args.examples:
        with as_storage_errors("write", args.examples, {}):
            pq.write_table(result["rows"], args.examples)
    shown = {metric: _text(metric, value) for metric, value in metrics.items()}
    common.print_table(
        args, f"{args.model} on {dataset.url}", shown, {"metrics": metrics}
    )
    return 0


def _text(name: str, value: float) -> str:
    if name == "examples":
        return f"{value:,.0f}"
    return f"{value:.2%}" if name == "rewards/accuracies" else f"{value:.6g}"
