"""Helpers of the model probes: packs, logits, and tolerances for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.format.arrays import Packs
from packstore.torch.batch.collate import PackedBatch

ROUNDING = {64: 1e-9, 32: 1e-4, 16: 5e-2}
"""Tolerance between two ways to compute the same logits, relative to the largest, by bits."""


def rounding_of(model: nn.Module, logits: Tensor, bits: int = 64) -> float:
    """Returns the absolute tolerance between two ways to compute `logits`.

    Args:
        model: the model; the dtype of its weights counts.
        logits: logits of the model.
        bits: precision of other operations involved; the coarsest counts.
    """
    bits = min(bits, 16 if is_half(model) else 64, 8 * logits.dtype.itemsize)
    bits = min(bits, 8 * next(model.parameters()).dtype.itemsize)
    return ROUNDING[bits] * float(logits.abs().max())


def is_half(model: nn.Module) -> bool:
    """Returns True if products have about 16 bits: by weight dtype, autocast or TF32."""
    weight = next(model.parameters())
    kind = weight.device.type
    fast = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return weight.dtype.itemsize == 2 or torch.is_autocast_enabled(kind) or fast


@contextmanager
def ieee_products() -> Iterator[None]:
    """Multiplies float32 matrices on a GPU in float32 instead of TF32, which has 10 bits."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def logits_of(model: nn.Module, batch: PackedBatch, input_ids: Tensor | None = None) -> Tensor:
    """Returns the model's logits of the row, `[T, V]`, optionally for other token ids."""
    inputs = batch.model_inputs()
    if input_ids is not None:
        inputs["input_ids"] = input_ids[None]
    logits: Tensor = model(**inputs).logits[0]
    return logits


def one_pack(tokens: Any, lengths: Any, bounds: Any, responses: Any) -> Packs:
    """Makes one pack of these tokens; sequences of `lengths`, segments between `bounds`."""
    sizes = (len(tokens), len(lengths), len(responses))
    offsets = [np.array([0, n]) for n in sizes]
    return Packs(
        signed_ids=~tokens.astype(np.int32),
        reward=np.zeros(len(lengths), np.float32),
        lengths=lengths.astype(np.int32),
        seq_boundaries=bounds.astype(np.int32),
        example_ids=np.arange(len(responses)),
        num_responses=responses.astype(np.int32),
        token_offsets=offsets[0],
        sequence_offsets=offsets[1],
        example_offsets=offsets[2],
    )
