"""Backend ``auto``: chooses at each call, as a model may change device after it was
prepared.

On a CUDA device (compute capability 8 or newer) in half precision: `torch_varlen`, or
`flex` if scores are soft-capped, with chunks or sinks, or if flash kernels do not
support the head size. Elsewhere `sdpa`, or `reference` if scores are soft-capped.

``torch.compile`` makes the choice while it traces, as device, dtype and sizes are
guarded: with `torch_varlen` the graph stays whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, Attend, Settings, flash
from packstore.torch.batch.layout import AttentionLayout

logger = logging.getLogger("packstore.torch.attention")

_ASKED: ContextVar[tuple[torch.device, set[str]] | None] = ContextVar(
    "asked", default=None
)
"""A device, and the backends that this thread's calls would choose on it."""

_LOADED: dict[str, Attend] = {}


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Computes attention with the chosen backend."""
    supported = (
        flash.fits(q_TNH, v_TKH) and settings.chunk is None and settings.sinks is None
    )
    name = _chosen(q_TNH.device, q_TNH.dtype, supported, settings.softcap is not None)
    return _LOADED[name](q_TNH, k_TKH, v_TKH, layout, settings)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _chosen(
    device: torch.device, dtype: torch.dtype, supported: bool, capped: bool
) -> str:
    """Returns the backend of a call, loaded and logged; records what :func:`chosen_on`
    asks.
    """
    name = choose(flash.runs_on(device), dtype, supported, capped)
    if name not in _LOADED:
        _LOADED[name] = ATTENTION.load(name)
        logger.info("packed attention: backend 'auto' is %r", name)
    if asked := _ASKED.get():
        asked[1].add(choose(flash.runs_on(asked[0]), dtype, supported, capped))
    return name


def choose(on_gpu: bool, dtype: torch.dtype, supported: bool, capped: bool) -> str:
    """Returns the backend for a device with or without flash kernels."""
    if on_gpu and dtype in flash.DTYPES:
        return "torch_varlen" if supported and not capped else "flex"
    return "reference" if capped else "sdpa"


@contextmanager
def chosen_on(device: torch.device) -> Iterator[set[str]]:
    """Yields a set to which attention calls inside add the backend they would use on
    `device`.
    """
    names: set[str] = set()
    token = _ASKED.set((device, names))
    try:
        yield names
    finally:
        _ASKED.reset(token)
