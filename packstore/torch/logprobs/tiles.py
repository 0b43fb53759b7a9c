"""The tiles of the logits, and the backends that compute the elementwise passes over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from packstore.registry import Registry

CPU_CHUNK = 2**21
"""Logits per tile on a CPU, 8 MiB: larger tiles leave its caches, and are no faster
(``benchmarks/logprobs.py``)."""

GPU_CHUNK = 2**26
"""Logits per tile on other devices, 256 MiB: few large products."""

ALIGNED = 16
"""Columns and rows of a tile are multiples of it where they can be: products of 16-bit operands
need 8, and Triton loads 16 bytes at once only where it knows of 16."""

ALIGNED_COLUMNS = 128
"""Columns of a tile of matrix products on a GPU."""


class Projection(NamedTuple):
    """Parameters that turn the product of hidden states and head into logits.

    Attributes:
        scale: factor on the product (and its bias).
        softcap: ``c`` of a final ``c * tanh(logits / c)``, or None.
        chunk_size: number of logits held at once.
        backend: name of the elementwise passes.
        keep_logits: keep the products for the backward pass, which otherwise recomputes them.
    """

    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int = CPU_CHUNK
    backend: str = "eager"
    keep_logits: bool = False


class Passes(NamedTuple):
    """Elementwise passes over one tile, the product `[n, w]` of hidden states and columns.

    Logits are ``cap(scale * (product + bias))``. `targets` count from the tile's first column and
    may lie outside. The product may be overwritten, unless the projection keeps it.

    Attributes:
        fold: ``(state, product, bias, targets, how)``: updates the rows of `state` `[3, n]` in
            place: highest logit so far, sum of exponentials relative to it, logit of the target.
        gap: ``(product, bias, log_total, targets, upstream, how, dtype)``: the derivative by the
            product over `scale`, ``upstream * ([j is the target] - softmax_j) * slope_j``, rounded
            once to `dtype`; `slope` is the derivative of the cap.
        fold_rest: ``(state, product, bias, targets, how, dtype)``: as `fold`; returns
            ``exp(logit_j - highest) * slope_j`` of all columns but the target, in `dtype`, and the
            factor `[n]` that makes sums relative to the former highest logit relative to the new.
    """

    fold: Callable[[Tensor, Tensor, Tensor | None, Tensor, Projection], None]
    gap: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Projection, torch.dtype], Tensor]
    fold_rest: Callable[
        [Tensor, Tensor, Tensor | None, Tensor, Projection, torch.dtype], tuple[Tensor, Tensor]
    ]


HEAD_BACKENDS: Registry[Passes] = Registry(
    "head backend",
    {
        "eager": "packstore.torch.logprobs.eager_tiles:PASSES",
        "triton": "packstore.torch.logprobs.triton_tiles:PASSES",
    },
)


def default_chunk(device: torch.device) -> int:
    """Returns the logits per tile on `device`."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


def tiles(n: int, vocab: int, chunk_size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Column slices, each with its row slices: roughly square tiles of `chunk_size` logits.

    A GPU multiplies at full speed only where rows start at multiples of 16 bytes. So widths are
    multiples of 128 columns, up to 15 last columns of the vocabulary are a tile of their own, and
    rows are split evenly, in multiples of 16.
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
