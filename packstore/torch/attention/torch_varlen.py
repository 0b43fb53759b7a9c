"""torch's own variable-length flash kernels (``torch.nn.attention.varlen``): no package
needed.

CUDA and half precision only; no softcap. The kernels need each sequence's keys in one
run, so shared keys are copied for each sequence that has them. With torch's
``varlen_attn``, autograd would keep the copies until the backward pass. Here it keeps
only the rows, and each pass copies them. The gradient of a row is the sum over its
copies, in float32 and in order.

Forward and backward pass are two custom operators. As plain code in a compiled graph,
the two copies would be merged into one, which might be kept in memory.
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

from packstore.errors import quote
from packstore.torch.attention import Settings, flash
from packstore.torch.batch.layout import AttentionLayout

logger = logging.getLogger("packstore")

GROUPED_QUERIES: dict[str, Any] = {}
"""Keyword for grouped queries: torch 2.11 has neither it nor the check that later
versions make, and the same kernel."""

if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
    GROUPED_QUERIES["enable_gqa"] = True

COPIES = "Tensor? index, Tensor? places, Tensor? starts"
"""Arguments of both operators: `kv_index`, `places` and `place_offsets` of a layout;
None: no row is copied.
"""

SIZES = (
    "Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, float scale, "
    "SymInt keys_before"
)
"""Arguments of both operators; `keys_before` is the number of keys before its own that
a query sees, -1: all.
"""


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention of all segments in one call."""
    flash.check("torch_varlen", q_TNH, k_TKH, v_TKH, settings)
    flash.check_no_softcap("torch_varlen", settings)
    keys_before = flash.count_keys_before(layout, settings.window)
    # torch 2.15 may choose cuDNN for its varlen_attn, which has no deterministic
    # backward pass.
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if layout.kv_index is not None or is_deterministic:
        output: Tensor
        output, _ = attend_gathered(
            q_TNH,
            layout.rows(k_TKH),
            layout.rows(v_TKH),
            layout.kv_index,
            layout.places,
            layout.place_offsets,
            layout.cu_seqlens_q,
            layout.cu_seqlens_k,
            layout.max_seqlen_q,
            layout.max_seqlen_k,
            settings.scale,
            keys_before,
        )
        return output
    # torch also types the result with the log-sum-exp, which was not requested.
    result: Any = varlen.varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
        scale=settings.scale,
        window_size=(keys_before, 0),
        **GROUPED_QUERIES,
    )
    return result  # type: ignore[no-any-return]


@torch.library.custom_op(
    "packstore::varlen",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {COPIES}, {SIZES}) -> (Tensor, Tensor)",
)
def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    places: Tensor | None,
    starts: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    keys_before: int,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, N, H]` and its log-sum-exp `[N, T]`.

    `k` and `v` are rows `[R, K, H]`; `index` has the row of each copy, see
    :data:`COPIES`.
    """
    output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
        q,
        _gather(k, index),
        _gather(v, index),
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout_p=0.0,
        is_causal=keys_before < 0,
        return_debug_mask=False,
        scale=scale,
        window_size_left=keys_before,
        window_size_right=0,
    )
    return output, log_sum_exp


@torch.library.custom_op(
    "packstore::varlen_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{COPIES}, {SIZES}) -> (Tensor, Tensor, Tensor)",
)
def attend_gathered_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: Tensor | None,
    places: Tensor | None,
    starts: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    keys_before: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v` of :func:`attend_gathered`."""
    d_queries, d_keys, d_values = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        _gather(k, index),
        _gather(v, index),
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout_p=0.0,
        is_causal=keys_before < 0,
        # Seeds of dropout, which is off.
        rng_state=torch.zeros(2, dtype=torch.uint64, device=q.device),
        unused=q.new_empty(0),
        scale=scale,
        window_size_left=keys_before,
        window_size_right=0,
    )
    return (
        d_queries,
        sum_over_copies(d_keys, places, starts),
        sum_over_copies(d_values, places, starts),
    )


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    """Copy rows `[R, K, H]` into the order of the key runs, `[P, K, H]`."""
    return rows if index is None else rows.index_select(0, index)


def sum_over_copies(
    grad: Tensor, places: Tensor | None, starts: Tensor | None
) -> Tensor:
    """Sum the gradients `[P, K, H]` of copies into those of the rows, `[R, K, H]`.

    The sums are computed in float32 at least. Without `places` no row is copied.
    """
    if places is None:
        return grad
    sum_copies = _load_sum_copies(grad.device)
    sums = sum_copies(grad.flatten(1), places, starts)
    return sums.view(-1, *grad.shape[1:])


@cache
def _load_sum_copies(device: torch.device) -> Callable[..., Tensor]:
    """Return the function that sums copies on a device: :func:`_copies.sum_copies`.

    If Triton's kernel does not run, or a small trial shows other bits, it is
    :func:`_sum_copies_by_bag`.
    """
    if device.type != "cuda":
        return _sum_copies_by_bag
    try:
        from packstore.torch.attention._copies import sum_copies

        copies = torch.linspace(-1, 1, 24, device=device).bfloat16().view(3, 8)
        places = torch.tensor([2, 0, 1], device=device)
        starts = torch.tensor([0, 2, 2, 3], device=device)
        actual = sum_copies(copies, places, starts)
        if torch.equal(actual, _sum_copies_by_bag(copies, places, starts)):
            return sum_copies
        reason = "the results differ"
    except Exception as error:  # Triton's compiler and driver raise any class
        reason = quote(f"{type(error).__name__}: {error}", 300)
    logger.warning(
        "gradients of shared prefixes are summed without Triton, slower: %s", reason
    )
    return _sum_copies_by_bag


def _sum_copies_by_bag(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum rows as ``_copies.sum_copies`` does, on any device."""
    return nn.functional.embedding_bag(
        places, copies, starts, mode="sum", include_last_offset=True
    )


@attend_gathered.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    log_sum_exp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), log_sum_exp


@attend_gathered_backward.register_fake
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
    """Save the tensors in the order of the backward operator's arguments."""
    q, k, v, index, places, starts, cu_q, cu_k, *sizes = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, index, places, starts, cu_q, cu_k)
    ctx.sizes = sizes  # max_q, max_k, scale, keys_before
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: Tensor | None, _grad_lse: None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v; the other 9 arguments have none."""
    if grad is None:
        return (None,) * 12
    d_queries, d_keys, d_values = attend_gathered_backward(
        grad, *ctx.saved_tensors, *ctx.sizes
    )
    no_gradients = (None,) * 9
    return d_queries, d_keys, d_values, *no_gradients


attend_gathered.register_autograd(_backward, setup_context=_save)
