"""torch's scaled_dot_product_attention, called once per segment.

The cost is the sum of the squares of segment lengths; one call with a block-diagonal mask would
cost the square of the row's length. Softcaps raise: the kernel does not support them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packstore.errors import BackendError, sentence
from packstore.torch.attention._causal import visible
from packstore.torch.attention._opaque import opaque
from packstore.torch.batch.layout import AttentionLayout


@opaque
def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes each segment separately.

    Raises:
        BackendError: the model caps its attention scores.
    """
    if softcap is not None:
        raise BackendError(
            sentence(
                "attention backend 'sdpa'",
                "attention scores must not be soft-capped",
                f"softcap {softcap}",
                "Use backend='reference', or 'flex' on a GPU",
            )
        )
    keys, values = layout.keys(k_TKH), layout.keys(v_TKH)
    grouped = q_TNH.shape[1] != k_TKH.shape[1]
    outputs = []
    for q, k, v in layout.split(q_TNH, keys, values):
        window = None if sliding_window is None or sliding_window >= len(k) else sliding_window
        plain = window is None and len(q) == len(k)
        output = scaled_dot_product_attention(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            attn_mask=None if plain else visible(len(q), len(k), window, q.device),
            is_causal=plain,
            scale=scale,
            enable_gqa=grouped,
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _heads_first(rows_TNH: Tensor) -> Tensor:
    return rows_TNH.transpose(0, 1).unsqueeze(0)
