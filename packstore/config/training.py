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

from packstore.config.settings import Settings, check_names, setting
from packstore.errors import ConfigError, sentence

_PATH, _SIDE = ({"metavar": name, "place": True} for name in ("PATH", "SIDE"))
_LOCAL = {"metavar": "DIR", "local": True}
_ITEMS = {"metavar": "NAME=VALUE"}

_OTHERS = """
per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
lr_scheduler_kwargs optim optim_args optim_target_modules weight_decay adam_beta1
adam_beta2 adam_epsilon max_grad_norm average_tokens_across_devices
label_smoothing_factor fp16 bf16_full_eval fp16_full_eval tf32
activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps
auto_find_batch_size logging_strategy logging_first_step log_on_each_node
logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
disable_tqdm run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
eval_strategy eval_delay prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
save_only_model save_strategy save_on_each_node save_total_limit enable_jit_checkpoint
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
hub_revision load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint full_determinism data_seed
use_cpu accelerator_config parallelism_config dataloader_drop_last
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names train_sampling_strategy length_column_name
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train
do_eval do_predict local_rank
"""
FURTHER = tuple(_OTHERS.split())
"""The fields of ``TrainingArguments`` that are no fields of :class:`TrainConfig`."""


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
        """As of the base; further fields of ``TrainingArguments`` are settings, too."""
        check_names(settings, (*cls.names(), *FURTHER), cls.LISTED_BY)
        further = {name: settings.pop(name) for name in FURTHER if name in settings}
        before = settings.pop("arguments", getattr(config, "arguments", {}))
        return super().of(config, **settings, arguments={**before, **further})

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
