"""Backends ``auto``, ``auto_varlen`` and ``auto_ranges``: choose another backend at
each call.

Not once, as a model may change its device after it was prepared.

On a CUDA device (compute capability 8 or newer) in half precision: `torch_varlen`, or
`flex` if scores are soft-capped, with chunks or sinks, or if flash kernels do not
support the head size. Elsewhere `sdpa`, or `reference` if scores are soft-capped.

``auto_ranges`` takes `ranges` in place of `torch_varlen`, except under context
parallelism. ``auto_varlen`` is ``auto`` under a name that no training changes: as a
setting, ``auto`` may be replaced by either, whichever a trial shows to be faster.

Under ``torch.compile`` the choice is made while it traces. The graph is traced again if
device, dtype or sizes change, so the choice stays right; and with `torch_varlen` or
`ranges` the graph has no break.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, Attend, Settings, flash
from packstore.torch.batch.layout import AttentionLayout

logger = logging.getLogger("packstore.torch.attention")

FlashBackend = Literal["torch_varlen", "ranges"]
"""The backend for calls that flash kernels support, on a GPU."""

_BACKENDS: dict[str, Attend] = {}
"""The backends that were chosen so far, by name."""


class Call(NamedTuple):
    """A call of attention in a model.

    Attributes:
        backend: the backend that the call would use on a device.
        num_heads: N, heads of queries.
        num_key_heads: K, heads of keys and values.
        head_size: H.
        dtype: dtype of the tensors.
        scale: factor on the scores.
        window: window in tokens; None: none.
    """

    backend: str
    num_heads: int
    num_key_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    window: int | None


@dataclass(frozen=True)
class _Recording:
    """Collects calls, with the backends that they would use on another device."""

    device: torch.device
    calls: list[Call] = field(default_factory=list)


_RECORDING: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention with the chosen backend."""
    return _attend("torch_varlen", q_TNH, k_TKH, v_TKH, layout, settings)


def attend_ranges(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention with the chosen backend, `ranges` if it supports the call."""
    has_ranges = layout.ranges is not None
    flash_backend: FlashBackend = "ranges" if has_ranges else "torch_varlen"
    return _attend(flash_backend, q_TNH, k_TKH, v_TKH, layout, settings)


def _attend(
    flash_backend: FlashBackend,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    has_plain_softmax = settings.chunk is None and settings.sinks is None
    supported = flash.fits(q_TNH, v_TKH) and has_plain_softmax
    capped = settings.softcap is not None
    if not torch.compiler.is_compiling():
        _record(flash_backend, q_TNH, k_TKH, settings, supported)
    name = _choose_and_load(q_TNH.device, q_TNH.dtype, supported, capped, flash_backend)
    return _BACKENDS[name](q_TNH, k_TKH, v_TKH, layout, settings)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose_and_load(
    device: torch.device,
    dtype: torch.dtype,
    supported: bool,
    capped: bool,
    flash_backend: FlashBackend,
) -> str:
    """Return the name of a call's backend, once it is loaded and logged."""
    name = choose(flash.runs_on(device), dtype, supported, capped, flash_backend)
    if name not in _BACKENDS:
        _BACKENDS[name] = ATTENTION.load(name)
        logger.info(
            "packed attention: backend 'auto' is %r for %s on %s", name, dtype, device
        )
    return name


def choose(
    on_gpu: bool,
    dtype: torch.dtype,
    supported: bool,
    capped: bool,
    flash_backend: FlashBackend = "torch_varlen",
) -> str:
    """Return the backend for a call.

    Args:
        on_gpu: flash kernels run on the device.
        dtype: dtype of the tensors.
        supported: flash kernels support head sizes and settings.
        capped: scores are soft-capped.
        flash_backend: the backend of flash kernels.
    """
    if on_gpu and dtype in flash.DTYPES:
        return flash_backend if supported and not capped else "flex"
    return "reference" if capped else "sdpa"


@contextmanager
def calls_on(device: torch.device) -> Iterator[list[Call]]:
    """Yield a list that collects the calls inside, with the backends that they would
    use on `device`.

    Calls of compiled code are not collected.
    """
    recording = _Recording(device)
    token = _RECORDING.set(recording)
    try:
        yield recording.calls
    finally:
        _RECORDING.reset(token)


def _record(
    flash_backend: FlashBackend,
    q: Tensor,
    k: Tensor,
    settings: Settings,
    supported: bool,
) -> None:
    """Add a call to the list of :func:`calls_on`, if there is one."""
    recording = _RECORDING.get()
    if recording is None:
        return
    on_gpu = flash.runs_on(recording.device)
    capped = settings.softcap is not None
    call = Call(
        backend=choose(on_gpu, q.dtype, supported, capped, flash_backend),
        num_heads=q.shape[1],
        num_key_heads=k.shape[1],
        head_size=q.shape[2],
        dtype=q.dtype,
        scale=settings.scale,
        window=settings.window,
    )
    recording.calls.append(call)
