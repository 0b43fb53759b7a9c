"""The tiles of the logits, and the elementwise passes over one: in plain torch, or by
Triton.

A tile has the logits of some tokens (rows) and some columns of the vocabulary. A pass
takes the product of hidden states and head for one tile, and updates log-sum-exps, or
computes gradients.

Backend ``eager`` is for any device and dtype, and the reference of ``triton``. ``auto``
takes Triton's passes if a proof succeeds: each pass of both backends runs on the first
tokens and all columns, and their results must agree. They sum in another order, which
moves the log-prob of a sequence no more than another size of tiles does, and less than
float32 resolves. So log-probs stored by one backend are right for the other.
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
"""Dtypes of 16 bits."""

CPU_CHUNK = 2**21
"""Logits per tile on a CPU, 8 MiB: larger tiles leave its caches, and are no faster
(``benchmarks/logprobs.py``)."""

GPU_CHUNK = 2**26
"""Logits per tile on other devices, 256 MiB: few large products."""

ALIGNED = 16
"""Columns and rows of a tile are multiples of it where they can be: fast products of
16-bit operands need 8, and Triton loads 16 bytes at once only if it can prove 16.
"""

ALIGNED_COLUMNS = 128
"""Wide tiles have a multiple of so many columns, as a GPU computes products in blocks
of this width.
"""

PROOF_TOKENS = 16
"""Tokens of the proof: 8 MiB of logits for a vocabulary of 128k."""

PROOF_TOLERANCE = 1e-4
"""Allowed norm of each row's difference over the norm of the row; float32 gives 1e-6.
Results of 16 bits may differ by their resolution.
"""

_AUTO_PASSES: dict[tuple[Any, ...], Passes] = {}
"""Kind of head -> the passes that backend ``auto`` chose for it."""


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

    Attributes:
        product: `[n, w]`, of hidden states and columns of the head; may be overwritten,
            unless the projection keeps it.
        bias: `[w]`, or None.
        targets: int64 `[n]`, counted from the first column of the tile; below 0 or
            above `w` if a token's target is in another tile.
        projection: scale and softcap.
    """

    product: Tensor
    bias: Tensor | None
    targets: Tensor
    projection: Projection


class Passes(NamedTuple):
    """Elementwise passes over one tile: j is a column, slope the softcap's derivative.

    Attributes:
        update_logsumexp: ``(state, tile)``: updates `state` `[3, n]` in place. Its rows
            are: the highest logit so far (never -inf), the sum of ``exp(logit -
            highest)`` so far, the logit of the target.
        grad_logits: ``(tile, log_total, upstream, dtype)``: returns ``upstream * ([j is
            the target] - softmax_j) * slope_j``, `[n, w]`, rounded once to `dtype`:
            times `scale`, the gradient of the tile's product. `log_total` `[n]` is the
            log-sum-exp over all columns, `upstream` `[n]` the gradient of the log-prob.
        update_logsumexp_and_weights: ``(state, tile, dtype)``: as `update_logsumexp`;
            returns ``exp(logit_j - highest) * slope_j``, `[n, w]` in `dtype`, with 0
            for the target, and ``exp(former highest - highest)``, `[n]`: the factor for
            sums over the tiles before.
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
    """Return the number of logits per tile on `device`."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


def tiles(n: int, vocab: int, chunk_size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield column slices, each with its row slices: roughly square tiles of
    `chunk_size` logits.

    A GPU multiplies at full speed only where rows start at multiples of 16 bytes. So
    widths are multiples of 128 columns, the last ``vocab % 16`` columns are a tile of
    their own, and rows are split evenly, in multiples of 16.

    Args:
        n: number of tokens.
        vocab: number of columns.
        chunk_size: maximum logits of a tile.
    """
    height = max(1, min(n, math.isqrt(chunk_size)))
    width = max(1, chunk_size // height)
    if width > ALIGNED_COLUMNS:
        width -= width % ALIGNED_COLUMNS

    even_height = 1
    if n > 0:
        even_height = math.ceil(n / math.ceil(n / height))
    height = min(height, even_height + -even_height % ALIGNED)
    row_slices = [slice(i, min(i + height, n)) for i in range(0, n, height)]

    aligned = vocab - vocab % ALIGNED
    edges = list(range(0, aligned, width))
    if aligned < vocab:
        edges.append(aligned)
    edges.append(vocab)
    for start, stop in itertools.pairwise(edges):
        yield slice(start, stop), row_slices


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; products of 16 bits are summed and returned in float32."""
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
    columns, is_inside = _target_columns(tile.targets, logits.shape[-1])
    delta = logits.sub_(log_total[:, None]).exp_().neg_()
    delta.scatter_add_(-1, columns, is_inside.to(delta.dtype))
    delta.mul_(upstream[:, None])
    if slope is not None:
        delta.mul_(slope)
    return delta.to(dtype)


def update_logsumexp_and_weights(
    state: Tensor, tile: Tile, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :class:`Passes`."""
    former_highest = state[0].clone()
    logits, slope = _logits(tile)
    weights = _update_logsumexp(state, logits, tile.targets)
    columns, is_inside = _target_columns(tile.targets, weights.shape[-1])
    without_target = weights.gather(-1, columns).masked_fill_(is_inside, 0)
    weights.scatter_(-1, columns, without_target)
    if slope is not None:
        weights.mul_(slope)
    factor = former_highest.sub_(state[0]).exp_()
    return weights.to(dtype), factor


def _update_logsumexp(state: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Update `state` with logits; return ``exp(logits - highest)``, which overwrites
    them.
    """
    columns, is_inside = _target_columns(targets, logits.shape[-1])
    state[2] += logits.gather(-1, columns).where(is_inside, 0).squeeze(-1)
    highest = torch.maximum(state[0], logits.amax(-1))
    state[1] *= (state[0] - highest).exp_()
    exponentials = logits.sub_(highest[:, None]).exp_()
    state[1] += exponentials.sum(-1)
    state[0] = highest
    return exponentials


def _target_columns(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns, clamped into the tile, and whether they are inside,
    `[n, 1]` each.
    """
    return columns_of_ids(targets[:, None], width)


def copy_logits(tile: Tile) -> Tensor:
    """Return the logits of a tile, `[n, w]`; its product stays as it is."""
    projection = tile.projection._replace(keep_logits=True)
    logits, _ = _logits(tile._replace(projection=projection))
    return logits


def logits_of_ids(tile: Tile, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of some ids of each token, and whether they are in the tile.

    Call it before a pass, which may overwrite the product. Ids in other tiles have any
    logit.

    Args:
        tile: the tile.
        ids: int64 `[n, k]`, counted from the first column of the tile.
    """
    columns, is_inside = columns_of_ids(ids, tile.product.shape[-1])
    projection = tile.projection
    logits = tile.product.gather(-1, columns)
    if tile.bias is not None:
        logits += tile.bias[columns]
    logits *= projection.scale
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    return logits, is_inside


def columns_of_ids(ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns of ids, clamped into a tile of `width` columns, and whether
    they are inside.
    """
    is_inside = (ids >= 0) & (ids < width)
    return ids.clamp(0, width - 1), is_inside


def _logits(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Return the logits of a tile, and the derivative of the softcap at each, or
    None.
    """
    projection = tile.projection
    logits = tile.product.clone() if projection.keep_logits else tile.product
    if tile.bias is not None:
        logits.add_(tile.bias)
    if projection.scale != 1:
        logits.mul_(projection.scale)
    if projection.softcap is None:
        return logits, None
    tanh = logits.div_(projection.softcap).tanh_()
    return tanh * projection.softcap, 1 - tanh * tanh


EAGER = Passes(update_logsumexp, grad_logits, update_logsumexp_and_weights)


def choose_passes(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    projection: Projection,
) -> Passes:
    """Return the passes of the projection's backend.

    ``auto`` is `triton` on CUDA devices, or under Triton's interpreter, if it is
    installed and proved for this kind of head; else `eager`, and the log says why.

    Args:
        inputs: `[n, H]`, hidden states in the dtype of the products' operands.
        weight: `[V, H]`, the head.
        bias: `[V]`, or None.
        targets: int64 `[n]`.
        projection: backend, scale and softcap.
    """
    backend = projection.backend
    if backend != "auto":
        HEAD_BACKENDS.check(backend)
    if inputs.dtype == torch.float64:  # Triton's passes compute in float32
        return EAGER
    if backend != "auto":
        return HEAD_BACKENDS.load(backend)
    if torch.compiler.is_compiling() or len(inputs) == 0:  # nothing to prove it on
        return EAGER
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if inputs.device.type == "cpu" and not is_interpreted:
        return EAGER

    kind = (
        inputs.device,
        inputs.dtype,
        weight.dtype,
        weight.shape,
        projection.scale,
        projection.softcap,
        bias is None,
    )
    if kind not in _AUTO_PASSES:
        first_tokens = slice(PROOF_TOKENS)
        _AUTO_PASSES[kind] = _prove_triton(
            inputs[first_tokens], weight, bias, targets[first_tokens], projection
        )
    return _AUTO_PASSES[kind]


def _prove_triton(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    projection: Projection,
) -> Passes:
    """Return Triton's passes if they agree with the eager ones, else these; log it."""
    reason = ""
    passes = EAGER
    try:
        passes = HEAD_BACKENDS.load("triton")
        gap = _difference(passes, inputs, weight, bias, targets, projection)
        if not gap <= 1:  # also true for NaN
            reason = f"its passes differ by {gap * PROOF_TOLERANCE:.2g}"
    except MissingExtraError as error:
        reason = str(error)
    except Exception as error:  # Triton's compiler and driver raise any class
        reason = quote(f"{type(error).__name__}: {error}", 200)
    if reason:
        logger.warning("head 'auto' is 'eager': %s", reason)
        return EAGER
    logger.info("head 'auto' is 'triton': it agrees with 'eager'")
    return passes


@torch.no_grad()
def _difference(
    passes: Passes,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    projection: Projection,
) -> float:
    """Return the largest difference of `passes` from the eager ones, over the limit.

    At most 1 is a success.
    """
    # A target's value is the largest of its row by far, and would hide the others in
    # the norm. So every other row has no target.
    rows = torch.arange(len(targets), device=targets.device)
    sparse_targets = targets.masked_fill(rows % 2 == 1, -1)
    # Kept logits, so that all passes see the same products.
    projection = projection._replace(keep_logits=True)
    tiles_of_head = []
    for columns, _ in tiles(len(inputs), len(weight), projection.chunk_size):
        tile = Tile(
            product=product(inputs, weight[columns].to(inputs.dtype).T),
            bias=None if bias is None else bias[columns],
            targets=sparse_targets - columns.start,
            projection=projection,
        )
        tiles_of_head.append(tile)

    actual_values = _values_of_passes(passes, tiles_of_head, inputs)
    expected_values = _values_of_passes(EAGER, tiles_of_head, inputs)
    differences = []
    for actual, expected in zip(actual_values, expected_values, strict=True):
        limit = max(PROOF_TOLERANCE, torch.finfo(expected.dtype).eps)
        gap = (actual.float() - expected.float()).norm(dim=-1)
        size = expected.float().norm(dim=-1).clamp(min=1e-30)
        differences.append((gap / size).max() / limit)
    return float(torch.stack(differences).max())


def _values_of_passes(
    passes: Passes, tiles_of_head: list[Tile], inputs: Tensor
) -> list[Tensor]:
    """Return all results of each pass over each tile."""
    state = torch.zeros((3, len(inputs)), device=inputs.device)
    state[0] = torch.finfo(state.dtype).min
    values = [state]
    for tile in tiles_of_head:
        weights, factor = passes.update_logsumexp_and_weights(
            state.clone(), tile, inputs.dtype
        )
        values += [weights, factor]
        passes.update_logsumexp(state, tile)

    log_total = state[0] + state[1].log()
    upstream = torch.ones_like(state[0])
    for tile in tiles_of_head:
        for dtype in {inputs.dtype, torch.float32}:
            values.append(passes.grad_logits(tile, log_total, upstream, dtype))
    return values
