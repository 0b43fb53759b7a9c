"""Input checks and the call shared by the flash kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packstore.errors import BackendError, sentence
from packstore.torch.batch.layout import AttentionLayout

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device; (0, 0) for others."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)


def runs_on(device: torch.device) -> bool:
    """Returns True for a CUDA device of compute capability 8 or newer."""
    return capability(device) >= (8, 0)


def fits(q: Tensor, v: Tensor) -> bool:
    """Returns True if the kernels support these head sizes."""
    size = q.shape[-1]
    # A branch, as torch.compile may have symbols for sizes: the answer is then a constant.
    if size == v.shape[-1] and size % 8 == 0 and size <= LARGEST_HEAD:  # noqa: SIM103
        return True
    return False


def check(
    backend: str, q: Tensor, k: Tensor, v: Tensor, *, chunk: int | None, sinks: Tensor | None
) -> None:
    """Refuses inputs that the kernels do not support or would cast.

    Raises:
        BackendError: the device, dtype or head size, chunks or sinks are not supported.
    """
    for found, given in (("chunks", chunk), ("sinks, whose gradient it ignores", sinks)):
        if given is not None:
            must = "attention must be a softmax over all tokens before, or over a window of them"
            raise refusal(backend, must, found, "Use backend='flex' or 'sdpa'")
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
    """Number of keys before its own that a query sees, as the kernels count windows; -1: all."""
    if sliding_window is None or sliding_window >= layout.max_seqlen_k:
        return -1
    return sliding_window - 1


def call(
    kernel: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: AttentionLayout,
    *,
    window: tuple[int | None, int | None],
    **settings: Any,
) -> Any:
    """Calls the `flash_attn_varlen_func` of a FlashAttention version; the keywords are shared.

    The backward pass is deterministic under ``torch.use_deterministic_algorithms``.
    """
    q_TNH, k_TKH, v_TKH = tensors
    return kernel(
        q_TNH,
        layout.keys(k_TKH),
        layout.keys(v_TKH),
        cu_seqlens_q=layout.cu_seqlens_q,
        cu_seqlens_k=layout.cu_seqlens_k,
        max_seqlen_q=layout.max_seqlen_q,
        max_seqlen_k=layout.max_seqlen_k,
        causal=True,
        window_size=window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **settings,
    )


def refusal(backend: str, must: str, found: str, do: str) -> BackendError:
    """Returns the error of a backend that does not support its inputs."""
    return BackendError(sentence(f"attention backend {backend!r}", must, found, do))
