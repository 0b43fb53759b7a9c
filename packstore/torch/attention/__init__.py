"""Attention backends: one file each, with one function of one signature.

``attend(q_TNH, k_TKH, v_TKH, layout, *, scale, sliding_window=None, softcap=None, chunk=None,
sinks=None) -> o_TNH``

Legend: T tokens of the flat row, N query heads, K key/value heads (N is a multiple of K: grouped
queries), H head size; values and output may have another head size, except with flash kernels. With
a window of w a query sees itself and the w - 1 tokens before it; with chunks of c, the tokens
before it from the last multiple of c in its sequence. A sink `[N]` is one more score in each
softmax, of a key whose value is zero: ``o * sigmoid(log_sum_exp - sink)``. A backend raises
:class:`~packstore.errors.BackendError` for anything it cannot compute exactly. Capabilities and
tested versions are in ``docs/attention.md``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from packstore.registry import Registry
from packstore.torch.batch.layout import AttentionLayout


class Attend(Protocol):
    """The signature of a backend."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layout: AttentionLayout,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        chunk: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes the output of attention, `[T, N, H]`."""


ATTENTION: Registry[Attend] = Registry(
    "attention backend",
    {
        "reference": "packstore.torch.attention.reference:attend",
        "sdpa": "packstore.torch.attention.sdpa:attend",
        "flex": "packstore.torch.attention.flex:attend",
        "torch_varlen": "packstore.torch.attention.torch_varlen:attend",
        "flash_attn": "packstore.torch.attention.flash_attn:attend",
        "flash_attn_3": "packstore.torch.attention.flash_attn_3:attend",
        "flash_attn_4": "packstore.torch.attention.flash_attn_4:attend",
    },
    extras={"flash_attn_4": "flash4"},
)
