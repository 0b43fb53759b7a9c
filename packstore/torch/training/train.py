"""Trains from packed datasets by settings alone: what ``packstore train`` calls.

::

    import packstore.torch

    packstore.torch.train(
        model="my-sft-model", train_dataset="prefs-8k", eval_dataset="held-out-8k",
        output_dir="run", loss="dpo", loss_parameters={"beta": 0.1}, learning_rate=1e-6,
    )

On several ranks, start the script with ``accelerate launch`` or ``torchrun``: DDP, or
FSDP2 if Accelerate's config says so. The settings are in ``docs/training.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from packstore.config.training import TrainConfig, TrainModelConfig
from packstore.errors import ConfigError, PackstoreError, StorageError, quote, sentence
from packstore.io.store.storage_errors import is_of_client
from packstore.secrets import client_cause, client_text
from packstore.torch.reference.provenance import choose_precision
from packstore.torch.training.arguments import check_setting_names, named_settings
from packstore.torch.training.checkpoint_files import newest_checkpoint, read_position
from packstore.torch.training.trainer import PackedTrainer

logger = logging.getLogger("packstore")

SHOWN: dict[str, tuple[str, str]] = {
    "loss": ("loss", ".4f"),
    "rewards/accuracies": ("accuracy", ".1%"),
    "rewards/margins": ("margin", ".3f"),
    "examples_per_second": ("examples/s", ",.1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "fill": ("fill", ".1%"),
    "data_wait": ("data wait", ".1%"),
    "learning_rate": ("learning rate", ".2e"),
}
"""Metric -> its name in a line of the log, and its format."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        step: optimizer steps of the whole run.
        examples: examples trained on.
        metrics: last logged training metrics.
        evaluation: metrics of the last evaluation, named ``eval_…``; empty without one.
        model: folder of the final model, or of its adapter.
    """

    step: int
    examples: int
    metrics: dict[str, float]
    evaluation: dict[str, float]
    model: Path


class LogLines(TrainerCallback):  # type: ignore[misc]
    """Logs one line for each record, and whether there is anything to train."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Says of a run that is finished how to go on."""
        if state.global_step >= state.max_steps and state.is_world_process_zero:
            text = (
                "%s is finished, at step %s: to go on, raise num_train_epochs or "
                "max_steps; to "
            )
            text += "start anew, take another output_dir"
            logger.warning(text, args.output_dir, f"{state.global_step:,}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Logs the metrics that a person looks at."""
        prefix = "eval_" if "eval_loss" in logs else ""
        known = [(f"{prefix}{name}", *how) for name, how in SHOWN.items()]
        shown = [
            f"{short} {logs[name]:{form}}"
            for name, short, form in known
            if name in logs
        ]
        if shown and state.is_world_process_zero:
            what = "evaluation after " if prefix else ""
            text = "%sstep %s/%s  %s"
            step, last = f"{state.global_step:,}", f"{state.max_steps:,}"
            logger.info(text, what, step, last, "  ".join(shown))


def train(
    config: TrainConfig | None = None,
    /,
    *,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> TrainResult:
    """Trains a model from the start or from its newest checkpoint; a collective call.

    Every pair weighs the same in any pack, batch or rank. The output folder then has
    the model, its card, the metrics (``trainer_state.json``), and the Trainer's
    checkpoints.

    Args:
        config: the settings; default: their defaults.
        callbacks: callbacks of transformers' Trainer.
        settings: fields of :class:`~packstore.config.training.TrainConfig` and of
            transformers' ``TrainingArguments`` that override `config`.

    Raises:
        ConfigError: settings are missing, unknown, out of range or exclude each other.
        CompatibilityError: model, data, loss, tokenizer or checkpoint do not belong
            together.
        DivergedError: loss or gradient is not finite; no model is written.
        PackstoreError: model, dataset or checkpoint is unusable.
    """
    check_setting_names(settings)
    config = TrainConfig.of(config, **settings)
    check_setting_names(config.arguments)
    checkpoint = _checkpoint(config)
    given = {name: getattr(config, name) for name in TrainModelConfig.names()}
    if given["examples_per_step"] is None and not {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    } & set(config.arguments):
        given["examples_per_step"] = 64
    given["peft_config"] = given["peft_config"] or None
    before = read_position(Path(checkpoint))["settings"] if checkpoint else {}
    if given["compile"] == "auto" and before.get("compile") == "none":
        given["compile"] = "none"
    with _named_places(config.output_dir):
        with named_settings():
            args = _arguments(config, before.get("mixed_precision"))
            trainer = PackedTrainer(args=args, callbacks=callbacks, **given)
        trainer.add_callback(LogLines)
        trainer.remove_callback(PrinterCallback)  # it would print on stdout
        trainer.train(checkpoint)
        step, history = trainer.state.global_step, trainer.state.log_history
        evaluated = [record for record in history if "eval_loss" in record]
        if config.eval_dataset and not (evaluated and evaluated[-1]["step"] == step):
            trainer.evaluate()
            evaluated = [record for record in history if "eval_loss" in record]
        trainer.save_model()
        trainer.save_state()
        trainer.create_model_card()
    trainer.accelerator.wait_for_everyone()
    trained = [
        record for record in history if "examples" in record
    ]  # by any logging_strategy
    return TrainResult(
        step=step,
        examples=sum(int(record["examples"]) for record in trained),
        metrics=_metrics(trained),
        evaluation=_metrics(evaluated),
        model=Path(config.output_dir),
    )


def _metrics(records: list[dict[str, float]]) -> dict[str, float]:
    last = records[-1] if records else {}
    return {
        name: value for name, value in last.items() if name not in ("step", "epoch")
    }


def _arguments(config: TrainConfig, precision: str | None) -> TrainingArguments:
    """Makes the Trainer's settings; `precision` is that of a run that goes on."""
    others = (*TrainModelConfig.names(), "arguments", "resume_from_checkpoint")
    own = {
        name: getattr(config, name)
        for name in TrainConfig.names()
        if name not in others
    }
    own["report_to"] = list(config.report_to) or "none"
    on_cpu = (
        parse_flag_from_env("ACCELERATE_USE_CPU")
        or not torch.accelerator.is_available()
    )
    defaults: dict[str, Any] = {
        "disable_tqdm": True,
        "save_total_limit": 2,
        "use_cpu": on_cpu,
    }
    if config.eval_steps is not None:
        defaults["eval_strategy"] = "steps"
    if (
        "activation_checkpointing" not in TrainingArguments.__dataclass_fields__
    ):  # before 5.23
        own["gradient_checkpointing"] = own.pop("activation_checkpointing")
    merged = {**defaults, **own, **config.arguments}
    given = {name: value for name, value in merged.items() if value is not None}
    args = TrainingArguments(**given)
    if config.bf16 is None:
        chosen = precision or choose_precision(
            "auto", args.device, getattr(torch, config.dtype)
        )
        if chosen == "bf16":
            args = TrainingArguments(**given, bf16=True)
    return args


@contextmanager
def _named_places(output_dir: str) -> Iterator[None]:
    """Names the output in errors of its disk, of the hub and of trackers: no defects of
    ours.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        if not is_of_client(error):
            raise
        rule = "disk, hub and trackers must take what is written"
        remedy = "The same command again goes on from the newest checkpoint"
        found = quote(client_text(error), 200)
        where = f"output_dir {output_dir}"
        raise StorageError(sentence(where, rule, found, remedy)) from client_cause(
            error
        )


def _checkpoint(config: TrainConfig) -> str | None:
    """Returns the checkpoint to resume from, or None to start in an output without a
    model.
    """
    output, asked = Path(config.output_dir), config.resume_from_checkpoint
    where = f"output_dir {output}"
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule, remedy = "it must be a folder that can be written", "Name another"
        raise StorageError(
            sentence(where, rule, str(error.strerror), remedy)
        ) from error
    newest = newest_checkpoint(str(output))
    if asked is not None:
        if (
            newest is not None
            and Path(asked).is_dir()
            and not Path(asked).samefile(newest)
        ):
            rule, remedy = (
                "it must be the newest of its output_dir",
                "Remove the later ones",
            )
            raise ConfigError(sentence(f"checkpoint {asked}", rule, newest, remedy))
        return asked
    models = map(output.joinpath, ("config.json", "adapter_config.json"))
    if (
        newest is None
        and (model := next(filter(Path.is_file, models), None)) is not None
    ):
        rule = "it must hold no model without checkpoints"
        raise ConfigError(
            sentence(where, rule, model.name, "Choose another, or move it away")
        )
    return newest
