"""Triton kernels that read keys where they lie in the row, without copies.

The queries of a segment read ranges of rows: the shared tokens of its ancestors, then
its own. So no pass copies keys, expands grouped heads or sums gradients of copies, as
:mod:`~packstore.torch.attention.torch_varlen` has to. The kernels are in
``_ranges.py``; they are deterministic.

CUDA and half precision only; no softcap, sinks or chunks. Under context parallelism the
keys lie on other ranks, and a layout has no ranges.

Forward and backward pass are two custom operators, so that ``torch.compile`` keeps them
in its graph.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from packstore.errors import BackendError, MissingExtraError, sentence
from packstore.torch.attention import Settings, flash
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.batch.ranges import KeyRanges

RANGES = (
    "Tensor offsets, Tensor positions, Tensor? runs, Tensor? run_offsets, "
    "Tensor? readers, Tensor? reader_offsets, Tensor tiles, Tensor items, "
    "Tensor splits, SymInt num_slots"
)
"""Arguments of both operators: the fields of KeyRanges, in order."""

SETTINGS = "float scale, SymInt keys_before"
"""Arguments of both operators; `keys_before` is the number of keys before its own that
a query sees, -1: all.
"""

NUM_RANGE_TENSORS = len(KeyRanges._fields) - 1
"""Fields of KeyRanges that are tensors: all but the last."""


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention of all segments in one call."""
    flash.check("ranges", q_TNH, k_TKH, v_TKH, settings)
    flash.check_no_softcap("ranges", settings)
    if q_TNH.device.type == "cuda":
        _check_gpu(q_TNH.device)
    ranges = _ranges_of(layout)
    keys_before = flash.count_keys_before(layout, settings.window)
    output: Tensor
    output, _ = attend_ranges(q_TNH, k_TKH, v_TKH, *ranges, settings.scale, keys_before)
    return output


def _ranges_of(layout: AttentionLayout) -> KeyRanges:
    """Return the ranges of a layout; raise BackendError if it has none."""
    if layout.ranges is None:
        raise BackendError(
            sentence(
                where="attention backend 'ranges'",
                rule="all keys of a row must be on one rank",
                found="a row that context parallelism split",
                remedy="Use backend='torch_varlen'",
            )
        )
    return layout.ranges


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_gpu(device: torch.device) -> None:
    """Raise BackendError for a GPU that is too old."""
    if not flash.runs_on(device):
        major, minor = flash.capability(device)
        raise BackendError(
            sentence(
                where="attention backend 'ranges'",
                rule="the GPU must have compute capability 8.0 or newer",
                found=f"{major}.{minor}",
                remedy="Use backend='sdpa'",
            )
        )


@torch.library.custom_op(
    "packstore::ranges",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {RANGES}, {SETTINGS}) -> (Tensor, Tensor)",
)
def attend_ranges(
    q: Tensor, k: Tensor, v: Tensor, *ranges_and_settings: Any
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, N, H]` and its log-sum-exp, float32 `[N, T]`.

    `ranges_and_settings` are :data:`RANGES` and :data:`SETTINGS`.
    """
    *ranges, scale, keys_before = ranges_and_settings
    output: tuple[Tensor, Tensor] = _load_kernels().attend_forward(
        _readable(q),
        _readable(k),
        _readable(v),
        KeyRanges(*ranges),
        scale,
        keys_before,
    )
    return output


@torch.library.custom_op(
    "packstore::ranges_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{RANGES}, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def attend_ranges_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *ranges_and_settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v` of :func:`attend_ranges`."""
    *ranges, scale, keys_before = ranges_and_settings
    gradients: tuple[Tensor, Tensor, Tensor] = _load_kernels().attend_backward(
        _readable(grad),
        _readable(q),
        _readable(k),
        _readable(v),
        out,
        lse,
        KeyRanges(*ranges),
        scale,
        keys_before,
    )
    return gradients


def _readable(rows: Tensor) -> Tensor:
    """Return rows whose last axis is contiguous, as the kernels read them."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _load_kernels() -> Any:
    """Return the module of the kernels, which imports Triton."""
    try:
        return importlib.import_module("packstore.torch.attention._ranges")
    except ImportError as error:
        raise MissingExtraError(
            "attention backend 'ranges' needs the package 'triton', which is not "
            "installed; torch for CUDA brings it on Linux. Use backend='torch_varlen'."
        ) from error


@attend_ranges.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    log_sum_exp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return q.new_empty(q.shape), log_sum_exp


@attend_ranges_backward.register_fake
def _(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors in the order of the backward operator's arguments."""
    q, k, v, *ranges_and_settings = inputs
    out, lse = output
    ranges = ranges_and_settings[:NUM_RANGE_TENSORS]
    ctx.save_for_backward(q, k, v, out, lse, *ranges)
    ctx.numbers = ranges_and_settings[NUM_RANGE_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: Tensor | None, _grad_lse: None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v; the other arguments have none."""
    no_gradients = (None,) * (NUM_RANGE_TENSORS + len(ctx.numbers))
    if grad is None:
        return (None, None, None, *no_gradients)
    gradients = attend_ranges_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *no_gradients)


attend_ranges.register_autograd(_backward, setup_context=_save)
