"""Plain versions of the two operators under torch's ``varlen_attn``, which only a GPU
has.

As flash attention does it: the backward pass has the output and its log-sum-exp, not
    the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from packstore.torch.attention import flash


def scores_of(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    """``q k^T * scale``, `[N, queries, keys]`: aligned at the end, within a window."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    behind = len(k) - len(q) + torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:
        hidden |= behind > left
    if right >= 0:
        hidden |= -behind > right
    return (torch.einsum("qnh,knh->nqk", q, k) * scale).masked_fill(
        hidden, float("-inf")
    )


def check(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor, int, int]
) -> None:
    """Refuses what the kernels refuse or would read wrongly."""
    for cu, longest, rows in zip(offsets[:2], offsets[2:], (q, k), strict=True):
        assert cu.dtype == torch.int32
        assert cu[0] == 0
        assert cu[-1] == len(rows)
        assert type(longest) is int
        assert longest >= cu.diff().max()
    assert len(k) == len(v)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    """``aten::_flash_attention_forward``."""
    left, right = window_size_left, window_size_right
    assert is_causal == ((left, right) == (-1, 0))
    check(q, k, v, (cu_q, cu_k, max_q, max_k))
    output, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), float("-inf"))
    for rows, keys in segments(cu_q, cu_k):
        scores = scores_of(q[rows], k[keys], scale, left, right)
        one_v = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        output[rows] = torch.einsum(
            "nqk,knh->qnh", scores.softmax(-1), one_v
        ).nan_to_num()
        lse[:, rows] = scores.logsumexp(-1)
    return output, lse, q.new_zeros(2), q.new_zeros(0), q.new_zeros(0)


def backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """``aten::_flash_attention_backward``."""
    left, right = window_size_left, window_size_right
    assert is_causal == ((left, right) == (-1, 0))
    check(q, k, v, (cu_q, cu_k, max_q, max_k))
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1).T
    for rows, keys in segments(cu_q, cu_k):
        one_k, one_v = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        scores = scores_of(q[rows], k[keys], scale, left, right)
        weights = (scores - lse[:, rows, None]).exp().nan_to_num()
        d_weights = torch.einsum("qnh,knh->nqk", grad[rows], one_v)
        d_scores = weights * (d_weights - delta[:, rows, None]) * scale
        dq[rows] = torch.einsum("nqk,knh->qnh", d_scores, one_k)
        for whole, d in (
            (dk, torch.einsum("nqk,qnh->knh", d_scores, q[rows])),
            (dv, torch.einsum("nqk,qnh->knh", weights, grad[rows])),
        ):
            whole[keys] = d.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def segments(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each segment that has queries."""
    for i in range(len(cu_q) - 1):
        if cu_q[i + 1] > cu_q[i]:
            yield (
                slice(int(cu_q[i]), int(cu_q[i + 1])),
                slice(int(cu_k[i]), int(cu_k[i + 1])),
            )


@contextmanager
def on_cpu() -> Iterator[None]:
    """Installs both operators for CPU tensors."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@contextmanager
def backend_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backend `torch_varlen` takes float64 on a CPU, and finds both operators there."""
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "DTYPES", (torch.float64, torch.bfloat16))
    monkeypatch.setattr(flash, "capability", lambda _: (9, 0))
    with on_cpu():
        yield
