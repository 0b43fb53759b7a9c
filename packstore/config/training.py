"""Settings of a training run with their defaults; the flags of ``packstore train`` are derived.

Needs no torch, so that the command line can be parsed without it. A run is described by keywords,
by a YAML file with the same names, or by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from packstore.config.job import read_yaml
from packstore.config.settings import Settings, check_names, setting
from packstore.errors import ConfigError, UnknownNameError, sentence

_PATH, _SIDE = ({"metavar": name, "place": True} for name in ("PATH", "SIDE"))
_LOCAL = {"metavar": "DIR", "local": True}


@dataclass(frozen=True, kw_only=True)
class TrainDataConfig(Settings):
    """Settings of data and batching."""

    dataset: str = setting(..., "folder or URL of the packed dataset", **_PATH)
    validation: str | None = setting(None, "packed dataset to validate on", **_PATH)
    ref_logps: tuple[str, ...] = setting((), "side datasets of the parts, as reference", **_SIDE)
    validation_ref_logps: tuple[str, ...] = setting((), "the same for the validation set", **_SIDE)
    storage_options: Mapping[str, str] = setting(
        dict, "for fsspec, e.g. endpoint_url=… (repeatable)", flag="storage-option", secret=True
    )
    examples_per_step: int = setting(64, "at most, if a pack a rank has no more", low=1)
    packs_per_batch: int | None = setting(
        None, "of one forward call on one rank; default: 1", low=1
    )
    epochs: int = setting(1, "passes over the dataset", low=1)
    max_steps: int | None = setting(None, "most optimizer steps", low=1)
    num_workers: int = setting(0, "processes that read; 0: threads", low=0)


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig(Settings):
    """Settings of model and precision."""

    model: str = setting(..., "folder or hub name of a causal LM or LoRA adapter", metavar="PATH")
    reference_model: str | None = setting(None, "default: the starting model", metavar="PATH")
    dtype: Literal["float32", "bfloat16", "float64"] = setting("float32", "of the weights")
    mixed_precision: Literal["auto", "none", "bf16"] = setting(
        "auto", "auto: bf16 where it is fast"
    )
    attention: str = setting("auto", "backend of packed attention")
    head: Literal["auto", "eager", "triton"] = setting("auto", "passes over logits")
    gradient_checkpointing: bool = setting(False, "recompute layers in the backward pass")
    compile: Literal["auto", "none", "layers"] = setting("auto", "auto: layers on CUDA")
    lora: Mapping[str, Any] = setting(
        dict, "adapter: rank=16, alpha, dropout, targets", metavar="NAME=VALUE"
    )


@dataclass(frozen=True, kw_only=True)
class TrainLossConfig(Settings):
    """Settings of the loss."""

    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo", "dpo, sft, …; a wrong name lists all"
    )
    loss_parameters: Mapping[str, Any] = setting(
        dict,
        "of PreferenceLoss, e.g. beta=0.1 (repeatable)",
        flag="loss-parameter",
        metavar="NAME=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptimizerConfig(Settings):
    """Settings of the optimizer, AdamW."""

    learning_rate: float = setting(1e-6, "highest learning rate", low=0)
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "after the warm-up: to 0, or constant"
    )
    warmup: float = setting(0.1, "linear, in steps; below 1: of all steps", low=0)
    weight_decay: float = setting(0.0, "of matrices; norms and biases have none", low=0)
    max_grad_norm: float = setting(1.0, "clip gradients to it; 0: never", low=0)


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig(Settings):
    """Settings of outputs and their intervals."""

    output: str = setting(..., "local folder of checkpoints, metrics, model", **_LOCAL)
    seed: int = setting(0, "of every random choice")
    resume: str = setting("auto", "auto (newest), never, or a checkpoint")
    log_every: int = setting(10, "steps between lines, after the tenth", low=1)
    eval_every: int | None = setting(None, "steps between validations; default: at the end", low=1)
    save_every: int | None = setting(None, "steps between checkpoints; default: few", low=1)
    trackers: tuple[str, ...] = setting(
        (), "of Accelerate, e.g. mlflow (repeatable)", flag="tracker"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    TrainRunConfig, TrainOptimizerConfig, TrainLossConfig, TrainModelConfig, TrainDataConfig
):
    """All settings of a training run; fields of later bases come first."""

    LISTED_BY = "`packstore train --help`"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names():
            if getattr(self, name) in ("", ("",)):
                raise ConfigError(f"setting {name} must not be empty; leave it out.")
        if self.validation is None:
            for name in ("eval_every", "validation_ref_logps"):
                if getattr(self, name):
                    rule, remedy = "it needs a validation set", "Give validation, or leave it out"
                    raise ConfigError(sentence(f"setting {name}", rule, "none", remedy))
        if self.lora:
            lora_settings(self.lora)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Members of the setting `lora`."""

    LISTED_BY = "docs/training.md"

    rank: int = setting(..., "size of the two matrices between", low=1)
    alpha: float = setting(16.0, "scale, over the rank")
    dropout: float = setting(0.0, "of the input of an adapter", low=0, below=1)
    targets: tuple[str, ...] = setting((), "names of layers; default: all linear ones")


def lora_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all members of the setting `lora`."""
    targets = given.get("targets", ())
    named = targets.split(",") if isinstance(targets, str) else targets
    try:
        return LoraConfig.of(**{**given, "targets": named}).recorded()
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise ConfigError(str(error).replace("setting ", "setting lora: ", 1)) from None


def read_settings(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads settings from a YAML file, as keywords of :meth:`TrainConfig.of`."""
    settings = read_yaml(path)
    check_names(settings, TrainConfig.names(), TrainConfig.LISTED_BY)
    return settings
