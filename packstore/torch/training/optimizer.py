"""AdamW over the trained weights, and the learning rate schedule."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler

from packstore.config.training import TrainOptimizerConfig

logger = logging.getLogger(__name__)


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
