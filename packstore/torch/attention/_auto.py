"""Backend ``auto``: chooses call by call, as a model may move to its device when it is prepared.

On a CUDA device (compute capability 8 or newer) in half precision: `torch_varlen`, which needs
nothing but torch, or `flex` if scores are soft-capped or heads have a size that flash kernels do
not take. Elsewhere `sdpa`, or `reference` if scores are soft-capped. The packages of flash-attn are
taken only when they are asked for by name.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, _flash
from packstore.torch.attention._opaque import opaque
from packstore.torch.layout import AttentionLayout

logger = logging.getLogger("packstore.torch.attention")


@opaque
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
    """What the chosen backend gives."""
    flash = q_TNH.is_cuda and _has_flash(q_TNH.device)
    name = choose(flash, q_TNH.dtype, _flash.fits(q_TNH, v_TKH), softcap is not None)
    _log(name)
    return ATTENTION.load(name)(
        q_TNH,
        k_TKH,
        v_TKH,
        layout,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def choose(flash: bool, dtype: torch.dtype, flash_heads: bool, softcap: bool) -> str:
    """The backend for a device with or without flash kernels."""
    if flash and dtype in _flash.DTYPES:
        return "torch_varlen" if flash_heads and not softcap else "flex"
    return "reference" if softcap else "sdpa"


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _log(name: str) -> None:
    logger.info("packed attention: backend 'auto' is %r", name)
