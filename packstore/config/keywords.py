"""Keyword arguments of calls, as types: editors complete them, and type checkers know them.

The fields of the other modules here, class by class; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class SizeSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.SizeConfig`."""

    pack_size: int
    layout: Literal["concat", "shared_prefix"]
    pad_to_multiple: int


class TokenizeSettings(SizeSettings, total=False):
    """Fields of :class:`~packstore.config.TokenizeConfig`."""

    kind: Literal["auto", "preference", "sft", "ranked"]
    fields: Mapping[str, str]
    where: str | None
    select: Mapping[str, str]
    carry: tuple[str, ...]
    implicit_prompt: Literal["hh", "common_prefix"]
    tokenizer_engine: Literal["auto", "tokenizers", "fastokens", "gigatoken", "sentencepiece"]
    chat_template: str | None
    template_variables: Mapping[str, Any]
    append_eos: bool | None
    add_bos: bool | None
    supervised_turns: Literal["all", "last"]
    thinking: Literal["template", "strip"]
    empty_thinking: Literal["unsupervised", "supervised"]
    tool_arguments: Literal["record", "object"]
    special_tokens: Literal["literal", "control", "drop", "error"]
    boundary: Literal["longest_common_prefix", "drop", "error"]
    max_length: int | None
    overlong: Literal["drop", "error", "truncate_prompt", "truncate_response"]
    empty_side: Literal["drop", "keep", "error"]
    empty_turn: Literal["drop", "keep", "error"]
    unrendered: Literal["drop", "keep", "error"]
    identical_sides: Literal["drop", "keep", "error"]
    unsupervised: Literal["drop", "error"]
    missing_field: Literal["error", "drop"]
    unpaired_feedback: Literal["error", "drop", "keep"]
    wrong_type: Literal["drop", "error"]
    invalid_unicode: Literal["drop", "error", "replace"]


class SelectSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.SelectConfig`."""

    dedup: Literal["none", "pair", "prompt"]
    validation_fraction: float


class PlanSettings(SizeSettings, total=False):
    """Fields of :class:`~packstore.config.PlanConfig`."""

    shuffle: bool
    strategy: str
    seed: int
    partitions: int | None


class WriteSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.WriteConfig`."""

    format: Literal["parquet", "arrow"]
    labels: Literal["plain", "spans"]
    row_group_tokens: int
    shard_tokens: int
    overwrite: bool


class WorkSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.WorkConfig`."""

    engine: str
    num_workers: int | None
    spill_dir: str | None


class RunSettings(WorkSettings, total=False):
    """Fields of :class:`~packstore.config.RunConfig`."""

    max_drop_rate: float
    rejects: str | None


class PackSettings(
    TokenizeSettings, SelectSettings, PlanSettings, WriteSettings, RunSettings, total=False
):
    """Fields of :class:`~packstore.config.PackConfig`."""


class AppendSettings(RunSettings, total=False):
    """Settings of ``packstore.append``: all others are those of the dataset."""

    fields: Mapping[str, str]
    missing_field: Literal["error", "drop"]
    partitions: int | None


class TrainDataSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.training.TrainDataConfig`."""

    dataset: str
    validation: str | None
    ref_logps: str | None
    validation_ref_logps: str | None
    validation_by: str | None
    ref_logps_check: Literal["exact", "model"]
    storage_options: Mapping[str, str]
    examples_per_step: int
    packs_per_batch: int | None
    tokens_per_batch: int | None
    epochs: int
    max_steps: int | None
    num_workers: int


class TrainModelSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.training.TrainModelConfig`."""

    model: str
    reference_model: str | None
    dtype: Literal["float32", "bfloat16", "float64"]
    mixed_precision: Literal["auto", "none", "bf16"]
    attention: str
    disable_dropout: bool
    probe: bool
    gradient_checkpointing: bool
    compile: Literal["none", "layers"]
    lora_rank: int | None
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...]


class TrainLossSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.training.TrainLossConfig`."""

    loss: str | Mapping[str, float | Mapping[str, float]]
    loss_parameters: Mapping[str, float]
    sft_weight: float
    sft_average: Literal["token", "sequence_sum", "sequence_mean"]
    average_logps: bool
    pairs: Literal["best_vs_rest", "all", "adjacent"]
    router_aux_loss_coef: float | None


class TrainOptimizerSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.training.TrainOptimizerConfig`."""

    learning_rate: float
    schedule: Literal["cosine", "constant"]
    warmup: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float


class TrainRunSettings(TypedDict, total=False):
    """Fields of :class:`~packstore.config.training.TrainRunConfig`."""

    output: str
    seed: int
    resume: str
    log_every: int
    eval_every: int | None
    save_every: int | None
    keep_last: int
    keep_every: int | None
    log_examples: bool
    tokenizer: str | None
    merge: bool
    trackers: tuple[str, ...]
    wandb: str | None
    cpu: bool


class TrainSettings(
    TrainRunSettings,
    TrainOptimizerSettings,
    TrainLossSettings,
    TrainModelSettings,
    TrainDataSettings,
    total=False,
):
    """Fields of :class:`~packstore.config.training.TrainConfig`."""


class EvalSettings(TypedDict, total=False):
    """Batching of ``packstore.torch.evaluate`` and ``write_ref_logps``: one of the two."""

    packs_per_batch: int | None
    tokens_per_batch: int | None


class BatchSettings(EvalSettings, total=False):
    """Fields of :class:`~packstore.config.BatchConfig`."""

    examples_per_step: int | None
    accumulation: int
    balance: bool
    largest_first: bool
    tail: Literal["drop", "pad", "repeat", "uneven"] | None
    mode: Literal["train", "eval"]
