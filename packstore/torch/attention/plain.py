"""Attention one segment at a time: `reference`, by its definition, and `sdpa`.

`reference` is slow, exact, and the standard of all tests: any dtype (float64 stays
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

from packstore.errors import BackendError, sentence
from packstore.torch.attention import Settings
from packstore.torch.batch.layout import AttentionLayout

KEY_BLOCK = 512
"""Keys that torch's CPU kernel processes at once; causal attention skips whole blocks
of keys that no query sees.
"""


def visible(
    queries: int, keys: int, settings: Settings, device: torch.device
) -> Tensor:
    """Return a bool mask `[queries, keys]`: True where a query sees a key.

    The last query is at the position of the last key.

    Args:
        queries: number of queries.
        keys: number of keys, at least as many.
        settings: with the window and chunk.
        device: device of the mask.
    """
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= query
    if settings.window is not None:
        mask &= query - key < settings.window
    if settings.chunk is not None:
        first_of_chunk = query // settings.chunk * settings.chunk
        mask &= key >= first_of_chunk
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reference(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute softmax(cap(q k^T * scale)) v over the visible keys of each segment."""
    exact = torch.promote_types(q_TNH.dtype, torch.float32)
    group_size = q_TNH.shape[1] // k_TKH.shape[1]
    outputs = []
    for q, k, v in layout.split(q_TNH, layout.keys(k_TKH), layout.keys(v_TKH)):
        keys = k.to(exact).repeat_interleave(group_size, dim=1)
        values = v.to(exact).repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qnh,knh->nqk", q.to(exact), keys) * settings.scale
        if settings.softcap is not None:
            scores = settings.softcap * torch.tanh(scores / settings.softcap)
        mask = visible(len(q), len(k), settings, q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        if settings.sinks is not None:
            sink_scores = settings.sinks.to(exact)[:, None, None]
            sink_scores = sink_scores.expand(-1, len(q), 1)
            scores = torch.cat([scores, sink_scores], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        outputs.append(torch.einsum("nqk,knh->qnh", weights, values))
    return torch.cat(outputs).to(q_TNH.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sdpa(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Call torch's kernel for each segment; it supports no softcap."""
    if settings.softcap is not None:
        raise BackendError(
            sentence(
                where="attention backend 'sdpa'",
                rule="attention scores must not be soft-capped",
                found=f"softcap {settings.softcap}",
                remedy="Use backend='reference', or 'flex' on a GPU",
            )
        )
    has_sinks = settings.sinks is not None
    is_grouped = q_TNH.shape[1] != k_TKH.shape[1]
    if settings.sinks is not None:
        # The kernel multiplies scores by the scale, so sinks are divided by it.
        q_TNH = _append_sinks(q_TNH, settings.sinks / settings.scale)
        k_TKH = pad(k_TKH, (0, 1))

    outputs = []
    for q, k, v in layout.split(q_TNH, layout.keys(k_TKH), layout.keys(v_TKH)):
        num_shared = len(k) - len(q)
        is_square = not has_sinks and _should_be_square(len(q), len(k), settings)
        mask = None
        if is_square and num_shared:
            q = pad(q, (0, 0, 0, 0, num_shared, 0))
        if not is_square:
            mask = visible(len(q), len(k), settings, q.device)
            if has_sinks:
                k, v, mask = _prepend_sink_key(k, v, mask)
        output = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            mask,
            is_causal=is_square,
            scale=settings.scale,
            enable_gqa=is_grouped,
        )
        output = output[0].transpose(0, 1)
        outputs.append(output[num_shared:] if is_square else output)
    return torch.cat(outputs)


def _should_be_square(queries: int, keys: int, settings: Settings) -> bool:
    """Return True if a segment needs no mask, or is faster without one.

    The kernel's own causal mask is aligned at the first key. It is right for a segment
    that omits no shared tokens, and for others with a query of zeros in place of each
    omitted token, the output of which is dropped. The kernel skips the keys behind
    each block of queries then, but computes the additional queries. By measurements of
    segments of up to 2,500 tokens, that takes 0.5 to 1 times as long as a mask under
    the condition below, and up to 4 times otherwise.
    """
    if settings.window is not None and settings.window < keys:
        return False
    if settings.chunk is not None and settings.chunk < keys:
        return False
    num_shared = keys - queries
    return num_shared == 0 or queries >= num_shared + max(num_shared, KEY_BLOCK)


def _append_sinks(q_TNH: Tensor, sinks: Tensor) -> Tensor:
    """Return queries with one more component, the sink of their head.

    The kernel has no sinks, so :func:`_prepend_sink_key` adds a key to each segment. It
    is 0 but for the additional component, where it is 1 and all other keys are 0. So
    its score is the sink, and the sink gets its gradient.
    """
    component = sinks.to(q_TNH.dtype)[None, :, None].expand(len(q_TNH), -1, 1)
    return torch.cat([q_TNH, component], dim=-1)


def _prepend_sink_key(
    k: Tensor, v: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and mask of a segment with the key of the sinks in front.

    All queries see it, and its value is 0.
    """
    sink_key = pad(torch.zeros_like(k[:1, :, 1:]), (0, 1), value=1.0)
    keys = torch.cat([sink_key, k])
    values = pad(v, (0, 0, 0, 0, 1, 0))
    return keys, values, pad(mask, (1, 0), value=True)
