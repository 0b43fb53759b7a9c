"""Pads segments to a multiple, so that each can be split evenly over ranks.

Padding tokens at the end of a segment are ignored by losses and, as attention is causal, invisible
to real tokens. So log-probs, lengths and counts remain those of the real tokens, in both layouts
and with any backend.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from packstore.errors import ConfigError
from packstore.format.arrays import IGNORE_INDEX
from packstore.torch.batch.collate import PackedBatch

Size = TypeVar("Size", int, Tensor)


def padding_multiple(
    *, context_parallel: int = 1, sequence_parallel: int = 1, fp8: bool = False
) -> int:
    """Returns the smallest multiple for :func:`pad_segments` that fits these settings.

    Each segment then splits into ``2 * context_parallel`` equal chunks, and the tokens of each
    context-parallel rank are divisible by `sequence_parallel`, and by 16 for FP8.

    Args:
        context_parallel: number of ranks that share a row of tokens.
        sequence_parallel: number of tensor-parallel ranks with sequence parallelism; 1 without.
        fp8: True if matrix products run in FP8.
    """
    if min(context_parallel, sequence_parallel) < 1:
        raise ConfigError(
            "context_parallel and sequence_parallel must be at least 1; "
            f"found {context_parallel} and {sequence_parallel}."
        )
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    # Transformer Engine multiplies FP8 matrices of a multiple of 16 rows.
    return math.lcm(chunks, context_parallel * math.lcm(sequence_parallel, 16 if fp8 else 1))


def offsets(lengths: Tensor) -> Tensor:
    """Returns the offsets of runs with these lengths, int64 `[n + 1]`."""
    return pad(lengths.cumsum(0), (1, 0))


def owners(lengths: Tensor) -> Tensor:
    """Returns the run of each element, int64 `[sum of lengths]`."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def round_up(value: Size, multiple: int) -> Size:
    """Rounds `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def pad_segments(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Pads every segment of the batch at its end to a multiple of `multiple` tokens.

    Padding tokens have id 0, label -100, and the next positions. `cu_seqlens` (and the keys of
    shared prefixes) then describe the padded segments, `cu_seqlens_unpadded` the real ones; fields
    per segment or example do not change.

    Raises:
        ConfigError: `multiple` is below 1.
    """
    if multiple < 1:
        raise ConfigError(f"the multiple of pad_segments must be at least 1; found {multiple}.")
    if multiple == 1:
        return batch
    before, keys_before = batch.cu_seqlens.long(), batch.cu_seqlens_k.long()
    left_out = keys_before.diff() - before.diff()
    padded = round_up(before.diff(), multiple)
    starts, keys = offsets(padded), offsets(left_out + padded)
    segment = owners(padded)
    tokens = torch.arange(len(segment), device=segment.device)
    moved = torch.arange(batch.num_tokens, device=segment.device)
    moved += (starts - before)[batch.segment_ids]
    kv_index = None
    if batch.kv_index is not None:
        run = owners(left_out + padded)
        place = torch.arange(len(run), device=run.device) - keys[run]
        own = place - left_out[run]
        shared = moved[batch.kv_index[(keys_before[run] + place).clamp(max=keys_before[-1] - 1)]]
        kv_index = torch.where(own < 0, shared, starts[run] + own)
    unpadded, cu_seqlens = batch.cu_seqlens_unpadded, starts.int()

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full((len(segment),), fill).index_copy(0, moved, values)

    return batch.replace(
        input_ids=spread(batch.input_ids, 0),
        labels=spread(batch.labels, IGNORE_INDEX),
        position_ids=tokens - starts[segment] + left_out[segment],
        segment_ids=segment,
        target_index=moved[batch.target_index],
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens if kv_index is None else keys.int(),
        kv_index=kv_index,
        max_seqlen=round_up(batch.max_seqlen, multiple),
        max_seqlen_k=int((left_out + padded).max()),
        cu_seqlens_unpadded=batch.cu_seqlens if unpadded is None else unpadded,
    )
