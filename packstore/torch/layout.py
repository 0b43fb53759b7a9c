"""Where the segments of a flat row lie, in the terms of a variable-length attention call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from packstore.errors import BackendError, sentence


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
    lengths: Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Lengths of the query segments and of the key runs; waits for the device once a batch."""
        return self.cu_seqlens_q.diff().tolist(), self.cu_seqlens_k.diff().tolist()

    @cached_property
    def sequence_lengths(self) -> tuple[list[int], list[int]]:
        """Tokens of the shortest and the longest sequence that each segment is part of.

        Waits for the device once a batch.

        Raises:
            BackendError: a layout of shared keys that does not hold `lengths`.
        """
        if self.lengths is None:
            if self.kv_index is not None:
                must = "a layout with shared keys must hold the lengths of its sequences"
                raise BackendError(sentence("AttentionLayout", must, "none", "Use batch.layout"))
            return self.sizes[1], self.sizes[1]
        shortest, longest = self.lengths.expand(2, -1).tolist()
        return shortest, longest

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


class _Row(Protocol):
    """The parts of a batch that say which sequences share tokens."""

    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def cu_seqlens_k(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def num_responses(self) -> Tensor: ...


def shared_lengths(row: _Row) -> Tensor:
    """int32 `[2, S]`: the shortest and the longest sequence that each segment is part of.

    An example's first segment holds the prefix of those that leave it out.
    """
    lengths, responses = row.lengths, row.num_responses.long()
    size = len(lengths)
    first = (responses.cumsum(0) - responses).repeat_interleave(responses, output_size=size)
    shares = row.cu_seqlens_k.diff() > row.cu_seqlens.diff()
    owner = torch.where(shares, first, torch.arange(size, device=lengths.device))
    return torch.stack([lengths.scatter_reduce(0, owner, lengths, how) for how in ("amin", "amax")])
