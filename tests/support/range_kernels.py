"""Plain versions of the kernels of backend `ranges`, by the definition of KeyRanges.

As the kernels do it: the backward pass has the output and its log-sum-exp, not the
weights. They read nothing of a layout but its ranges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from packstore.torch.attention import flash
from packstore.torch.batch.ranges import KeyRanges

MODULE = "packstore.torch.attention._ranges"


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float, keys_before: int
) -> tuple[Tensor, Tensor]:
    """Output `[T, N, H]` and its log-sum-exp `[N, T]`."""
    check(q, k, v, ranges)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=wide(q).dtype)
    for rows, keys, hidden in segments(ranges, keys_before):
        scores = scores_of(q[rows], k[keys], scale, hidden)
        values = wide(v[keys]).repeat_interleave(group, 1)
        out[rows] = torch.einsum("nqk,knh->qnh", scores.softmax(-1), values).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: KeyRanges,
    scale: float,
    keys_before: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    check(q, k, v, ranges)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide(x).dtype) for x in (q, k, v))
    delta = (wide(grad) * wide(out)).sum(-1).T
    for rows, keys, hidden in segments(ranges, keys_before):
        scores = scores_of(q[rows], k[keys], scale, hidden)
        weights = (scores - lse[:, rows, None]).exp()
        upstream = wide(grad[rows])
        values = wide(v[keys]).repeat_interleave(group, 1)
        d_weights = torch.einsum("qnh,knh->nqk", upstream, values)
        d_scores = weights * (d_weights - delta[:, rows, None]) * scale
        all_keys = wide(k[keys]).repeat_interleave(group, 1)
        dq[rows] = torch.einsum("nqk,knh->qnh", d_scores, all_keys)
        d_keys = torch.einsum("nqk,qnh->knh", d_scores, wide(q[rows]))
        d_values = torch.einsum("nqk,qnh->knh", weights, upstream)
        dk.index_add_(0, keys, d_keys.unflatten(1, (-1, group)).sum(2))
        dv.index_add_(0, keys, d_values.unflatten(1, (-1, group)).sum(2))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def check(q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> None:
    """Refuses what the kernels would read wrongly."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert len(q) == len(k) == len(v) == int(ranges.offsets[-1])
    assert all(x.dtype == torch.int32 for x in ranges if isinstance(x, Tensor))


def wide(values: Tensor) -> Tensor:
    """Values in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def scores_of(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """``q k^T * scale``, `[N, queries, keys]`, -inf where `hidden`."""
    keys = wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qnh,knh->nqk", wide(q), keys) * scale
    return scores.masked_fill(hidden, float("-inf"))


def segments(
    ranges: KeyRanges, keys_before: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, key rows, and hidden keys `[queries, keys]` of each segment with queries."""
    offsets, positions = ranges.offsets.tolist(), ranges.positions.tolist()
    for i in range(len(positions)):
        rows = slice(offsets[i], offsets[i + 1])
        if rows.stop == rows.start:
            continue
        runs = [(i, rows.stop - rows.start)]
        if ranges.runs is not None:
            first, last = ranges.run_offsets[i : i + 2].tolist()
            assert ranges.runs[:, last - 1].tolist() == [i, 0]
            runs = [*ranges.runs[:, first : last - 1].T.tolist(), *runs]
        keys = torch.cat([offsets[j] + torch.arange(n) for j, n in runs])
        key = torch.cat([positions[j] + torch.arange(n) for j, n in runs])
        assert key.tolist() == list(range(len(key)))
        query = positions[i] + torch.arange(rows.stop - rows.start)
        behind = query[:, None] - key
        hidden = behind < 0
        if keys_before >= 0:
            hidden |= behind > keys_before
        yield rows, keys, hidden


@contextmanager
def backend_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backend `ranges` takes float64 too, on a CPU, and computes by these functions."""
    module = ModuleType(MODULE)
    module.attend_forward = attend_forward  # type: ignore[attr-defined]
    module.attend_backward = attend_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(flash, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(flash, "DTYPES", (torch.float64, torch.bfloat16))
    yield
