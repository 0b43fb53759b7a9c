"""Sources of the reference model's log-probs during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import display
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.reference.reference import run_on_rank_zero
from packstore.torch.reference.reference_fingerprint import check_arithmetic, check_reference

logger = logging.getLogger("packstore")

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a model runs."""

Reference = Callable[[PackedBatch], Tensor | None]
"""Returns log-probs `[S]` in nats, or None if the batch carries them or the loss needs none."""


def of_the_batch(batch: PackedBatch) -> None:
    """Computes nothing: the loss needs no reference, or the batch carries precomputed log-probs."""


def needs_reference(loss_fn: Any) -> bool:
    """Returns True for a loss that compares with a reference model."""
    return bool(getattr(loss_fn, "reference", False) or getattr(loss_fn, "kl_weight", 0))


def tell_unused(loss_fn: Any, *given: str | None) -> None:
    """Warns of references that are `given` to a loss without one."""
    names = ", ".join(map(display, filter(None, given)))
    if names and not needs_reference(loss_fn):
        logger.warning("the loss has no reference; not used: %s", names)


def frozen(policy: nn.Module, context: Autocast = nullcontext) -> Reference:
    """Makes a reference of a policy, which runs inside `context()` and without gradients."""

    @torch.no_grad()
    def logps(batch: PackedBatch) -> Tensor:
        with context():
            values: Tensor = policy(batch)
            return values

    return logps


def check_sides(
    sides: Sequence[tuple[str, Dataset]],
    reference: Any,
    accelerator: Any,
    storage_options: Mapping[str, Any] | None,
    *,
    adapter: bool,
    known: bool,
) -> None:
    """Refuses precomputed log-probs that are not those of the reference; a collective call.

    `adapter`: the reference is the model with its adapter. Of log-probs that are `known` to belong
    to the run, only other numerics are said.
    """

    def check() -> None:
        for url, dataset in sides:
            side = open_side(url, storage_options)
            with accelerator.autocast():
                device = accelerator.device
                if known:
                    check_arithmetic(side, reference, device)
                else:
                    check_reference(side, reference, dataset, adapter=adapter, device=device)

    if sides:
        run_on_rank_zero(check)
