"""FlashAttention-3 for Hopper: the module `flash_attn_interface`, which is built from source.

CUDA and half precision only; grouped queries, windows and soft-capped scores.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packstore.errors import MissingExtraError
from packstore.torch.attention import _flash
from packstore.torch.batch.layout import AttentionLayout

try:
    from flash_attn_interface import flash_attn_varlen_func
except ImportError as error:
    raise MissingExtraError(
        "attention backend 'flash_attn_3' needs the module 'flash_attn_interface', which is not "
        "installed and not on PyPI. Run: git clone --recursive "
        "https://github.com/Dao-AILab/flash-attention && pip install --no-build-isolation "
        "./flash-attention/hopper"
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
    _flash.check("flash_attn_3", q_TNH, k_TKH, v_TKH, chunk=chunk, sinks=sinks)
    left = _flash.window_left(layout, sliding_window)
    output: Any = _flash.call(
        flash_attn_varlen_func,
        (q_TNH, k_TKH, v_TKH),
        layout,
        window=(left, -1 if left < 0 else 0),
        softmax_scale=scale,
        softcap=softcap or 0.0,
    )
    # Builds before 2025-11 always return the log-sum-exp as well.
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]
