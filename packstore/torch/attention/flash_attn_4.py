"""FlashAttention-4: the package `flash-attn-4`, module `flash_attn.cute`, for Hopper and Blackwell.

CUDA and half precision only; grouped queries, windows and soft-capped scores.
"""

from __future__ import annotations

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from packstore.torch.attention import _flash
from packstore.torch.batch.layout import AttentionLayout

LEAST = (9, 0)
"""Compute capability that the backward pass needs."""


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes all segments in one call.

    The kernel's fourth positional argument is `qv`, not the offsets.

    Raises:
        BackendError: the kernel does not support the device, dtype or head size.
    """
    _flash.check("flash_attn_4", q_TNH, k_TKH, v_TKH, chunk=chunk, sinks=sinks)
    found = _flash.capability(q_TNH.device)
    if found < LEAST:
        # On older devices its forward pass runs, and the backward pass ends in an assertion.
        must = f"the device must have compute capability {LEAST[0]} or newer (Hopper, Blackwell)"
        do = "Use backend='torch_varlen' or 'flash_attn'"
        raise _flash.refusal("flash_attn_4", must, f"{found[0]}.{found[1]}", do)
    left = _flash.window_left(layout, sliding_window)
    output: Tensor
    output, _ = _flash.call(
        flash_attn_varlen_func,
        (q_TNH, k_TKH, v_TKH),
        layout,
        window=(None, None) if left < 0 else (left, 0),
        softmax_scale=scale,
        softcap=softcap or 0.0,
    )
    return output
