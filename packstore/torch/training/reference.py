"""Sources of the reference model's log-probs during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from packstore.config.training import TrainConfig
from packstore.errors import display
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.models.load import compile_layers, is_adapter, load_model
from packstore.torch.reference.reference import run_on_rank_zero
from packstore.torch.reference.reference_fingerprint import check_arithmetic, check_reference

logger = logging.getLogger("packstore")

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a model runs."""

Reference = Callable[[PackedBatch], Tensor | None]
"""Returns log-probs `[S]` in nats, or None if the batch carries them or the loss needs none."""


def of_the_batch(batch: PackedBatch) -> None:
    """Computes nothing: the loss needs no reference, or the batch carries precomputed log-probs."""


def load_reference(config: TrainConfig) -> Any:
    """Loads the reference model of the settings; without one, the starting model."""
    path = config.reference_model or config.model
    return load_model(path, dtype=config.dtype, attention=config.attention)


def tell_unused(loss_fn: PreferenceLoss, *given: str | None) -> None:
    """Warns of references that are `given` to a loss without one."""
    names = ", ".join(map(display, filter(None, given)))
    if names and not loss_fn.reference:
        logger.warning("the loss has no reference; not used: %s", names)


def frozen(policy: nn.Module, context: Autocast = nullcontext) -> Reference:
    """Makes a reference of a policy, which runs inside `context()` and without gradients."""

    @torch.no_grad()
    def logps(batch: PackedBatch) -> Tensor:
        with context():
            values: Tensor = policy(batch)
            return values

    return logps


def check_precomputed(
    config: TrainConfig,
    policy: Any,
    before: Mapping[str, Any] | None,
    sides: Sequence[tuple[str, Dataset]],
    accelerator: Any,
) -> None:
    """Refuses precomputed log-probs that are not those of the reference; a collective call.

    A run that resumes with those of its checkpoint, `before`, only logs a difference in numerics.
    """
    names = ("ref_logps", "validation_ref_logps")
    now = config.recorded()
    known = before is not None and all(before.get(n) == now[n] for n in names)
    device = accelerator.device

    def check() -> None:
        reference, adapter = policy, is_adapter(config.reference_model or config.model)
        if not known and (config.reference_model is not None or before is not None):
            reference = load_reference(config)
            if config.compile == "layers":
                compile_layers(reference)
        for url, dataset in sides:
            side = open_side(url, dict(config.storage_options) or None)
            with accelerator.autocast():
                if known:
                    check_arithmetic(side, reference, device)
                else:
                    check_reference(side, reference, dataset, adapter=adapter, device=device)

    if sides:
        run_on_rank_zero(check)
