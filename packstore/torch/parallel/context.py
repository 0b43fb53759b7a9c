"""Context parallelism: several ranks share the tokens of a row.

Each rank computes its own tokens, and gathers the keys and values of the others in
every attention layer. For attention backends that is an ordinary layout: each run of a
rank's tokens is a query segment, whose keys are its sequence up to the run's last
token. So every backend and both layouts work unchanged. A rank copies the keys that its
queries see, about one row.

Its gradient is that of the sum of the losses of all ranks. All ranks of a group get the
same sums and the same loss, which that sum counts once per rank. So average gradients
of parameters over the group, as DDP and FSDP do: they then equal those of one process.
For counts and divisors a group is one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packstore.errors import ConfigError
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.inputs import hf
from packstore.torch.batch.layout import AttentionLayout, Targets, offsets, segment_ids

How = Literal["zigzag", "contiguous"]

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
        index: int64 `[C, T / C]`, the tokens of each rank, in its order.
        inverse: int64 `[T]`, index of each token in the concatenation of the ranks'
            tokens.
        cuts: no run is longer than the longest segment divided by this.
    """

    starts: Tensor
    lengths: Tensor
    segments: Tensor
    index: Tensor
    inverse: Tensor
    cuts: int

    @classmethod
    def zigzag(cls, cu_seqlens: Tensor, size: int) -> Self:
        """Splits each segment into ``2 * size`` equal chunks; rank r holds chunks r and
        -1 - r.

        So all ranks have equally many tokens, and about equally many causal scores. The
        order is that of Transformer Engine.

        Args:
            cu_seqlens: int `[S + 1]`, offsets of the segments.
            size: C.

        Raises:
            ConfigError: a segment is not a multiple of ``2 * size`` tokens.
        """
        lengths = cu_seqlens.long().diff()
        if (lengths % (2 * size)).any():
            odd = int(lengths[lengths % (2 * size) != 0][0])
            raise ConfigError(
                f"zig-zag split over {size} ranks: every segment must be a multiple of "
                f"{2 * size} "
                f"tokens; found one of {odd}. Use pad_segments(batch, {2 * size}) "
                "first."
            )
        ranks = torch.arange(size, device=lengths.device)
        chunks = torch.stack([ranks, 2 * size - 1 - ranks], dim=1)
        chunk = lengths // (2 * size)
        starts = cu_seqlens.long()[:-1, None] + chunks[:, None] * chunk[:, None]
        segments = torch.arange(len(chunk), device=lengths.device).repeat_interleave(2)
        return cls._of(
            starts.flatten(1), chunk[segments].expand(size, -1), segments, 2 * size
        )

    @classmethod
    def contiguous(cls, cu_seqlens: Tensor, size: int) -> Self:
        """Splits the row into `size` equal parts, ignoring segments.

        Only the row must be divisible, not each segment; but the last rank of a long
        segment computes the most scores.

        Raises:
            ConfigError: the row is not a multiple of `size` tokens.
        """
        total = int(cu_seqlens[-1])
        if total % size:
            raise ConfigError(
                f"split over {size} ranks: the row must be a multiple of {size} "
                "tokens; found "
                f"{total}. Use pad_batch(batch, num_tokens=…) first."
            )
        first = torch.arange(0, total, total // size, device=cu_seqlens.device)[:, None]
        edges = cu_seqlens.long().clamp(first, first + total // size)
        segments = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
        return cls._of(edges[:, :-1], edges.diff(), segments, 1)

    @classmethod
    def _of(cls, starts: Tensor, lengths: Tensor, segments: Tensor, cuts: int) -> Self:
        index = _ranges(starts.flatten(), lengths.flatten())
        places = torch.arange(len(index), device=index.device)
        inverse = torch.empty_like(index).index_copy_(0, index, places)
        return cls(
            starts, lengths, segments, index.view(len(starts), -1), inverse, cuts
        )


@dataclass(frozen=True, eq=False)
class GatheredLayout(AttentionLayout):
    """The layout of one rank's tokens; `kv_index` indexes the tokens of all ranks of
    `group`.
    """

    group: Any = None

    def rows(self, rows_TKH: Tensor) -> Tensor:
        """Gathers K or V over all ranks."""
        return gather_rows(rows_TKH, self.group)


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextShard:
    """The share of a batch that one context-parallel rank computes: T / C of its
    tokens.

    Its log-probs, from :func:`~packstore.torch.segment_logps`, are sums over its own
    tokens; :func:`reduce_segment_sums` returns those of the batch. Losses take the
    whole batch.

    Attributes:
        index: int64 `[T / C]`, indices of these tokens in the batch.
        input_ids: int64 `[T / C]`.
        position_ids: int64 `[T / C]`, position of each token in its logical sequence.
        segment_ids: int64 `[T / C]`.
        layout: the keys, on all ranks, that these tokens see.
        targets: the tokens that they predict, which may lie on another rank.
        num_segments: S of the whole batch.
    """

    index: Tensor
    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    layout: GatheredLayout
    targets: Targets
    num_segments: int

    @classmethod
    def of(
        cls, batch: PackedBatch, split: ContextSplit, rank: int, group: Any = None
    ) -> Self:
        """Makes the share of `rank`; see :func:`context_shard`."""
        index, targets = split.index[rank], batch.targets
        queries, segments = split.lengths[rank], split.segments
        starts, key_starts = batch.cu_seqlens.long(), batch.cu_seqlens_k.long()
        shared_tokens = (key_starts.diff() - starts.diff())[segments]
        seen = shared_tokens + split.starts[rank] + queries - starts[segments]
        keys = torch.where(queries > 0, seen, 0)
        tokens = _ranges(key_starts[segments], keys)
        if batch.kv_index is not None:
            tokens = batch.kv_index[tokens]
        layout = GatheredLayout(
            cu_seqlens_q=offsets(queries).int(),
            cu_seqlens_k=offsets(keys).int(),
            max_seqlen_q=min(-(-batch.max_seqlen // split.cuts), len(index)),
            max_seqlen_k=batch.max_seqlen_k,
            num_queries=len(index),
            kv_index=split.inverse[tokens],
            num_rows=len(split.inverse),
            group=group,
        )
        places = split.inverse[targets.rows]
        mine = places // len(index) == rank
        rows = places[mine] % len(index)
        return cls(
            index=index,
            input_ids=batch.input_ids[index],
            position_ids=batch.position_ids[index],
            segment_ids=batch.segment_ids[index],
            layout=layout,
            targets=Targets(rows, targets.ids[mine], targets.segments[mine]),
            num_segments=batch.num_segments,
        )

    @property
    def num_tokens(self) -> int:
        """T / C."""
        return len(self.index)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Returns the share with all tensors on `device`."""

        def moved(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values.to(device, non_blocking=non_blocking)
            if not is_dataclass(values):
                return values
            parts = {
                field.name: moved(getattr(values, field.name))
                for field in fields(values)
            }
            return replace(values, **parts)  # type: ignore[type-var]

        return moved(self)  # type: ignore[no-any-return]

    def model_inputs(self) -> dict[str, Any]:
        """Returns keyword arguments for a model prepared by
        :func:`use_packed_attention`.
        """
        return hf(self)


def context_shard(
    batch: PackedBatch, group: Any = None, how: How = "zigzag"
) -> ContextShard:
    """Returns this rank's share of a batch that all ranks of `group` hold whole.

    Args:
        batch: the batch, the same on all ranks of the group.
        group: the context-parallel process group; None: all ranks.
        how: ``zigzag``, see :meth:`ContextSplit.zigzag`, or
            :meth:`~ContextSplit.contiguous`.

    Raises:
        ConfigError: the batch is not divisible, or `how` is unknown.
    """
    choice("context_shard: how", how, get_args(How))
    split = ContextSplit.zigzag if how == "zigzag" else ContextSplit.contiguous
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return ContextShard.of(batch, split(batch.cu_seqlens, size), rank, group)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenates the runs ``starts[i] .. + lengths[i]``: int64 `[sum of lengths]`."""
    run = segment_ids(lengths)
    places = torch.arange(len(run), device=run.device)
    return places + (starts - offsets(lengths)[:-1])[run]


def reduce_segment_sums(logps: Tensor, group: Any = None) -> Tensor:
    """Sums the log-probs of segments over all ranks of the group.

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
    """Gathers the rows `[n, ...]` of all ranks: `[ranks * n, ...]`; differentiable."""
    return _AllGather.apply(rows, group)  # type: ignore[no-untyped-call, no-any-return]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        out = rows.new_empty((ranks * len(rows), *rows.shape[1:]))
        _gather_into(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        out = grad.new_empty((len(grad) // ranks, *grad.shape[1:]))
        _scatter_sum(out, grad.contiguous(), group=ctx.group)
        return out, None
