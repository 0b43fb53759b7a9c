"""Head backend ``auto``: Triton's passes where a proof on the first tokens agrees with torch's.

The proof runs each pass of both over all columns, for a few tokens of the first call. They sum in
another order, which moves the log-prob of a sequence no more than another size of tiles does, and
less than the float32 that stores it resolves. So precomputed ones may come from either.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from packstore.errors import MissingExtraError, quote
from packstore.torch.logprobs.tiles import (
    EAGER,
    HEAD_BACKENDS,
    Passes,
    Projection,
    Tile,
    product,
    tiles,
)

logger = logging.getLogger("packstore")

TOKENS = 16
"""Tokens of the proof: 8 MiB of logits for a vocabulary of 128k."""

TOLERANCE = 1e-4
"""Allowed difference by norm of each row; float32 gives 1e-6. Of 16 bits, their resolution."""

_CHOSEN: dict[tuple[Any, ...], Passes] = {}
"""The passes of each kind of head."""


def choose(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: Projection
) -> Passes:
    """Returns the passes of `how`; arguments are those of a head, `inputs` in its operands' dtype.

    ``auto`` is `triton` on CUDA devices, or under Triton's interpreter, if it is installed and
    proved for this kind of head; else `eager`, and the log says why.
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
    kind = (device, inputs.dtype, weight.dtype, *weight.shape, how.scale, how.softcap, bias is None)
    if kind not in _CHOSEN:
        reason = _objection(inputs[:TOKENS], weight, bias, targets[:TOKENS], how)
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
    return "" if gap <= 1 else f"its passes differ by {gap * TOLERANCE:.2g}"


@torch.no_grad()
def _difference(
    passes: Passes,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: Projection,
) -> float:
    """The largest difference of `passes` from the eager ones, as a share of what is allowed."""
    how = how._replace(keep_logits=True)  # leaves the products as they are
    # A row's target has the largest value by far, so every other row is without.
    aims = targets.masked_fill(torch.arange(len(targets), device=targets.device) % 2 == 1, -1)
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
            of.grad_logits(tile, total, upstream, kind) for tile in vocab_tiles for kind in types
        ]

    gaps = []
    for mine, eager in zip(values(passes), values(EAGER), strict=True):
        limit = max(TOLERANCE, torch.finfo(eager.dtype).eps)
        mine, eager = mine.float(), eager.float()
        gap, size = (mine - eager).norm(dim=-1), eager.norm(dim=-1).clamp(min=1e-30)
        gaps.append((gap / size).max() / limit)
    return float(torch.stack(gaps).max())
