"""Every backend that runs on CPU against one dense mask over the row, in both layouts."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import collate
from packstore.torch.attention import ATTENTION, _auto, _flash, flex
from packstore.torch.batch.layout import AttentionLayout

EXAMPLES = random_examples(5, seed=5)
WITH_GRADIENTS = ("reference", "sdpa")
ON_CPU = (*WITH_GRADIENTS, "flex")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Clears compiled kernels: those of one test would count against the limit of the next."""
    torch._dynamo.reset()


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    window: int | None,
    cap: float | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
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
            if chunk is not None:
                first = max(first, keys[s] + (last - keys[s]) // chunk * chunk)
            mask[i, first : last + 1] = True
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("tnh,snh->nts", q, k) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    powers = scores.masked_fill(~mask, float("-inf")).exp()
    extra = 0 if sinks is None else sinks.exp()[:, None, None]
    weights = powers / (powers.sum(-1, keepdim=True) + extra)
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
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
def test_value_and_gradients(
    kit: SimpleNamespace,
    backend: str,
    layout: str,
    heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
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


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, None), (None, 4), (None, 1000)])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_sinks_and_chunks(
    kit: SimpleNamespace,
    backend: str,
    layout: str,
    with_sinks: bool,
    window: int | None,
    chunk: int | None,
) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
    gradients = backend in WITH_GRADIENTS
    qkv = [x.detach().requires_grad_(gradients) for x in inputs(batch.num_tokens)]
    values = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    sinks = values.requires_grad_(gradients) if with_sinks else None
    found = ATTENTION.load(backend)(
        *qkv, batch.layout, scale=0.3, sliding_window=window, chunk=chunk, sinks=sinks
    )
    expected = dense(*qkv, batch.layout, window, chunk=chunk, sinks=sinks)
    assert (found - expected).abs().max() < 1e-12
    if gradients:
        upstream = torch.randn_like(expected)
        inputs_ = [*qkv] if sinks is None else [*qkv, sinks]
        pairs = [torch.autograd.grad((x * upstream).sum(), inputs_) for x in (found, expected)]
        for a, b in zip(*pairs, strict=True):
            assert (a - b).abs().max() < 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(("name", "value"), [("chunk", 4), ("sinks", torch.zeros(4))])
def test_flash_kernels_refuse_sinks_and_chunks(name: str, value: object) -> None:
    settings: dict[str, object] = {"chunk": None, "sinks": None, name: value}
    with pytest.raises(BackendError, match=f"{name}.*Use backend='flex' or 'sdpa'"):
        _flash.check("flash_attn", *inputs(3), **settings)
    assert _auto.choose(True, torch.bfloat16, False, False) == "flex"


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_flex_value(kit: SimpleNamespace, layout: str) -> None:
    for packs in ([2, 3], [5], [1, 1, 3]):
        batch = collate(kit.packed(EXAMPLES, packs, layout), "preference")
        qkv = [x.detach() for x in inputs(batch.num_tokens)]
        for window, softcap in ((None, None), (3, None), (1, 0.7), (1000, 0.7)):
            found = flex.attend(
                *qkv, batch.layout, scale=0.3, sliding_window=window, softcap=softcap
            )
            expected = dense(*qkv, batch.layout, window, softcap)
            assert (found - expected).abs().max() < 1e-12


def test_flex_on_cpu_refuses_gradients(kit: SimpleNamespace) -> None:
    batch = collate(kit.packed(EXAMPLES, [5], "concat"), "preference")
    message = r"'flex': on CPU it has a forward pass only; found tensors that need gradients. Use"
    with pytest.raises(BackendError, match=message):
        flex.attend(*inputs(batch.num_tokens), batch.layout, scale=0.3)
    with torch.no_grad():
        flex.attend(*inputs(batch.num_tokens), batch.layout, scale=0.3)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_flex_skips_only_what_no_query_sees(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layout: str, window: int | None
) -> None:
    """The kernel of a GPU trusts the lists of blocks, which the CPU never looks at."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    examples = random_examples(12, seed=2, max_prompt=60, max_response=60)
    batch = collate(kit.packed(examples, [12], layout), "preference")
    mask = flex.block_mask(batch.layout, window)
    assert flex.block_mask(batch.layout, window) is mask
    assert flex.block_mask(dataclasses.replace(batch.layout), window) is not mask
    queries, keys = flex.rounded(batch.num_tokens), flex.rounded(int(batch.cu_seqlens_k[-1]))
    seen = mask.mask_mod(0, 0, torch.arange(queries)[:, None], torch.arange(keys))
    assert seen.any(1).all()
    blocks = seen.view(queries // 16, 16, keys // 16, 16).transpose(1, 2).flatten(2)
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (some & whole).any()
    assert torch.equal(whole, blocks.all(2))
    assert (blocks.any(2) <= (some | whole)).all()
    if window is None:
        assert torch.equal(some | whole, blocks.any(2))
        assert whole.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, in inductor
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_flex_compiled_follows_the_blocks(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The compiled CPU kernel, which skips blocks as that of a GPU does; forward pass only."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which torch.compile needs on CPU")
    kernel = torch.compile(flex.flex_attention, fullgraph=True)
    monkeypatch.setattr(flex, "_kernel", lambda _: kernel)
    examples = random_examples(20, seed=2, max_prompt=60, max_response=60)
    batch = collate(kit.packed(examples, [20], layout), "preference")
    qkv = [x.detach().float() for x in inputs(batch.num_tokens)]
    for window in (None, 150):
        found = flex.attend(*qkv, batch.layout, scale=0.3, sliding_window=window)
        assert (found - dense(*qkv, batch.layout, window, None)).abs().max() < 1e-5


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """bool `[query blocks, key blocks]`: those that a block mask lists."""
    found = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[row, indices[0, 0, row, :count].long()] = True
    return found


def test_lengths_that_flex_compiles_for() -> None:
    assert [flex.rounded(n) for n in (1, 128, 129, 4096, 4097, 8191, 8193)] == [
        128, 128, 256, 4096, 5120, 8192, 10240,
    ]  # fmt: skip
    assert len({flex.rounded(n) for n in range(4097, 8193)}) == 4


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_empty_segments_change_nothing(kit: SimpleNamespace, backend: str, layout: str) -> None:
    """As a fixed number of offsets has them at its end."""
    one = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference").layout
    repeated = dataclasses.replace(
        one,
        cu_seqlens_q=torch.cat([one.cu_seqlens_q, one.cu_seqlens_q[-1:].repeat(3)]),
        cu_seqlens_k=torch.cat([one.cu_seqlens_k, one.cu_seqlens_k[-1:].repeat(3)]),
    )
    qkv = [x.detach() for x in inputs(one.num_queries)]
    attend = ATTENTION.load(backend)
    assert torch.equal(attend(*qkv, repeated, scale=0.3), attend(*qkv, one, scale=0.3))


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_window(kit: SimpleNamespace, backend: str, layout: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
    qkv = [x.detach() for x in inputs(batch.num_tokens)]
    for window in range(1, batch.max_seqlen_k + 2):
        found = ATTENTION.load(backend)(*qkv, batch.layout, scale=0.3, sliding_window=window)
        assert (found - dense(*qkv, batch.layout, window, None)).abs().max() < 1e-12, window


@pytest.mark.parametrize("backend", ON_CPU)
def test_half_precision_stays_near_and_keeps_its_type(kit: SimpleNamespace, backend: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], "shared_prefix"), "preference")
    half = [x.detach() for x in inputs(batch.num_tokens, dtype=torch.bfloat16)]
    found = ATTENTION.load(backend)(*half, batch.layout, scale=0.3)
    exact = ATTENTION.load("reference")(*(x.double() for x in half), batch.layout, scale=0.3)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 0.03


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", WITH_GRADIENTS)  # flex: 0 * NaN, in blocks of 128
def test_poison_in_one_segment_stays_there(kit: SimpleNamespace, backend: str, layout: str) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
    q, k, v = (x.detach() for x in inputs(batch.num_tokens))
    last = batch.segment_ids == batch.num_segments - 1
    for x in (q, k, v):
        x[last] = float("nan")
    found = ATTENTION.load(backend)(q, k, v, batch.layout, scale=0.3)
    assert found[~last].isfinite().all()
    assert found[last].isnan().all()
