"""Where the segments of a flat row lie, in the terms of a variable-length attention call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Which keys each query may see: query segment `i` attends to key run `i`, and to nothing else.

    Causal masks are aligned at the end: with n queries and m >= n keys, query `j` stands at
    position ``m - n + j``. In layout ``concat`` both runs are the segment; in ``shared_prefix`` the
    keys are the whole logical sequence, whose shared tokens `kv_index` takes from the example's
    first segment.

    Attributes:
        cu_seqlens_q: int32 `[S + 1]`, offsets of the query segments.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the key runs.
        max_seqlen_q: longest query segment.
        max_seqlen_k: longest key run.
        num_queries: T, tokens of the row.
        kv_index: int64 `[last of cu_seqlens_k]`, the token of the row that each key is; None: the
            keys are the tokens of the row, in order.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_queries: int
    kv_index: Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Lengths of the query segments and of the key runs; waits for the device once a batch."""
        return self.cu_seqlens_q.diff().tolist(), self.cu_seqlens_k.diff().tolist()

    def keys(self, rows_TKH: Tensor) -> Tensor:
        """K or V of the tokens `[T, K, H]` as K or V of the key runs."""
        return rows_TKH if self.kv_index is None else rows_TKH.index_select(0, self.kv_index)

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each segment in turn; `k` and `v` as :meth:`keys` gave them.

        Views from one split: its backward is one concatenation, where slices would each fill a
        gradient as large as the row. Segments without queries, which fill up a fixed number of
        segments, are passed over: they add nothing to the row.
        """
        queries, keys = self.sizes
        parts = torch.split(q, queries), torch.split(k, keys), torch.split(v, keys)
        return (part for part in zip(*parts, strict=True) if len(part[0]))
