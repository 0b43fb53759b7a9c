"""Every backend that runs on CPU against one dense mask over the row, in both layouts,
and in prefix trees of any depth.
"""

from __future__ import annotations

import dataclasses
import shutil
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forests import examples_of, random_forest
from sized_pairs import row_of
from torch import Tensor

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import collate
from packstore.torch.attention import ATTENTION, Settings, auto, flex
from packstore.torch.batch import AttentionLayout

EXAMPLES = random_examples(5, seed=5)
FOREST = examples_of(random_forest(1, size=10), "preference")
WITH_GRADIENTS = ("reference", "sdpa")
ON_CPU = (*WITH_GRADIENTS, "flex")
LAYOUTS = pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])
SINKS = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64)
CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "windows": [{"window": window} for window in (1, 2, 3, 7, 1000)],
    "softcap": [{"softcap": 0.7}, {"softcap": 0.7, "window": 3}],
    "chunks": [{"chunk": chunk} for chunk in (4, 1000)],
    "sinks": [{"sinks": SINKS}, {"sinks": SINKS, "window": 4}],
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Clears compiled kernels: those of one test would count against the limit of the
    next.
    """
    torch._dynamo.reset()


def dense(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, settings: Settings
) -> Tensor:
    """softmax over a [T, keys] mask that is built one entry at a time."""
    if layout.kv_index is not None:
        k, v = k[layout.kv_index], v[layout.kv_index]
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    queries, keys = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    for s in range(len(queries) - 1):
        for i in range(queries[s], queries[s + 1]):
            last = keys[s + 1] - (queries[s + 1] - i)
            first = keys[s]
            if settings.window is not None:
                first = max(first, last - settings.window + 1)
            if settings.chunk is not None:
                first = max(
                    first, keys[s] + (last - keys[s]) // settings.chunk * settings.chunk
                )
            mask[i, first : last + 1] = True
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("tnh,snh->nts", q, k) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    powers = scores.masked_fill(~mask, float("-inf")).exp()
    extra = 0 if settings.sinks is None else settings.sinks.exp()[:, None, None]
    return torch.einsum(
        "nts,snh->tnh", powers / (powers.sum(-1, keepdim=True) + extra), v
    )


def inputs(
    tokens: int, heads: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 8), (tokens, heads, 8), (tokens, heads, 6))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for s in shapes
    ]


def packs(kit: SimpleNamespace, layout: str, *sizes: int) -> Any:
    examples = FOREST if layout == "forest" else EXAMPLES
    return collate(kit.packed(examples, sizes or [2, 3], layout), "preference")


def long_packs(kit: SimpleNamespace, layout: str, pairs: int) -> Any:
    examples = random_examples(pairs, seed=2, max_prompt=60, max_response=60)
    if layout == "forest":
        forest = random_forest(2, size=2 * pairs, longest_turn=60)
        examples = examples_of(forest, "preference")
    return collate(kit.packed(examples, [pairs], layout), "preference")


@pytest.mark.parametrize("case", [{}, {"softcap": 0.7}])
def test_auto_on_a_cpu_is_the_backend_that_can(
    kit: SimpleNamespace, case: dict[str, Any]
) -> None:
    """To the last bit, as another backend would round differently."""
    layout = packs(kit, "concat").layout
    qkv = inputs(layout.num_queries, dtype=torch.float32)
    settings = Settings(0.3, **case)
    expected = ATTENTION.load("reference" if case else "sdpa")(*qkv, layout, settings)
    assert torch.equal(ATTENTION.load("auto")(*qkv, layout, settings), expected)


@pytest.mark.parametrize("cases", CASES)
@LAYOUTS
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
def test_values_and_gradients(
    kit: SimpleNamespace, backend: str, layout: str, cases: str
) -> None:
    """With 1, 2 and 4 heads of keys."""
    layout_of, attend = packs(kit, layout).layout, ATTENTION.load(backend)
    for case, heads in product(CASES[cases], (1, 2, 4)):
        settings = Settings(0.3, **case)
        leaves = [x.requires_grad_() for x in inputs(layout_of.num_queries, heads)]
        if settings.sinks is not None:
            sinks = settings.sinks.clone().requires_grad_()
            settings, leaves = settings._replace(sinks=sinks), [*leaves, sinks]
        if backend == "sdpa" and settings.softcap is not None:
            with pytest.raises(BackendError, match=r"'sdpa': .*softcap"):
                attend(*leaves[:3], layout_of, settings)
            continue
        expected = dense(*leaves[:3], layout_of, settings)
        found = attend(*leaves[:3], layout_of, settings)
        assert (found - expected).abs().max() < 1e-12
        upstream = torch.randn_like(expected)
        both = [
            torch.autograd.grad((x * upstream).sum(), leaves) for x in (found, expected)
        ]
        for a, b in zip(*both, strict=True):
            assert (a - b).abs().max() < 1e-11 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("cases", ["plain", "windows", "chunks", "sinks"])
def test_long_responses_of_sdpa(cases: str) -> None:
    """After short prompts, where a mask would be slow, and after a long one."""
    batch = row_of([(9, 30, 560), (300, 5, 530), (2, 5, 513), (600, 5, 620)])
    leaves = [x.requires_grad_() for x in inputs(batch.num_tokens)]
    for case in CASES[cases]:
        outputs, gradients = [], []
        for backend in ("sdpa", "reference"):
            attend = ATTENTION.load(backend)
            output = attend(*leaves, batch.layout, Settings(0.3, **case))
            upstream = inputs(batch.num_tokens)[0][:, :, :6]
            outputs.append(output)
            gradients.append(torch.autograd.grad((output * upstream).sum(), leaves))
        assert (outputs[0] - outputs[1]).abs().max() < 1e-12
        for a, b in zip(*gradients, strict=True):
            assert (a - b).abs().max() < 1e-11 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        *(("concat", cases) for cases in ("plain", "chunks")),
        *(("shared_prefix", cases) for cases in ("softcap", "sinks")),
        ("forest", "plain"),
        *(
            pytest.param(layout, cases, marks=pytest.mark.slow)
            for layout, cases in (
                ("shared_prefix", "windows"),
                ("shared_prefix", "chunks"),
                *(("forest", cases) for cases in CASES if cases != "plain"),
            )
        ),
    ],
)
def test_values_of_flex(kit: SimpleNamespace, layout: str, cases: str) -> None:
    """Which refuses gradients on CPU."""
    layout_of, attend = packs(kit, layout).layout, ATTENTION.load("flex")
    qkv = inputs(layout_of.num_queries)
    for case in CASES[cases]:
        settings = Settings(0.3, **case)
        found = attend(*qkv, layout_of, settings)
        assert (found - dense(*qkv, layout_of, settings)).abs().max() < 1e-12
    with pytest.raises(BackendError, match="'flex'"):
        attend(*(x.requires_grad_() for x in qkv), layout_of, Settings(0.3))


@pytest.mark.parametrize("window", [None, 5])
@LAYOUTS
def test_flex_skips_only_what_no_query_sees(
    kit: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    window: int | None,
) -> None:
    """The kernel of a GPU trusts the lists of blocks, which the CPU never looks at."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    batch = long_packs(kit, layout, 12)
    mask = flex.block_mask(batch.layout, window)
    assert flex.block_mask(batch.layout, window) is mask
    queries, keys = (
        flex.rounded(batch.num_tokens),
        flex.rounded(int(batch.cu_seqlens_k[-1])),
    )
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


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """bool `[query blocks, key blocks]`: those that a block mask lists."""
    found = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[row, indices[0, 0, row, :count].long()] = True
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning"
)  # torch's own, in inductor
@LAYOUTS
def test_flex_compiled_follows_the_blocks(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The compiled CPU kernel, which skips blocks as that of a GPU does; forward pass
    only.
    """
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which torch.compile needs on CPU")
    kernel = torch.compile(flex.flex_attention, fullgraph=True)
    monkeypatch.setattr(flex, "_kernel", lambda _: kernel)
    batch = long_packs(kit, layout, 20)
    qkv = inputs(batch.num_tokens, dtype=torch.float32)
    for window in (None, 150):
        settings = Settings(0.3, window)
        found = ATTENTION.load("flex")(*qkv, batch.layout, settings)
        assert (found - dense(*qkv, batch.layout, settings)).abs().max() < 1e-5


@LAYOUTS
@pytest.mark.parametrize("backend", ON_CPU)
def test_empty_segments_and_half_precision(
    kit: SimpleNamespace, backend: str, layout: str
) -> None:
    """Empty segments, which pad the number of offsets, change nothing; dtypes
    are kept.
    """
    one = packs(kit, layout).layout
    repeated = dataclasses.replace(
        one,
        cu_seqlens_q=torch.cat([one.cu_seqlens_q, one.cu_seqlens_q[-1:].repeat(3)]),
        cu_seqlens_k=torch.cat([one.cu_seqlens_k, one.cu_seqlens_k[-1:].repeat(3)]),
    )
    half, attend = (
        inputs(one.num_queries, dtype=torch.bfloat16),
        ATTENTION.load(backend),
    )
    found = attend(*half, one, Settings(0.3))
    assert found.dtype == torch.bfloat16
    assert torch.equal(attend(*half, repeated, Settings(0.3)), found)
    exact = dense(*(x.double() for x in half), one, Settings(0.3))
    assert (found.double() - exact).abs().max() < 0.03


@LAYOUTS
@pytest.mark.parametrize("backend", WITH_GRADIENTS)  # flex: 0 * NaN, in blocks of 128
def test_poison_in_one_segment_stays_there(
    kit: SimpleNamespace, backend: str, layout: str
) -> None:
    batch = packs(kit, layout)
    q, k, v = inputs(batch.num_tokens)
    last = batch.segment_ids == batch.num_segments - 1
    for x in (q, k, v):
        x[last] = float("nan")
    found = ATTENTION.load(backend)(q, k, v, batch.layout, Settings(0.3))
    assert found[~last].isfinite().all()
    assert found[last].isnan().all()


def test_auto_logs_its_choice_with_dtype_and_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_BACKENDS", {})
    batch = row_of([(3, 4, 5)])
    q, k, v = torch.randn(3, batch.num_tokens, 2, 8)
    with caplog.at_level("INFO"):
        for _ in range(2):
            ATTENTION.load("auto")(q, k, v, batch.layout, Settings(scale=1.0))
    (message,) = caplog.messages
    assert message.endswith("'sdpa' for torch.float32 on cpu")
