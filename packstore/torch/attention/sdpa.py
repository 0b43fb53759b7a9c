"""torch's scaled_dot_product_attention, called once per segment.

The cost is the sum of the squares of segment lengths; one call with a block-diagonal mask would
cost the square of the row's length. Softcaps raise: the kernel does not support them.

A sink is one more key, whose value is zero. Heads get one more component: ``sink / scale`` in
queries; in keys 1 at the sink and 0 elsewhere. So its score is the sink, with its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

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
    chunk: int | None = None,
    sinks: Tensor | None = None,
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
    if sinks is not None:
        extra = (sinks / scale).to(q_TNH.dtype)[None, :, None].expand(len(q_TNH), -1, 1)
        q_TNH, k_TKH = torch.cat([q_TNH, extra], dim=-1), pad(k_TKH, (0, 1))
    keys, values = layout.keys(k_TKH), layout.keys(v_TKH)
    grouped = q_TNH.shape[1] != k_TKH.shape[1]
    outputs = []
    for q, k, v in layout.split(q_TNH, keys, values):
        window = None if sliding_window is None or sliding_window >= len(k) else sliding_window
        chunked = None if chunk is None or chunk >= len(k) else chunk
        plain = window is None and chunked is None and sinks is None and len(q) == len(k)
        mask = None if plain else visible(len(q), len(k), window, chunked, q.device)
        if sinks is not None:
            seen = visible(len(q), len(k), window, chunked, q.device)
            mask = pad(seen, (1, 0), value=True)
            first = pad(torch.zeros_like(k[:1, :, 1:]), (0, 1), value=1.0)
            k, v = torch.cat([first, k]), pad(v, (0, 0, 0, 0, 1, 0))
        output = scaled_dot_product_attention(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            attn_mask=mask,
            is_causal=plain,
            scale=scale,
            enable_gqa=grouped,
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _heads_first(rows_TNH: Tensor) -> Tensor:
    return rows_TNH.transpose(0, 1).unsqueeze(0)
