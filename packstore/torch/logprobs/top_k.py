"""The k most probable ids in place of each target, without making all logits.

They are the highest logits: of each tile, then of these and the highest of the tiles
before. A logit and its id become one number, so that equal logits have an order, the
lowest id first, whatever the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import TopK
from packstore.torch.logprobs.logprobs import (
    exact_dtype,
    head_parts,
    initial_state,
    logsumexp_of,
    make_tile,
    operand_dtype,
)
from packstore.torch.logprobs.tiles import Projection, choose_passes, copy_logits

LARGEST_ID = 2**31 - 1

BLOCK = 2**22
"""Logits that are sorted at once: 8 bytes each, and copies of them."""


@torch.no_grad()
def head_top_k(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    projection: Projection,
    k: int,
) -> tuple[Tensor, TopK]:
    """Return the log-probs of the targets, `[n]`, and the k most probable ids.

    The log-probs of the targets are those of
    :class:`~packstore.torch.logprobs.logprobs.HeadLogProbs`, to the bit.

    Args:
        hidden: `[n, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        targets: int64 `[n]`.
        projection: from the product to the logits.
        k: number of ids for each target.

    Raises:
        ConfigError: `k` is below 1, or above V.
    """
    if not 1 <= k <= len(weight):
        rule = f"k must be from 1 to {len(weight)}, the vocabulary of the head"
        raise ConfigError(sentence("top k", rule=rule, found=str(k)))

    state = initial_state(hidden, exact_dtype(hidden, weight))
    lowest = torch.iinfo(torch.int64).min
    keys = torch.full((len(hidden), k), lowest, device=hidden.device)
    inputs = hidden.to(operand_dtype(hidden, weight))
    with torch.autocast(hidden.device.type, enabled=False):
        passes = choose_passes(inputs, weight, bias, targets, projection)
        for part in head_parts(inputs, weight, projection):
            rows = part.rows
            tile = make_tile(part, bias, targets[rows], projection)
            keys_of_tile = _highest_keys(copy_logits(tile), part.columns.start, k)
            candidates = torch.cat([keys[rows], keys_of_tile], dim=-1)
            keys[rows] = candidates.topk(k).values
            passes.update_logsumexp(state[:, rows], tile)

    log_total = logsumexp_of(state)
    target_logits = state[2]
    ids, logits = _split_keys(keys)
    # A sum of exponentials may be rounded below its largest summand.
    logps = (logits - log_total[:, None]).clamp(max=0)
    return target_logits - log_total, TopK(ids, logps.float())


def _highest_keys(logits: Tensor, first_id: int, k: int) -> Tensor:
    """Return the highest keys of each row, int64 `[n, min(k, w)]`, unique in a row.

    The upper 32 bits of a key have the order of the float32 logit, the lower ones the
    opposite order of the id.

    Args:
        logits: `[n, w]`; overwritten.
        first_id: the id of the first column.
        k: number of keys.
    """
    width = logits.shape[1]
    ids = torch.arange(first_id, first_id + width, device=logits.device)
    keys_of_ids = LARGEST_ID - ids
    blocks = []
    for block in torch.split(logits, max(1, BLOCK // width)):
        # -0.0 becomes 0.0, which it is equal to.
        bits = block.add_(0.0).float().view(torch.int32)
        keys = _reorder(bits).long().mul_(2**32).add_(keys_of_ids)
        blocks.append(keys.topk(min(k, width)).values)
    return torch.cat(blocks)


def _split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids, int32 `[n, k]`, and float32 logits of keys."""
    ids = LARGEST_ID - (keys & LARGEST_ID)
    logits = _reorder((keys >> 32).int()).view(torch.float32)
    return ids.int(), logits


def _reorder(bits: Tensor) -> Tensor:
    """Return the bits of float32 numbers as int32 numbers of the same order, or back.

    Negative numbers have their order reversed: all bits but the sign are flipped.
    """
    flips = (bits >> 31).bitwise_and_(2**31 - 1)
    return flips.bitwise_xor_(bits)
