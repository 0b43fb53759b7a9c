"""Attention one segment at a time: by its definition, and by torch's kernel.

`reference` is slow, exact, and what tests compare with: any dtype (float64 stays
float64, half precision is computed in float32), windows, softcaps, chunks and sinks.
`sdpa` calls torch's scaled_dot_product_attention once per segment: the cost is the sum
of the squares of their lengths, where one call with a block-diagonal mask would cost
the square of the row's.

torch.compile is kept out of both, as a graph would be specialised to one batch's sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from packstore.errors import BackendError
from packstore.torch.attention import Settings
from packstore.torch.batch.layout import AttentionLayout


def visible(
    queries: int, keys: int, settings: Settings, device: torch.device
) -> Tensor:
    """Returns a bool mask `[queries, keys]`, causal and aligned at the end; see
    `Attend`.
    """
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= query
    if settings.window is not None:
        mask &= query - key < settings.window
    if settings.chunk is not None:
        mask &= key >= query // settings.chunk * settings.chunk
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reference(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Computes softmax(cap(q k^T * scale)) v over the visible keys of each segment."""
    softcap, sinks = settings.softcap, settings.sinks
    exact = torch.promote_types(q_TNH.dtype, torch.float32)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    outputs = []
    for q, k, v in layout.split(q_TNH, layout.keys(k_TKH), layout.keys(v_TKH)):
        k, v = (x.to(exact).repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q.to(exact), k) * settings.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mask = visible(len(q), len(k), settings, q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            extra = sinks.to(exact)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        outputs.append(torch.einsum("nqk,knh->qnh", weights, v))
    return torch.cat(outputs).to(q_TNH.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sdpa(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Calls torch's kernel for each segment, which has no softcap.

    A sink is one more key, whose value is zero. Heads get one more component: ``sink /
    scale`` in queries; in keys 1 at the sink and 0 elsewhere. So its score is the sink,
    with its gradient.
    """
    if settings.softcap is not None:
        raise BackendError(
            "attention backend 'sdpa': attention scores must not be soft-capped; found "
            "softcap "
            f"{settings.softcap}. Use backend='reference', or 'flex' on a GPU."
        )
    sinks = settings.sinks
    if sinks is not None:
        extra = (
            (sinks / settings.scale)
            .to(q_TNH.dtype)[None, :, None]
            .expand(len(q_TNH), -1, 1)
        )
        q_TNH, k_TKH = torch.cat([q_TNH, extra], dim=-1), pad(k_TKH, (0, 1))
    grouped, outputs = q_TNH.shape[1] != k_TKH.shape[1], []
    for q, k, v in layout.split(q_TNH, layout.keys(k_TKH), layout.keys(v_TKH)):
        within = len(k) <= min(settings.window or len(k), settings.chunk or len(k))
        plain = within and sinks is None and len(q) == len(k)
        mask = None if plain else visible(len(q), len(k), settings, q.device)
        if sinks is not None and mask is not None:
            mask = pad(mask, (1, 0), value=True)
            first = pad(torch.zeros_like(k[:1, :, 1:]), (0, 1), value=1.0)
            k, v = torch.cat([first, k]), pad(v, (0, 0, 0, 0, 1, 0))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = scaled_dot_product_attention(
            q, k, v, mask, is_causal=plain, scale=settings.scale, enable_gqa=grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
