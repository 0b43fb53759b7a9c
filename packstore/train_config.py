"""Every setting of a training run, with its default; the flags of ``packstore train`` follow.

It stands beside the settings of packing and needs no torch, so that the command line can be read
without it. A run is described by keywords, by a YAML file of the same names, or by both.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from packstore.config import setting, validate
from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.registry import missing_extra


def _required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainDataConfig:
    """What is trained on, and in which portions."""

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
        "side datasets made in other arithmetic (weights, autocast, attention, device): refuse "
        "them, or only log it and compare model, tokenizer and template",
    )
    storage_options: Mapping[str, str] = setting(
        dict,
        "passed to the fsspec filesystem, e.g. endpoint_url=… (repeatable)",
        flag="storage-option",
    )
    pairs_per_step: int = setting(
        64, "batch size: examples of one optimizer step at most, over all ranks"
    )
    packs_per_batch: int | None = setting(None, "packs of one forward call on one rank; default: 1")
    tokens_per_batch: int | None = setting(
        None, "tokens of one forward call on one rank at most, in place of packs_per_batch"
    )
    epochs: int = setting(1, "times that the dataset is gone through")
    max_steps: int | None = setting(None, "optimizer steps at most")
    num_workers: int = setting(0, "processes that read; 0: threads of this one")


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig:
    """What is trained, and in which precision."""

    model: str = _required("folder or hub name of a causal LM, or of a LoRA adapter to go on with")
    reference_model: str | None = setting(
        None, "folder or hub name of the reference model; default: the model as it was at first"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting("float32", "of the weights")
    mixed_precision: Literal["none", "bf16"] = setting("none", "of the computation, by autocast")
    attention: str = setting("auto", "backend of packed attention")
    disable_dropout: bool = setting(
        True, "set the model's dropout to 0; that of the adapter is lora_dropout"
    )
    probe: bool = setting(
        True, "before the first step, compare packed with unpacked logits of the model"
    )
    gradient_checkpointing: bool = setting(
        False, "compute each layer again in the backward pass, to save memory"
    )
    lora_rank: int | None = setting(None, "train a LoRA adapter of this rank; default: all weights")
    lora_alpha: float = setting(16.0, "the adapter is scaled by lora_alpha / lora_rank")
    lora_dropout: float = setting(0.0, "dropout of the adapter's input")
    lora_targets: tuple[str, ...] = setting(
        (),
        "names of modules that are adapted (repeatable); default: all linear but the head",
        flag="lora-target",
    )


@dataclass(frozen=True, kw_only=True)
class TrainLossConfig:
    """What is minimised."""

    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo", "name of the loss; in a file also a mix {name: weight, …}"
    )
    loss_parameters: Mapping[str, float] = setting(
        dict, "parameters of the loss, e.g. beta=0.1 (repeatable)", flag="loss-parameter"
    )
    sft_weight: float = setting(0.0, "weight of the added likelihood loss of the best response")
    sft_average: Literal["token", "sequence_sum", "sequence_mean"] = setting(
        "token", "what the likelihood loss is a mean of"
    )
    average_logps: bool = setting(False, "compare means over tokens, not sums")
    pairs: Literal["best_vs_rest", "all", "adjacent"] = setting(
        "best_vs_rest", "kind ranked: which responses are compared"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptimizerConfig:
    """How the weights move: AdamW."""

    learning_rate: float = setting(1e-6, "highest learning rate")
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "of the learning rate after its warm-up: down to 0, or constant"
    )
    warmup: float = setting(0.1, "steps of linear warm-up; below 1: their share of all steps")
    weight_decay: float = setting(0.0, "of the matrices; norms and biases have none")
    adam_beta1: float = setting(0.9, "decay of the mean of gradients")
    adam_beta2: float = setting(0.95, "decay of the mean of their squares")
    adam_epsilon: float = setting(1e-8, "added to the root of that mean")
    max_grad_norm: float = setting(1.0, "longer gradients are cut to this norm; 0: never")


@dataclass(frozen=True, kw_only=True)
class TrainRunConfig:
    """Where the run writes, and how often."""

    output: str = _required("local folder of the run: checkpoints, metrics, final model")
    seed: int = setting(0, "source of every random choice")
    resume: str = setting(
        "auto", "auto: from the newest checkpoint of the output, if any; never; or its folder"
    )
    log_every: int = setting(10, "steps between two lines of metrics")
    eval_every: int | None = setting(None, "steps between validations; default: at the end only")
    save_every: int | None = setting(
        None, "steps between checkpoints; default: at the best validations and the end"
    )
    keep_last: int = setting(2, "newest checkpoints that are kept; the best one always is")
    keep_every: int | None = setting(None, "checkpoints of multiples of this step are kept as well")
    log_examples: bool = setting(False, "write the example ids of each step to examples.jsonl")
    tokenizer: str | None = setting(
        None, "folder of the tokenizer: checked against the dataset, and copied beside the model"
    )
    merge: bool = setting(False, "write the final model with its adapter merged, as well")
    wandb: str | None = setting(None, "project of Weights & Biases to log to")
    cpu: bool = setting(False, "train on the CPU, also where there is an accelerator")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    TrainRunConfig, TrainOptimizerConfig, TrainLossConfig, TrainModelConfig, TrainDataConfig
):
    """All settings of a training run; fields of later bases come first.

    Raises:
        ConfigError: a value of the wrong type or out of range, or two that exclude each other.
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
        """`config` (or the defaults) with `settings` over it.

        Raises:
            UnknownNameError: a setting that does not exist; the choices are listed.
            ConfigError: see the class; or one that must be given is missing.
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
        """All settings as JSON values; :meth:`of` makes the same config of them again."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}


def read_settings(path: str | PathLike[str]) -> dict[str, Any]:
    """The settings in a YAML file, as keywords of :meth:`TrainConfig.of`.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
        UnknownNameError: a setting that does not exist; the choices are listed.
        MissingExtraError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise missing_extra("a config file", "train", error) from error

    # YAML 1.1 takes 1e-6 for a text; everybody who trains means the number.
    loader = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    loader.add_implicit_resolver(  # type: ignore[attr-defined]
        "tag:yaml.org,2002:float", number, list("-+0123456789")
    )
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(sentence(str(path), "it must be a readable file", reason)) from error
    except yaml.YAMLError as error:
        raise ConfigError(sentence(str(path), "it must be YAML", str(error))) from error
    if not isinstance(settings, Mapping):
        raise ConfigError(
            sentence(str(path), "it must hold settings, name: value", quote(settings))
        )
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    for name in settings:
        _check_known(name, names)
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}


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
    "pairs_per_step": 1,
    "packs_per_batch": 1,
    "tokens_per_batch": 1,
    "epochs": 1,
    "max_steps": 1,
    "num_workers": 0,
    "lora_rank": 1,
    "sft_weight": 0,
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
