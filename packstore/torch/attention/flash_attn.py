"""FlashAttention-2: the package `flash_attn`, version 2.8.

CUDA and half precision only; grouped queries, windows and soft-capped scores.
"""

from __future__ import annotations

from torch import Tensor

from packstore.errors import MissingExtraError
from packstore.torch.attention import _flash
from packstore.torch.batch.layout import AttentionLayout

try:
    from flash_attn import flash_attn_varlen_func
except ImportError as error:
    raise MissingExtraError(
        "attention backend 'flash_attn' needs the package 'flash_attn', which is not installed; "
        "its build needs nvcc and the installed torch. Run: "
        "pip install ninja packaging setuptools wheel && "
        "pip install --no-build-isolation 'packstore[flash]'"
    ) from error


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
        BackendError: the kernel does not support the device, dtype or head size.
    """
    _flash.check("flash_attn", q_TNH, k_TKH, v_TKH, chunk=chunk, sinks=sinks)
    left = _flash.window_left(layout, sliding_window)
    output: Tensor = _flash.call(
        flash_attn_varlen_func,
        (q_TNH, k_TKH, v_TKH),
        layout,
        window=(left, -1 if left < 0 else 0),
        softmax_scale=scale,
        softcap=softcap or 0.0,
    )
    return output
