"""Settings of a training run with their defaults; the flags of ``packstore train`` are derived.

Needs no torch, so that the command line can be parsed without it. A run is described by keywords,
by a YAML file with the same names, or by both.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, Self

from packstore.config import setting, validate
from packstore.config.yaml_file import read_yaml
from packstore.errors import ConfigError, UnknownNameError, quote, sentence


def _required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainDataConfig:
    """Settings of data and batching."""

    dataset: str = _required("folder or URL of the packed dataset")
    validation: str | None = setting(None, "folder or URL of a packed dataset to validate on")
    ref_logps: str | None = setting(
        None, "side dataset of reference log-probs; then no reference model runs"
    )
    validation_ref_logps: str | None = setting(None, "the same for the validation set")
    validation_by: str | None = setting(
        None, "validate also by value of a carried column, or by input file: file"
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
        64, "batch size: most examples of one optimizer step, over all ranks"
    )
    packs_per_batch: int | None = setting(None, "packs of one forward call on one rank; default: 1")
    tokens_per_batch: int | None = setting(
        None, "most tokens of one forward call on one rank, instead of packs_per_batch"
    )
    epochs: int = setting(1, "passes over the dataset")
    max_steps: int | None = setting(None, "most optimizer steps")
    num_workers: int = setting(0, "processes that read; 0: threads of this one")


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig:
    """Settings of model and precision."""

    model: str = _required("folder or hub name of a causal LM, or of a LoRA adapter to train on")
    reference_model: str | None = setting(
        None, "folder or hub name of the reference model; default: the starting model"
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
    lora_rank: int | None = setting(None, "train a LoRA adapter of this rank; default: all weights")
    lora_alpha: float = setting(16.0, "the adapter is scaled by lora_alpha / lora_rank")
    lora_dropout: float = setting(0.0, "dropout of the adapter's input")
    lora_targets: tuple[str, ...] = setting(
        (),
        "names of modules to adapt (repeatable); default: all linear ones except the head",
        flag="lora-target",
    )


@dataclass(frozen=True, kw_only=True)
class TrainLossConfig:
    """Settings of the loss."""

    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo",
        "name of the loss, such as dpo, ipo or sft (a wrong name lists all); in a file also a mix "
        "{name: weight, …}",
    )
    loss_parameters: Mapping[str, float] = setting(
        dict, "parameters of the loss, e.g. beta=0.1 (repeatable)", flag="loss-parameter"
    )
    sft_weight: float = setting(0.0, "weight of an added likelihood loss of the best response")
    sft_average: Literal["token", "sequence_sum", "sequence_mean"] = setting(
        "token", "average of the likelihood loss: over tokens, or over sequences' sums or means"
    )
    average_logps: bool = setting(False, "compare means over tokens, not sums")
    pairs: Literal["best_vs_rest", "all", "adjacent"] = setting(
        "best_vs_rest", "kind ranked: the pairs of responses to compare"
    )
    router_aux_loss_coef: float | None = setting(
        None, "weight of the load-balancing loss of experts; default: the model's own; 0: none"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptimizerConfig:
    """Settings of the optimizer, AdamW."""

    learning_rate: float = setting(1e-6, "highest learning rate")
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "learning rate after the warm-up: cosine decay to 0, or constant"
    )
    warmup: float = setting(0.1, "steps of linear warm-up; below 1: as a fraction of all steps")
    weight_decay: float = setting(0.0, "weight decay of matrices; norms and biases have none")
    adam_beta1: float = setting(0.9, "decay of the mean of gradients")
    adam_beta2: float = setting(0.95, "decay of the mean of squared gradients")
    adam_epsilon: float = setting(1e-8, "added to the root of the mean of squares")
    max_grad_norm: float = setting(1.0, "clip gradients to this norm; 0: no clipping")


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig:
    """Settings of outputs and their intervals."""

    output: str = _required("local folder of the run: checkpoints, metrics, final model")
    seed: int = setting(0, "source of every random choice")
    resume: str = setting(
        "auto", "auto: from the newest checkpoint of the output, if any; never; or a checkpoint"
    )
    log_every: int = setting(10, "steps between two lines of metrics")
    eval_every: int | None = setting(None, "steps between validations; default: at the end only")
    save_every: int | None = setting(
        None, "steps between checkpoints; default: at the best validations and the end"
    )
    keep_last: int = setting(2, "number of newest checkpoints to keep; the best is always kept")
    keep_every: int | None = setting(None, "also keep checkpoints at multiples of this step")
    log_examples: bool = setting(False, "write the example ids of each step to examples.jsonl")
    tokenizer: str | None = setting(
        None, "folder of the tokenizer: checked against the dataset, and copied to the model"
    )
    merge: bool = setting(False, "also write the final model with its adapter merged")
    trackers: tuple[str, ...] = setting(
        (),
        "trackers of Accelerate to log to, such as mlflow (repeatable); TensorBoard if installed",
        flag="tracker",
    )
    wandb: str | None = setting(None, "project of Weights & Biases to log to")
    cpu: bool = setting(False, "train on the CPU even if there is an accelerator")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    TrainRunConfig, TrainOptimizerConfig, TrainLossConfig, TrainModelConfig, TrainDataConfig
):
    """All settings of a training run; fields of later bases come first.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two exclude each other.
    """

    def __post_init__(self) -> None:
        validate(self)
        for name in (f.name for f in dataclasses.fields(self)):
            if getattr(self, name) == "":
                raise ConfigError(
                    f"setting {name} must not be empty; leave it out for its default."
                )
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"setting {name} must be at least {low}; found {value}.")
        for name in ("lora_dropout", "adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found = getattr(self, name)
                raise ConfigError(f"setting {name} must be at least 0 and below 1; found {found}.")
        if self.packs_per_batch is not None and self.tokens_per_batch is not None:
            raise ConfigError("give packs_per_batch or tokens_per_batch, not both.")
        if self.validation is None:
            for name in ("eval_every", "validation_ref_logps", "validation_by"):
                if getattr(self, name) is not None:
                    must = "it needs a validation set"
                    do = "Give validation, or leave it out"
                    raise ConfigError(sentence(f"setting {name}", must, "none", do))

    @classmethod
    def of(cls, config: TrainConfig | None = None, /, **settings: Any) -> Self:
        """Returns `config` (or the defaults) overridden by `settings`.

        Raises:
            UnknownNameError: a setting does not exist; lists the choices.
            ConfigError: see the class; or a required setting is missing.
        """
        fields = dataclasses.fields(cls)
        for name in settings:
            _check_known(name, [f.name for f in fields])
        base = {} if config is None else {f.name: getattr(config, f.name) for f in fields}
        given = {**base, **settings}
        for f in fields:
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in given:
                raise ConfigError(f"setting {f.name} must be given: {f.metadata['help']}.")
        return cls(**given)

    def recorded(self) -> dict[str, Any]:
        """Returns all settings as JSON values, from which :meth:`of` makes an equal config."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}


def read_settings(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads settings from a YAML file, as keywords of :meth:`TrainConfig.of`.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
        UnknownNameError: a setting does not exist; lists the choices.
    """
    settings = read_yaml(path)
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    for name in settings:
        _check_known(name, names)
    return settings


def _check_known(name: Any, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(
            f"unknown setting {quote(name)}; choose from: {', '.join(known)}.{hint}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


_MINIMUM = {
    "examples_per_step": 1,
    "packs_per_batch": 1,
    "tokens_per_batch": 1,
    "epochs": 1,
    "max_steps": 1,
    "num_workers": 0,
    "lora_rank": 1,
    "sft_weight": 0,
    "router_aux_loss_coef": 0,
    "learning_rate": 0,
    "warmup": 0,
    "weight_decay": 0,
    "adam_epsilon": 0,
    "max_grad_norm": 0,
    "log_every": 1,
    "eval_every": 1,
    "save_every": 1,
    "keep_last": 1,
    "keep_every": 1,
}
