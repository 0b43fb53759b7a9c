"""torch's flash kernels on keys and values that are gathered again in the backward pass.

The kernels need each sequence's keys in one run, so those of a shared prefix are copied once per
response. ``varlen_attn`` would keep the copies until the backward pass; here the rows are kept, and
gathered twice. The gradient of a row is the sum over its copies, in float32: with two copies, as
pairs have them, it is the same in every run; with more, under
``torch.use_deterministic_algorithms``.

Operators of their own: in a traced graph both gathers would be one, which the compiler may keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 2**16
"""Gathered rows whose gradients are in float32 at once: 0.25 GiB for 8 heads of 128."""


@torch.library.custom_op("packstore::varlen", mutates_args=())
def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor]:
    """Returns the output `[T, N, H]` and its log-sum-exp.

    Args:
        q: `[T, N, H]`.
        k: `[R, K, H]`, rows of keys.
        v: `[R, K, H]`, rows of values.
        index: int64, the row at each place of the key runs; None: `k` and `v` are the runs.
        cu_q: int32, offsets of the query segments.
        cu_k: int32, offsets of the key runs.
        max_q: longest query segment.
        max_k: longest key run.
        scale: factor on scores.
        left: keys before its own that a query sees; -1: all.
    """
    k, v = _taken(k, index), _taken(v, index)
    causal = left < 0  # a window that ends at the query's own key is causal as well
    window = {"window_size_left": left, "window_size_right": 0}
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, **window
    )
    return found[0], found[1]


@torch.library.custom_op("packstore::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `q`, `k` and `v` of :func:`varlen`."""
    runs = _taken(k, index), _taken(v, index)
    nothing, state = q.new_empty(0), torch.zeros(2, dtype=torch.uint64, device=q.device)
    window = {"window_size_left": left, "window_size_right": 0}
    ends = (cu_q, cu_k, max_q, max_k, 0.0, left < 0, state, nothing)  # 0.0: no dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, *runs, out, lse, *ends, scale=scale, **window
    )
    return dq, _summed(dk, index, k), _summed(dv, index, v)


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _summed(grad: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Sums the gradients of the places of each row, in float32 at least."""
    if index is None:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    sums = grad.new_zeros(rows.shape, dtype=wide)
    for part, places in zip(torch.split(grad, BLOCK), torch.split(index, BLOCK), strict=True):
        sums.index_add_(0, places, part.to(wide))
    return sums.to(grad.dtype)


@varlen.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@varlen_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if index is None:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, index, cu_q, cu_k, *ctx.sizes = inputs
    ctx.save_for_backward(q, k, v, *output, index, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad is None:
        return None, None, None, *nothing
    return *varlen_backward(grad, *ctx.saved_tensors, *ctx.sizes), *nothing


varlen.register_autograd(_backward, setup_context=_save)
