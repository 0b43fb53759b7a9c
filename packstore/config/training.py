"""Settings of a training run with their defaults; the flags of ``packstore train`` are
derived.

Needs no torch, so that the command line can be parsed without it. A run is described by
keywords, by a YAML file with the same names, or by both: those of
:class:`packstore.torch.PackedTrainer`, and those of transformers'
``TrainingArguments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from packstore.config.settings import Settings, setting
from packstore.errors import ConfigError, sentence

_PATH, _SIDE = ({"metavar": name, "place": True} for name in ("PATH", "SIDE"))
_LOCAL = {"metavar": "DIR", "local": True}
_ITEMS = {"metavar": "NAME=VALUE"}


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig(Settings):
    """Settings of model, data and loss: arguments of PackedTrainer."""

    model: str = setting(
        ..., "folder or hub name of a causal LM or LoRA adapter", metavar="PATH"
    )
    train_dataset: str = setting(..., "folder or URL of the packed dataset", **_PATH)
    eval_dataset: str | None = setting(None, "packed dataset to evaluate on", **_PATH)
    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo", "dpo, sft, …; a wrong name lists all"
    )
    loss_parameters: Mapping[str, Any] = setting(
        dict,
        "of PreferenceLoss, e.g. beta=0.1 (repeatable)",
        flag="loss-parameter",
        **_ITEMS,
    )
    reference: str | None = setting(None, "default: the starting model", metavar="PATH")
    ref_logps: tuple[str, ...] = setting(
        (), "side datasets of the parts, as reference", **_SIDE
    )
    eval_ref_logps: tuple[str, ...] = setting(
        (), "the same for the evaluation set", **_SIDE
    )
    examples_per_step: int | None = setting(
        None, "examples of a step (default: 64)", low=1
    )
    packs_per_batch: int | None = setting(
        None, "of one forward call on one rank; default: 1", low=1
    )
    peft_config: Mapping[str, Any] = setting(
        dict, "of PEFT's LoraConfig: r=16, …", **_ITEMS
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "of the weights"
    )
    attention: str = setting("auto", "backend of packed attention")
    head: Literal["auto", "eager", "triton"] = setting("auto", "passes over logits")
    compile: Literal["auto", "none", "layers"] = setting("auto", "auto: layers on CUDA")
    storage_options: Mapping[str, Any] = setting(
        dict,
        "for fsspec, e.g. endpoint_url=… (repeatable)",
        flag="storage-option",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainModelConfig):
    """All settings of a training run; the defaults are those of preference training."""

    LISTED_BY = "`packstore train --help-all`"

    output_dir: str = setting(..., "local folder of checkpoints and model", **_LOCAL)
    num_train_epochs: float = setting(1.0, "passes over the dataset", low=0)
    max_steps: int = setting(-1, "of the optimizer, in place of epochs", low=-1)
    learning_rate: float = setting(1e-6, "highest learning rate", low=0)
    lr_scheduler_type: str = setting("cosine", "after the warm-up")
    warmup_steps: float = setting(0.1, "linear; below 1: of all steps", low=0)
    bf16: bool | None = setting(None, "autocast to bfloat16; default: where it is fast")
    activation_checkpointing: bool | None = setting(
        None, "recompute layers in the backward pass"
    )
    logging_steps: float = setting(10, "steps between lines, after the tenth", low=0)
    eval_steps: float | None = setting(
        None, "steps between evaluations; default: at the end"
    )
    save_steps: float = setting(500, "steps between checkpoints", low=0)
    report_to: tuple[str, ...] = setting((), "trackers, e.g. tensorboard (repeatable)")
    seed: int = setting(42, "of every random choice", low=0, high=2**32 - 1)
    resume_from_checkpoint: str | None = setting(
        None, "default: the newest of output_dir", local=True
    )
    arguments: Mapping[str, Any] = setting(dict, "further fields of TrainingArguments")

    @classmethod
    def of(cls, config: Settings | None = None, /, **settings: Any) -> Self:
        """Return `config` (or the defaults) overridden by `settings`.

        Settings of other names are further fields of ``TrainingArguments``. They are
        not checked here, as their class needs torch:
        :func:`packstore.torch.training.arguments.check_setting_names` does.
        """
        arguments = dict(settings.pop("arguments", getattr(config, "arguments", {})))
        own_names = cls.names()
        for name in [name for name in settings if name not in own_names]:
            arguments[name] = settings.pop(name)
        return super().of(config, **settings, arguments=arguments)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names():
            if getattr(self, name) in ("", ("",)):
                raise ConfigError(f"setting {name} must not be empty; leave it out.")
        if self.eval_dataset is None:
            for name in ("eval_steps", "eval_ref_logps"):
                if getattr(self, name):
                    rule, remedy = "it needs an evaluation set", "Give eval_dataset"
                    raise ConfigError(sentence(f"setting {name}", rule, "none", remedy))
