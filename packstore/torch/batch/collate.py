"""Packs -> one :class:`PackedBatch`, without loops over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packstore.errors import ConfigError
from packstore.format.arrays import Column, Float32, Int32, Int64, Packs
from packstore.format.schema import require_kind
from packstore.torch.batch.batch import PackedBatch, StepInfo, Style

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
        kind: what an example is: ``preference``, ``sft`` or ``ranked``.
        ref_logps: float32 `[S]`, log-probs of a reference model in nats; default: the packs' own.
        sources: int64 `[P]`, the source of each pack in a mix; default: 0.
        step: the optimizer step that the batch belongs to.
        fillers: number of packs at the end that get weight 0.

    Raises:
        UnknownNameError: `kind` is none of those.
        ConfigError: there are no packs, or `ref_logps` has another length.
    """
    require_kind(kind)
    if not len(packs):
        raise ConfigError("a batch must hold at least one pack; found none.")
    parts = [packs] if isinstance(packs, Packs) else packs
    lengths = np.concatenate([p.lengths for p in parts], dtype=np.int32)
    if ref_logps is None:
        stored = [p.ref_logps for p in parts if p.ref_logps is not None]
        ref_logps = np.concatenate(stored) if len(stored) == len(parts) else None
    if ref_logps is not None and len(ref_logps) != len(lengths):
        raise ConfigError(
            f"ref_logps must have one value for each of {len(lengths)} sequences; "
            f"found {len(ref_logps)}."
        )
    segments = _steps([p.seq_boundaries for p in parts])
    starts = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=starts[1:])
    longest, logical = int(segments.max()), int(lengths.sum(dtype=np.int64))
    pack_examples = _steps([p.example_offsets for p in parts])
    number = len(pack_examples)
    unweighted = list(range(number - fillers, number))
    if any(p.stand_in for p in parts):
        stand_ins = np.repeat([p.stand_in for p in parts], [len(p) for p in parts])
        unweighted += np.flatnonzero(stand_ins).tolist()
    columns = [p.columns for p in parts]
    shared = [name for name in columns[0] if all(name in c for c in columns)]
    return PackedBatch(
        signed_ids=_joined([p.signed_ids for p in parts], np.int32),
        logical_tokens=logical,
        pack_examples=pack_examples,
        unweighted_packs=unweighted,
        pack_sources=sources,
        kind=kind,
        cu_seqlens=torch.from_numpy(starts),
        max_seqlen=longest,
        max_seqlen_k=longest if logical == starts[-1] else int(lengths.max()),
        lengths=torch.from_numpy(lengths),
        rewards=_joined([p.reward for p in parts], np.float32),
        # A copy, as stored columns are read-only views.
        ref_logps=None if ref_logps is None else torch.from_numpy(np.array(ref_logps, np.float32)),
        example_ids=_joined([p.example_ids for p in parts], np.int64),
        num_responses=_joined([p.num_responses for p in parts], np.int32),
        num_packs=number,
        columns={name: _column([c[name] for c in columns]) for name in shared},
        step=step,
        cu_seqlens_unpadded=None,
    )


def _steps(parts: Sequence[Int32] | Sequence[Int64]) -> Any:
    """Returns the differences inside each pack of offsets that rise strictly, from 0 in each."""
    flat: Any = np.concatenate(parts)
    steps = flat[1:] - flat[:-1]
    return steps[steps > 0]  # the others lead from the end of a pack to the start of the next


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _column(parts: Sequence[Column]) -> Tensor | Column:
    """Returns numbers as a tensor; strings, which torch has no dtype for, stay an array."""
    values = np.concatenate(parts)
    return torch.from_numpy(values) if values.dtype.kind in "biuf" else values
