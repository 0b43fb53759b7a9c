"""Assembles a run from its settings: model, reference, data, optimizer, checkpoint."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.nn  # before a process group is made: see packstore.cli._model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from packstore.config.training import TrainConfig, TrainOptimizerConfig, lora_settings
from packstore.errors import ConfigError, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.side import open_side
from packstore.registry import missing_extra
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy, proved_head, trust_head
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.models.compatibility import check_model, check_same_tokenizer
from packstore.torch.models.load import (
    add_lora,
    checkpoint_gradients,
    choose_compile,
    compile_layers,
    is_adapter,
    load_model,
)
from packstore.torch.models.probe import probe_model
from packstore.torch.models.routers import router_settings
from packstore.torch.models.unwrap import REF_ADAPTER, as_reference, text_config, unwrapped
from packstore.torch.reference.arithmetic import choose_precision
from packstore.torch.reference.reference import run_on_rank_zero
from packstore.torch.training.checkpoint import (
    MODEL,
    RunState,
    check_unchanged,
    count_steps,
    find_checkpoint,
    load_state,
    make_output,
    read_state,
    set_random_state,
)
from packstore.torch.training.reference import (
    Reference,
    check_precomputed,
    frozen,
    of_the_batch,
    tell_unused,
)
from packstore.torch.training.sinks import tracker_names

logger = logging.getLogger("packstore")

T = TypeVar("T")


class Run:
    """All parts of a run, at its start or resumed from `start`; making them is collective."""

    def __init__(self, config: TrainConfig) -> None:
        for name in {"name", "gradients"} & config.loss_parameters.keys():
            rule = "loss_parameters takes the keywords of PreferenceLoss that a run leaves open"
            raise ConfigError(sentence(f"setting loss_parameters: {name}", rule, name))
        self.loss_fn = PreferenceLoss(config.loss, **config.loss_parameters)
        self.folder = Path(config.output, "checkpoints")
        checkpoint = find_checkpoint(config)
        self.start = None if checkpoint is None else read_state(checkpoint)
        if self.start is not None:
            for name in ("mixed_precision", "compile"):
                if getattr(config, name) == "auto":
                    config = replace(config, **{name: self.start.config.get(name, "none")})
            check_unchanged(config, self.start.config)
        options = dict(config.storage_options) or None
        self.dataset = open_dataset(config.dataset, options)
        held_out = None if config.validation is None else open_dataset(config.validation, options)
        both = [self.dataset] if held_out is None else [self.dataset, held_out]
        _check_data(self.loss_fn, both)
        self.accelerator = accelerator = _make_accelerator(config)
        taken: Any = accelerator.mixed_precision
        self.config = config = replace(config, mixed_precision="none" if taken == "no" else taken)
        # One rank reads the weights, and others get theirs where the model is sharded.
        sharding = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
        self._from_one_rank = bool(sharding and sharding.cpu_ram_efficient_loading)
        _seed(config.seed)
        model = self._load_model(checkpoint)
        self._check_model(model, both)
        chosen: Any = choose_compile(config.compile, model, accelerator.device)
        self.config = config = replace(config, compile=chosen)
        if chosen == "layers":
            compile_layers(model)
        stored = [config.ref_logps, config.validation_ref_logps][: len(both)]
        tell_unused(self.loss_fn, config.reference_model, *itertools.chain(*stored))
        if self.loss_fn.reference:
            pairs = zip(stored, both, strict=True)
            sides = [(url, dataset) for urls, dataset in pairs for url in urls]
            known = None if self.start is None else self.start.config
            check_precomputed(config, model, known, sides, accelerator)
        self.loader = self._loader(self.dataset, config.ref_logps, config.examples_per_step)
        if self.start is not None:
            self.loader.load_state_dict(self.start.loader)
        self.validation = None
        if held_out is not None:
            self.validation = self._loader(held_out, config.validation_ref_logps, None)
        policy = self._packed(model).train()
        self.policy, self.optimizer = accelerator.prepare(policy, make_optimizer(policy, config))
        fuse_updates(self.optimizer.optimizer)
        done = self.start.step if self.start else 0
        self.total_steps = count_steps(config, self.loader, done)
        self.schedule = make_schedule(self.optimizer.optimizer, config, self.total_steps, done)
        self._make_references(stored)
        if checkpoint is None or self.start is None:
            _seed(config.seed, accelerator.process_index)
        else:
            self._restore(checkpoint, self.start)

    def _load_model(self, checkpoint: Path | None) -> Any:
        """Loads the starting or checkpointed model, with its trained weights unfrozen."""
        config = self.config
        goes_on = is_adapter(config.model)
        if goes_on and config.lora:
            remedy = "Leave lora out to train it further"
            rule = "the model must have no adapter"
            raise ConfigError(sentence("setting lora", rule, config.model, remedy))
        stored = checkpoint is not None and (checkpoint / MODEL).is_dir()  # no shards
        path = checkpoint / MODEL if checkpoint and stored else config.model
        model = self._load(path, trainable=True, scores=self.loss_fn.scores)
        if config.lora and not stored:
            model = add_lora(model, **lora_settings(config.lora))
        if goes_on and self.loss_fn.reference and config.reference_model is None:
            model.load_adapter(config.model, REF_ADAPTER, is_trainable=False)
        if config.gradient_checkpointing:
            checkpoint_gradients(model)
        return model

    def _load(self, path: Any, **how: bool) -> Any:
        """Loads a model; where one rank reads the weights, others have any values."""
        config, loaded = self.config, list[Any]()
        load = partial(load_model, path, dtype=config.dtype, attention=config.attention, **how)
        self._with_weights(lambda: loaded.append(load()))
        model = loaded[0] if loaded else load(weights=False)
        if self._from_one_rank:  # what reading adds: layers in float32, padding of a new head
            text = text_config(model)
            kinds, text.pad_token_id = run_on_rank_zero(
                lambda: (
                    {name: weight.dtype for name, weight in model.named_parameters()},
                    getattr(text, "pad_token_id", None),
                )
            )
            for name, weight in model.named_parameters():
                if weight.dtype != kinds[name]:
                    weight.data = torch.empty_like(weight, dtype=kinds[name])
        return model

    def _with_weights(self, call: Callable[[], T]) -> T:
        """Calls on each rank that has weights before they are sharded; collective."""
        return run_on_rank_zero(call) if self._from_one_rank else call()

    def _packed(self, model: Any) -> Any:
        """Wraps a model, whose head is proved where its weights are."""
        if self._from_one_rank and not self.loss_fn.scores:
            number = run_on_rank_zero(lambda: proved_head(model))
            if not self.accelerator.is_main_process:
                trust_head(model, number)
        policy = PackedPolicy(model, backend=self.config.head)
        policy._no_split_modules = model._no_split_modules  # the units that Accelerate shards
        return policy

    def _check_model(self, model: Any, datasets: list[Dataset]) -> None:
        """Refuses data that is not the model's, and a model that packs would change."""
        for data in datasets:
            check_model(data, model)
        routed = not self.loss_fn.scores and router_settings(model) is not None
        if self.loss_fn.router_aux_loss_coef and not routed:
            raise ConfigError(
                "loss parameter router_aux_loss_coef: the model's config must have "
                "output_router_logits and router_aux_loss_coef above 0; found "
                f"{type(unwrapped(model)).__name__}. Leave it out, or add them to its config.json."
            )
        self._probe(model)

    def _probe(self, model: Any) -> None:
        """Compares packed with unpacked logits, on the device and in the precision of the run."""
        accelerator = self.accelerator
        # Where it is sharded, a device may not hold it whole.
        if accelerator.distributed_type in ("NO", "MULTI_GPU"):
            model.to(accelerator.device)
        with accelerator.autocast():
            self._with_weights(lambda: probe_model(model))

    def _loader(
        self, dataset: Dataset, ref_logps: Sequence[str], examples_per_step: int | None
    ) -> PackedDataLoader:
        config, urls = self.config, ref_logps if self.loss_fn.reference else ()
        side = [open_side(url, dict(config.storage_options) or None) for url in urls]
        return PackedDataLoader(
            PackedDataset(dataset, seed=config.seed, side=side),
            packs_per_batch=config.packs_per_batch,
            num_workers=config.num_workers,
            pin_memory=self.accelerator.device.type == "cuda",
            examples_per_step=examples_per_step,
            balance=True,
        )

    def _make_references(self, stored: Sequence[Sequence[str]]) -> None:
        """Sets what computes log-probs of the reference; `stored`: side data of each dataset."""
        online: Reference = of_the_batch
        if self.loss_fn.reference and not all(stored):
            online = self._online()
        self.reference = of_the_batch if self.config.ref_logps else online
        self.validation_reference = of_the_batch if self.config.validation_ref_logps else online

    def _online(self) -> Reference:
        """Makes the reference that is computed during training."""
        config, accelerator = self.config, self.accelerator
        inner = accelerator.unwrap_model(self.policy).model
        if config.reference_model is None and hasattr(inner, "peft_config"):
            return frozen(self.policy, partial(as_reference, self.policy, inner))
        model = self._load(config.reference_model or config.model)
        if config.reference_model is not None:
            self._probe(model)
        reference, context = self._packed(model).eval(), accelerator.autocast
        if config.compile == "layers":
            compile_layers(model)
        if accelerator.is_fsdp2:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            # In the precision of the policy, which autocast is not.
            reference, context = fsdp2_prepare_model(accelerator, reference), nullcontext
            reference.set_reshard_after_forward(True)  # no backward pass follows
        return frozen(reference.to(accelerator.device), context)

    def _restore(self, checkpoint: Path, state: RunState) -> None:
        """Restores optimizer, random generators, and weights that were sharded."""
        optimizer = self.optimizer.optimizer
        load_state(self.accelerator, self.policy, optimizer, checkpoint, state)
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if ranks != len(state.random):
            text = "since the checkpoint, the number of ranks was %d and is %d"
            logger.warning(text, len(state.random), ranks)
        if rank < len(state.random):
            set_random_state(state.random[rank])
        else:
            _seed(self.config.seed + state.step, rank)
        logger.info("resuming from %s", checkpoint)


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


def make_schedule(
    optimizer: torch.optim.Optimizer, config: TrainOptimizerConfig, total_steps: int, done: int
) -> LRScheduler:
    """Makes linear warm-up, then a cosine to 0 or a constant; `done` steps of it are over."""
    warmup = int(config.warmup if config.warmup >= 1 else config.warmup * total_steps)

    def share(step: int) -> float:
        if step < warmup:
            return step / warmup
        through = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return (1 + math.cos(math.pi * through)) / 2 if config.schedule == "cosine" else 1.0

    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return LambdaLR(optimizer, share, last_epoch=done - 1)


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
    run_on_rank_zero(partial(make_output, config))
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


def _check_data(loss_fn: PreferenceLoss, both: list[Dataset]) -> None:
    """Refuses data that the loss cannot use, before any model is loaded."""
    for dataset in both:
        loss_fn.check_data(dataset)
    check_same_tokenizer([data.manifest for data in both])
