"""``packstore train``: train a model on a packed dataset."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from typing import Any

from packstore.cli import command, common
from packstore.cli._model import is_main_rank, join_logs
from packstore.config.job import read_yaml
from packstore.config.training import TrainConfig, TrainModelConfig


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
            type=common.json_or_text,
            metavar="VALUE",
            help="",
        )


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
        "--help-all",
        nargs=0,
        action=_HelpAll,
        help="also list all of TrainingArguments",
    )
    common.add_json(parser)
    common.add_settings(parser, "model, data and loss", TrainModelConfig)
    own = [name for name in TrainConfig.names() if name != "arguments"]
    common.add_settings(parser, "of transformers' TrainingArguments", TrainConfig, own)
    # transformers is imported only for a flag that is not one of those above.
    parser.set_defaults(add_further_flags=_add_transformers_flags)


@command(
    _configure_train,
    "  packstore train dpo.yaml --learning-rate 5e-7 --loss ipo --output-dir run-2\n"
    "  packstore train dpo.yaml --report-to tensorboard\n"
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
    settings |= common.read_settings(args, TrainConfig)
    settings |= getattr(args, "transformers_fields", {})
    config = TrainConfig.of(**settings)
    outcome = _run(config)
    if is_main_rank():
        common.print_table(args, *outcome)
    return 0


def _run(config: TrainConfig) -> common.Result:
    """Train, or find the run already finished; return the table and its title."""
    from transformers import TrainerCallback

    from packstore.torch import train

    first_steps: list[int] = []

    class FirstStep(TrainerCallback):  # type: ignore[misc]
        """Remembers the step at which training begins, or goes on."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first_steps.append(state.global_step)

    join_logs()
    result = train(config, callbacks=[FirstStep()])

    figures = {**result.metrics, **result.evaluation}
    figures.pop("examples", None)  # only of the last record
    rows: dict[str, object] = {
        "steps": result.step,
        "examples": result.examples,
        **{name: f"{value:.6g}" for name, value in figures.items()},
        "model": str(result.model),
    }
    has_trained = first_steps != [result.step]
    title = "trained" if has_trained else "already finished:"
    return f"{title} {config.output_dir}", rows, result
