"""Log-probs of the segments, from logits, or from hidden states without ever making the logits.

The logits of 8192 tokens over a vocabulary of 128k are 4 GiB in float32, and automatic
differentiation keeps about three times that. :func:`segment_logps` with `hidden` projects only the
tokens that predict a supervised one, a chunk at a time, and computes each chunk again in the
backward pass: four head products instead of three, and memory bounded by the chunk. Recomputation
is needed because the gradient that reaches a token is known only when both sides of its pair are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packstore.errors import ConfigError, sentence
from packstore.torch.collate import PackedBatch

CHUNK_SIZE = 1024
"""Tokens whose logits exist at once: 0.5 GiB in float32 at a vocabulary of 128k."""


def segment_logps(
    batch: PackedBatch,
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Sum of the log-probs of the supervised tokens of each segment.

    Either from `logits`, as the model gives them, or from `hidden` and the output head.

    Args:
        batch: the batch; token t predicts token t + 1 of the same segment.
        logits: `[T, V]` or `[1, T, V]`.
        hidden: `[T, H]` or `[1, T, H]`, the last hidden states.
        weight: `[V, H]`, the output head.
        bias: `[V]`, its bias, if it has one.
        logit_scale: factor on the head's output (Cohere; one over Granite's `logits_scaling`).
        softcap: then ``c * tanh(logits / c)`` (Gemma's `final_logit_softcapping`), or None.
        chunk_size: with `hidden`, tokens whose logits exist at once.

    Returns:
        `[S]`, float32 (float64 from float64 inputs). Computed and summed in at least float32.

    Raises:
        ConfigError: not exactly one of `logits` and `hidden` with `weight`; shapes that do not fit.
    """
    if (logits is None) == (hidden is None) or (hidden is None) != (weight is None):
        raise ConfigError("segment_logps takes either logits, or hidden and weight.")
    targets = batch.labels[batch.target_index]
    if hidden is not None:
        head = _Head(logit_scale, softcap, max(1, chunk_size))
        rows = _rows(batch, hidden, "hidden")
        logps: Tensor = _HeadLogProbs.apply(rows, weight, bias, targets, head)  # type: ignore[no-untyped-call]
    else:
        if bias is not None or softcap is not None or logit_scale != 1:
            raise ConfigError("segment_logps: bias, logit_scale and softcap go with hidden only.")
        rows = _rows(batch, logits, "logits")
        rows = rows.to(_exact_dtype(rows))
        logps = rows.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return _sum_by_segment(batch, logps)


def segment_token_counts(batch: PackedBatch) -> Tensor:
    """Supervised tokens of each segment, int64 `[S]`: what averaged losses divide by."""
    ones = torch.ones_like(batch.target_index)
    zeros = ones.new_zeros(batch.num_segments)
    return zeros.index_add(0, batch.segment_ids[batch.target_index], ones)


def _rows(batch: PackedBatch, values: Tensor | None, name: str) -> Tensor:
    """The rows that predict a supervised token, `[n, ...]`."""
    shape = tuple(values.shape) if values is not None else ()
    if (
        values is None
        or len(shape) not in (2, 3)
        or shape[:-1]
        not in (
            (batch.num_tokens,),
            (1, batch.num_tokens),
        )
    ):
        raise ConfigError(
            sentence(
                f"segment_logps({name}=…)",
                f"its shape must be [T, …] or [1, T, …] with T = {batch.num_tokens}",
                str(shape),
                "Padded outputs become flat with batch.unpad(…)",
            )
        )
    return values.reshape(batch.num_tokens, shape[-1])[batch.target_index - 1]


def _sum_by_segment(batch: PackedBatch, logps: Tensor) -> Tensor:
    # In float32 the sum of 1024 tokens loses 2e-3; in float64 it costs nothing at this size.
    wide = logps if logps.device.type == "mps" else logps.double()
    sums = wide.new_zeros(batch.num_segments)
    return sums.index_add(0, batch.segment_ids[batch.target_index], wide).to(logps.dtype)


class _Head(NamedTuple):
    scale: float
    softcap: float | None
    chunk_size: int


class _HeadLogProbs(torch.autograd.Function):
    """log softmax(cap(scale * (hidden @ weight.T + bias)))[target], one chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head = head
        logps = torch.empty(len(hidden), dtype=_exact_dtype(hidden), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(hidden), head.chunk_size):
                logits, _ = _project(hidden[part], weight, bias, head)
                chosen = logits.gather(-1, targets[part, None]).squeeze(-1)
                logps[part] = chosen - logits.logsumexp(-1)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        needs = ctx.needs_input_grad
        exact = _exact_dtype(hidden)
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        # Partial sums in bf16 would lose the small terms, and so bias the gradient of the head.
        d_weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=exact) if needs[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(hidden), ctx.head.chunk_size):
                logits, slope = _project(hidden[part], weight, bias, ctx.head)
                delta = logits.softmax(-1).neg_()
                delta.scatter_add_(-1, targets[part, None], torch.ones_like(delta[:, :1]))
                delta.mul_(grad[part, None] * slope)
                if d_hidden is not None:
                    d_hidden[part] = _product(delta, weight, weight.dtype)
                if d_weight is not None:
                    d_weight += _product(delta.T, hidden[part], hidden.dtype)
                if d_bias is not None:
                    d_bias += delta.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head
) -> tuple[Tensor, Tensor | float]:
    """Logits of some rows, and the derivative of each with respect to the plain product."""
    logits = _product(hidden, weight.T, weight.dtype)
    if bias is not None:
        logits = logits.add_(bias)
    if head.scale != 1:
        logits = logits.mul_(head.scale)
    if head.softcap is None:
        return logits, head.scale
    capped = torch.tanh(logits / head.softcap)
    return capped * head.softcap, (1 - capped * capped) * head.scale


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in float32 or better; a GPU multiplies half precision as `dtype`."""
    exact = torch.promote_types(_exact_dtype(left), _exact_dtype(right))
    if left.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.to(dtype), right.to(dtype), out_dtype=torch.float32)
    return left.to(exact) @ right.to(exact)


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))


def _exact_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
