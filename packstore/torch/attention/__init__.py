"""Attention backends: functions of one signature, :data:`Attend`.

A backend computes causal attention in a packed row, where each segment sees only its
own sequence. It raises :class:`~packstore.errors.BackendError` where it would not be
exact. Capabilities and tested versions are in ``docs/attention.md``.

Suffixes of tensors name their axes: T tokens of the flat row, N query heads, K
key/value heads (N is a multiple of K: grouped queries), H head size; values and output
may have another head size, except with flash kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from packstore.registry import Registry
from packstore.torch.batch.layout import AttentionLayout


class Settings(NamedTuple):
    """Settings of the attention of a layer.

    Attributes:
        scale: factor on the products of queries and keys: the scores.
        window: w: a query sees itself and the w - 1 tokens before it; None: all.
        softcap: c: scores become ``c * tanh(score / c)``; None: they stay.
        chunk: n: a sequence is cut into chunks of n tokens, and a query sees itself and
            the tokens before it in its chunk; None: all.
        sinks: `[N]`, one more score in each softmax of a head, of a key with the value
            zero. That is the output without sinks, times ``sigmoid(lse - sink)``, where
            lse is the logarithm of the sum of the exponentials of the scores.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: Tensor | None = None


Attend = Callable[[Tensor, Tensor, Tensor, AttentionLayout, Settings], Tensor]
"""A backend: queries `[T, N, H]`, keys and values `[T, K, H]`, layout, settings -> `[T,
N, H]`.
"""

ATTENTION: Registry[Attend] = Registry(
    "attention backend",
    {
        "auto": "packstore.torch.attention.auto:attend",
        "auto_varlen": "packstore.torch.attention.auto:attend",
        "auto_ranges": "packstore.torch.attention.auto:attend_ranges",
        "reference": "packstore.torch.attention.plain:reference",
        "sdpa": "packstore.torch.attention.plain:sdpa",
        "flex": "packstore.torch.attention.flex:attend",
        "torch_varlen": "packstore.torch.attention.torch_varlen:attend",
        "ranges": "packstore.torch.attention.ranges:attend",
        "flash_attn": "packstore.torch.attention.flash:flash_attn",
        "flash_attn_3": "packstore.torch.attention.flash:flash_attn_3",
    },
)

AUTOMATIC = ("auto", "auto_varlen", "auto_ranges")
"""Backends that choose another one at each call."""
