"""FlashAttention 2 and 3 by their packages, and the inputs that flash kernels support.

CUDA and half precision only; grouped queries, windows and soft-capped scores. Causal
masks are aligned at the end of the keys (bottom right), so a shared prefix needs no
special call. :mod:`packstore.torch.attention` explains the letters of shapes.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from packstore.errors import BackendError, MissingExtraError, sentence
from packstore.torch.attention import Attend, Settings
from packstore.torch.batch.layout import AttentionLayout

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


class Package(NamedTuple):
    """The package of a version of FlashAttention: its module, and how to install it."""

    module: str
    install: str


PACKAGES = {
    "flash_attn": Package(
        "flash_attn",
        "its build needs nvcc and the installed torch. Run: pip install ninja "
        "packaging setuptools wheel && pip install --no-build-isolation "
        "'packstore[flash]'",
    ),
    "flash_attn_3": Package(
        "flash_attn_interface",
        "it is for Hopper, and not on PyPI. Run: git clone --recursive "
        "https://github.com/Dao-AILab/flash-attention && pip install "
        "--no-build-isolation ./flash-attention/hopper",
    ),
}
"""Backend -> package."""


def __getattr__(name: str) -> Attend:
    """Return the backend of this name, so that its package is imported only then."""
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load_backend(name)


def _load_backend(name: str) -> Attend:
    """Return the backend `name`; raise MissingExtraError without its package."""
    package = PACKAGES[name]
    try:
        kernel = importlib.import_module(package.module).flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"attention backend {name!r} needs the module {package.module!r}, which is "
            f"not installed; {package.install}"
        ) from error

    def attend(
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layout: AttentionLayout,
        settings: Settings,
    ) -> Tensor:
        check(name, q_TNH, k_TKH, v_TKH, settings)
        keys_before = count_keys_before(layout, settings.window)
        # Keys and values in the order of the key runs: with a shared prefix, each run
        # begins with the prefix.
        keys = layout.keys(k_TKH)
        values = layout.keys(v_TKH)
        output = kernel(
            q_TNH,
            keys,
            values,
            cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k,
            max_seqlen_q=layout.max_seqlen_q,
            max_seqlen_k=layout.max_seqlen_k,
            causal=True,
            window_size=(-1, -1) if keys_before < 0 else (keys_before, 0),
            softmax_scale=settings.scale,
            softcap=settings.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Builds of version 3 before 2025-11 return the log-sum-exp as well.
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    return attend


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) for others."""
    has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if device.type != "cuda" or not has_cuda:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def runs_on(device: torch.device) -> bool:
    """Return True for a CUDA device of compute capability 8 or newer."""
    return capability(device) >= (8, 0)


def fits(q: Tensor, v: Tensor) -> bool:
    """Return True if the kernels support these head sizes."""
    size = q.shape[-1]
    # Not `return size == ...`: with symbolic sizes of torch.compile that is a SymBool,
    # and a branch returns a constant.
    if size == v.shape[-1] and size % 8 == 0 and size <= LARGEST_HEAD:  # noqa: SIM103
        return True
    return False


def check(backend: str, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> None:
    """Raise BackendError for chunks, sinks, and tensors that the kernels do not support
    or would cast.
    """
    where = f"attention backend {backend!r}"
    if settings.chunk is not None or settings.sinks is not None:
        if settings.chunk is not None:
            unsupported = "chunks"
        else:
            unsupported = "sinks, with a gradient that it ignores"
        raise BackendError(
            sentence(
                where=where,
                rule=(
                    "attention must be a softmax over all tokens before, or over a "
                    "window of them"
                ),
                found=unsupported,
                remedy="Use backend='flex' or 'sdpa'",
            )
        )

    dtypes = {q.dtype, k.dtype, v.dtype}
    is_supported_dtype = len(dtypes) == 1 and q.dtype in DTYPES
    if q.device.type not in DEVICES or not is_supported_dtype:
        names = " and ".join(sorted(str(dtype) for dtype in dtypes))
        raise BackendError(
            sentence(
                where=where,
                rule=(
                    "tensors must be float16 or bfloat16, all the same, on a CUDA "
                    "device"
                ),
                found=f"{names} on {q.device.type}",
                remedy=(
                    "Load the model in bfloat16 on a GPU, use torch.autocast, or "
                    "choose backend='sdpa'"
                ),
            )
        )
    if not fits(q, v):
        raise BackendError(
            sentence(
                where=where,
                rule=(
                    f"heads must have one size, a multiple of 8 up to {LARGEST_HEAD}"
                ),
                found=f"{q.shape[-1]} for queries and {v.shape[-1]} for values",
                remedy="Use backend='flex' or 'sdpa'",
            )
        )


def check_no_softcap(backend: str, settings: Settings) -> None:
    """Raise BackendError for soft-capped scores, which only FlashAttention supports."""
    if settings.softcap is not None:
        raise BackendError(
            sentence(
                where=f"attention backend {backend!r}",
                rule="attention scores must not be soft-capped",
                found=f"softcap {settings.softcap}",
                remedy="Use backend='flex' or 'flash_attn'",
            )
        )


def count_keys_before(layout: AttentionLayout, window: int | None) -> int:
    """Return how many keys before its own a query sees; -1: all.

    Windows of :class:`Settings` include the query's own key, windows of the kernels do
    not.
    """
    if window is None or window >= layout.max_seqlen_k:
        return -1
    return window - 1
