"""Log-probs of chosen tokens from hidden states and the output head, a tile of logits at a time.

A tile is some tokens times some columns of the vocabulary, so memory is bounded for any vocabulary
size. The forward pass keeps one number per token, the log-sum-exp of its logits; the backward pass
recomputes the tiles. The vocabulary is the outer loop: the gradient of a column is summed over all
tokens in float32 and rounded once to the dtype of the head, so that no float32 copy of the head or
of its gradient exists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNK = 2**21
"""Logits per tile on a CPU, 8 MiB: larger tiles leave its caches, and are no faster
(``benchmarks/logprobs.py``)."""

GPU_CHUNK = 2**26
"""Logits per tile on other devices, 256 MiB: few large products."""

ALIGNED = 8
"""Elements of 2 bytes in 16 bytes."""

ALIGNED_COLUMNS = 128
"""Columns of a tile of matrix products on a GPU."""

HALF = (torch.bfloat16, torch.float16)


class Projection(NamedTuple):
    """Parameters that turn the product of hidden states and head into logits.

    Attributes:
        scale: factor on the product (and its bias).
        softcap: ``c`` of a final ``c * tanh(logits / c)``, or None.
        chunk_size: number of logits held at once.
        group: process group that shards the vocabulary in rank order, or None.
    """

    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int = CPU_CHUNK
    group: Any = None


class HeadLogProbs(torch.autograd.Function):
    """``log softmax(cap(scale * (hidden @ weight.T + bias)))[target]``, `[n]`, in nats.

    Arguments are hidden `[n, H]`, weight `[V, H]`, bias `[V]` or None, targets int64 `[n]` and a
    :class:`Projection`. With a group, weight and bias are this rank's shard of the vocabulary, and
    the gradient of the hidden states is summed over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: Projection,
    ) -> Tensor:
        """The log-probs, at least in float32."""
        ctx.how, ctx.operand = how, _operand_dtype(hidden, weight)
        targets = targets - first_column(len(weight), how.group)
        exact = exact_dtype(hidden, weight)
        # Rows: highest logit so far, sum of exponentials relative to it, logit of the target.
        state = torch.zeros((3, len(hidden)), dtype=exact, device=hidden.device)
        state[0] = -math.inf
        inputs = hidden.to(ctx.operand)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in _tiles(len(hidden), len(weight), how.chunk_size):
                head = weight[columns].to(ctx.operand)
                for part in rows:
                    logits, _ = _project(inputs[part], head, _part(bias, columns), how)
                    _fold(state[:, part], logits, targets[part] - columns.start)
        log_total = merge(state, how.group)
        ctx.save_for_backward(hidden, weight, bias, targets, log_total)
        return state[2] - log_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one; nothing is computed for a frozen head or trunk."""
        hidden, weight, bias, targets, log_total = ctx.saved_tensors
        how, operand = ctx.how, ctx.operand
        exact = log_total.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=exact) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if needs_bias else None
        inputs, grad = hidden.to(operand), grad * how.scale
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in _tiles(len(hidden), len(weight), how.chunk_size):
                head = weight[columns].to(operand)
                d_head = None if d_weight is None else _accumulator(d_weight[columns], exact)
                for part in rows:
                    logits, slope = _project(inputs[part], head, _part(bias, columns), how)
                    delta = _softmax_gap(logits, log_total[part], targets[part] - columns.start)
                    delta.mul_(grad[part, None])
                    if slope is not None:
                        delta.mul_(slope)
                    if d_bias is not None:
                        d_bias[columns] += delta.sum(0)
                    delta = delta.to(operand)
                    if d_hidden is not None:
                        _add_product(d_hidden[part], delta, head)
                    if d_head is not None:
                        _add_product(d_head, delta.T, inputs[part])
                if d_weight is not None and d_head is not None and d_weight.dtype != exact:
                    d_weight[columns] = d_head
        if d_hidden is not None:
            reduce(d_hidden, how.group)
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None


class ShardedLogProbs(torch.autograd.Function):
    """``log softmax(logits)[target]``, `[n]`, from this rank's columns `[n, V / P]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        """The log-probs, at least in float32."""
        targets = targets - first_column(logits.shape[-1], group)
        values = logits.to(exact_dtype(logits), copy=True)
        state = torch.zeros((3, len(logits)), dtype=values.dtype, device=values.device)
        state[0] = -math.inf
        _fold(state, values, targets)
        log_total = merge(state, group)
        ctx.save_for_backward(logits, targets, log_total)
        return state[2] - log_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of this rank's logits."""
        logits, targets, log_total = ctx.saved_tensors
        delta = _softmax_gap(logits.to(log_total.dtype, copy=True), log_total, targets)
        return delta.mul_(grad[:, None]).to(logits.dtype), None, None


def exact_dtype(*values: Tensor) -> torch.dtype:
    """Returns the widest dtype of the tensors, at least float32."""
    widest = torch.float32
    for value in values:
        widest = torch.promote_types(widest, value.dtype)
    return widest


def default_chunk(device: torch.device) -> int:
    """Returns the logits per tile on `device`."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


def first_column(width: int, group: Any) -> int:
    """Returns the first column of this rank's vocabulary shard; all shards are `width` wide."""
    return 0 if group is None else width * dist.get_rank(group)


def merge(state: Tensor, group: Any) -> Tensor:
    """Returns the log-sum-exp over all ranks, `[n]`; sums the target logits in place.

    Args:
        state: `[3, n]`: highest logit, sum of exponentials relative to it, logit of the target or
            0.
        group: process group that shards the vocabulary, or None.
    """
    if group is not None:
        highest = state[0].clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        state[1] *= (state[0] - highest).exp()
        state[0] = highest
        reduce(state[1:], group)
    return state[0] + state[1].log()


def reduce(values: Tensor, group: Any) -> None:
    """Sums `values` over the ranks of `group`, in place."""
    if group is not None:
        dist.all_reduce(values, group=group)


def _operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the operands: a GPU multiplies half precision and accumulates in float32."""
    device = hidden.device.type
    if device == "cuda":
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        if weight.dtype in HALF:
            return weight.dtype
    return exact_dtype(hidden, weight)


def _tiles(n: int, vocab: int, chunk_size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Column slices, each with its row slices: roughly square tiles of `chunk_size` logits.

    A GPU multiplies at full speed only where rows start at multiples of 16 bytes. So widths are
    multiples of 128 columns, up to 7 last columns of the vocabulary are a tile of their own, and
    rows are split evenly, in multiples of 8.
    """
    height = max(1, min(n, math.isqrt(chunk_size)))
    width = max(1, chunk_size // height)
    if width > ALIGNED_COLUMNS:
        width -= width % ALIGNED_COLUMNS
    even = math.ceil(n / math.ceil(n / height)) if n else 1
    height = min(height, even + -even % ALIGNED)
    rows = [slice(i, min(i + height, n)) for i in range(0, n, height)]
    aligned = vocab - vocab % ALIGNED
    cuts = [*range(0, aligned, width), *([aligned] if aligned < vocab else []), vocab]
    return ((slice(a, b), rows) for a, b in itertools.pairwise(cuts))


def _part(bias: Tensor | None, columns: slice) -> Tensor | None:
    return None if bias is None else bias[columns]


def _project(
    hidden: Tensor, head: Tensor, bias: Tensor | None, how: Projection
) -> tuple[Tensor, Tensor | None]:
    """Logits of a tile, and the derivative of the softcap at each, if there is one."""
    logits = _product(hidden, head.T)
    if bias is not None:
        logits.add_(bias)
    if how.scale != 1:
        logits.mul_(how.scale)
    if how.softcap is None:
        return logits, None
    capped = logits.div_(how.softcap).tanh_()
    return capped * how.softcap, 1 - capped * capped


def _fold(state: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Folds a tile into `state`, overwriting `logits`; `targets` may lie outside the tile."""
    inside = (targets >= 0) & (targets < logits.shape[-1])
    place = targets.clamp(0, logits.shape[-1] - 1)
    state[2] += logits.gather(-1, place[:, None]).squeeze(-1).where(inside, 0)
    highest = torch.maximum(state[0], logits.amax(-1))
    state[1] *= (state[0] - highest).exp_()
    state[1] += logits.sub_(highest[:, None]).exp_().sum(-1)
    state[0] = highest


def _softmax_gap(logits: Tensor, log_total: Tensor, targets: Tensor) -> Tensor:
    """``[j is the target] - softmax_j`` of a tile, in place."""
    inside = (targets >= 0) & (targets < logits.shape[-1])
    place = targets.clamp(0, logits.shape[-1] - 1)
    gap = logits.sub_(log_total[:, None]).exp_().neg_()
    return gap.scatter_add_(-1, place[:, None], inside[:, None].to(gap.dtype))


def _accumulator(gradient: Tensor, exact: torch.dtype) -> Tensor:
    """Zeros to accumulate in: `gradient` itself if its dtype is wide enough."""
    if gradient.dtype == exact:
        return gradient.zero_()
    return torch.zeros_like(gradient, dtype=exact)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype in HALF:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, summed in the dtype of `total`, without a temporary."""
    if left.dtype in HALF:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left, right)
