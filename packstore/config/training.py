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
from packstore.errors import ConfigError, sentence


@dataclass(frozen=True, kw_only=True)
class TrainDataConfig(Settings):
    """Settings of data and batching."""

    dataset: str = setting(..., "folder or URL of the packed dataset", metavar="PATH")
    validation: str | None = setting(
        None, "folder or URL of a packed dataset to validate on", metavar="PATH"
    )
    ref_logps: str | None = setting(
        None, "side dataset of reference log-probs; then no reference model runs", metavar="SIDE"
    )
    validation_ref_logps: str | None = setting(
        None, "the same for the validation set", metavar="SIDE"
    )
    validation_by: str | None = setting(
        None, "validate also by value of a carried column, or by input file: file", metavar="COLUMN"
    )
    ref_logps_check: Literal["exact", "model"] = setting(
        "exact",
        "side datasets made with other numerics (weights, autocast, attention, device): refuse "
        "them, or only log that and compare model, tokenizer and template",
    )
    storage_options: Mapping[str, str] = setting(
        dict,
        "passed to the fsspec filesystem, e.g. endpoint_url=… (repeatable)",
        flag="storage-option",
    )
    examples_per_step: int = setting(
        64, "batch size: most examples of one optimizer step, over all ranks", low=1
    )
    packs_per_batch: int | None = setting(
        None, "packs of one forward call on one rank; default: 1", low=1
    )
    tokens_per_batch: int | None = setting(
        None, "most tokens of one forward call on one rank, instead of packs_per_batch", low=1
    )
    epochs: int = setting(1, "passes over the dataset", low=1)
    max_steps: int | None = setting(None, "most optimizer steps", low=1)
    num_workers: int = setting(0, "processes that read; 0: threads of this one", low=0)


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig(Settings):
    """Settings of model and precision."""

    model: str = setting(
        ..., "folder or hub name of a causal LM, or of a LoRA adapter to train on", metavar="PATH"
    )
    reference_model: str | None = setting(
        None,
        "folder or hub name of the reference model; default: the starting model",
        metavar="PATH",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting("float32", "dtype of the weights")
    mixed_precision: Literal["auto", "none", "bf16"] = setting(
        "auto",
        "precision of autocast; auto: bf16 for float32 weights on CUDA devices of compute "
        "capability 8 or newer, else none; a resumed run keeps its own",
    )
    attention: str = setting("auto", "backend of packed attention")
    disable_dropout: bool = setting(
        True, "set the model's dropout to 0; an adapter's dropout is lora_dropout"
    )
    probe: bool = setting(
        True, "before the first step, compare packed with unpacked logits of the model"
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer in the backward pass, to save memory"
    )
    compile: Literal["none", "layers"] = setting(
        "none", "layers: compile each decoder layer with torch.compile, which takes a minute"
    )
    lora_rank: int | None = setting(
        None, "train a LoRA adapter of this rank; default: all weights", low=1
    )
    lora_alpha: float = setting(16.0, "the adapter is scaled by lora_alpha / lora_rank")
    lora_dropout: float = setting(0.0, "dropout of the adapter's input", low=0, below=1)
    lora_targets: tuple[str, ...] = setting(
        (),
        "names of modules to adapt (repeatable); default: all linear ones except the head",
        flag="lora-target",
    )


@dataclass(frozen=True, kw_only=True)
class TrainLossConfig(Settings):
    """Settings of the loss."""

    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo",
        "name of the loss, such as dpo, ipo or sft (a wrong name lists all); in a file also a mix "
        "{name: weight, …}",
    )
    loss_parameters: Mapping[str, float] = setting(
        dict,
        "parameters of the loss, e.g. beta=0.1 (repeatable)",
        flag="loss-parameter",
        metavar="NAME=NUMBER",
    )
    sft_weight: float = setting(
        0.0, "weight of an added likelihood loss of the best response", low=0
    )
    sft_average: Literal["token", "sequence_sum", "sequence_mean"] = setting(
        "token", "average of the likelihood loss: over tokens, or over sequences' sums or means"
    )
    average_logps: bool = setting(False, "compare means over tokens, not sums")
    pairs: Literal["best_vs_rest", "all", "adjacent"] = setting(
        "best_vs_rest", "kind ranked: the pairs of responses to compare"
    )
    router_aux_loss_coef: float | None = setting(
        None,
        "weight of the load-balancing loss of experts; default: the model's own; 0: none",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptimizerConfig(Settings):
    """Settings of the optimizer, AdamW."""

    learning_rate: float = setting(1e-6, "highest learning rate", low=0)
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "learning rate after the warm-up: cosine decay to 0, or constant"
    )
    warmup: float = setting(
        0.1, "steps of linear warm-up; below 1: as a fraction of all steps", low=0
    )
    weight_decay: float = setting(
        0.0, "weight decay of matrices; norms and biases have none", low=0
    )
    adam_beta1: float = setting(0.9, "decay of the mean of gradients", low=0, below=1)
    adam_beta2: float = setting(0.95, "decay of the mean of squared gradients", low=0, below=1)
    adam_epsilon: float = setting(1e-8, "added to the root of the mean of squares", low=0)
    max_grad_norm: float = setting(1.0, "clip gradients to this norm; 0: no clipping", low=0)


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig(Settings):
    """Settings of outputs and their intervals."""

    output: str = setting(
        ..., "local folder of the run: checkpoints, metrics, final model", metavar="DIR"
    )
    seed: int = setting(0, "source of every random choice")
    resume: str = setting(
        "auto", "auto: from the newest checkpoint of the output, if any; never; or a checkpoint"
    )
    log_every: int = setting(10, "steps between two lines of metrics", low=1)
    eval_every: int | None = setting(
        None, "steps between validations; default: at the end only", low=1
    )
    save_every: int | None = setting(
        None, "steps between checkpoints; default: at the best validations and the end", low=1
    )
    keep_last: int = setting(
        2, "number of newest checkpoints to keep; the best is always kept", low=1
    )
    keep_every: int | None = setting(None, "also keep checkpoints at multiples of this step", low=1)
    log_examples: bool = setting(False, "write the example ids of each step to examples.jsonl")
    tokenizer: str | None = setting(
        None,
        "folder of the tokenizer: checked against the dataset, and copied to the model",
        metavar="PATH",
    )
    merge: bool = setting(False, "also write the final model with its adapter merged")
    trackers: tuple[str, ...] = setting(
        (),
        "trackers of Accelerate to log to, such as mlflow (repeatable); TensorBoard if installed",
        flag="tracker",
    )
    wandb: str | None = setting(None, "project of Weights & Biases to log to", metavar="PROJECT")
    cpu: bool = setting(False, "train on the CPU even if there is an accelerator")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    TrainRunConfig, TrainOptimizerConfig, TrainLossConfig, TrainModelConfig, TrainDataConfig
):
    """All settings of a training run; fields of later bases come first.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two exclude each other.
    """

    LISTED_BY = "`packstore train --help`"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names():
            if getattr(self, name) == "":
                raise ConfigError(
                    f"setting {name} must not be empty; leave it out for its default."
                )
        if self.packs_per_batch is not None and self.tokens_per_batch is not None:
            raise ConfigError("give packs_per_batch or tokens_per_batch, not both.")
        if self.validation is None:
            for name in ("eval_every", "validation_ref_logps", "validation_by"):
                if getattr(self, name) is not None:
                    must = "it needs a validation set"
                    do = "Give validation, or leave it out"
                    raise ConfigError(sentence(f"setting {name}", must, "none", do))


def read_settings(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads settings from a YAML file, as keywords of :meth:`TrainConfig.of`.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
        UnknownNameError: a setting does not exist; suggests the nearest.
    """
    settings = read_yaml(path)
    check_names(settings, TrainConfig.names(), TrainConfig.LISTED_BY)
    return settings
