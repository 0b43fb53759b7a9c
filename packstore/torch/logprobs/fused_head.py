"""Log-probs of chosen tokens from hidden states and the output head, a tile of logits
at a time.

A tile is some tokens times some columns of the vocabulary, so memory is bounded for any
vocabulary size. The forward pass keeps one number per token, the log-sum-exp of its
logits; the backward pass recomputes the tiles, as a token's gradient is known only
after both sides of its pair are, or takes those that were kept. The vocabulary is the
outer loop: the gradient of a column is summed over all tokens in float32 and rounded
once to the dtype of the head, so that no float32 copy of the head or of its gradient
exists.

A frozen head (LoRA) needs no second pass: the forward pass sums the rows of the head,
weighted by the softmax so far, as flash attention sums values, and the backward pass is
a scaling.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packstore.torch.logprobs.tiles import (
    HALF,
    Projection,
    Tile,
    choose_passes,
    product,
    tiles,
)


class HeadLogProbs(torch.autograd.Function):
    """``log softmax(cap(scale * (hidden @ weight.T + bias)))[target]``, `[n]`, in nats.

    Arguments are hidden `[n, H]`, weight `[V, H]`, bias `[V]` or None, targets int64
    `[n]` and a :class:`Projection`.
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
        exact, operand = exact_dtype(hidden, weight), _operand_dtype(hidden, weight)
        needs_hidden, *needs_head, _, _ = ctx.needs_input_grad
        ctx.frozen_head = needs_hidden and not any(needs_head)
        keep = how.keep_logits and any(needs_head)
        # Rows: highest logit so far, sum of exponentials relative to it, logit of the
        # target.
        state = torch.zeros((3, len(hidden)), dtype=exact, device=hidden.device)
        state[0] = torch.finfo(
            exact
        ).min  # not -inf, as a tile of such logits would be NaN
        inputs = hidden.to(operand)
        rest = torch.zeros_like(hidden, dtype=exact) if ctx.frozen_head else None
        kept: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            passes = choose_passes(inputs, weight, bias, targets, how)
            for columns, rows in tiles(len(hidden), len(weight), how.chunk_size):
                head = weight[columns].to(operand)
                for part in rows:
                    logits = product(inputs[part], head.T)
                    if keep:
                        kept.append(logits)
                    tile = _tile(logits, bias, targets[part], columns, how)
                    if rest is None:
                        passes.update_logsumexp(state[:, part], tile)
                    else:
                        weights, factor = passes.update_logsumexp_and_weights(
                            state[:, part], tile, operand
                        )
                        _add_product(rest[part].mul_(factor[:, None]), weights, head)
        log_total = state[0] + state[1].log()
        logps = state[2] - log_total
        ctx.how, ctx.operand, ctx.passes, ctx.dtype = how, operand, passes, hidden.dtype
        if rest is not None:
            rest.mul_((state[0] - log_total).exp_()[:, None])
            share = torch.expm1(logps).neg_()
            if how.softcap is not None:
                share *= 1 - (state[2] / how.softcap).square_()
            d_logps = weight[targets].to(operand).to(exact).mul_(share[:, None])
            ctx.save_for_backward(d_logps.sub_(rest).mul_(how.scale))
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, log_total, *kept)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one; nothing is computed for a frozen head
        or trunk.
        """
        how, operand = ctx.how, ctx.operand
        if ctx.frozen_head:
            (d_logps,) = ctx.saved_tensors
            return (d_logps * grad[:, None]).to(ctx.dtype), None, None, None, None
        hidden, weight, bias, targets, log_total, *kept = ctx.saved_tensors
        exact = log_total.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=exact) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if needs_bias else None
        inputs, grad = hidden.to(operand), grad * how.scale
        rounded = exact if needs_bias else operand  # the bias sums what is not rounded
        products = iter(kept)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in tiles(len(hidden), len(weight), how.chunk_size):
                head = weight[columns].to(operand)
                d_head = None
                if (
                    d_weight is not None and len(rows) != 1
                ):  # in place, where the dtype is wide
                    d_head = d_weight[columns].zero_()
                    d_head = d_head if d_head.dtype == exact else d_head.to(exact)
                for part in rows:
                    logits = next(products) if kept else product(inputs[part], head.T)
                    tile = _tile(logits, bias, targets[part], columns, how)
                    delta = ctx.passes.grad_logits(
                        tile, log_total[part], grad[part], rounded
                    )
                    if d_bias is not None:
                        d_bias[columns] += delta.sum(0)
                    delta = delta.to(operand)
                    if d_hidden is not None:
                        _add_product(d_hidden[part], delta, head)
                    if d_head is not None:
                        _add_product(d_head, delta.T, inputs[part])
                    elif d_weight is not None:  # one product: there is nothing to sum
                        _write_product(d_weight[columns], delta.T, inputs[part])
                if (
                    d_weight is not None
                    and d_head is not None
                    and d_weight.dtype != exact
                ):
                    d_weight[columns] = d_head
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return (
            d_hidden,
            d_weight,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def exact_dtype(*values: Tensor) -> torch.dtype:
    """Returns the widest dtype of the tensors, at least float32."""
    return reduce(torch.promote_types, (value.dtype for value in values), torch.float32)


def _operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the operands: a GPU multiplies half precision and accumulates in
    float32.
    """
    device = hidden.device.type
    if device == "cuda":
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        if weight.dtype in HALF:
            return weight.dtype
    return exact_dtype(hidden, weight)


def _tile(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    columns: slice,
    how: Projection,
) -> Tile:
    of_columns = None if bias is None else bias[columns]
    return Tile(logits, of_columns, targets - columns.start, how)


def _write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out = left @ right``, summed in float32 at least, and rounded once."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(product(left, right))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, summed in the dtype of `total`, without a
    temporary.
    """
    if left.dtype in HALF:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left, right)
