"""Batches for parallel training and for fixed shapes; see ``docs/parallel.md``."""

from packstore.torch.parallel.context import (
    ContextShard,
    ContextSplit,
    context_shard,
    gather_rows,
    reduce_segment_sums,
)
from packstore.torch.parallel.padding import (
    pad_batch,
    pad_segments,
    padding_multiple,
    static_sizes,
)

__all__ = [
    "ContextShard",
    "ContextSplit",
    "context_shard",
    "gather_rows",
    "pad_batch",
    "pad_segments",
    "padding_multiple",
    "reduce_segment_sums",
    "static_sizes",
]
