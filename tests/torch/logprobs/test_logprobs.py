"""Log-probs of segments against a loop over tokens, with and without logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import PackedBatch, collate, segment_logps
from packstore.torch.logprobs import logprobs

HIDDEN = 16


@pytest.fixture(params=["concat", "shared_prefix"])
def batch(kit: SimpleNamespace, request: pytest.FixtureRequest) -> PackedBatch:
    return collate(
        kit.packed(random_examples(4, seed=2), [1, 3], request.param), "preference"
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def one_by_one(batch: PackedBatch, logits: Tensor) -> Tensor:
    sums = [torch.zeros((), dtype=logits.dtype) for _ in range(batch.num_segments)]
    for t in range(batch.num_tokens - 1):
        label, segment = int(batch.labels[t + 1]), int(batch.segment_ids[t])
        if label != -100 and segment == batch.segment_ids[t + 1]:
            sums[segment] = sums[segment] + logits[t].log_softmax(-1)[label]
    return torch.stack(sums)


def test_from_logits(kit: SimpleNamespace, batch: PackedBatch) -> None:
    logits = normal(batch.num_tokens, kit.VOCAB)
    expected = one_by_one(batch, logits)
    kept = logits[batch.targets.rows]
    for given in (logits, logits[None], kept, kept[None]):
        assert (segment_logps(batch, logits=given) - expected).abs().max() < 1e-12
    assert segment_logps(batch, logits=logits.float()).dtype == torch.float32
    assert segment_logps(batch, logits=logits.bfloat16()).dtype == torch.float32


def test_a_masked_vocabulary(kit: SimpleNamespace) -> None:
    """By a bias of -inf, also where a whole tile is so, and the first."""
    batch = kit.row(1, seed=5)
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    others = ~torch.isin(torch.arange(kit.VOCAB), batch.targets.ids)
    assert others[:3].all()
    bias = torch.zeros(kit.VOCAB, dtype=torch.float64).masked_fill(others, -torch.inf)
    expected = one_by_one(batch, hidden @ weight.T + bias)
    for head, leaves in ((weight, [hidden, weight]), (weight.detach(), [hidden])):
        found = segment_logps(
            batch, hidden=hidden, weight=head, bias=bias, chunk_size=3
        )
        assert (found - expected).abs().max() < 1e-12
        made = torch.autograd.grad(found.sum(), leaves)
        wanted = torch.autograd.grad(expected.sum(), leaves, retain_graph=True)
        for a, b in zip(made, wanted, strict=True):
            assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize(
    ("biased", "softcap", "chunk_size"),
    [(False, None, 2), (True, None, 90), (False, 1.5, 7), (True, 1.5, 100_000)],
)
def test_from_hidden(
    kit: SimpleNamespace,
    batch: PackedBatch,
    biased: bool,
    softcap: float | None,
    chunk_size: int,
) -> None:
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    bias = normal(kit.VOCAB, seed=2) if biased else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    logits = 0.3 * (hidden @ weight.T + (0 if bias is None else bias))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = one_by_one(batch, logits)
    how = {"logit_scale": 0.3, "softcap": softcap, "chunk_size": chunk_size}
    found = segment_logps(batch, hidden=hidden[None], weight=weight, bias=bias, **how)
    assert (found - expected).abs().max() < 1e-12
    upstream = normal(batch.num_segments, seed=3).detach()
    wanted = torch.autograd.grad(expected, leaves, upstream)
    for a, b in zip(torch.autograd.grad(found, leaves, upstream), wanted, strict=True):
        assert (a - b).abs().max() < 1e-11
    fixed = [None if x is None else x.detach() for x in (weight, bias)]
    frozen = segment_logps(batch, hidden=hidden, weight=fixed[0], bias=fixed[1], **how)
    assert (frozen - expected).abs().max() < 1e-12
    assert (
        torch.autograd.grad(frozen, hidden, upstream)[0] - wanted[0]
    ).abs().max() < 1e-11


@pytest.mark.parametrize(("vocab", "chunk_size"), [(50_257, None), (151_936, 1 << 16)])
def test_a_large_vocabulary(
    kit: SimpleNamespace, vocab: int, chunk_size: int | None
) -> None:
    batch = kit.row(1)
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(vocab, HIDDEN, seed=1)
    found = segment_logps(batch, hidden=hidden, weight=weight, chunk_size=chunk_size)
    expected = segment_logps(batch, logits=hidden @ weight.T)
    assert (found - expected).abs().max() < 1e-11
    upstream = normal(batch.num_segments, seed=3).detach()
    both = [
        torch.autograd.grad(x, (hidden, weight), upstream) for x in (found, expected)
    ]
    for a, b in zip(*both, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("chunk_size", [100, 2**21])  # several tiles of tokens, and one
def test_half_precision_is_summed_in_float32(
    kit: SimpleNamespace, batch: PackedBatch, chunk_size: int
) -> None:
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in half]
    found = segment_logps(batch, hidden=half[0], weight=half[1], chunk_size=chunk_size)
    expected = segment_logps(batch, hidden=exact[0], weight=exact[1])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 2e-5
    found.sum().backward()
    expected.sum().backward()
    for a, b in zip(half, exact, strict=True):
        assert a.grad.dtype == torch.bfloat16
        assert (
            (a.grad - b.grad).abs() <= 2**-8 * b.grad.abs() + 1e-5
        ).all()  # one rounding


def test_autocast_does_not_lower_the_precision(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    hidden, weight = (
        normal(batch.num_tokens, HIDDEN).float(),
        normal(kit.VOCAB, HIDDEN).float(),
    )
    plain = segment_logps(batch, hidden=hidden, weight=weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(segment_logps(batch, hidden=hidden, weight=weight), plain)


class Products(TorchDispatchMode):
    """Sizes of the matrix products that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten.mm.default:
            self.sizes.append(out.numel())
        return out


def test_no_more_logits_than_asked_for_and_each_twice(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    with Products() as products:
        segment_logps(
            batch, hidden=hidden, weight=weight, chunk_size=64
        ).sum().backward()
    assert max(products.sizes) == 64
    assert (
        sum(products.sizes) == 2 * len(batch.target_index) * kit.VOCAB
    )  # forward and backward


def test_kept_logits_give_a_second_backward_pass(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    leaves = [normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)]
    found = {}
    for keep in (False, True):
        logps = segment_logps(
            batch,
            hidden=leaves[0],
            weight=leaves[1],
            softcap=2.0,
            chunk_size=90,
            keep_logits=keep,
        ).sum()
        twice = [
            torch.autograd.grad(logps, leaves, retain_graph=True) for _ in range(2)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
        found[keep] = twice[0]
    assert all(
        torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True)
    )


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no product of operands of 16 bits that is summed in float32."""
    monkeypatch.setattr(logprobs, "operand_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(logprobs, "product", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(
        logprobs,
        "_add_product",
        lambda total, a, b: total.addmm_(a.float(), b.float()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_head_from_one_product_or_several(
    kit: SimpleNamespace,
    batch: PackedBatch,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """Both are rounded once, to the dtype of the head."""
    as_on_a_gpu(monkeypatch)
    hidden = normal(batch.num_tokens, HIDDEN).to(torch.bfloat16)
    weight = normal(kit.VOCAB, HIDDEN, seed=1).detach().to(dtype).requires_grad_()

    def gradient(chunk_size: int) -> Tensor:
        logps = segment_logps(
            batch, hidden=hidden, weight=weight, chunk_size=chunk_size
        )
        return torch.autograd.grad(logps.sum(), weight)[0]

    one, several = gradient(2**21), gradient(100)
    assert one.dtype == several.dtype == dtype
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert ((one - several).abs() <= rounding * several.abs() + 1e-5).all()


def test_a_frozen_head_in_half_precision_where_the_model_is_sure(
    kit: SimpleNamespace, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax - 1 of the target is not the difference of rounded numbers."""
    half = torch.bfloat16
    as_on_a_gpu(monkeypatch)
    weight = normal(kit.VOCAB, HIDDEN, seed=1).detach().to(half)
    rows, ids = batch.targets.rows, batch.targets.ids
    hidden = torch.zeros(batch.num_tokens, HIDDEN, dtype=half)
    hidden[rows] = (
        10 * weight[ids] / weight[ids].norm(dim=1, keepdim=True).square()
    ).to(half)
    leaves = {
        kind: hidden.to(kind, copy=True).requires_grad_()
        for kind in (half, torch.float64)
    }
    segment_logps(batch, hidden=leaves[half], weight=weight).sum().backward()
    monkeypatch.undo()
    segment_logps(
        batch, hidden=leaves[torch.float64], weight=weight.double()
    ).sum().backward()
    found, exact = (
        x.grad[rows].double() for x in leaves.values() if x.grad is not None
    )
    assert exact.norm(dim=1).min() < 0.05
    assert ((found - exact).norm(dim=1) / exact.norm(dim=1)).max() < 2**-7


def test_a_second_derivative_is_refused(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN)
    logps = segment_logps(batch, hidden=hidden, weight=weight).square().sum()
    (slope,) = torch.autograd.grad(logps, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_logits_far_apart_stay_finite(kit: SimpleNamespace, batch: PackedBatch) -> None:
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    leaves = [x.detach().float().mul(1e3).requires_grad_() for x in (hidden, weight)]
    found = segment_logps(batch, hidden=leaves[0], weight=leaves[1], chunk_size=20)
    expected = segment_logps(batch, logits=leaves[0] @ leaves[1].T)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_a_pack_without_supervised_tokens_sums_to_zero(kit: SimpleNamespace) -> None:
    packs = kit.packed(random_examples(2), [2], "concat")
    packs.signed_ids[packs.supervised] ^= -1
    batch = collate(packs, "preference")
    hidden = normal(batch.num_tokens, HIDDEN)
    found = segment_logps(batch, hidden=hidden, weight=normal(kit.VOCAB, HIDDEN))
    found.sum().backward()
    assert found.tolist() == [0] * 4
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("sizes", "settings", "mentioned"),
    [
        ({}, {}, "logits"),
        ({"hidden": 16}, {}, "logits"),
        ({"logits": 50, "hidden": 16, "weight": 16}, {}, "logits"),
        ({"logits": 50}, {"softcap": 3.0}, "softcap"),
        (
            {"hidden": 15, "weight": 16},
            {},
            "weight",
        ),
        (
            {},
            {"logits": torch.zeros(2, 3, 50)},
            r"logits=.*unpad",
        ),
    ],
)
def test_refusals(
    batch: PackedBatch, sizes: dict[str, int], settings: dict[str, Any], mentioned: str
) -> None:
    tensors = {name: normal(batch.num_tokens, size) for name, size in sizes.items()}
    with pytest.raises(ConfigError, match=mentioned):
        segment_logps(batch, **tensors, **settings)
