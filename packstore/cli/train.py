"""``packstore train``: trains a model on a packed dataset."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from packstore.cli import Command
from packstore.cli._model import join_logs
from packstore.cli._results import add_json, print_result
from packstore.cli.common import stdout_console, two_columns
from packstore.cli.settings import add_settings, read_settings
from packstore.config.training import (
    TrainConfig,
    TrainDataConfig,
    TrainLossConfig,
    TrainModelConfig,
    TrainOptimizerConfig,
    TrainRunConfig,
)
from packstore.config.training import read_settings as read_file
from packstore.pages import frame
from packstore.pages.train_page import read_metrics, train_page


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file of settings; flags override it"
    )
    parser.add_argument("--config", dest="config_file", metavar="FILE", help="the same")
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page with the curves of the run, at its end"
    )
    add_json(parser)
    add_settings(parser, "data", TrainDataConfig)
    add_settings(parser, "model", TrainModelConfig)
    add_settings(parser, "loss", TrainLossConfig)
    add_settings(parser, "optimizer", TrainOptimizerConfig)
    add_settings(parser, "running", TrainRunConfig)


def _run(args: argparse.Namespace) -> int:
    if args.config and args.config_file:
        args.parser.error("CONFIG and --config are the same: give one")
    path = args.config or args.config_file
    settings: dict[str, Any] = {} if path is None else read_file(path)
    flags = read_settings(args, TrainConfig)
    config = TrainConfig.of(**{**settings, **flags})
    from packstore.torch.training.train import train

    join_logs()
    first = os.environ.get("RANK", "0") == "0"
    if args.html and first:
        frame.check_writable(args.html)
    try:
        result = train(config)
    finally:  # the curves of a run that failed are the first to look at
        if args.html and first:
            _write_page(args.html, config)
    if not first:
        return 0
    if args.json:
        print_result(result)
        return 0
    rows: dict[str, object] = {"steps": result.step, "examples": result.examples}
    for name, value in {**result.metrics, **result.evaluation}.items():
        rows[name] = f"{value:.6g}"
    rows["model"] = str(result.model)
    stdout_console().print(two_columns(f"trained {config.output}", rows))
    return 0


def _write_page(path: str, config: TrainConfig) -> None:
    """Writes the page of a run that has logged metrics."""
    metrics = Path(config.output) / "metrics.jsonl"
    if metrics.exists():
        loss = config.loss if isinstance(config.loss, str) else " + ".join(config.loss)
        subtitle = f"model {config.model}, dataset {config.dataset}, loss {loss}"
        page = train_page(f"Training of {config.output}", subtitle, read_metrics(metrics))
        frame.write(path, page)


COMMAND = Command(
    examples="  packstore train examples/dpo.yaml --learning-rate 5e-7 --loss ipo --output run-2\n"
    "  packstore train examples/dpo.yaml --html run.html\n"
    "  packstore train --model Qwen3-0.6B --dataset chats-8k --loss sft --output sft-run\n"
    "  accelerate launch -m packstore train dpo.yaml        # several GPUs or nodes\n",
    configure=_configure,
    run=_run,
)
