"""Every backend against one dense mask over the row, in both layouts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import collate
from packstore.torch.attention import ATTENTION
from packstore.torch.layout import AttentionLayout

EXAMPLES = random_examples(5, seed=5)


def dense(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, window: int | None, cap: float | None
) -> Tensor:
    """softmax over a [T, keys] mask that is built one entry at a time."""
    if layout.kv_index is not None:
        k, v = k[layout.kv_index], v[layout.kv_index]
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    queries, keys = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    for s in range(len(queries) - 1):
        for i in range(queries[s], queries[s + 1]):
            last = keys[s + 1] - (queries[s + 1] - i)
            first = keys[s] if window is None else max(keys[s], last - window + 1)
            mask[i, first : last + 1] = True
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("tnh,snh->nts", q, k) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights, v)


def inputs(tokens: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 8), (tokens, heads, 8), (tokens, heads, 6))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", list(ATTENTION))
def test_value_and_gradients(
    kit: SimpleNamespace,
    backend: str,
    layout: str,
    heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "dpo")
    qkv = inputs(batch.num_tokens, heads)

    def run() -> Tensor:
        return ATTENTION.load(backend)(
            *qkv, batch.layout, scale=0.3, sliding_window=window, softcap=softcap
        )

    if backend == "sdpa" and softcap is not None:
        with pytest.raises(BackendError, match=r"soft-capped; found softcap 0.7. Use backend='ref"):
            run()
        return
    expected = dense(*qkv, batch.layout, window, softcap)
    found = run()
    assert (found - expected).abs().max() < 1e-12
    upstream = torch.randn(found.shape, dtype=found.dtype)
    for a, b in zip(
        torch.autograd.grad(found, qkv, upstream),
        torch.autograd.grad(expected, qkv, upstream),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", list(ATTENTION))
def test_every_window(kit: SimpleNamespace, backend: str, layout: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "dpo")
    qkv = inputs(batch.num_tokens)
    for window in range(1, batch.max_seqlen_k + 2):
        found = ATTENTION.load(backend)(*qkv, batch.layout, scale=0.3, sliding_window=window)
        assert (found - dense(*qkv, batch.layout, window, None)).abs().max() < 1e-12, window


@pytest.mark.parametrize("backend", list(ATTENTION))
def test_half_precision_stays_near_and_keeps_its_type(kit: SimpleNamespace, backend: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], "shared_prefix"), "dpo")
    half = inputs(batch.num_tokens, dtype=torch.bfloat16)
    found = ATTENTION.load(backend)(*half, batch.layout, scale=0.3)
    exact = ATTENTION.load("reference")(*(x.double() for x in half), batch.layout, scale=0.3)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 0.03


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", list(ATTENTION))
def test_poison_in_one_segment_stays_there(kit: SimpleNamespace, backend: str, layout: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "dpo")
    q, k, v = (x.detach() for x in inputs(batch.num_tokens))
    last = batch.segment_ids == batch.num_segments - 1
    for x in (q, k, v):
        x[last] = float("nan")
    found = ATTENTION.load(backend)(q, k, v, batch.layout, scale=0.3)
    assert found[~last].isfinite().all()
    assert found[last].isnan().all()
