"""Settings of a training run with their defaults; they define the flags of
``packstore train``.

Needs no torch, so that the command line can be parsed without it. A run is described by
keywords, by a YAML file with the same names, or by both: the names are arguments of
:class:`packstore.torch.PackedTrainer` and fields of transformers'
``TrainingArguments``. Three kinds of paths, `path`, `place` and `local`, are explained
at :func:`~packstore.config.settings.setting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from packstore.config.settings import Settings, setting
from packstore.errors import ConfigError, sentence


@dataclass(frozen=True, kw_only=True)
class TrainModelConfig(Settings):
    """Settings of model, data and loss: arguments of PackedTrainer."""

    model: str = setting(
        ...,
        "folder or hub name of a causal LM or LoRA adapter",
        metavar="PATH",
        path=True,
    )
    train_dataset: str = setting(
        ..., "folder or URL of the packed dataset", metavar="PATH", place=True
    )
    eval_dataset: str | None = setting(
        None, "packed dataset to evaluate on", metavar="PATH", place=True
    )
    # A name, or a mix: name -> weight, or name -> weight and parameters.
    loss: str | Mapping[str, float | Mapping[str, float]] = setting(
        "dpo", "dpo, sft, distill, …: docs/losses.md"
    )
    loss_parameters: Mapping[str, Any] = setting(
        dict,
        "parameter of the loss, e.g. beta=0.1 (repeatable)",
        flag="loss-parameter",
        metavar="NAME=VALUE",
    )
    reference: str | None = setting(
        None,
        "reference model (default: the starting model)",
        metavar="PATH",
        path=True,
    )
    ref_logps: tuple[str, ...] = setting(
        (),
        "side dataset with reference log-probs (repeatable)",
        metavar="SIDE",
        place=True,
    )
    eval_ref_logps: tuple[str, ...] = setting(
        (),
        "the same for the evaluation set (repeatable)",
        metavar="SIDE",
        place=True,
    )
    side: tuple[str, ...] = setting(
        (),
        "more side data, such as a teacher's (repeatable)",
        metavar="SIDE",
        place=True,
    )
    eval_side: tuple[str, ...] = setting(
        (),
        "the same for the evaluation set (repeatable)",
        metavar="SIDE",
        place=True,
    )
    # None, as the default holds only if `arguments` has no batch size.
    examples_per_step: int | None = setting(
        None, "examples per step (default: 64)", low=1
    )
    packs_per_batch: int | None = setting(
        None, "packs per forward call on a rank (default: 1)", low=1
    )
    peft_config: Mapping[str, Any] = setting(
        dict,
        "argument of PEFT's LoraConfig, e.g. r=16 (repeatable)",
        metavar="NAME=VALUE",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "dtype of the weights"
    )
    attention: str = setting("auto", "backend of packed attention")
    head: Literal["auto", "eager", "triton"] = setting(
        "auto", "kernel from hidden states to log-probs"
    )
    compile: Literal["auto", "none", "layers"] = setting(
        "auto", "what to compile; auto: layers on CUDA"
    )
    cuda_graphs: bool = setting(False, "replay batches as CUDA graphs")
    storage_options: Mapping[str, Any] = setting(
        dict,
        "option for fsspec, e.g. endpoint_url=… (repeatable)",
        flag="storage-option",
        secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainModelConfig):
    """All settings of a training run, with defaults for preference training."""

    LISTED_BY = "`packstore train --help-all`"  # for errors about unknown settings

    output_dir: str = setting(
        ..., "local folder for checkpoints and the model", metavar="DIR", local=True
    )
    num_train_epochs: float = setting(1.0, "passes over the dataset", low=0)
    max_steps: int = setting(-1, "optimizer steps, instead of epochs", low=-1)
    learning_rate: float = setting(1e-6, "peak learning rate", low=0)
    lr_scheduler_type: str = setting("cosine", "schedule after the warm-up")
    warmup_steps: float = setting(0.1, "warm-up steps; below 1: fraction of all", low=0)
    bf16: bool | None = setting(
        None, "autocast to bfloat16 (default: where it is fast)"
    )
    activation_checkpointing: bool | None = setting(
        None, "recompute layers in the backward pass"
    )
    logging_steps: float = setting(10, "steps between log lines, after step 10", low=0)
    eval_steps: float | None = setting(
        None, "steps between evaluations (default: only at the end)"
    )
    save_steps: float = setting(500, "steps between checkpoints", low=0)
    report_to: tuple[str, ...] = setting((), "tracker, e.g. tensorboard (repeatable)")
    seed: int = setting(42, "random seed", low=0, high=2**32 - 1)
    resume_from_checkpoint: str | None = setting(
        None, "checkpoint (default: newest of output_dir, if any)", local=True
    )
    # Marked as a path, as some of its texts are paths.
    arguments: Mapping[str, Any] = setting(
        dict, "further fields of TrainingArguments", path=True
    )

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
            if getattr(self, name) in ("", ("",)):  # a text, or the only one of a list
                raise ConfigError(f"setting {name} must not be empty; leave it out.")
        for name in ("eval_steps", "eval_ref_logps", "eval_side"):
            if getattr(self, name) and self.eval_dataset is None:
                raise ConfigError(
                    sentence(
                        f"setting {name}",
                        rule="it needs an evaluation set",
                        found="none",
                        remedy="Give eval_dataset",
                    )
                )
