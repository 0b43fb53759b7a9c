"""torch's own variable-length flash kernels (``torch.nn.attention.varlen``): no package needed.

CUDA and half precision only. Softcaps raise: the kernel does not support them. Causal masks are
aligned at the end of the keys, so a shared prefix needs no special call.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from packstore.torch.attention import _flash, _varlen
from packstore.torch.batch.layout import AttentionLayout

# Later versions require the keyword for grouped queries; torch 2.11 has neither it nor the check,
# and the same kernel.
GROUPS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
)


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

    Raises:
        BackendError: the kernel does not support the device, dtype, head size or a softcap.
    """
    _flash.check("torch_varlen", q_TNH, k_TKH, v_TKH, chunk=chunk, sinks=sinks)
    if softcap is not None:
        must, found = "attention scores must not be soft-capped", f"softcap {softcap}"
        raise _flash.refusal("torch_varlen", must, found, "Use backend='flex' or 'flash_attn'")
    left = _flash.window_left(layout, sliding_window)
    cu_q, cu_k = layout.cu_seqlens_q, layout.cu_seqlens_k
    longest = (layout.max_seqlen_q, layout.max_seqlen_k)
    # torch 2.15 may choose cuDNN for its varlen_attn, which has no deterministic backward pass.
    if layout.kv_index is not None or torch.are_deterministic_algorithms_enabled():
        rows = layout.rows(k_TKH), layout.rows(v_TKH), layout.kv_index
        output: Tensor = _varlen.varlen(q_TNH, *rows, cu_q, cu_k, *longest, scale, left)[0]
        return output
    window: dict[str, Any] = {"scale": scale, "window_size": (left, 0), **GROUPS}
    whole: Any = varlen.varlen_attn(q_TNH, k_TKH, v_TKH, cu_q, cu_k, *longest, **window)
    return whole  # type: ignore[no-any-return]
