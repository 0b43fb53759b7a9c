"""The tiles of the logits, and the elementwise passes over one: in plain torch, or by
Triton.

Backend ``eager`` is for any device and dtype, and the reference of ``triton``. ``auto``
takes Triton's passes where a proof on the first tokens agrees: it runs each pass of
both over all columns. They sum in another order, which moves the log-prob of a sequence
no more than another size of tiles does, and less than the float32 that stores it
resolves. So precomputed ones may come from either.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packstore.errors import MissingExtraError, quote
from packstore.registry import Registry

logger = logging.getLogger("packstore")

HALF = (torch.bfloat16, torch.float16)

CPU_CHUNK = 2**21
"""Logits per tile on a CPU, 8 MiB: larger tiles leave its caches, and are no faster
(``benchmarks/logprobs.py``)."""

GPU_CHUNK = 2**26
"""Logits per tile on other devices, 256 MiB: few large products."""

ALIGNED = 16
"""Columns and rows of a tile are multiples of it where they can be: products of 16-bit
operands need 8, and Triton loads 16 bytes at once only where it knows of 16.
"""

ALIGNED_COLUMNS = 128
"""Columns of a tile of matrix products on a GPU."""

PROOF_TOKENS = 16
"""Tokens of the proof: 8 MiB of logits for a vocabulary of 128k."""

PROOF_TOLERANCE = 1e-4
"""Allowed difference by norm of each row; float32 gives 1e-6. Of 16 bits, their
resolution.
"""

_CHOSEN: dict[tuple[Any, ...], Passes] = {}
"""The passes of each kind of head."""


class Projection(NamedTuple):
    """Parameters that turn the product of hidden states and head into logits.

    Attributes:
        scale: factor on the product (and its bias).
        softcap: ``c`` of a final ``c * tanh(logits / c)``, or None.
        chunk_size: number of logits held at once.
        backend: name of the elementwise passes, or ``auto``.
        keep_logits: keep the products for the backward pass, which otherwise recomputes
            them.
    """

    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int = CPU_CHUNK
    backend: str = "auto"
    keep_logits: bool = False


class Tile(NamedTuple):
    """Some logits, ``cap(scale * (product + bias))``.

    The product `[n, w]` of hidden states and columns of the head may be overwritten,
    unless the projection keeps it; targets, int64 `[n]`, count from the first column
    and may lie outside.
    """

    product: Tensor
    bias: Tensor | None
    targets: Tensor
    how: Projection


class Passes(NamedTuple):
    """Elementwise passes over one tile.

    Attributes:
        update_logsumexp: ``(state, tile)``: updates the rows of `state` `[3, n]` in
            place: highest logit so far, never -inf, sum of exponentials relative to it,
            logit of the target.
        grad_logits: ``(tile, log_total, upstream, dtype)``: the derivative by the
            product over `scale`, ``upstream * ([j is the target] - softmax_j) *
            slope_j``, rounded once to `dtype`; `slope` is the derivative of the cap.
        update_logsumexp_and_weights: ``(state, tile, dtype)``: as `update_logsumexp`;
            returns ``exp(logit_j - highest) * slope_j`` of all columns but the target,
            in `dtype`, and the factor `[n]` that makes sums relative to the former
            highest logit relative to the new.
    """

    update_logsumexp: Callable[[Tensor, Tile], None]
    grad_logits: Callable[[Tile, Tensor, Tensor, torch.dtype], Tensor]
    update_logsumexp_and_weights: Callable[
        [Tensor, Tile, torch.dtype], tuple[Tensor, Tensor]
    ]


HEAD_BACKENDS: Registry[Passes] = Registry(
    "head backend",
    {
        "eager": "packstore.torch.logprobs.tiles:EAGER",
        "triton": "packstore.torch.logprobs.triton_tiles:PASSES",
    },
)


def default_chunk(device: torch.device) -> int:
    """Returns the logits per tile on `device`."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


def tiles(n: int, vocab: int, chunk_size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Column slices, each with its row slices: roughly square tiles of `chunk_size`
    logits.

    A GPU multiplies at full speed only where rows start at multiples of 16 bytes. So
    widths are multiples of 128 columns, up to 15 last columns are a tile, and rows are
    split evenly, by 16.
    """
    height = max(1, min(n, math.isqrt(chunk_size)))
    width = max(1, chunk_size // height)
    if width > ALIGNED_COLUMNS:
        width -= width % ALIGNED_COLUMNS
    even = math.ceil(n / math.ceil(n / height)) if n else 1
    height = min(height, even + -even % ALIGNED)
    rows = [slice(i, min(i + height, n)) for i in range(0, n, height)]
    aligned = vocab - vocab % ALIGNED
    cuts = [*range(0, aligned, width), *([aligned] if aligned < vocab else []), vocab]
    return ((slice(a, b), rows) for a, b in itertools.pairwise(cuts))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies matrices; products of 16 bits are summed and returned in float32."""
    if left.dtype in HALF:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def update_logsumexp(state: Tensor, tile: Tile) -> None:
    """See :class:`Passes`."""
    logits, _ = _logits(tile)
    _update_logsumexp(state, logits, tile.targets)


def grad_logits(
    tile: Tile, log_total: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :class:`Passes`."""
    logits, slope = _logits(tile)
    place, inside = _places(tile.targets, logits.shape[-1])
    delta = logits.sub_(log_total[:, None]).exp_().neg_()
    delta.scatter_add_(-1, place, inside.to(delta.dtype)).mul_(upstream[:, None])
    if slope is not None:
        delta.mul_(slope)
    return delta.to(dtype)


def update_logsumexp_and_weights(
    state: Tensor, tile: Tile, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :class:`Passes`."""
    before = state[0].clone()
    logits, slope = _logits(tile)
    rest = _update_logsumexp(state, logits, tile.targets)
    place, inside = _places(tile.targets, rest.shape[-1])
    rest.scatter_(-1, place, rest.gather(-1, place).masked_fill_(inside, 0))
    if slope is not None:
        rest.mul_(slope)
    return rest.to(dtype), before.sub_(state[0]).exp_()


def _update_logsumexp(state: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Folds finished logits into `state`; overwrites and returns them, relative to the
    highest.
    """
    place, inside = _places(targets, logits.shape[-1])
    state[2] += logits.gather(-1, place).where(inside, 0).squeeze(-1)
    highest = torch.maximum(state[0], logits.amax(-1))
    state[1] *= (state[0] - highest).exp_()
    state[1] += logits.sub_(highest[:, None]).exp_().sum(-1)
    state[0] = highest
    return logits


def _places(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns to read and write, clamped into the tile, and whether they are the
    targets.
    """
    return targets.clamp(0, width - 1)[:, None], ((targets >= 0) & (targets < width))[
        :, None
    ]


def _logits(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Logits of a tile, and the derivative of the softcap at each, if there is one."""
    how = tile.how
    logits = tile.product.clone() if how.keep_logits else tile.product
    if tile.bias is not None:
        logits.add_(tile.bias)
    if how.scale != 1:
        logits.mul_(how.scale)
    if how.softcap is None:
        return logits, None
    capped = logits.div_(how.softcap).tanh_()
    return capped * how.softcap, 1 - capped * capped


EAGER = Passes(update_logsumexp, grad_logits, update_logsumexp_and_weights)


def choose_passes(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: Projection,
) -> Passes:
    """Returns the passes of `how`; arguments are those of a head, `inputs` in its
    operands' dtype.

    ``auto`` is `triton` on CUDA devices, or under Triton's interpreter, if it is
    installed and proved for this kind of head; else `eager`, and the log says why.
    """
    device = inputs.device
    name = how.backend if how.backend == "auto" else HEAD_BACKENDS.check(how.backend)
    if inputs.dtype == torch.float64:  # Triton's compute in float32
        return EAGER
    if name != "auto":
        return HEAD_BACKENDS.load(name)
    if torch.compiler.is_compiling() or not len(inputs):  # nothing to prove it on
        return EAGER
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return EAGER
    kind = (
        device,
        inputs.dtype,
        weight.dtype,
        *weight.shape,
        how.scale,
        how.softcap,
        bias is None,
    )
    if kind not in _CHOSEN:
        reason = _objection(
            inputs[:PROOF_TOKENS], weight, bias, targets[:PROOF_TOKENS], how
        )
        _CHOSEN[kind] = EAGER if reason else HEAD_BACKENDS.load("triton")
        if reason:
            logger.warning("head 'auto' is 'eager': %s", reason)
        else:
            logger.info("head 'auto' is 'triton': it agrees with 'eager'")
    return _CHOSEN[kind]


def _objection(*head: Any) -> str:
    """The reason not to take Triton's passes, or nothing."""
    try:
        gap = _difference(HEAD_BACKENDS.load("triton"), *head)
    except MissingExtraError as error:
        return str(error)
    except Exception as error:  # of its compiler and driver, of any class
        return quote(f"{type(error).__name__}: {error}", 200)
    return "" if gap <= 1 else f"its passes differ by {gap * PROOF_TOLERANCE:.2g}"


@torch.no_grad()
def _difference(
    passes: Passes,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: Projection,
) -> float:
    """The largest difference of `passes` from the eager ones, as a share of what is
    allowed.
    """
    how = how._replace(keep_logits=True)  # leaves the products as they are
    # A row's target has the largest value by far, so every other row is without.
    aims = targets.masked_fill(
        torch.arange(len(targets), device=targets.device) % 2 == 1, -1
    )
    vocab_tiles = []
    for columns, _ in tiles(len(inputs), len(weight), how.chunk_size):
        logits = product(inputs, weight[columns].to(inputs.dtype).T)
        biases = None if bias is None else bias[columns]
        vocab_tiles.append(Tile(logits, biases, aims - columns.start, how))

    def values(of: Passes) -> list[Tensor]:
        state = torch.zeros((3, len(inputs)), device=inputs.device)
        state[0] = torch.finfo(state.dtype).min
        found = [state]
        for tile in vocab_tiles:
            found += of.update_logsumexp_and_weights(state.clone(), tile, inputs.dtype)
            of.update_logsumexp(state, tile)
        total, upstream = state[0] + state[1].log(), torch.ones_like(state[0])
        types = {inputs.dtype, torch.float32}
        return found + [
            of.grad_logits(tile, total, upstream, kind)
            for tile in vocab_tiles
            for kind in types
        ]

    gaps = []
    for mine, eager in zip(values(passes), values(EAGER), strict=True):
        limit = max(PROOF_TOLERANCE, torch.finfo(eager.dtype).eps)
        mine, eager = mine.float(), eager.float()
        gap, size = (mine - eager).norm(dim=-1), eager.norm(dim=-1).clamp(min=1e-30)
        gaps.append((gap / size).max() / limit)
    return float(torch.stack(gaps).max())
