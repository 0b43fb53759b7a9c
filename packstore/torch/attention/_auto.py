"""Backend ``auto``: chooses call by call, as a model may move to its device when it is prepared.

On a CUDA device (compute capability 8 or newer) in half precision: `torch_varlen`, which needs
nothing but torch, or `flex` if scores are soft-capped or heads have a size that flash kernels do
not take. Elsewhere `sdpa`, or `reference` if scores are soft-capped. The packages of flash-attn are
taken only when they are asked for by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, _flash
from packstore.torch.attention._opaque import opaque
from packstore.torch.layout import AttentionLayout

logger = logging.getLogger("packstore.torch.attention")

_ASKED: ContextVar[tuple[torch.device, set[str]] | None] = ContextVar("asked", default=None)
"""A device, and what the calls of this thread would choose on it."""


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
    needs = (q_TNH.dtype, _flash.fits(q_TNH, v_TKH), softcap is not None)
    name = choose(_has_flash(q_TNH.device), *needs)
    asked = _ASKED.get()
    if asked is None:
        _log(name)
    else:
        asked[1].add(choose(_has_flash(asked[0]), *needs))
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


@contextmanager
def chosen_on(device: torch.device) -> Iterator[set[str]]:
    """The set that the calls inside fill: the backends that they would take on `device`."""
    names: set[str] = set()
    token = _ASKED.set((device, names))
    try:
        yield names
    finally:
        _ASKED.reset(token)


@cache
def _has_flash(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _log(name: str) -> None:
    logger.info("packed attention: backend 'auto' is %r", name)
