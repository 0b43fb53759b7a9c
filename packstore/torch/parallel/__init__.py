"""Batches for parallel training and for fixed shapes; see ``docs/parallel.md``."""

from packstore.torch.parallel.collectives import gather_rows, reduce_segment_sums
from packstore.torch.parallel.context import ContextShard, ContextSplit, context_shard
from packstore.torch.parallel.padding import pad_segments, padding_multiple
from packstore.torch.parallel.static import StaticSizes, pad_batch, static_sizes

__all__ = [
    "ContextShard",
    "ContextSplit",
    "StaticSizes",
    "context_shard",
    "gather_rows",
    "pad_batch",
    "pad_segments",
    "padding_multiple",
    "reduce_segment_sums",
    "static_sizes",
]
