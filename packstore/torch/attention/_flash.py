"""What the flash kernels have in common: what they ask of their inputs, and how windows count."""

from __future__ import annotations

import torch
from torch import Tensor

from packstore.errors import BackendError, sentence
from packstore.torch.layout import AttentionLayout

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take heads of these sizes."""
    size = q.shape[-1]
    return size == v.shape[-1] and size % 8 == 0 and size <= LARGEST_HEAD


def check(backend: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what the kernels would not compute, or would compute on other numbers.

    Raises:
        BackendError: another device, another dtype, or heads of a size that they do not take.
    """
    kinds = {x.dtype for x in (q, k, v)}
    if q.device.type not in DEVICES or len(kinds) != 1 or not kinds <= set(DTYPES):
        names = " and ".join(sorted(str(kind) for kind in kinds))
        raise refusal(
            backend,
            "tensors must be float16 or bfloat16, all the same, on a CUDA device",
            f"{names} on {q.device.type}",
            "Load the model in bfloat16 on a GPU, use torch.autocast, or choose backend='sdpa'",
        )
    if not fits(q, v):
        raise refusal(
            backend,
            f"heads must have one size, a multiple of 8 up to {LARGEST_HEAD}",
            f"{q.shape[-1]} for queries and {v.shape[-1]} for values",
            "Use backend='flex' or 'sdpa'",
        )


def window_left(layout: AttentionLayout, sliding_window: int | None) -> int:
    """How many keys before its own a query sees, -1: all. They count without the query's own."""
    if sliding_window is None or sliding_window >= layout.max_seqlen_k:
        return -1
    return sliding_window - 1


def refusal(backend: str, must: str, found: str, do: str) -> BackendError:
    """The error of a backend that cannot do what is asked."""
    return BackendError(sentence(f"attention backend {backend!r}", must, found, do))
