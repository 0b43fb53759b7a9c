"""Parts of a flat row: the keys that attention sees, and the targets of log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(make: Callable[P, T]) -> Callable[P, T]:
    """Makes a function whose tensors gradients may use, also if it is called in
    inference mode.

    torch never saves for backward what was made in inference mode.
    """

    @wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    return wrapper


def cached_outside_inference_mode(make: Callable[[Any], T]) -> cached_property[T]:
    """Makes a cached property of a function, :func:`outside_inference_mode`."""
    return cached_property(outside_inference_mode(make))


def offsets(lengths: Tensor) -> Tensor:
    """Returns the offsets of runs with these lengths, int64 `[n + 1]`."""
    return pad(lengths.cumsum(0), (1, 0))


def segment_ids(lengths: Tensor, size: int | None = None) -> Tensor:
    """Returns the run of each element, int64 `[sum of lengths]`; waits for the sum
    unless given.
    """
    runs = torch.arange(len(lengths), device=lengths.device)
    return runs.repeat_interleave(lengths, output_size=size)


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The keys that each query may see: query segment `i` attends to key run `i` only.

    Causal masks are aligned at the end: with n queries and m >= n keys, query `j` has
    position ``m - n + j``. In layout ``concat`` both runs are the segment; in
    ``shared_prefix`` the keys are the whole logical sequence, whose shared tokens
    `kv_index` takes from the example's first segment.

    Attributes:
        cu_seqlens_q: int32 `[S + 1]`, offsets of the query segments.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the key runs; `cu_seqlens_q` itself if
            the keys of each segment are its own tokens.
        max_seqlen_q: longest query segment.
        max_seqlen_k: longest key run.
        num_queries: T, tokens of the row.
        kv_index: int64 `[last of cu_seqlens_k]`, the row index of each key; None: the
            keys are the tokens of the row, in order.
        lengths: int `[S]`, tokens of each key run before its padding; None: no run has
            any.
        num_rows: R, rows that `kv_index` indexes; None: the tokens of the row.
        places: int64, the inverse of `kv_index`, made from it: the places of each row's
            keys.
        place_offsets: int64 `[R + 1]`, made from it: offsets of the rows in `places`.
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

    def __post_init__(self) -> None:
        if (
            self.kv_index is None or self.places is not None
        ):  # FSDP2 copies it, field by field
            return
        size = self.num_queries if self.num_rows is None else self.num_rows
        rows, places = self.kv_index.sort(stable=True)
        ends = torch.arange(size + 1, device=rows.device)
        # Here, not where it is used: there each compiled layer would compute it again.
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "place_offsets", torch.searchsorted(rows, ends))

    @cached_outside_inference_mode
    def sizes(self) -> tuple[list[int], list[int]]:
        """Lengths of the query segments and key runs; synchronises the device once per
        batch.
        """
        queries: list[int] = self.cu_seqlens_q.diff().tolist()
        if self.cu_seqlens_k is self.cu_seqlens_q:
            return queries, queries
        return queries, self.cu_seqlens_k.diff().tolist()

    @cached_outside_inference_mode
    def real_sizes(self) -> list[int]:
        """Lengths of the key runs without padding; synchronises the device once per
        batch.
        """
        if self.lengths is None:
            return self.sizes[1]
        lengths: list[int] = self.lengths.tolist()
        return lengths

    def rows(self, rows_TKH: Tensor) -> Tensor:
        """Returns the rows of K or V that `kv_index` indexes, from those of the row's
        tokens.
        """
        return rows_TKH

    def keys(self, rows_TKH: Tensor) -> Tensor:
        """Gathers K or V of the row's tokens, `[T, K, H]`, in the order of the key
        runs.
        """
        rows = self.rows(rows_TKH)
        return rows if self.kv_index is None else rows.index_select(0, self.kv_index)

    def split(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields queries, keys and values of each segment; `k` and `v` come from
        :meth:`keys`.
        """
        queries, keys = self.sizes
        parts = torch.split(q, queries), torch.split(k, keys), torch.split(v, keys)
        return (part for part in zip(*parts, strict=True) if len(part[0]))


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict: int64 `[n]` each.

    Attributes:
        rows: index of the token whose output predicts the target.
        ids: token id of the target.
        segments: segment that its log-prob belongs to; S, one past the last, for
            padding of a fixed number of targets.
    """

    rows: Tensor
    ids: Tensor
    segments: Tensor
