"""Train from packed datasets by settings alone: the function of ``packstore train``.

::

    import packstore.torch

    packstore.torch.train(
        model="my-sft-model", train_dataset="prefs-8k", eval_dataset="held-out-8k",
        output_dir="run", loss="dpo", loss_parameters={"beta": 0.1}, learning_rate=1e-6,
    )

On several ranks, start the script with ``accelerate launch`` or ``torchrun``: DDP, or
FSDP2 if Accelerate's config has it. The settings are in ``docs/training.md``.
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

from packstore.config.reading import DEFAULT_EXAMPLES_PER_STEP
from packstore.config.training import TrainConfig, TrainModelConfig
from packstore.errors import ConfigError, PackstoreError, StorageError, quote, sentence
from packstore.io.store.storage_errors import is_of_client
from packstore.secrets import client_cause, client_text
from packstore.torch.reference.provenance import choose_precision
from packstore.torch.training.arguments import check_setting_names, naming_settings
from packstore.torch.training.attention_choice import attention_of_checkpoint
from packstore.torch.training.checkpoint_files import newest_checkpoint, read_position
from packstore.torch.training.data import datasets_of
from packstore.torch.training.signals import SignalRepeater
from packstore.torch.training.trainer import PackedTrainer

logger = logging.getLogger("packstore")

LOGGED_METRICS: dict[str, tuple[str, str]] = {
    "loss": ("loss", ".4f"),
    "rewards/accuracies": ("accuracy", ".1%"),
    "rewards/margins": ("margin", ".3f"),
    "agreement": ("agreement", ".1%"),
    "examples_per_second": ("examples/s", ",.1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "fill": ("fill", ".1%"),
    "data_wait": ("data wait", ".1%"),
    "learning_rate": ("learning rate", ".2e"),
}
"""Metric -> its name and its format in a line of the log."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        step: optimizer steps of the whole run.
        examples: examples trained on.
        metrics: last logged training metrics.
        evaluation: metrics of the last evaluation, named ``eval_…``; empty without one.
        model: folder of the final model, or of its adapter.
        train_datasets, eval_datasets: `url` and `version` of each dataset that was
            read.
    """

    step: int
    examples: int
    metrics: dict[str, float]
    evaluation: dict[str, float]
    model: Path
    train_datasets: list[dict[str, Any]]
    eval_datasets: list[dict[str, Any]]


class LogLines(TrainerCallback):  # type: ignore[misc]
    """Logs a line for each record of metrics, and for a run that resumes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step that a run resumes from.

        If the run is finished already, warn, and name the ways to go on.
        """
        if not state.is_world_process_zero:
            return
        step = f"{state.global_step:,}"
        if state.global_step >= state.max_steps:
            logger.warning(
                "%s is finished, at step %s: to go on, raise num_train_epochs or "
                "max_steps; to start anew, take another output_dir",
                args.output_dir,
                step,
            )
        elif state.global_step > 0:
            max_steps = f"{state.max_steps:,}"
            logger.info("resumed from step %s of %s", step, max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Log the metrics that a person looks at."""
        if not state.is_world_process_zero:
            return
        is_evaluation = "eval_loss" in logs
        prefix = "eval_" if is_evaluation else ""
        has_no_ranking = all(
            logs.get(f"{prefix}{name}") == 0
            for name in ("rewards/accuracies", "rewards/margins")
        )
        metric_texts = []
        for name, (title, number_format) in LOGGED_METRICS.items():
            value = logs.get(f"{prefix}{name}")
            if value is None:
                continue
            text = f"{value:{number_format}}"
            if name == "rewards/accuracies" and has_no_ranking:
                # Both are 0 only if each margin is: the policy equals the reference.
                text = "– (each margin is 0)"
            metric_texts.append(f"{title} {text}")
        if metric_texts:
            logger.info(
                "%sstep %s/%s  %s",
                "evaluation after " if is_evaluation else "",
                f"{state.global_step:,}",
                f"{state.max_steps:,}",
                "  ".join(metric_texts),
            )


def train(
    config: TrainConfig | None = None,
    /,
    *,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> TrainResult:
    """Train a model from the start or from its newest checkpoint; a collective call.

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
    checkpoint = _find_checkpoint(config)
    with _naming_output(config.output_dir):
        trainer = _make_trainer(config, checkpoint, callbacks)
        repeater = SignalRepeater()
        trainer.add_callback(repeater)
        with repeater.watch():
            trainer.train(checkpoint)
            _evaluate_last_step(trainer)
        trainer.save_model()
        trainer.save_state()
        trainer.create_model_card()
    trainer.accelerator.wait_for_everyone()
    return _result_of(trainer, Path(config.output_dir))


def _make_trainer(
    config: TrainConfig, checkpoint: str | None, callbacks: Sequence[Any]
) -> PackedTrainer:
    """Make the trainer; a run that resumes keeps its precision, compilation and
    attention.
    """
    settings = {name: getattr(config, name) for name in TrainModelConfig.names()}
    old_settings: dict[str, Any] = {}
    if checkpoint is not None:
        position = read_position(Path(checkpoint))
        old_settings = position["settings"]
        if settings["attention"] == "auto":
            settings["attention"] = attention_of_checkpoint(position)

    settings["peft_config"] = settings["peft_config"] or None
    if settings["compile"] == "auto" and old_settings.get("compile") == "none":
        settings["compile"] = "none"
    batch_names = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    if settings["examples_per_step"] is None and not batch_names & {*config.arguments}:
        settings["examples_per_step"] = DEFAULT_EXAMPLES_PER_STEP

    with naming_settings():
        args = _make_arguments(config, old_settings.get("mixed_precision"))
        trainer = PackedTrainer(args=args, callbacks=callbacks, **settings)
    trainer.add_callback(LogLines)
    trainer.remove_callback(PrinterCallback)  # it would print on stdout
    return trainer


def _make_arguments(
    config: TrainConfig, old_precision: str | None
) -> TrainingArguments:
    """Make the Trainer's settings.

    Args:
        config: the settings of the run.
        old_precision: ``bf16`` or ``no``, as the checkpoint's run had it; None: new.
    """
    values: dict[str, Any] = {
        "disable_tqdm": True,
        "save_total_limit": 2,
        "use_cpu": _runs_on_cpu(),
    }
    if config.eval_steps is not None:
        values["eval_strategy"] = "steps"
    not_arguments = {
        *TrainModelConfig.names(),
        "arguments",
        "resume_from_checkpoint",
    }
    for name in TrainConfig.names():
        if name not in not_arguments:
            values[name] = getattr(config, name)
    values["report_to"] = list(config.report_to) or "none"
    if "activation_checkpointing" not in TrainingArguments.__dataclass_fields__:
        # Its name before transformers 5.23.
        values["gradient_checkpointing"] = values.pop("activation_checkpointing")
    values.update(config.arguments)

    values = {name: value for name, value in values.items() if value is not None}
    args = TrainingArguments(**values)
    if config.bf16 is not None:
        return args
    precision = old_precision
    if not precision:
        dtype = getattr(torch, config.dtype)
        precision = choose_precision("auto", args.device, dtype)
    if precision == "bf16":
        return TrainingArguments(**values, bf16=True)
    return args


def _runs_on_cpu() -> bool:
    is_requested = parse_flag_from_env("ACCELERATE_USE_CPU")
    return bool(is_requested or not torch.accelerator.is_available())


def _evaluate_last_step(trainer: PackedTrainer) -> None:
    """Evaluate the final model, unless it was evaluated after the last step."""
    if trainer.eval_dataset is None:
        return
    evaluations = _records_with("eval_loss", trainer)
    last_step = evaluations[-1]["step"] if evaluations else None
    if last_step != trainer.state.global_step:
        trainer.evaluate()


def _result_of(trainer: PackedTrainer, output: Path) -> TrainResult:
    # Only records of training steps have `examples`, with any logging_strategy.
    training_records = _records_with("examples", trainer)
    return TrainResult(
        step=trainer.state.global_step,
        examples=sum(int(record["examples"]) for record in training_records),
        metrics=_last_metrics(training_records),
        evaluation=_last_metrics(_records_with("eval_loss", trainer)),
        model=output,
        train_datasets=_identities(trainer.train_dataset),
        eval_datasets=_identities(trainer.eval_dataset),
    )


def _identities(source: Any) -> list[dict[str, Any]]:
    """Return URL and version of the datasets in an argument of a trainer."""
    return [
        {"url": dataset.url, "version": dataset.version}
        for dataset in datasets_of(source)
    ]


def _records_with(name: str, trainer: PackedTrainer) -> list[dict[str, float]]:
    return [record for record in trainer.state.log_history if name in record]


def _last_metrics(records: list[dict[str, float]]) -> dict[str, float]:
    if not records:
        return {}
    metrics = dict(records[-1])
    metrics.pop("step", None)
    metrics.pop("epoch", None)
    return metrics


@contextmanager
def _naming_output(output_dir: str) -> Iterator[None]:
    """Re-raise errors of disk, hub and trackers as StorageError, naming the output.

    They come from other packages, and would look like bugs of packstore.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        if not is_of_client(error):
            raise
        raise StorageError(
            sentence(
                where=f"output_dir {output_dir}",
                rule="disk, hub and trackers must take what is written",
                found=quote(client_text(error), 200),
                remedy="The same command again goes on from the newest checkpoint",
            )
        ) from client_cause(error)


def _find_checkpoint(config: TrainConfig) -> str | None:
    """Return the checkpoint to resume from; None for a new run.

    Raises:
        StorageError: the output folder cannot be written.
        ConfigError: a new run would overwrite a model, or later checkpoints exist.
    """
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            sentence(
                where=f"output_dir {output}",
                rule="it must be a folder that can be written",
                found=str(error.strerror),
                remedy="Name another",
            )
        ) from error

    newest = newest_checkpoint(str(output))
    checkpoint = config.resume_from_checkpoint
    if checkpoint is not None:
        _check_is_newest(checkpoint, newest)
        return checkpoint
    if newest is None:
        _check_no_model(output)
    return newest


def _check_is_newest(checkpoint: str, newest: str | None) -> None:
    """Raise if the output folder holds later checkpoints than the one to resume."""
    if newest is None or not Path(checkpoint).is_dir():
        return
    if not Path(checkpoint).samefile(newest):
        raise ConfigError(
            sentence(
                where=f"checkpoint {checkpoint}",
                rule="it must be the newest of its output_dir",
                found=newest,
                remedy="Remove the later ones",
            )
        )


def _check_no_model(output: Path) -> None:
    """Raise if a new run would overwrite a model."""
    for name in ("config.json", "adapter_config.json"):
        if (output / name).is_file():
            raise ConfigError(
                sentence(
                    where=f"output_dir {output}",
                    rule="it must hold no model without checkpoints",
                    found=name,
                    remedy="Choose another, or move it away",
                )
            )
