"""Backend ``auto``: chooses another backend at each call.

Not once, as a model may change its device after it was prepared.

On a CUDA device (compute capability 8 or newer) in half precision: `torch_varlen`, or
`flex` if scores are soft-capped, with chunks or sinks, or if flash kernels do not
support the head size. Elsewhere `sdpa`, or `reference` if scores are soft-capped.

Under ``torch.compile`` the choice is made while it traces. The graph is traced again if
device, dtype or sizes change, so the choice stays right; and with `torch_varlen` the
graph has no break.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, Attend, Settings, flash
from packstore.torch.batch.layout import AttentionLayout

logger = logging.getLogger("packstore.torch.attention")

_BACKENDS: dict[str, Attend] = {}
"""The backends that were chosen so far, by name."""


@dataclass(frozen=True)
class _Recording:
    """Collects the backends that calls would choose on another device."""

    device: torch.device
    names: set[str] = field(default_factory=set)


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention with the chosen backend."""
    is_plain = settings.chunk is None and settings.sinks is None
    name = _choose_and_load(
        q_TNH.device,
        q_TNH.dtype,
        supported=flash.fits(q_TNH, v_TKH) and is_plain,
        capped=settings.softcap is not None,
    )
    return _BACKENDS[name](q_TNH, k_TKH, v_TKH, layout, settings)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose_and_load(
    device: torch.device, dtype: torch.dtype, supported: bool, capped: bool
) -> str:
    """Return the name of a call's backend, once it is loaded and logged.

    Inside :func:`chosen_on`, record the choice for its device, too.
    """
    name = choose(flash.runs_on(device), dtype, supported, capped)
    if name not in _BACKENDS:
        _BACKENDS[name] = ATTENTION.load(name)
        logger.info("packed attention: backend 'auto' is %r", name)
    recording = _RECORDING.get()
    if recording is not None:
        on_gpu = flash.runs_on(recording.device)
        recording.names.add(choose(on_gpu, dtype, supported, capped))
    return name


def choose(on_gpu: bool, dtype: torch.dtype, supported: bool, capped: bool) -> str:
    """Return the backend for a call.

    Args:
        on_gpu: flash kernels run on the device.
        dtype: dtype of the tensors.
        supported: flash kernels support head sizes and settings.
        capped: scores are soft-capped.
    """
    if on_gpu and dtype in flash.DTYPES:
        return "torch_varlen" if supported and not capped else "flex"
    return "reference" if capped else "sdpa"


@contextmanager
def chosen_on(device: torch.device) -> Iterator[set[str]]:
    """Yield a set that collects the backends that calls inside would use on
    `device`.
    """
    recording = _Recording(device)
    token = _RECORDING.set(recording)
    try:
        yield recording.names
    finally:
        _RECORDING.reset(token)
