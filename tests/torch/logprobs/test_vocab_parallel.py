"""A head whose rows lie on several ranks gives the log-probs and gradients of the whole head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import launch
from torch import Tensor

from packstore.testing import random_examples
from packstore.torch import PackedBatch, PreferenceLoss, collate, segment_logps

HIDDEN = 6
HEADS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 1},
    {"chunk_size": 90, "logit_scale": 0.3},
    {"chunk_size": 300, "softcap": 1.5, "logit_scale": 2.0},
    {"biased": True, "softcap": 2.5},
    {"from_logits": True},
]


def step(
    task: tuple[PackedBatch, Tensor, Tensor, Tensor], group: Any, head: dict[str, Any]
) -> list[Tensor]:
    """Log-probs, loss, and the gradients of hidden states, weight and bias."""
    batch, how = task[0], dict(head)
    leaves = [x.clone().requires_grad_() for x in task[1:]]
    hidden, weight, bias = leaves
    if how.pop("from_logits", False):
        logps = segment_logps(batch, logits=hidden @ weight.T + bias, group=group)
    else:
        how["bias"] = bias if how.pop("biased", False) else None
        logps = segment_logps(batch, hidden=hidden, weight=weight, group=group, **how)
    loss = PreferenceLoss("dpo")(logps, batch, torch.zeros_like(logps)).loss
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)
    ]
    return [logps.detach(), loss.detach(), *gradients]


def on_rank(task: tuple[PackedBatch, Tensor, Tensor, Tensor]) -> list[list[Tensor]]:
    batch, hidden, weight, bias = task
    rank, size = dist.get_rank(), dist.get_world_size()
    own = (batch, hidden, weight.chunk(size)[rank], bias.chunk(size)[rank])
    return [step(own, dist.group.WORLD, head) for head in HEADS]


def test_equal_to_the_whole_head(kit: SimpleNamespace, tmp_path: Path) -> None:
    batch = collate(kit.packed(random_examples(7, seed=2), [3, 4], "shared_prefix"), "preference")
    torch.manual_seed(0)
    hidden = torch.randn(batch.num_tokens, HIDDEN, dtype=torch.float64)
    # Logits far apart: each rank must subtract the highest of all ranks, not its own.
    weight = torch.randn(kit.VOCAB, HIDDEN, dtype=torch.float64) * 20
    bias = torch.randn(kit.VOCAB, dtype=torch.float64)
    task = (batch, hidden, weight, bias)
    results = launch(__file__, task, 2, tmp_path)
    for i, head in enumerate(HEADS):
        logps, loss, d_hidden, d_weight, d_bias = step(task, None, head)
        for rank in range(2):
            found = results[rank][i]
            assert (found[0] - logps).abs().max() < 1e-10, head
            assert (found[1] - loss).abs() < 1e-10, head
        if head.get("from_logits"):  # what made the logits sums their gradients over the ranks
            found_hidden = results[0][i][2] + results[1][i][2]
        else:
            found_hidden = results[0][i][2]
            assert torch.equal(found_hidden, results[1][i][2]), head
        assert (found_hidden - d_hidden).abs().max() < 1e-10, head
        for place, expected in ((3, d_weight), (4, d_bias)):
            both = torch.cat([results[rank][i][place] for rank in range(2)])
            assert (both - expected).abs().max() < 1e-10, head
