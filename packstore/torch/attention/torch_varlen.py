"""torch's own variable-length flash kernels (``torch.nn.attention.varlen``): no package
needed.

CUDA and half precision only; no softcap. The kernels need each sequence's keys in one
run, so those of a shared prefix are copied once per response. ``varlen_attn`` would
keep the copies until the backward pass; here the rows are kept, and gathered twice. The
gradient of a row is the sum over its copies, in float32 and in order.

The gathering kernels are operators of their own, as in a traced graph both gathers
would be one, which the compiler may keep.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from packstore.errors import BackendError, quote
from packstore.torch.attention import Settings, flash
from packstore.torch.batch.layout import AttentionLayout

logger = logging.getLogger("packstore")

# Later versions require the keyword for grouped queries; torch 2.11 has neither it nor
# the check, and the same kernel.
GROUPS: dict[str, Any] = (
    {"enable_gqa": True}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    else {}
)

COPIES = "Tensor? index, Tensor? places, Tensor? starts"
"""The key runs as `kv_index`, `places` and `place_offsets` of a layout; None: they are
the rows.
"""

SIZES = "Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, float scale, SymInt left"
"""Arguments of both operators; `left` counts the keys before its own that a query sees,
-1: all.
"""


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Computes all segments in one call."""
    flash.check("torch_varlen", q_TNH, k_TKH, v_TKH, settings)
    if settings.softcap is not None:
        raise BackendError(
            "attention backend 'torch_varlen': attention scores must not be "
            "soft-capped; found "
            f"softcap {settings.softcap}. Use backend='flex' or 'flash_attn'."
        )
    left = flash.window_left(layout, settings.window)
    cu_q, cu_k = layout.cu_seqlens_q, layout.cu_seqlens_k
    longest = (layout.max_seqlen_q, layout.max_seqlen_k)
    # torch 2.15 may choose cuDNN for its varlen_attn, which has no deterministic
    # backward pass.
    if layout.kv_index is not None or torch.are_deterministic_algorithms_enabled():
        rows = layout.rows(k_TKH), layout.rows(v_TKH)
        copies = layout.kv_index, layout.places, layout.place_offsets
        sizes = cu_q, cu_k, *longest, settings.scale, left
        output: Tensor = gathered(q_TNH, *rows, *copies, *sizes)[0]
        return output
    window: dict[str, Any] = {
        "scale": settings.scale,
        "window_size": (left, 0),
        **GROUPS,
    }
    whole: Any = varlen.varlen_attn(q_TNH, k_TKH, v_TKH, cu_q, cu_k, *longest, **window)
    return whole  # type: ignore[no-any-return]


@torch.library.custom_op(
    "packstore::varlen",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {COPIES}, {SIZES}) -> (Tensor, Tensor)",
)
def gathered(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Returns the output `[T, N, H]` and its log-sum-exp.

    `k` and `v` are rows `[R, K, H]`, of which `index` takes one for each place of the
    key runs, or the runs if it is None.
    """
    *offsets, scale, left = rest[2:]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, _taken(k, index), _taken(v, index), *offsets),
        *(0.0, left < 0, False),  # without dropout
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return out, lse


@torch.library.custom_op(
    "packstore::varlen_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{COPIES}, "
    f"{SIZES}) -> (Tensor, Tensor, Tensor)",
)
def gathered_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `q`, `k` and `v` of :func:`gathered`."""
    index, places, starts, *offsets, scale, left = rest
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(grad, q, _taken(k, index), _taken(v, index), out, lse, *offsets),
        *(0.0, left < 0, state, q.new_empty(0)),
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return dq, summed(dk, places, starts), summed(dv, places, starts)


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def summed(grad: Tensor, places: Tensor | None, starts: Tensor | None) -> Tensor:
    """Sums the gradients of the places of each row, `[R, K, H]`, in float32 at
    least.
    """
    if places is None:
        return grad
    sums = _sum_copies(grad.device)(grad.flatten(1), places, starts)
    return sums.view(-1, *grad.shape[1:])


@cache
def _sum_copies(device: torch.device) -> Callable[..., Tensor]:
    """Triton's kernel if it computes the same on this device, else
    ``embedding_bag``.
    """
    if device.type != "cuda":
        return _bag
    try:
        from packstore.torch.attention._copies import sum_copies

        copies = torch.linspace(-1, 1, 24, device=device).bfloat16().view(3, 8)
        sample = (
            copies,
            *(torch.tensor(x, device=device) for x in ([2, 0, 1], [0, 2, 2, 3])),
        )
        if torch.equal(sum_copies(*sample), _bag(*sample)):
            return sum_copies
        reason = "the results differ"
    except Exception as error:  # a compiler fails in any way
        reason = quote(f"{type(error).__name__}: {error}", 300)
    logger.warning(
        "gradients of shared prefixes are summed without Triton, slower: %s", reason
    )
    return _bag


def _bag(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    return nn.functional.embedding_bag(
        places, copies, starts, mode="sum", include_last_offset=True
    )


@gathered.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@gathered_backward.register_fake
def _(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    index: Any,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if index is None:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, index, places, starts, cu_q, cu_k, *ctx.sizes = inputs
    ctx.save_for_backward(q, k, v, *output, index, places, starts, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    return *gathered_backward(grad, *ctx.saved_tensors, *ctx.sizes), *(None,) * 9


gathered.register_autograd(_backward, setup_context=_save)
