"""The metrics of training over a whole dataset, each example once over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from packstore.torch.collate import PackedBatch
from packstore.torch.loss import PreferenceLoss
from packstore.torch.metrics import Metrics
from packstore.torch.training.reference import Reference


@torch.no_grad()
def evaluate_batches(
    policy: nn.Module,
    batches: Iterable[PackedBatch],
    loss_fn: PreferenceLoss,
    reference: Reference,
    device: torch.device,
) -> dict[str, float]:
    """The mean of each metric of the loss over all batches on all ranks.

    A collective call; every rank needs a batch at least, as a loader with ``mode="eval"`` gives.

    Args:
        policy: gives the log-probs `[S]` of a batch; its mode is put back as it was.
        batches: of this rank.
        loss_fn: the loss.
        reference: of the log-probs of the reference model.
        device: of the policy.
    """
    metrics, training = Metrics(), policy.training
    policy.eval()
    try:
        for batch in batches:
            here = batch.to(device)
            metrics.add(loss_fn(policy(here), here, reference(here)).metrics)
    finally:
        policy.train(training)
    return metrics.means()
