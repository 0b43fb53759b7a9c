"""Trains from packed datasets: preference losses and SFT, on torch, Accelerate and PEFT.

::

    import packstore.torch

    packstore.torch.train(
        model="my-sft-model", dataset="prefs-8k", validation="held-out-8k", output="run",
        loss="dpo", loss_parameters={"beta": 0.1}, examples_per_step=64, learning_rate=1e-6,
    )

On several ranks, start the script with ``accelerate launch`` or ``torchrun``: DDP, or FSDP2 if
Accelerate's config says so. The settings are in ``docs/training.md``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from packstore.config.training import TrainConfig
from packstore.torch.training.export import export_model, model_card
from packstore.torch.training.loop import Loop
from packstore.torch.training.setup import Run, prepare
from packstore.torch.training.sinks import ConsoleLines, JsonLines, Sink, Trackers

__all__ = ["TrainConfig", "TrainResult", "train"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        step: optimizer steps of the whole run.
        examples: examples trained on.
        metrics: last logged training metrics.
        evaluation: metrics of the last validation, named ``eval/…``; empty without validation.
        model: folder of the final model, or of its adapter.
    """

    step: int
    examples: int
    metrics: dict[str, float]
    evaluation: dict[str, float]
    model: Path


def train(config: TrainConfig | None = None, /, **settings: Any) -> TrainResult:
    """Trains a model from the start or from its newest checkpoint; a collective call.

    Every pair weighs the same in any pack, batch or rank. Writes ``metrics.jsonl``,
    ``checkpoints`` and the final ``model`` in the output folder.

    Args:
        config: the settings; default: their defaults.
        settings: fields of :class:`~packstore.config.training.TrainConfig` that override `config`.

    Raises:
        ConfigError: settings are missing, unknown, out of range or exclude each other.
        CompatibilityError: model, data, loss, tokenizer or checkpoint do not belong together.
        MissingExtraError: transformers, accelerate or peft is not installed.
        DivergedError: loss or gradient is not finite; no model is written.
        PackstoreError: model, dataset or checkpoint is unusable.
    """
    config = TrainConfig.of(config, **settings)
    run = prepare(config)
    config, accelerator = run.config, run.accelerator
    sinks = _sinks(run)
    try:
        loop = Loop(run, sinks)
        loop()
        results = {**loop.metrics, **loop.evaluation}
        card = model_card(config, run.dataset.manifest, loop.step, results)
        model = export_model(accelerator, run.policy, config, card)
    finally:
        for sink in sinks:
            sink.close()
    accelerator.end_training()
    return TrainResult(
        step=loop.step,
        examples=loop.examples,
        metrics=loop.metrics,
        evaluation=loop.evaluation,
        model=model,
    )


def _sinks(run: Run) -> list[Sink]:
    """The sinks of this rank's metrics."""
    accelerator, config = run.accelerator, run.config
    if accelerator.log_with:
        flat = {n: str(v) for n, v in config.recorded().items()}
        project = "packstore" if config.trackers else "tensorboard"  # also the name of its folder
        accelerator.init_trackers(os.environ.get("WANDB_PROJECT", project), flat)
    if not accelerator.is_main_process:
        return []
    step, output = run.start.step if run.start else 0, Path(config.output)
    lines = ConsoleLines(step, run.total_steps, Console(stderr=True))
    sinks: list[Sink] = [JsonLines(output / "metrics.jsonl", step), lines]
    if accelerator.log_with:
        sinks.append(Trackers(accelerator))
    return sinks
