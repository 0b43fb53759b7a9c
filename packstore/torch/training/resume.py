"""Finds the checkpoint to resume from, and checks the settings against it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, StorageError, quote, sentence
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.training.checkpoint import RunState, checkpoints, step_of

logger = logging.getLogger("packstore")

FIXED = ("model", "reference_model", "dtype", "loss", "loss_parameters", "lora")
"""Settings that a resumed run must share with its checkpoint."""

PLANNED = ("epochs", "max_steps", "examples_per_step")
"""Settings that determine the number of steps of the schedule."""


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Returns the checkpoint to resume from, or None to start.

    Raises:
        ConfigError: a required checkpoint is missing, an unexpected one exists, or the output holds
            a model without checkpoints.
    """
    saved = checkpoints(Path(config.output, "checkpoints"))
    if not saved:
        _check_new(config.output)
    if config.resume not in ("auto", "never"):
        chosen = Path(config.resume)
        later = [path.name for path in saved if step_of(path) > step_of(chosen)]
        if later and chosen.is_dir():
            needed = "its output must have no later checkpoints"
            remedy = "Remove them, or choose another output"
            raise ConfigError(sentence(f"resume {chosen}", needed, ", ".join(later), remedy))
        return chosen
    if saved and config.resume == "never":
        where, remedy = f"output {config.output}", "Choose another output, or resume: auto"
        raise ConfigError(sentence(where, "it must be new", saved[-1].name, remedy))
    return saved[-1] if saved else None


def make_output(config: TrainConfig) -> None:
    """Makes the folder of the run.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    try:
        Path(config.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where, needed = f"output {config.output}", "the output must be a folder that can be written"
        raise StorageError(sentence(where, needed, str(error.strerror), "Name another")) from error


def _check_new(output: str) -> None:
    """Refuses an output with a model but no checkpoints, as this run would replace the model."""
    if Path(output, "model").exists():
        needed = "it must hold no model without checkpoints"
        remedy = "Choose another output, or move it away"
        raise ConfigError(sentence(f"output {output}", needed, "model", remedy))


def keep_precision(config: TrainConfig, before: Mapping[str, Any]) -> TrainConfig:
    """Returns `config` with ``mixed_precision: auto`` as that of the checkpoint."""
    if config.mixed_precision != "auto":
        return config
    return replace(config, mixed_precision=before.get("mixed_precision", "none"))


def check_unchanged(config: TrainConfig, before: Mapping[str, Any]) -> None:
    """Refuses to resume with another model or loss; logs other changes."""
    now = config.recorded()
    changed = [n for n in now if now[n] != before.get(n) and n not in ("resume", "output")]
    for name in changed:
        text = f"{name} was {quote(before.get(name))} and is {quote(now[name])}"
        if name in FIXED:
            needed = "a run that goes on must keep its model and loss"
            remedy = "Choose another output to begin a new run"
            raise ConfigError(sentence(f"checkpoint in {config.output}", needed, text, remedy))
        logger.warning("since the checkpoint, %s", text)


def count_steps(config: TrainConfig, loader: PackedDataLoader, state: RunState | None) -> int:
    """Returns the optimizer steps of the whole run: the checkpoint's, unless the plan changed."""
    settings = config.recorded()
    if state is not None and all(settings[n] == state.config.get(n) for n in PLANNED):
        return state.total_steps
    plan = loader.plan(config.epochs)
    if not plan.steps:
        raise ConfigError(f"dataset {config.dataset} must hold packs to train on; found none.")
    return min(plan.steps, config.max_steps or plan.steps)
