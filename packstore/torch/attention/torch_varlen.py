"""torch's own variable-length flash kernels (``torch.nn.attention.varlen``): no package needed.

CUDA and half precision only. Softcaps raise: the kernel does not support them. Causal masks are
aligned at the end of the keys, so a shared prefix needs no special call.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention import varlen

from packstore.torch.attention import _flash
from packstore.torch.batch.layout import AttentionLayout

# torch 2.11 has no such keyword; later versions require it for grouped queries.
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
) -> Tensor:
    """Computes all segments in one call.

    Raises:
        BackendError: the kernel does not support the device, dtype, head size or a softcap.
    """
    _flash.check("torch_varlen", q_TNH, k_TKH, v_TKH)
    if softcap is not None:
        must, found = "attention scores must not be soft-capped", f"softcap {softcap}"
        raise _flash.refusal("torch_varlen", must, found, "Use backend='flex' or 'flash_attn'")
    keys, values = layout.keys(k_TKH), layout.keys(v_TKH)
    if not GROUPS:
        group = q_TNH.shape[1] // k_TKH.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    output: Any = varlen.varlen_attn(
        q_TNH,
        keys,
        values,
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
        scale=scale,
        window_size=(_flash.window_left(layout, sliding_window), 0),
        **GROUPS,
    )
    return output  # type: ignore[no-any-return]
