"""Training metrics over a whole dataset, each example once over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from packstore.torch.batch.collate import PackedBatch
from packstore.torch.losses.grouped_metrics import GroupedMetrics
from packstore.torch.training.reference import Reference

OF_A_GROUP = ("examples", "loss", "rewards/accuracies", "rewards/margins", "perplexity")
"""Metrics that are recorded for each group."""


@torch.no_grad()
def evaluate_batches(
    policy: nn.Module,
    batches: Iterable[PackedBatch],
    grouped: GroupedMetrics,
    reference: Reference,
    device: torch.device,
) -> dict[str, float]:
    """Returns the mean of each metric of the loss over all batches on all ranks.

    Metrics of a group are named ``column=value/…``. A collective call; every rank needs at least
    one batch, which a loader with ``mode="eval"`` guarantees.

    Args:
        policy: returns the log-probs `[S]` of a batch; its training mode is restored.
        batches: batches of this rank.
        grouped: sums the metrics.
        reference: returns log-probs of the reference model.
        device: device of the policy.
    """
    training = policy.training
    policy.eval()
    try:
        for batch in batches:
            here = batch.to(device)
            grouped.add(policy(here), here, reference(here))
    finally:
        policy.train(training)
    figures = grouped.figures(device)
    found = {n: v for n, v in figures["metrics"].items() if n not in ("examples", "perplexity")}
    for group, own in figures["by"].items():
        found |= {f"{grouped.by}={group}/{n}": own[n] for n in OF_A_GROUP if n in own}
    return found
