"""FlashAttention-2: the package `flash_attn`, version 2.8.

CUDA and half precision only; grouped queries, windows and soft-capped scores. The backward pass is
the deterministic one if ``torch.use_deterministic_algorithms`` asks for it.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from packstore.torch.attention import _flash
from packstore.torch.layout import AttentionLayout


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One call over all segments.

    Raises:
        BackendError: another device, dtype or head size than the kernel takes.
    """
    _flash.check("flash_attn", q_TNH, k_TKH, v_TKH)
    left = _flash.window_left(layout, sliding_window)
    output: Tensor = flash_attn_varlen_func(
        q_TNH,
        layout.keys(k_TKH),
        layout.keys(v_TKH),
        cu_seqlens_q=layout.cu_seqlens_q,
        cu_seqlens_k=layout.cu_seqlens_k,
        max_seqlen_q=layout.max_seqlen_q,
        max_seqlen_k=layout.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        window_size=(left, -1 if left < 0 else 0),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output
