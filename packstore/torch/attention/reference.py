"""Attention by its definition, one segment at a time: slow, exact, the reference for tests.

Supports any dtype (float64 stays float64, half precision is computed in float32), grouped queries,
windows, softcaps, chunks, sinks, both layouts and gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Computes softmax(cap(q k^T * scale)) v over the visible keys of each segment."""
    exact = torch.promote_types(q_TNH.dtype, torch.float32)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    keys, values = layout.keys(k_TKH), layout.keys(v_TKH)
    outputs = []
    for q, k, v in layout.split(q_TNH, keys, values):
        k, v = (x.to(exact).repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q.to(exact), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~visible(len(q), len(k), sliding_window, chunk, q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.to(exact)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        outputs.append(torch.einsum("nqk,knh->qnh", weights, v))
    return torch.cat(outputs).to(q_TNH.dtype)
