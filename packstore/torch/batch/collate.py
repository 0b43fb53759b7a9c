"""Packs -> one :class:`PackedBatch`, without loops over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packstore.errors import ConfigError
from packstore.format.arrays import Column, Float32, Int32, Int64, Packs
from packstore.io.shards.signed_packs import CompactRow
from packstore.torch.batch.batch import PackedBatch, Style
from packstore.torch.schedule.steps import StepInfo

__all__ = ["PackedBatch", "Style", "collate"]


def collate(
    packs: Packs | Sequence[Packs],
    kind: str,
    *,
    ref_logps: Float32 | None = None,
    sources: Int64 | None = None,
    step: StepInfo | None = None,
    fillers: int = 0,
) -> PackedBatch:
    """Lays packs end to end as one batch.

    Args:
        packs: the packs; a sequence of them is joined first.
        kind: what an example is: ``dpo``, ``sft`` or ``ranked``.
        ref_logps: float32 `[S]`, log-probs of a reference model in nats; default: the packs' own.
        sources: int64 `[P]`, the source of each pack in a mix; default: 0.
        step: the optimizer step that the batch belongs to.
        fillers: number of packs at the end that get weight 0.

    Raises:
        ConfigError: there are no packs, or `ref_logps` has another length.
    """
    if not len(packs):
        raise ConfigError("a batch must hold at least one pack; found none.")
    parts = [packs] if isinstance(packs, Packs) else packs
    rows = [p for p in parts if type(p) is CompactRow]
    flat = _of_rows(rows) if len(rows) == len(parts) else _of_packs(parts)
    lengths, starts, number = flat.lengths, flat.starts, len(flat.examples)
    filling = range(number - fillers, number)
    ref_logps = flat.ref_logps if ref_logps is None else ref_logps
    if ref_logps is not None and len(ref_logps) != len(lengths):
        raise ConfigError(
            f"ref_logps must have one value for each of {len(lengths)} sequences; "
            f"found {len(ref_logps)}."
        )
    longest, logical = int((starts[1:] - starts[:-1]).max()), int(lengths.sum(dtype=np.int64))
    whole = logical == starts[-1]
    return PackedBatch.of(
        logical,
        **flat.tokens,
        kind=kind,
        cu_seqlens=torch.from_numpy(starts),
        max_seqlen=longest,
        max_seqlen_k=longest if whole else int(lengths.max()),
        lengths=torch.from_numpy(lengths),
        rewards=torch.from_numpy(flat.rewards),
        ref_logps=None if ref_logps is None else _tensor(ref_logps, np.float32),
        example_ids=torch.from_numpy(flat.example_ids),
        num_responses=torch.from_numpy(flat.num_responses),
        _examples=flat.examples,
        _void=[*flat.stand_ins, *filling],
        _pack_sources=sources,
        num_packs=number,
        columns={name: _column(values) for name, values in flat.columns.items()},
        step=step,
        cu_seqlens_unpadded=None,
    )


@dataclass(slots=True)
class _Flat:
    """Packs laid end to end, in arrays that share no memory with them.

    Attributes:
        tokens: the tensors of length T: ``signed``, or ``input_ids`` and ``labels``.
        starts: int32 `[S + 1]`, offsets of the segments.
        examples: number of examples of each pack.
        stand_ins: indices of packs that replace others.
    """

    tokens: dict[str, Tensor]
    starts: Int32
    lengths: Int32
    rewards: Float32
    example_ids: Int64
    num_responses: Int32
    examples: list[int]
    stand_ins: list[int]
    columns: Mapping[str, Column] = field(default_factory=dict)
    ref_logps: Float32 | None = None


def _of_rows(rows: Sequence[CompactRow]) -> _Flat:
    """Rows of row groups, whose ids and labels stay in one array."""
    parts = [(row.group, row.group.cuts[row.index]) for row in rows]
    tokens = np.concatenate([group.packs.input_ids[cut[0] : cut[3]] for group, cut in parts])
    columns = [group.sequences[:, cut[1] : cut[4]] for group, cut in parts]
    lengths, ends, rewards = np.concatenate(columns, axis=1)
    of_examples = [group.examples[:, cut[2] : cut[5]] for group, cut in parts]
    ids, responses = np.concatenate(of_examples, axis=1)
    starts = np.zeros(len(ends) + 1, np.int32)
    starts[1:] = ends
    base, at = 0, 1
    for _, cut in parts:
        starts[at : (at := at + cut[4] - cut[1])] += base
        base += cut[3] - cut[0]
    return _Flat(
        tokens={"signed": torch.from_numpy(tokens)},
        starts=starts,
        lengths=lengths,
        rewards=rewards.view(np.float32),
        example_ids=ids,
        num_responses=responses.astype(np.int32),
        examples=[cut[5] - cut[2] for _, cut in parts],
        stand_ins=[i for i, row in enumerate(rows) if row.stand_in],
        columns=_columns(rows) if rows[0].columns else {},
        ref_logps=None if rows[0].ref_logps is None else _ref_logps(rows),
    )


def _of_packs(parts: Sequence[Packs]) -> _Flat:
    """Packs of any kind, ids and labels as they are."""
    starts: list[npt.NDArray[Any]] = [np.zeros(1, np.int64), *(p.segment_lengths for p in parts)]
    stand_ins = np.repeat([p.stand_in for p in parts], [len(p) for p in parts])
    return _Flat(
        tokens={n: _joined([getattr(p, n) for p in parts], np.int64) for n in _TOKENS},
        starts=np.cumsum(np.concatenate(starts)).astype(np.int32),
        lengths=np.concatenate([p.lengths for p in parts], dtype=np.int32),
        rewards=np.concatenate([p.reward for p in parts], dtype=np.float32),
        example_ids=np.concatenate([p.example_ids for p in parts], dtype=np.int64),
        num_responses=np.concatenate([p.num_responses for p in parts], dtype=np.int32),
        examples=np.concatenate([np.diff(p.example_offsets) for p in parts]).tolist(),
        stand_ins=np.flatnonzero(stand_ins).tolist(),
        columns=_columns(parts),
        ref_logps=_ref_logps(parts),
    )


def _columns(parts: Sequence[Packs]) -> dict[str, Column]:
    """The carried columns that all parts have."""
    columns = [p.columns for p in parts]
    names = [n for n in columns[0] if all(n in c for c in columns)]
    joined: dict[str, Column] = {n: np.concatenate([c[n] for c in columns]) for n in names}
    return joined


def _ref_logps(parts: Sequence[Packs]) -> Float32 | None:
    found = [p.ref_logps for p in parts if p.ref_logps is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _column(values: Column) -> Tensor | Column:
    """Returns numbers as a tensor; strings, which torch has no dtype for, stay an array."""
    return torch.from_numpy(np.array(values)) if values.dtype.kind in "biuf" else values


def _tensor(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> Tensor:
    """Copies, as stored columns are read-only views."""
    return torch.from_numpy(np.array(values, dtype))


_TOKENS = ("input_ids", "labels")
