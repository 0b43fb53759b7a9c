"""torch's FlexAttention with the layout as its mask: supports softcaps, sinks and any
head size.

Every query of a layout sees one contiguous run of keys, windows and chunks included. So
the mask is two numbers per query: its first and its last key. The blocks of keys that
the kernel may skip follow from the minimum and maximum of these numbers in each block
of queries, without a matrix of queries times keys. Masks are computed once per layout,
window and chunk, and reused by all layers and by gradient checkpointing.

On a GPU the kernel is compiled for the length of its inputs; a second length triggers
one more compilation, for any length. So that most runs compile once, rows are padded:
their length is rounded up to a multiple of a quarter of the power of two below it, as
5,000 to 5,120. On CPU the kernel runs uncompiled, and torch has the forward pass only:
inputs that need gradients raise.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from packstore.errors import BackendError, sentence
from packstore.torch.attention import Settings
from packstore.torch.batch.layout import AttentionLayout, segment_ids

BLOCK = 128
"""Block size of the mask: the kernel skips or computes this many queries and keys
together.
"""

MaskKey = tuple[int | None, int | None]
"""Window and chunk."""

_MASKS: WeakKeyDictionary[AttentionLayout, dict[MaskKey, BlockMask]] = (
    WeakKeyDictionary()
)
"""The masks of each layout; weak, so that they are freed with it."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: AttentionLayout,
    settings: Settings,
) -> Tensor:
    """Compute attention of all segments in one call.

    Compiled layers run it outside their graph, as the kernel is compiled by itself.
    """
    rows = (q_TNH, layout.keys(k_TKH), layout.keys(v_TKH))
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in rows)
    if needs_gradients and q_TNH.device.type == "cpu":
        raise BackendError(
            sentence(
                where="attention backend 'flex'",
                rule="on CPU it has a forward pass only",
                found="tensors that need gradients",
                remedy="Use backend='sdpa' or 'reference' on CPU",
            )
        )
    queries, keys, values = (_heads_first(x) for x in rows)
    output = _kernel(q_TNH.device.type)(
        queries,
        keys,
        values,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap),
        block_mask=block_mask(layout, settings.window, settings.chunk),
        scale=settings.scale,
        enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        return_aux=None if settings.sinks is None else AuxRequest(lse=True),
    )
    if settings.sinks is not None:
        output, aux = output
        sinks = settings.sinks.to(aux.lse.dtype)[:, None]
        share_of_keys = torch.sigmoid(aux.lse - sinks)
        output = (output * share_of_keys[..., None]).to(q_TNH.dtype)
    return output[0].transpose(0, 1)[: len(q_TNH)]  # type: ignore[no-any-return]


def _heads_first(rows: Tensor) -> Tensor:
    """Return rows `[n, heads, H]` as `[1, heads, rounded n, H]`, padded with zeros."""
    padding = rounded(len(rows)) - len(rows)
    padded = pad(rows, (0, 0, 0, 0, 0, padding))
    return padded.transpose(0, 1)[None]


def rounded(tokens: int) -> int:
    """Round `tokens` up to a quarter of the power of two below it, and to whole
    blocks.
    """
    step = max(BLOCK, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


def block_mask(
    layout: AttentionLayout, window: int | None, chunk: int | None = None
) -> BlockMask:
    """Return the mask of a layout, which is computed on first use."""
    masks = _MASKS.setdefault(layout, {})
    key = (window, chunk)
    if key not in masks:
        masks[key] = _compute_block_mask(layout, window, chunk)
    return masks[key]


def _compute_block_mask(
    layout: AttentionLayout, window: int | None, chunk: int | None
) -> BlockMask:
    """Compute the mask from the first and last key of each query."""
    num_tokens = layout.num_queries
    num_keys = num_tokens if layout.kv_index is None else len(layout.kv_index)
    first, last = _visible_keys(layout, window, chunk)
    # Queries of the padding see the last key, as a softmax over no keys is undefined.
    padding = (0, rounded(num_tokens) - num_tokens)
    first = pad(first, padding, value=num_keys - 1)
    last = pad(last, padding, value=num_keys - 1)

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    # Blocks of queries (rows) against blocks of keys (columns): a block of keys is
    # partly visible if it overlaps the keys of any query of the block, and fully
    # visible if it lies in the keys of all.
    lowest_first, highest_first = first.view(-1, BLOCK).aminmax(dim=1)
    lowest_last, highest_last = last.view(-1, BLOCK).aminmax(dim=1)
    starts = torch.arange(0, rounded(num_keys), BLOCK, device=first.device)
    ends = starts + BLOCK
    is_partly_visible = (ends > lowest_first[:, None]) & (
        starts <= highest_last[:, None]
    )
    is_fully_visible = (starts >= highest_first[:, None]) & (
        ends <= lowest_last[:, None] + 1
    )
    num_partial, partial_blocks = _block_list(is_partly_visible & ~is_fully_visible)
    num_full, full_blocks = _block_list(is_fully_visible)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_blocks,
        num_full,
        full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
    )


def _visible_keys(
    layout: AttentionLayout, window: int | None, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Return the first and last key that each query sees, int64 `[T]` each."""
    starts_q = layout.cu_seqlens_q.long()
    starts_k = layout.cu_seqlens_k.long()
    segment = segment_ids(starts_q.diff(), layout.num_queries)
    query = torch.arange(layout.num_queries, device=starts_q.device)
    last = starts_k[segment + 1] - (starts_q[segment + 1] - query)
    first = starts_k[segment]
    if chunk is not None:
        first = first + (last - first) // chunk * chunk
    if window is not None:
        first = torch.maximum(first, last - window + 1)
    return first, last


def _block_list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks of each row, int32 `[1, 1, rows]`, and the
    indices of all blocks, the marked ones first, `[1, 1, rows, n]`.
    """
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None].contiguous()


@cache
def _kernel(device: str) -> Any:
    """Return the compiled kernel; on a CPU it runs as it is."""
    # fullgraph: raises instead of running the uncompiled kernel, which computes all
    # scores of a row.
    backend = "eager" if device == "cpu" else "inductor"
    return torch.compile(flex_attention, fullgraph=True, backend=backend)


@cache
def _softcap(softcap: float) -> Any:
    """Return the function that caps a score.

    It is cached, as the kernel would be compiled again for a new function object.
    """

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap
