"""``packstore train`` and ``run``: train a model, on a dataset that a job may pack
before.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from typing import Any

from packstore.cli import command, common
from packstore.cli._model import is_main_rank, join_logs
from packstore.cli.pack import run_job, try_job
from packstore.config.job import check_job, read_steps, read_yaml
from packstore.config.training import FURTHER, TrainConfig, TrainModelConfig
from packstore.errors import ConfigError, display, sentence
from packstore.pages.charts import train_page
from packstore.pages.frame import check_writable, write

STEPS = ("pack", "train")
"""Parts of a job, in their order."""

FLAGS = [name for name in FURTHER if name != "debug"]
"""Of transformers' fields; its `debug` is for settings in a file, as ours shows
tracebacks.
"""


class _HelpAll(argparse.Action):
    """Prints the help with every field of transformers' TrainingArguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action in parser._actions:
            if action.help is argparse.SUPPRESS:
                action.help = ""
        parser.print_help()
        parser.exit()


def _configure_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML file of settings; flags override it",
    )
    parser.add_argument(
        "--example",
        choices=("dpo", "sft", "reward"),
        help="print a CONFIG to begin with",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page with the curves"
    )
    parser.add_argument(
        "--help-all",
        nargs=0,
        action=_HelpAll,
        help="also list all of TrainingArguments",
    )
    common.add_json(parser)
    common.add_settings(parser, "model, data and loss", TrainModelConfig)
    own = [name for name in TrainConfig.names() if name != "arguments"]
    common.add_settings(parser, "of transformers' TrainingArguments", TrainConfig, own)
    group = parser.add_argument_group(
        "further TrainingArguments, as transformers describes them",
        argument_default=argparse.SUPPRESS,
    )
    for name in FLAGS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, type=common.json_or_text, metavar="VALUE", help=argparse.SUPPRESS
        )


@command(
    _configure_train,
    "  packstore train dpo.yaml --learning-rate 5e-7 --loss ipo --output-dir run-2\n"
    "  packstore train dpo.yaml --html run.html --report-to tensorboard\n"
    "  packstore train --model Qwen3-0.6B --train-dataset chats-8k --loss sft "
    "--output-dir sft\n"
    "  accelerate launch -m packstore train dpo.yaml        # several GPUs or nodes\n",
)
def _train(args: argparse.Namespace) -> int:
    if args.example:
        example = files("packstore.cli").joinpath("examples", f"{args.example}.yaml")
        sys.stdout.write(example.read_text(encoding="utf-8"))
        return 0
    settings: dict[str, Any] = {} if args.config is None else read_yaml(args.config)
    further = {name: value for name, value in vars(args).items() if name in FLAGS}
    config = TrainConfig.of(
        **settings | common.read_settings(args, TrainConfig) | further
    )
    outcome = train_model(config, args.html)
    if is_main_rank():
        common.print_table(args, *outcome)
    return 0


def train_model(config: TrainConfig, html: str | None = None) -> common.Result:
    """Trains, and writes a page with the curves to the file `html`."""
    from transformers import TrainerCallback

    from packstore.torch import train

    history: list[dict[str, float]] = []
    begun: list[int] = []

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            history[:] = state.log_history

    join_logs()
    if html and is_main_rank():
        check_writable(html)
    try:
        result = train(config, callbacks=[Keep()])
    finally:  # the curves of a run that failed are the first to look at
        if html and is_main_rank() and history:
            loss = (
                config.loss if isinstance(config.loss, str) else " + ".join(config.loss)
            )
            subtitle = (
                f"model {config.model}, dataset "
                f"{display(config.train_dataset)}, loss {loss}"
            )
            write(
                html, train_page(f"Training of {config.output_dir}", subtitle, history)
            )
    figures = {**result.metrics, **result.evaluation}
    figures.pop("examples", None)  # of the last record alone
    rows: dict[str, object] = {
        "steps": result.step,
        "examples": result.examples,
        **{name: f"{value:.6g}" for name, value in figures.items()},
        "model": str(result.model),
    }
    title = "trained" if begun != [result.step] else "already finished:"
    return f"{title} {config.output_dir}", rows, result


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="JOB",
        help="YAML file with pack: (arguments of packstore pack), train: (settings of "
        "packstore "
        "train, whose train_dataset is what was packed unless it says otherwise), or "
        "both",
    )
    flags = {"--dry-run": "check the job, and a sample of its records"}
    common.add_flags(parser, flags)
    common.add_json(parser)


@command(
    _configure_run,
    "  packstore run job.yaml --dry-run\n"
    "  accelerate launch -m packstore run job.yaml        # several GPUs or nodes\n",
)
def _run(args: argparse.Namespace) -> int:
    steps = read_steps(args.config, STEPS)
    if not steps:
        rule = f"it must have {' or '.join(f'{step}:' for step in STEPS)}"
        raise ConfigError(sentence(args.config, rule, "neither"))
    job, packed = steps.get("pack", {}), {}
    if "pack" in steps:
        where = f"{args.config}, pack"
        for name in {"source", "out"} - check_job(job, where).keys():
            raise ConfigError(sentence(where, f"it must have {name}", "none"))
        common.refuse_memory(args, job["out"], job.get("rejects"))
        packed = {"train_dataset": job["out"]}
    config = TrainConfig.of(**packed | steps["train"]) if "train" in steps else None
    if args.dry_run:
        return try_job(args, job) if job else 0
    facts: dict[str, Any] = {}
    for step in steps:
        if step == "pack":
            with _first_rank_first():
                title, rows, facts[step] = run_job(args, job)
        elif config is not None:
            title, rows, facts[step] = train_model(config)
        if is_main_rank() and not args.json:
            common.print_table(args, title, rows, None)
    if is_main_rank() and args.json:
        common.print_result(facts)
    return 0


def _first_rank_first() -> AbstractContextManager[Any]:
    """The first of several ranks packs; to the others the dataset is then there."""
    if "RANK" not in os.environ:
        return nullcontext()
    from accelerate import PartialState

    return PartialState().main_process_first()  # type: ignore[no-any-return]
