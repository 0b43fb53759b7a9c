"""``packstore train``: trains a model on a packed dataset."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from packstore.cli import Command, common
from packstore.cli._model import join_logs, say
from packstore.config.training import (
    TrainConfig,
    TrainDataConfig,
    TrainLossConfig,
    TrainModelConfig,
    TrainOptimizerConfig,
    TrainRunConfig,
)
from packstore.config.training import read_settings as read_file
from packstore.errors import display
from packstore.pages.charts import train_page
from packstore.pages.frame import check_writable, write


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file of settings; flags override it"
    )
    parser.add_argument(
        "--example", choices=("dpo", "sft", "reward"), help="print a CONFIG to begin with"
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with the curves")
    common.add_json(parser)
    common.add_settings(parser, "data", TrainDataConfig)
    common.add_settings(parser, "model", TrainModelConfig)
    common.add_settings(parser, "loss", TrainLossConfig)
    common.add_settings(parser, "optimizer", TrainOptimizerConfig)
    common.add_settings(parser, "running", TrainRunConfig)


def _run(args: argparse.Namespace) -> int:
    if args.example:
        example = files("packstore.cli").joinpath("examples", f"{args.example}.yaml")
        sys.stdout.write(example.read_text(encoding="utf-8"))
        return 0
    settings: dict[str, Any] = {} if args.config is None else read_file(args.config)
    config = TrainConfig.of(**{**settings, **common.read_settings(args, TrainConfig)})
    from packstore.torch.training.train import train

    join_logs()
    if args.html and say():
        check_writable(args.html)
    try:
        result = train(config)
    finally:  # the curves of a run that failed are the first to look at
        metrics = Path(config.output) / "metrics.jsonl"
        if args.html and say() and metrics.exists():
            loss = config.loss if isinstance(config.loss, str) else " + ".join(config.loss)
            subtitle = f"model {config.model}, dataset {display(config.dataset)}, loss {loss}"
            write(args.html, train_page(f"Training of {config.output}", subtitle, metrics))
    if say():
        figures = {**result.metrics, **result.evaluation}
        rows: dict[str, object] = {
            "steps": result.step,
            "examples": result.examples,
            **{name: f"{value:.6g}" for name, value in figures.items()},
            "model": str(result.model),
        }
        common.print_table(args, f"trained {config.output}", rows, result)
    return 0


TRAIN = Command(
    "  packstore train dpo.yaml --learning-rate 5e-7 --loss ipo --output run-2\n"
    "  packstore train dpo.yaml --html run.html\n"
    "  packstore train --model Qwen3-0.6B --dataset chats-8k --loss sft --output sft-run\n"
    "  accelerate launch -m packstore train dpo.yaml        # several GPUs or nodes\n",
    _configure,
    _run,
)
