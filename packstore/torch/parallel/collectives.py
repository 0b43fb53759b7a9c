"""The two differentiable collectives of context parallelism.

Both differentiate the sum of the losses of all ranks. All ranks of a context-parallel group get the
same sums and the same loss, which that sum counts once per rank. So average gradients of parameters
over the group, as DDP and FSDP do: they then equal those of one process. For counts and divisors a
group is one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.13 renamed both, and warns about the old names.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_segment_sums(logps: Tensor, group: Any = None) -> Tensor:
    """Sums the log-probs of segments over all ranks of the group.

    Call it before anything that is not linear in the sums, such as the loss.

    Args:
        logps: `[S]`, result of :func:`~packstore.torch.segment_logps` for this rank's tokens.
        group: the context-parallel process group; None: all ranks.

    Returns:
        `[S]` in nats, the same on all ranks. Its gradient is summed over the ranks: average the
        gradients of parameters over the group, or divide the loss by its size and sum them.
    """
    return _AllReduce.apply(logps, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_rows(rows: Tensor, group: Any = None) -> Tensor:
    """Gathers the rows `[n, ...]` of all ranks: `[ranks * n, ...]`; differentiable."""
    return _AllGather.apply(rows, group)  # type: ignore[no-untyped-call, no-any-return]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        out = rows.new_empty((ranks * len(rows), *rows.shape[1:]))
        _gather_into(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        out = grad.new_empty((len(grad) // ranks, *grad.shape[1:]))
        _scatter_sum(out, grad.contiguous(), group=ctx.group)
        return out, None
