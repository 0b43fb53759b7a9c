"""``packstore train``: train a model on a packed dataset."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from packstore.cli import Command
from packstore.cli._arguments import (
    add_json,
    add_settings,
    json_or_text,
    read_settings,
)
from packstore.cli._model import is_main_rank, redirect_transformers_logs
from packstore.cli._output import fact_table, print_result, stdout_console
from packstore.config.job import read_yaml
from packstore.config.training import TrainConfig, TrainModelConfig
from packstore.errors import display

if TYPE_CHECKING:
    from packstore.torch.training.train import TrainResult

EXAMPLES = ("dpo", "kto", "reward", "sft", "lora", "distill")
"""Names of the files in the folder ``examples``."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML file of settings; flags override it",
    )
    parser.add_argument(
        "--example",
        choices=EXAMPLES,
        metavar="NAME",
        help=f"print a CONFIG: {', '.join(EXAMPLES)}",
    )
    parser.add_argument(
        "--help-all",
        nargs=0,
        action=_HelpAll,
        help="also list all of TrainingArguments",
    )
    add_json(parser)
    add_settings(parser, "model, data and loss", TrainModelConfig)
    names = [name for name in TrainConfig.names() if name != "arguments"]
    add_settings(parser, "transformers' TrainingArguments", TrainConfig, names)
    # An unknown flag may be a field of TrainingArguments. Only then `main` calls this,
    # which imports transformers for seconds, and parses the command line again.
    parser.set_defaults(add_further_flags=_add_transformers_flags)


class _HelpAll(argparse.Action):
    """Prints the help with every field of transformers' TrainingArguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _add_transformers_flags(parser)
        parser.print_help()
        parser.exit()


class _TransformersField(argparse.Action):
    """Collects fields of TrainingArguments by name, as ``transformers_fields``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        fields = getattr(namespace, "transformers_fields", {})
        namespace.transformers_fields = {**fields, self.dest: values}


def _add_transformers_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of TrainingArguments that has none yet."""
    from packstore.torch.training.arguments import further_names

    group = parser.add_argument_group(
        "further TrainingArguments, as transformers describes them",
        argument_default=argparse.SUPPRESS,
    )
    for name in further_names():
        # Its `debug` can be set in a file; the flag --debug shows our tracebacks.
        if name == "debug":
            continue
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            action=_TransformersField,
            type=json_or_text,
            metavar="VALUE",
            help="",
        )


def _run(args: argparse.Namespace) -> int:
    if args.example:
        example = files("packstore.cli").joinpath("examples", f"{args.example}.yaml")
        sys.stdout.write(example.read_text(encoding="utf-8"))
        return 0

    settings: dict[str, Any] = {} if args.config is None else read_yaml(args.config)
    settings |= read_settings(args, TrainConfig)
    settings |= getattr(args, "transformers_fields", {})
    if settings.keys() - set(TrainConfig.names()):
        # Before absent settings: a file of another program has other names for them.
        from packstore.torch.training.arguments import check_setting_names

        check_setting_names(settings)
    config = TrainConfig.of(**settings)

    result, has_trained = _train(config)
    if is_main_rank():
        verdict = "trained" if has_trained else "already finished:"
        _print_train_result(args, f"{verdict} {config.output_dir}", result)
        if not args.json:
            _print_evaluate_command(config)
    return 0


def _train(config: TrainConfig) -> tuple[TrainResult, bool]:
    """Train a model.

    Returns:
        The result; and False if the run was already finished: no step was taken.
    """
    from transformers import TrainerCallback

    from packstore.torch import train

    first_steps: list[int] = []

    class FirstStep(TrainerCallback):  # type: ignore[misc]
        """Remembers the step at which training starts or resumes."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first_steps.append(state.global_step)

    redirect_transformers_logs()
    result = train(config, callbacks=[FirstStep()])
    has_trained = first_steps != [result.step]
    return result, has_trained


def _print_train_result(
    args: argparse.Namespace, title: str, result: TrainResult
) -> None:
    """Print the run, its last record and its last evaluation."""
    if args.json:
        print_result(result)
        return
    run = {
        "steps": result.step,
        "examples": result.examples,
        "model": str(result.model),
    }
    metrics = dict(result.metrics)
    metrics.pop("examples", None)  # of the last record alone
    console = stdout_console()
    console.print(fact_table(title, run))
    for name, values in {
        "last record of training": metrics,
        "last evaluation": result.evaluation,
    }.items():
        if values:
            texts = {metric: f"{value:.6g}" for metric, value in values.items()}
            console.print(fact_table(name, texts))


def _print_evaluate_command(config: TrainConfig) -> None:
    """Print the command that evaluates the model.

    There is none for a mix of losses, which evaluate does not take, nor with options or
    addresses of a store that may hold secrets.
    """
    from packstore.torch.losses.named import make_loss

    if not isinstance(config.loss, str):
        return
    if config.eval_dataset is None:
        dataset = config.train_dataset
        ref_logps = config.ref_logps
        sides = config.side
    else:
        dataset = config.eval_dataset
        ref_logps = config.eval_ref_logps
        sides = config.eval_side
    places = [dataset, *ref_logps, *sides]
    if config.storage_options or any(display(place) != place for place in places):
        return

    words = ["packstore", "evaluate", dataset, "--model", config.output_dir]
    words += ["--loss", config.loss]
    for name, value in config.loss_parameters.items():
        words += ["--loss-parameter", f"{name}={json.dumps(value)}"]
    if make_loss(config.loss, config.loss_parameters).reference:
        if not ref_logps:
            words += ["--reference-model", config.reference or config.model]
        for url in ref_logps:
            words += ["--ref-logps", url]
    for url in sides:
        words += ["--side", url]
    stdout_console().print(f"To evaluate it: {shlex.join(words)}")


TRAIN = Command(
    configure=_configure,
    run=_run,
    examples="  packstore train dpo.yaml --learning-rate 5e-7 --loss ipo --output-dir "
    "run-2\n"
    "  packstore train dpo.yaml --report-to tensorboard\n"
    "  packstore train --model Qwen3-0.6B --train-dataset chats-8k --loss sft "
    "--output-dir sft\n"
    "  accelerate launch -m packstore train dpo.yaml        # several GPUs or nodes\n",
)
