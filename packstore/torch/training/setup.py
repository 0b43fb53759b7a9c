"""Assembles a run from its settings: model, reference, data, optimizer, checkpoint."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # before a process group is made: see packstore.cli._model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler

from packstore.config.training import TrainConfig, TrainOptimizerConfig, lora_settings
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.side import open_side
from packstore.registry import missing_extra
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.models.compatibility import check_model, check_same_tokenizer
from packstore.torch.models.load import (
    add_lora,
    checkpoint_gradients,
    compile_layers,
    is_adapter,
    load_model,
)
from packstore.torch.models.probe import probe_model
from packstore.torch.models.routers import router_settings
from packstore.torch.models.unwrap import unwrapped
from packstore.torch.reference.arithmetic import choose_precision
from packstore.torch.training.checkpoint import (
    MODEL,
    RunState,
    check_unchanged,
    count_steps,
    find_checkpoint,
    load_optimizer,
    make_output,
    read_state,
    set_random_state,
)
from packstore.torch.training.reference import (
    REF_ADAPTER,
    OwnAdapter,
    Reference,
    SecondModel,
    check_precomputed,
    load_reference,
    of_the_batch,
)
from packstore.torch.training.sinks import tracker_names

logger = logging.getLogger("packstore")


@dataclass(eq=False, kw_only=True)
class Run:
    """All parts of a run; policy and optimizer are prepared by Accelerate."""

    config: TrainConfig
    accelerator: Any
    loss_fn: PreferenceLoss
    dataset: Dataset
    loader: PackedDataLoader
    validation: PackedDataLoader | None
    policy: nn.Module
    optimizer: Any
    schedule: LRScheduler
    reference: Reference
    validation_reference: Reference
    total_steps: int
    start: RunState | None

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return Path(self.config.output, "checkpoints")


def make_optimizer(policy: nn.Module, config: TrainOptimizerConfig) -> AdamW:
    """Makes AdamW (Loshchilov & Hutter, 2019); weight decay applies to matrices only."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim <= 1]
    decays = [(matrices, config.weight_decay), (others, 0.0)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def fuse_updates(optimizer: torch.optim.Optimizer) -> None:
    """Makes AdamW update all weights in one kernel, if all are on CUDA devices by now."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.device.type == "cuda" for p in weights):
        for group in optimizer.param_groups:
            group["fused"] = True
        logger.info("AdamW is fused: one kernel updates the weights")


def warmup_steps(config: TrainOptimizerConfig, total_steps: int) -> int:
    """Returns the warm-up steps: `warmup` if it is at least 1, else that fraction of all steps."""
    return int(config.warmup if config.warmup >= 1 else config.warmup * total_steps)


def make_schedule(
    optimizer: torch.optim.Optimizer, config: TrainOptimizerConfig, total_steps: int
) -> LRScheduler:
    """Makes the schedule: linear warm-up, then a cosine to 0 at `total_steps`, or constant."""
    from transformers import get_scheduler

    name = {"cosine": "cosine", "constant": "constant_with_warmup"}[config.schedule]
    warmup = warmup_steps(config, total_steps)
    schedule: LRScheduler = get_scheduler(name, optimizer, warmup, total_steps)
    return schedule


def make_loss(config: TrainConfig) -> PreferenceLoss:
    """Makes the loss of the settings."""
    for name in ("name", "gradients"):
        if name in config.loss_parameters:
            needed = "loss_parameters takes the keywords of PreferenceLoss that a run leaves open"
            raise ConfigError(sentence(f"setting loss_parameters: {name}", needed, name))
    return PreferenceLoss(config.loss, **config.loss_parameters)


def prepare(config: TrainConfig) -> Run:
    """Makes all parts of a run, at its start or at its checkpoint; a collective call."""
    loss_fn = make_loss(config)
    checkpoint = find_checkpoint(config)
    state = None if checkpoint is None else read_state(checkpoint)
    if state is not None:
        if config.mixed_precision == "auto":
            before = state.config.get("mixed_precision", "none")
            config = replace(config, mixed_precision=before)
        check_unchanged(config, state.config)
    options = dict(config.storage_options) or None
    dataset = open_dataset(config.dataset, options)
    validation = None if config.validation is None else open_dataset(config.validation, options)
    both = [dataset] if validation is None else [dataset, validation]
    _check_data(config, loss_fn, both)
    accelerator = _make_accelerator(config)
    precision = accelerator.mixed_precision
    config = replace(config, mixed_precision="none" if precision == "no" else precision)
    _seed(config.seed)
    model = _make_model(config, checkpoint, loss_fn)
    for data in both:
        check_model(data, model)
    if router_settings(model) is None and loss_fn.router_aux_loss_coef:
        raise ConfigError(
            sentence(
                "loss parameter router_aux_loss_coef",
                "the model's config must have output_router_logits and router_aux_loss_coef "
                "above 0",
                type(unwrapped(model)).__name__,
                "Leave it out, or add them to the model's config.json",
            )
        )
    _probe(accelerator, model)
    if loss_fn.reference:
        sides = [(config.ref_logps, dataset), (config.validation_ref_logps, validation)]
        known = None if state is None else state.config
        check_precomputed(config, model, known, sides, accelerator)
    loader_of = partial(_make_loader, config, loss_fn, accelerator.device)
    loader = loader_of(dataset, config.ref_logps, config.examples_per_step)
    held_out = None
    if validation is not None:
        held_out = loader_of(validation, config.validation_ref_logps, None)
    policy = PackedPolicy(model)
    policy._no_split_modules = model._no_split_modules  # the units that Accelerate shards
    policy.train()
    if config.compile == "layers":  # after the probe and checks, which run tiny batches
        compile_layers(model)
    policy, optimizer = accelerator.prepare(policy, make_optimizer(policy, config))
    fuse_updates(optimizer.optimizer)
    total = count_steps(config, loader, state)
    schedule = make_schedule(optimizer.optimizer, config, total)
    stored = [config.ref_logps, config.validation_ref_logps][: len(both)]
    needed = loss_fn.reference and not all(stored)
    online = _online(config, accelerator, policy) if needed else of_the_batch
    run = Run(
        config=config,
        accelerator=accelerator,
        loss_fn=loss_fn,
        dataset=dataset,
        loader=loader,
        validation=held_out,
        policy=policy,
        optimizer=optimizer,
        schedule=schedule,
        reference=of_the_batch if config.ref_logps else online,
        validation_reference=of_the_batch if config.validation_ref_logps else online,
        total_steps=total,
        start=state,
    )
    if state is None or checkpoint is None:
        _seed(config.seed, accelerator.process_index)
    else:
        _restore(run, checkpoint, state)
    return run


def _make_model(config: TrainConfig, checkpoint: Path | None, loss_fn: PreferenceLoss) -> Any:
    """Loads the starting or checkpointed model, with its trained weights unfrozen."""
    goes_on = is_adapter(config.model)
    if goes_on and config.lora:
        needed, remedy = "the model must have no adapter", "Leave lora out to train it further"
        raise ConfigError(sentence("setting lora", needed, config.model, remedy))
    path = config.model if checkpoint is None else checkpoint / MODEL
    model = load_model(path, dtype=config.dtype, attention=config.attention, trainable=True)
    if config.lora and checkpoint is None:
        model = add_lora(model, **lora_settings(config.lora))
    if goes_on and loss_fn.reference and config.reference_model is None:
        model.load_adapter(config.model, REF_ADAPTER, is_trainable=False)
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    return model


def _probe(accelerator: Any, model: Any) -> None:
    """Compares packed with unpacked logits, on the device and in the precision of the run."""
    if accelerator.distributed_type in ("NO", "MULTI_GPU"):  # else a device may not hold it whole
        model.to(accelerator.device)
    with accelerator.autocast():
        probe_model(model)


def _online(config: TrainConfig, accelerator: Any, policy: nn.Module) -> Reference:
    """Makes the reference that is computed during training."""
    inner = accelerator.unwrap_model(policy).model
    if config.reference_model is None and hasattr(inner, "peft_config"):
        return OwnAdapter(policy, inner)
    model = load_reference(config)
    if config.reference_model is not None:
        _probe(accelerator, model)
    model.to(accelerator.device)
    context = accelerator.autocast
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # The policy computes with its weights in bfloat16, where autocast keeps norms in float32.
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        context = nullcontext
    reference = SecondModel(model, context)
    if config.compile == "layers":
        compile_layers(model)
    return reference


def _make_accelerator(config: TrainConfig) -> Any:
    try:
        from accelerate import Accelerator, PartialState
        from accelerate.utils import parse_flag_from_env
    except ImportError as error:
        raise missing_extra("packstore train", "train", error) from error
    trackers = tracker_names(config.trackers)
    try:
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
        ranks = PartialState(cpu=cpu)
        if not ranks.is_main_process:
            logger.setLevel(logging.WARNING)
        weights = getattr(torch, config.dtype)
        precision = choose_precision(config.mixed_precision, ranks.device, weights)
        accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no" if precision == "none" else precision,
            log_with=trackers or None,
            project_dir=config.output,
        )
    except ValueError as error:  # Accelerate keeps its first state for the whole process
        needed = "Accelerate must take the settings of device and precision"
        remedy = "Start a new process for a run with others"
        raise ConfigError(sentence("training", needed, quote(str(error), 200), remedy)) from error
    if accelerator.is_main_process:
        make_output(config)
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # Accelerate's own policy rounds outputs, which are log-probs, and sums of gradients to
        # bfloat16, and copies the layout of a row for each layer.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return accelerator


def _seed(seed: int, rank: int = 0) -> None:
    from accelerate.utils import set_seed

    set_seed((seed + rank) % 2**32)  # numpy's limit


def _check_data(config: TrainConfig, loss_fn: PreferenceLoss, both: list[Dataset]) -> None:
    """Refuses data that the loss cannot use, before any model is loaded."""
    for dataset in both:
        if dataset.manifest.kind == "sft" and not loss_fn.only_sft:
            raise CompatibilityError(
                sentence(
                    f"dataset {dataset.url}",
                    f"loss {config.loss!r} compares responses, so the dataset must hold several",
                    "kind 'sft'",
                    "Use loss: sft, or a dataset of preferences",
                )
            )
    check_same_tokenizer([data.manifest for data in both])


def _make_loader(
    config: TrainConfig,
    loss_fn: PreferenceLoss,
    device: torch.device,
    dataset: Dataset,
    ref_logps: str | None,
    examples_per_step: int | None,
) -> PackedDataLoader:
    side = []
    if ref_logps is not None and loss_fn.reference:
        side.append(open_side(ref_logps, dict(config.storage_options) or None))
    data = PackedDataset(dataset, seed=config.seed, side=side)
    return PackedDataLoader(
        data,
        packs_per_batch=config.packs_per_batch,
        num_workers=config.num_workers,
        pin_memory=device.type == "cuda",
        examples_per_step=examples_per_step,
    )


def _restore(run: Run, checkpoint: Path, state: RunState) -> None:
    """Restores optimizer, schedule, position and random generators."""
    load_optimizer(run.policy, run.optimizer.optimizer, checkpoint, state)
    run.schedule.load_state_dict(dict(state.schedule))
    run.loader.load_state_dict(state.loader)
    rank = run.accelerator.process_index
    if rank < len(state.random):
        set_random_state(state.random[rank])
    else:
        _seed(run.config.seed + state.step, rank)
    logger.info("resuming from %s", checkpoint)
