"""torch's FlexAttention with the layout as its mask: supports softcaps, sinks and any
head size.

Every query of a layout sees one contiguous run of keys, windows and chunks included. So
the mask is two numbers per query, and the blocks that the kernel may skip follow from
their minimum and maximum in each block, without evaluating queries times keys. Both are
made once per layout, window and chunk, and reused by all layers and by gradient
checkpointing.

On a GPU the kernel is compiled. Lengths are rounded up to a quarter of the power of two
below them, so that most runs compile once; a second length triggers one more
compilation, for any length. On CPU it runs uncompiled, and torch has the forward pass
only: inputs that need gradients raise.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from packstore.errors import BackendError
from packstore.torch.attention import Settings
from packstore.torch.batch.layout import AttentionLayout, segment_ids

BLOCK = 128
"""Block size of the mask: the kernel skips or computes this many queries and keys
together.
"""

_masks: WeakKeyDictionary[AttentionLayout, dict[Any, BlockMask]] = WeakKeyDictionary()
"""The masks of a layout, by window and chunk."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Computes all segments in one call; torch.compile is kept out, as it has
    its own.
    """
    rows = (q_TNH, layout.keys(k_TKH), layout.keys(v_TKH))
    training = torch.is_grad_enabled() and any(x.requires_grad for x in rows)
    if training and q_TNH.device.type == "cpu":
        raise BackendError(
            "attention backend 'flex': on CPU it has a forward pass only; found "
            "tensors that need "
            "gradients. Use backend='sdpa' or 'reference' on CPU."
        )
    heads_first = (
        pad(x, (0, 0, 0, 0, 0, rounded(len(x)) - len(x))).transpose(0, 1)[None]
        for x in rows
    )
    output = _kernel(q_TNH.device.type)(
        *heads_first,
        score_mod=None if settings.softcap is None else _capped(settings.softcap),
        block_mask=block_mask(layout, settings.window, settings.chunk),
        scale=settings.scale,
        enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        return_aux=None if settings.sinks is None else AuxRequest(lse=True),
    )
    if settings.sinks is not None:
        output, aux = output
        share = torch.sigmoid(aux.lse - settings.sinks.to(aux.lse.dtype)[:, None])
        output = (output * share[..., None]).to(q_TNH.dtype)
    return output[0].transpose(0, 1)[: len(q_TNH)]  # type: ignore[no-any-return]


def rounded(tokens: int) -> int:
    """Rounds `tokens` up to a quarter of the power of two below it, and to whole
    blocks.
    """
    step = max(BLOCK, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


def block_mask(
    layout: AttentionLayout, window: int | None, chunk: int | None = None
) -> BlockMask:
    """Returns the mask of a layout, made on first use."""
    masks = _masks.setdefault(layout, {})
    if (window, chunk) not in masks:
        masks[window, chunk] = _block_mask(layout, window, chunk)
    return masks[window, chunk]


def _block_mask(
    layout: AttentionLayout, window: int | None, chunk: int | None
) -> BlockMask:
    """From the first and last key of each query, `[rounded T]`."""
    starts_q, starts_k = layout.cu_seqlens_q.long(), layout.cu_seqlens_k.long()
    tokens = layout.num_queries
    keys = tokens if layout.kv_index is None else len(layout.kv_index)
    segment = segment_ids(starts_q.diff(), tokens)
    query = torch.arange(tokens, device=starts_q.device)
    last = starts_k[segment + 1] - (starts_q[segment + 1] - query)
    first = starts_k[segment]
    if chunk is not None:
        first = first + (last - first) // chunk * chunk
    if window is not None:
        first = torch.maximum(first, last - window + 1)
    # Padding queries see the last key, as the softmax over no keys is undefined.
    extra = (0, rounded(tokens) - tokens)
    first, last = (pad(x, extra, value=keys - 1) for x in (first, last))

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    starts = torch.arange(0, rounded(keys), BLOCK, device=first.device)
    lowest, highest = first.view(-1, BLOCK).aminmax(dim=1)
    least, greatest = last.view(-1, BLOCK).aminmax(dim=1)
    some = (starts + BLOCK > lowest[:, None]) & (starts <= greatest[:, None])
    whole = (starts >= highest[:, None]) & (starts + BLOCK <= least[:, None] + 1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks of each row, and indices with those blocks first: `[1, 1, rows(,
    n)]`.
    """
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None].contiguous()


@cache
def _kernel(device: str) -> Any:
    # fullgraph: raises instead of running the uncompiled kernel, which makes all scores
    # of a row.
    compiler = "eager" if device == "cpu" else "inductor"
    return torch.compile(flex_attention, fullgraph=True, backend=compiler)


@cache
def _capped(softcap: float) -> Any:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
