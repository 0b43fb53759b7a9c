"""Keys that are gathered twice: values, gradients, what is kept for the backward pass, sums."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import varlen_kernels
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.utils._python_dispatch import TorchDispatchMode

from packstore.testing import random_examples
from packstore.torch import collate
from packstore.torch.attention import ATTENTION, _flash, _varlen
from packstore.torch.batch.layout import AttentionLayout


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(_flash, "DTYPES", (torch.float64, torch.bfloat16))
    with varlen_kernels.on_cpu():
        yield


def layout_of(kit: SimpleNamespace, kind: str = "preference") -> AttentionLayout:
    examples = random_examples(4, kind=kind, seed=1, max_prompt=20, max_response=4)
    return collate(kit.packed(examples, [4], "shared_prefix"), kind).layout


def inputs(layout: AttentionLayout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(layout.num_queries, n, 8) for n in (4, 2, 2)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


def gathered(qkv: list[Tensor], layout: AttentionLayout, left: int) -> Tensor:
    """The same kernels on copies that autograd makes and sums."""
    q, k, v = qkv
    return torch_varlen.varlen_attn(
        q, layout.keys(k), layout.keys(v), layout.cu_seqlens_q, layout.cu_seqlens_k,
        layout.max_seqlen_q, layout.max_seqlen_k, scale=0.3, window_size=(left, 0),
        enable_gqa=True,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_values_and_gradients(kit: SimpleNamespace, kind: str, window: int | None) -> None:
    layout = layout_of(kit, kind)
    assert layout.kv_index is not None
    assert int(layout.kv_index.bincount().max()) >= (3 if kind == "ranked" else 2)
    qkv = inputs(layout)
    attend = ATTENTION.load("torch_varlen")
    found = attend(*qkv, layout, scale=0.3, sliding_window=window)
    expected = gathered(qkv, layout, -1 if window is None else window - 1)
    plain = ATTENTION.load("reference")(*qkv, layout, scale=0.3, sliding_window=window)
    upstream = torch.randn(found.shape, dtype=found.dtype)
    for other in (expected, plain):
        assert (found - other).abs().max() < 1e-12
        for a, b in zip(
            torch.autograd.grad(found, qkv, upstream, retain_graph=True),
            torch.autograd.grad(other, qkv, upstream),
            strict=True,
        ):
            assert (a - b).abs().max() < 1e-12


def test_copies_are_not_kept(kit: SimpleNamespace) -> None:
    layout = layout_of(kit)
    qkv = inputs(layout)
    output = 4 * layout.num_queries * 9  # and log-sum-exp, of every head
    rows = sum(x.numel() for x in qkv)
    copies = 2 * 2 * 8 * int(layout.cu_seqlens_k[-1])

    def kept(call: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            call()
        return sum(sizes.values())

    own = kept(lambda: ATTENTION.load("torch_varlen")(*qkv, layout, scale=0.3))
    assert own == rows + output
    assert kept(lambda: gathered(qkv, layout, -1)) == qkv[0].numel() + copies + output
    assert copies > 1.5 * (rows - qkv[0].numel())


class Sums(TorchDispatchMode):
    """Lists the dtypes in which rows are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [2**16, 3])
def test_gradients_of_copies_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """256 + 1 + ... + 1: with bfloat16 sums each 1 may be lost."""
    monkeypatch.setattr(_varlen, "BLOCK", block)
    index = torch.tensor([1] * 9 + [0])
    grad = torch.tensor([256.0] + [1.0] * 8 + [5.0]).bfloat16()[:, None, None]
    rows = torch.zeros(3, 1, 1, dtype=torch.bfloat16)
    with Sums() as sums:
        found = _varlen._summed(grad, index, rows)
    assert found.flatten().tolist() == [5, 264, 0]
    assert found.dtype == torch.bfloat16
    assert set(sums.dtypes) == {torch.float32}


def test_deterministic_calls_never_reach_other_kernels(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chooses(*_: Any, **__: Any) -> None:
        raise AssertionError("torch 2.15 may choose cuDNN here")

    monkeypatch.setattr(torch_varlen, "varlen_attn", chooses)
    batch = collate(kit.packed(random_examples(4, seed=1), [4], "concat"), "preference")
    qkv = inputs(batch.layout)
    attend = ATTENTION.load("torch_varlen")
    with pytest.raises(AssertionError, match="cuDNN"):
        attend(*qkv, batch.layout, scale=0.3)
    torch.use_deterministic_algorithms(True)
    try:
        found = attend(*qkv, batch.layout, scale=0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = ATTENTION.load("reference")(*qkv, batch.layout, scale=0.3)
    assert (found - expected).abs().max() < 1e-12
    a, b = (torch.autograd.grad(x.sin().sum(), qkv) for x in (found, expected))
    assert all((x - y).abs().max() < 1e-12 for x, y in zip(a, b, strict=True))
