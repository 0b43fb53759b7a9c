"""Context parallelism: several ranks share the tokens of a row.

The T tokens of a row are split over the C ranks of a group. A rank holds runs of
tokens, each of which lies in one segment. It computes these tokens, and in every
attention layer gathers the keys and values of the other ranks. For attention backends
that is an ordinary layout: each run is a query segment, and its keys are the sequence
up to the run's last token. So every backend and both layouts work unchanged. A rank
copies the keys that its queries see, about one row.

All ranks of a group compute the same loss, from the sums of their log-probs. The
gradient of a parameter on a rank is one share, multiplied by C, of the gradient in one
process. So average gradients over the group, as DDP and FSDP do: they are then those of
one process. For counts and divisors a group is one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import TopK, map_token_values
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.inputs import hf
from packstore.torch.batch.layout import (
    AttentionLayout,
    Targets,
    offsets,
    range_indices,
)

SplitMethod = Literal["zigzag", "contiguous"]

# torch 2.13 renamed both, and warns about the old names.
_gather_into: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_sum: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True, eq=False)
class ContextSplit:
    """The distribution of a row's T tokens over C ranks.

    Attributes:
        starts: int64 `[C, n]`, start of each rank's runs of tokens; a run lies in one
            segment, and may be empty.
        lengths: int64 `[C, n]`, lengths of the runs.
        segments: int64 `[n]`, the segment of each run, on every rank.
        index: int64 `[C, T / C]`, index in the row of each rank's tokens, in the order
            of the rank.
        inverse: int64 `[T]`, index of each token in `index`, flattened.
        cuts: number of equal runs that a segment is cut into; 1 if runs may have the
            length of a segment.
    """

    starts: Tensor
    lengths: Tensor
    segments: Tensor
    index: Tensor
    inverse: Tensor
    cuts: int

    @classmethod
    def zigzag(cls, cu_seqlens: Tensor, size: int) -> Self:
        """Split each segment into ``2 * size`` equal chunks, and give each rank two.

        Rank r holds chunk r from the start and chunk r from the end, as in Transformer
        Engine. So all ranks have equally many tokens, and about equally many pairs of a
        query and a key that it sees.

        Args:
            cu_seqlens: int `[S + 1]`, offsets of the segments.
            size: C.

        Raises:
            ConfigError: a segment is not a multiple of ``2 * size`` tokens.
        """
        lengths = cu_seqlens.long().diff()
        num_chunks = 2 * size
        is_odd = lengths % num_chunks != 0
        if is_odd.any():
            raise ConfigError(
                sentence(
                    where=f"zig-zag split over {size} ranks",
                    rule=f"every segment must be a multiple of {num_chunks} tokens",
                    found=f"one of {int(lengths[is_odd][0])}",
                    remedy=f"Use pad_segments(batch, {num_chunks}) first",
                )
            )
        ranks = torch.arange(size, device=lengths.device)
        chunks = torch.stack([ranks, num_chunks - 1 - ranks], dim=1)  # [C, 2]
        chunk_lengths = lengths // num_chunks
        chunk_offsets = chunks[:, None] * chunk_lengths[:, None]  # [C, S, 2]
        starts = cu_seqlens.long()[:-1, None] + chunk_offsets
        segments = torch.arange(len(lengths), device=lengths.device)
        segments = segments.repeat_interleave(2)
        return cls._from_runs(
            starts=starts.flatten(1),
            lengths=chunk_lengths[segments].expand(size, -1),
            segments=segments,
            cuts=num_chunks,
        )

    @classmethod
    def contiguous(cls, cu_seqlens: Tensor, size: int) -> Self:
        """Split the row into `size` equal parts, whatever the segments.

        Only the row must be divisible, not each segment. But in a long segment the last
        rank has the most work, as its queries see the most keys.

        Raises:
            ConfigError: the row is not a multiple of `size` tokens.
        """
        num_tokens = int(cu_seqlens[-1])
        if num_tokens % size:
            raise ConfigError(
                sentence(
                    where=f"split over {size} ranks",
                    rule=f"the row must be a multiple of {size} tokens",
                    found=str(num_tokens),
                    remedy="Use pad_batch(batch, num_tokens=…) first",
                )
            )
        part = num_tokens // size
        part_starts = torch.arange(0, num_tokens, part, device=cu_seqlens.device)
        part_starts = part_starts[:, None]
        edges = cu_seqlens.long().clamp(part_starts, part_starts + part)  # [C, S + 1]
        return cls._from_runs(
            starts=edges[:, :-1],
            lengths=edges.diff(),
            segments=torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device),
            cuts=1,
        )

    @classmethod
    def _from_runs(
        cls, *, starts: Tensor, lengths: Tensor, segments: Tensor, cuts: int
    ) -> Self:
        """Return a split with the index of its runs, and the inverse."""
        index = range_indices(starts.flatten(), lengths.flatten())
        places = torch.arange(len(index), device=index.device)
        inverse = torch.empty_like(index).index_copy_(0, index, places)
        return cls(
            starts=starts,
            lengths=lengths,
            segments=segments,
            index=index.view(len(starts), -1),
            inverse=inverse,
            cuts=cuts,
        )


@dataclass(frozen=True, eq=False)
class GatheredLayout(AttentionLayout):
    """The layout of one rank's tokens; `kv_index` indexes the tokens of all ranks of
    `group`.
    """

    group: Any = None

    def rows(self, rows_TKH: Tensor) -> Tensor:
        """Gather K or V over all ranks."""
        return gather_rows(rows_TKH, self.group)


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextShard:
    """The share of a batch that one context-parallel rank computes: T / C of its
    tokens.

    Its log-probs, from :func:`~packstore.torch.segment_logps`, are sums over its own
    tokens; :func:`reduce_segment_sums` returns the sums over the batch. Losses take the
    whole batch.

    Attributes:
        index: int64 `[T / C]`, indices of these tokens in the batch.
        input_ids: int64 `[T / C]`.
        position_ids: int64 `[T / C]`, position of each token in its logical sequence.
        segment_ids: int64 `[T / C]`.
        layout: the keys, on all ranks, that these tokens see.
        targets: the tokens that they predict, which may lie on another rank.
        num_segments: S of the whole batch.
        token_columns: side data of these targets, in their order.
    """

    index: Tensor
    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    layout: GatheredLayout
    targets: Targets
    num_segments: int
    token_columns: Mapping[str, Tensor | TopK]

    @classmethod
    def of(
        cls, batch: PackedBatch, split: ContextSplit, rank: int, group: Any = None
    ) -> Self:
        """Return the share of `rank`; see :func:`context_shard`."""
        index = split.index[rank]
        places = split.inverse[batch.targets.rows]
        is_mine = places // len(index) == rank
        targets = Targets(
            rows=places[is_mine] % len(index),
            ids=batch.targets.ids[is_mine],
            segments=batch.targets.segments[is_mine],
        )
        return cls(
            index=index,
            input_ids=batch.input_ids[index],
            position_ids=batch.position_ids[index],
            segment_ids=batch.segment_ids[index],
            layout=_layout_of_rank(batch, split, rank, group),
            targets=targets,
            num_segments=batch.num_segments,
            token_columns={
                name: map_token_values(values, lambda x: x[is_mine])
                for name, values in batch.token_columns.items()
            },
        )

    @property
    def num_tokens(self) -> int:
        """T / C."""
        return len(self.index)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Return the share with all tensors on `device`."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, Mapping):
                return {
                    name: map_token_values(values, move)
                    for name, values in value.items()
                }
            if not is_dataclass(value):
                return value
            changes = {
                field.name: move(getattr(value, field.name)) for field in fields(value)
            }
            return replace(value, **changes)  # type: ignore[type-var]

        return move(self)  # type: ignore[no-any-return]

    def model_inputs(self) -> dict[str, Any]:
        """Return keyword arguments for a model prepared by
        :func:`use_packed_attention`.
        """
        return hf(self)


def context_shard(
    batch: PackedBatch, group: Any = None, how: SplitMethod = "zigzag"
) -> ContextShard:
    """Return this rank's share of a batch that all ranks of `group` hold whole.

    Args:
        batch: the batch, the same on all ranks of the group.
        group: the context-parallel process group; None: all ranks.
        how: ``zigzag``, see :meth:`ContextSplit.zigzag`, or
            :meth:`~ContextSplit.contiguous`.

    Raises:
        ConfigError: the batch is not divisible, or `how` is unknown.
    """
    choice("context_shard: how", how, get_args(SplitMethod))
    size = dist.get_world_size(group)
    if how == "zigzag":
        split = ContextSplit.zigzag(batch.cu_seqlens, size)
    else:
        split = ContextSplit.contiguous(batch.cu_seqlens, size)
    return ContextShard.of(batch, split, dist.get_rank(group), group)


def _layout_of_rank(
    batch: PackedBatch, split: ContextSplit, rank: int, group: Any
) -> GatheredLayout:
    """Return the layout of a rank's runs.

    Each run sees its logical sequence up to the last token of the run.
    """
    segments = split.segments
    run_starts = split.starts[rank]
    run_lengths = split.lengths[rank]
    starts = batch.cu_seqlens.long()
    key_starts = batch.cu_seqlens_k.long()

    num_shared = (key_starts.diff() - starts.diff())[segments]
    keys_up_to_run = num_shared + run_starts - starts[segments]
    num_keys = torch.where(run_lengths > 0, keys_up_to_run + run_lengths, 0)
    tokens = range_indices(key_starts[segments], num_keys)
    if batch.kv_index is not None:
        tokens = batch.kv_index[tokens]

    num_queries = len(split.index[rank])
    longest_run = -(-batch.max_seqlen // split.cuts)  # rounded up
    return GatheredLayout(
        cu_seqlens_q=offsets(run_lengths).int(),
        cu_seqlens_k=offsets(num_keys).int(),
        max_seqlen_q=min(longest_run, num_queries),
        max_seqlen_k=batch.max_seqlen_k,
        num_queries=num_queries,
        kv_index=split.inverse[tokens],
        num_rows=len(split.inverse),
        group=group,
    )


def reduce_segment_sums(logps: Tensor, group: Any = None) -> Tensor:
    """Sum the log-probs of segments over all ranks of the group.

    Call it before anything that is not linear in the sums, such as the loss.

    Args:
        logps: `[S]`, result of :func:`~packstore.torch.segment_logps` for this rank's
            tokens.
        group: the context-parallel process group; None: all ranks.

    Returns:
        `[S]` in nats, the same on all ranks. Its gradient is summed over the ranks:
        average the gradients of parameters over the group, or divide the loss by its
        size and sum them.
    """
    return gather_rows(logps[None], group).sum(0)


def gather_rows(rows: Tensor, group: Any = None) -> Tensor:
    """Gather the rows `[n, ...]` of all ranks: `[ranks * n, ...]`; differentiable."""
    return _AllGather.apply(rows, group)  # type: ignore[no-untyped-call, no-any-return]


class _AllGather(torch.autograd.Function):
    """All-gather; its gradient is a reduce-scatter, the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        num_ranks = dist.get_world_size(group)
        out = rows.new_empty((num_ranks * len(rows), *rows.shape[1:]))
        _gather_into(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        num_ranks = dist.get_world_size(ctx.group)
        out = grad.new_empty((len(grad) // num_ranks, *grad.shape[1:]))
        _scatter_sum(out, grad.contiguous(), group=ctx.group)
        return out, None
