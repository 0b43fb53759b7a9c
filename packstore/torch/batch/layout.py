"""The layout of a flat row for attention, and its targets for log-probs.

A row holds S segments one after another. For attention each of them is a segment of
queries, and the tokens that these may see are its key run: the segment itself, or in
layout ``shared_prefix`` the tokens that it omits and then the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from packstore.torch.batch.ranges import KeyRanges

T = TypeVar("T")


def cached_outside_inference_mode(compute: Callable[[Any], T]) -> cached_property[T]:
    """Make a cached property, computed outside torch's inference mode.

    Its tensors may take part in training, even if they were first needed in inference
    mode: torch does not save tensors of that mode for backward.
    """

    @wraps(compute)
    def compute_outside(instance: Any) -> T:
        if not torch.is_inference_mode_enabled():
            return compute(instance)
        with torch.inference_mode(False):
            return compute(instance)

    return cached_property(compute_outside)


def offsets(lengths: Tensor) -> Tensor:
    """Return the offsets of runs with these lengths, int64 `[n + 1]`.

    Lengths ``[3, 2]`` have the offsets ``[0, 3, 5]``.
    """
    return pad(lengths.cumsum(0), (1, 0))


def segment_ids(lengths: Tensor, size: int | None = None) -> Tensor:
    """Return the index of each element's run, int64 `[sum of lengths]`.

    Lengths ``[3, 2]`` give ``[0, 0, 0, 1, 1]``.

    Args:
        lengths: int `[n]`, lengths of the runs.
        size: the sum of the lengths; None: compute it, which waits for the device.
    """
    runs = torch.arange(len(lengths), device=lengths.device)
    return runs.repeat_interleave(lengths, output_size=size)


def range_indices(starts: Tensor, lengths: Tensor, size: int | None = None) -> Tensor:
    """Concatenate ranges of integers, int64 `[sum of lengths]`.

    Starts ``[10, 5]`` and lengths ``[3, 2]`` give ``[10, 11, 12, 5, 6]``.

    Args:
        starts: int64 `[n]`.
        lengths: int `[n]`.
        size: the sum of the lengths; None: compute it, which waits for the device.
    """
    run = segment_ids(lengths, size)
    places = torch.arange(len(run), device=run.device)
    return places + (starts - offsets(lengths)[:-1])[run]


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The keys that each query may see: query segment `i` attends to key run `i` only.

    Causal masks are aligned at the end: with n queries and m >= n keys, query `j` has
    position ``m - n + j``. In layout ``concat`` both runs are the segment; in
    ``shared_prefix`` the keys are the whole logical sequence: `kv_index` takes the
    tokens that a segment omits from its parent's sequence.

    Attributes:
        cu_seqlens_q: int32 `[S + 1]`, offsets of the query segments.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the key runs; `cu_seqlens_q` itself if
            the keys of each segment are its own tokens.
        max_seqlen_q: longest query segment.
        max_seqlen_k: longest key run.
        num_queries: T, tokens of the row.
        kv_index: int64 `[last of cu_seqlens_k]`, the row index of each key; None: the
            keys are the tokens of the row, in order.
        lengths: int `[S]`, tokens of each key run before its padding; None: no run is
            padded.
        num_rows: R, number of rows of K and V that `kv_index` indexes; None: the T
            tokens. More under context parallelism: tokens of all ranks.
        places: int64, computed from `kv_index`, as its inverse: the indices in
            `kv_index` of row 0, then of row 1, and so on.
        place_offsets: int64 `[R + 1]`, computed from `kv_index`: offsets of the rows in
            `places`.
        ranges: the same keys as ranges of rows; None under context parallelism, where
            a rank has rows of its own only.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_queries: int
    kv_index: Tensor | None = None
    lengths: Tensor | None = None
    num_rows: int | None = None
    places: Tensor | None = None
    place_offsets: Tensor | None = None
    ranges: KeyRanges | None = None

    def __post_init__(self) -> None:
        if self.kv_index is None:
            return
        if self.places is not None:
            return  # a copy: FSDP2 copies the layout field by field
        num_rows = self.num_queries if self.num_rows is None else self.num_rows
        rows, places = self.kv_index.sort(stable=True)
        all_rows = torch.arange(num_rows + 1, device=rows.device)
        place_offsets = torch.searchsorted(rows, all_rows)
        # Here, not where they are used: there each compiled layer would compute them
        # again.
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "place_offsets", place_offsets)

    @cached_outside_inference_mode
    def sizes(self) -> tuple[list[int], list[int]]:
        """Lengths of the query segments and key runs; synchronises the device once per
        batch.
        """
        query_lengths: list[int] = self.cu_seqlens_q.diff().tolist()
        if self.cu_seqlens_k is self.cu_seqlens_q:
            return query_lengths, query_lengths
        key_lengths: list[int] = self.cu_seqlens_k.diff().tolist()
        return query_lengths, key_lengths

    @cached_outside_inference_mode
    def real_sizes(self) -> list[int]:
        """Lengths of the key runs without padding; synchronises the device once per
        batch.
        """
        if self.lengths is None:
            _, key_lengths = self.sizes
            return key_lengths
        lengths: list[int] = self.lengths.tolist()
        return lengths

    def rows(self, rows_TKH: Tensor) -> Tensor:
        """Return the rows of K or V that `kv_index` indexes: here those of the tokens.

        Under context parallelism they are gathered from all ranks.
        """
        return rows_TKH

    def keys(self, rows_TKH: Tensor) -> Tensor:
        """Gather K or V of the row's tokens, `[T, K, H]`, in the order of the key
        runs.
        """
        rows = self.rows(rows_TKH)
        return rows if self.kv_index is None else rows.index_select(0, self.kv_index)

    def split(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield queries, keys and values of each segment that has tokens.

        `k` and `v` come from :meth:`keys`.
        """
        query_lengths, key_lengths = self.sizes
        queries = torch.split(q, query_lengths)
        keys = torch.split(k, key_lengths)
        values = torch.split(v, key_lengths)
        for query, key, value in zip(queries, keys, values, strict=True):
            if len(query):
                yield query, key, value


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict: int64 `[n]` each.

    Attributes:
        rows: row index of the token before the target, which predicts it.
        ids: token id of the target.
        segments: segment that its log-prob belongs to; S, one past the last, for
            padding of a fixed number of targets.
    """

    rows: Tensor
    ids: Tensor
    segments: Tensor
