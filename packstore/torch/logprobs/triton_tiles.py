"""Backend ``triton``: each pass over a tile is one kernel, which reads the product
once.

For CUDA devices, in float32: a pass of ``eager`` reads and writes a tile several times,
`update_logsumexp` here reads 4 bytes of each logit, and `grad_logits` reads 4 and
writes the 2 or 4 bytes of an operand of the next product. On an H200 the head takes
14.5 ms with them and 22.4 ms with `eager`, for 4,105 targets of 128,256 columns
(``benchmarks/gpu_session.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from packstore.errors import BackendError, MissingExtraError, sentence
from packstore.torch.logprobs.tiles import Passes, Tile

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "head backend 'triton' needs the package 'triton', which is not installed; "
        "CUDA builds of torch for Linux bring it. Run: pip install triton"
    ) from error

BLOCK = 4096
"""Columns that a program has in registers at once: 16 for each thread."""

WARPS = 8

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True under TRITON_INTERPRET=1, as it was when the kernels were made: they then run on
a CPU.
"""


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Return ``tanh`` to a few units in the last place; for small x its series."""
    square = x * x
    series = x * (
        1
        + square
        * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    size = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -size, size))


@triton.jit
def logits_and_slopes(  # type: ignore[no-untyped-def]
    product, bias, at, inside, scale, softcap, BIAS: tl.constexpr, CAP: tl.constexpr
):
    """Return the logits of columns `at`, and the derivative of the softcap at each.

    Columns that are not `inside` the tile have -inf.
    """
    logits = tl.load(product + at, mask=inside, other=0.0)
    if BIAS:
        logits += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    logits *= scale
    slopes = tl.full(logits.shape, 1.0, tl.float32)
    if CAP:
        capped = tanh(logits / softcap)
        logits = softcap * capped
        slopes = 1 - capped * capped
    return tl.where(inside, logits, float("-inf")), slopes


@triton.jit(do_not_specialize=["state_stride"])
def logsumexp_kernel(  # type: ignore[no-untyped-def]
    product, stride, columns, bias, targets, state, state_stride, scale, softcap,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the three values of `state` for one token, in one program.

    They are: highest logit, sum of exponentials relative to it, logit of the target.
    """
    row = tl.program_id(0).to(tl.int64)
    product += row * stride
    state += row
    highest = tl.load(state)
    total = tl.load(state + state_stride)
    target = tl.load(targets + row)
    chosen = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        logits, _ = logits_and_slopes(
            product, bias, at, inside, scale, softcap, BIAS, CAP
        )
        chosen = tl.where(inside & (at == target), logits, chosen)
        higher = tl.maximum(highest, tl.max(logits, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(logits - higher), 0)
        highest = higher
    tl.store(state, highest)
    tl.store(state + state_stride, total)
    chosen_before = tl.load(state + 2 * state_stride)
    tl.store(state + 2 * state_stride, chosen_before + tl.sum(chosen, 0))


@triton.jit
def softmax_kernel(  # type: ignore[no-untyped-def]
    product, stride, columns, bias, shifts, targets, upstream, out, out_stride, scale,
    softcap,
    BIAS: tl.constexpr, CAP: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of columns of one token, from ``softmax_j = exp(logit_j -
    shift)``.

    With REST, ``softmax_j * slope_j`` of all columns but the target, which has 0;
    otherwise ``upstream * ([j is the target] - softmax_j) * slope_j``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    logits, slopes = logits_and_slopes(
        product + row * stride, bias, at, inside, scale, softcap, BIAS, CAP
    )
    softmax = tl.exp(logits - tl.load(shifts + row))
    hit = at == tl.load(targets + row)
    if REST:
        values = tl.where(hit, 0.0, softmax) * slopes
    else:
        values = (tl.where(hit, 1.0, 0.0) - softmax) * tl.load(upstream + row) * slopes
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=inside)


def update_logsumexp(state: Tensor, tile: Tile) -> None:
    """See :class:`Passes`."""
    product = tile.product
    if product.device.type != "cuda" and not INTERPRETED:
        raise BackendError(
            sentence(
                where="head backend 'triton'",
                rule="tensors must be on a CUDA device",
                found=product.device.type,
                remedy="Use backend='eager', which computes the same",
            )
        )
    rows, columns = product.shape
    scale, softcap, has_bias, has_cap = _constants(tile)
    with torch.cuda.device_of(product):  # type: ignore[no-untyped-call]
        logsumexp_kernel[(rows,)](
            product,
            product.stride(0),
            columns,
            tile.bias,
            tile.targets,
            state,
            state.stride(0),
            scale,
            softcap,
            has_bias,
            has_cap,
            min(BLOCK, triton.next_power_of_2(columns)),
            num_warps=WARPS,
        )


def update_logsumexp_and_weights(
    state: Tensor, tile: Tile, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :class:`Passes`."""
    former_highest = state[0].clone()
    update_logsumexp(state, tile)
    weights = grad_logits(tile, state[0], None, dtype)
    return weights, former_highest.sub_(state[0]).exp_()


def grad_logits(
    tile: Tile, log_total: Tensor, upstream: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See :class:`Passes`; without `upstream`, ``softmax_j * slope_j`` as by REST."""
    product = tile.product
    in_place = dtype == product.dtype and not tile.projection.keep_logits
    out = product if in_place else torch.empty_like(product, dtype=dtype)
    rows, columns = product.shape
    size = min(BLOCK, triton.next_power_of_2(columns))
    scale, softcap, has_bias, has_cap = _constants(tile)
    with torch.cuda.device_of(product):  # type: ignore[no-untyped-call]
        softmax_kernel[(rows, triton.cdiv(columns, size))](
            product,
            product.stride(0),
            columns,
            tile.bias,
            log_total,
            tile.targets,
            upstream,
            out,
            out.stride(0),
            scale,
            softcap,
            has_bias,
            has_cap,
            upstream is None,
            size,
            num_warps=WARPS,
        )
    return out


def _constants(tile: Tile) -> tuple[float, float, bool, bool]:
    """Return scale and softcap, and whether there are a bias and a cap."""
    scale = float(tile.projection.scale)
    softcap = tile.projection.softcap
    return scale, float(softcap or 1), tile.bias is not None, softcap is not None


PASSES = Passes(update_logsumexp, grad_logits, update_logsumexp_and_weights)
