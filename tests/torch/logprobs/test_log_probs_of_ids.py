"""Log-probs of k ids in place of each target, against log_softmax of all logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from packstore.errors import CompatibilityError, ConfigError
from packstore.format.arrays import TopK
from packstore.testing import random_examples
from packstore.torch import (
    ContextShard,
    ContextSplit,
    PackedBatch,
    PackedPolicy,
    collate,
    packed_logps,
    pad_batch,
    segment_logps,
    use_packed_attention,
)
from packstore.torch.logprobs import logprobs
from packstore.torch.models.compatibility import check_ids

HIDDEN = 16
K = 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.requires_grad_()


def packed_batch(kit: SimpleNamespace, layout: str = "shared_prefix") -> PackedBatch:
    packs = kit.packed(random_examples(4, seed=2), [1, 3], layout)
    return collate(packs, "preference")


def random_ids(num_targets: int, vocab: int, k: int = K) -> Tensor:
    """Ids of which some stand twice in a row."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, vocab, (num_targets, k), generator=generator)
    ids[::2, -1] = ids[::2, 0]
    return ids


def log_probs_of_logits(batch: PackedBatch, logits: Tensor, ids: Tensor) -> Tensor:
    return logits[batch.targets.rows].log_softmax(-1).gather(-1, ids)


def largest_difference(actual: Any, expected: Any) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def with_ids(batch: PackedBatch, ids: Tensor) -> PackedBatch:
    """The batch with a column `teacher` of these ids."""
    top = TopK(ids.int(), torch.zeros(ids.shape))
    return batch.replace(token_columns={"teacher": top})


@pytest.mark.parametrize(
    ("layout", "has_bias", "softcap", "chunk_size"),
    [
        ("concat", False, None, 40),
        ("shared_prefix", True, None, 90),
        ("concat", False, 1.5, 23),
        ("shared_prefix", True, 1.5, 100_000),
    ],
)
def test_values_and_gradients(
    kit: SimpleNamespace,
    layout: str,
    has_bias: bool,
    softcap: float | None,
    chunk_size: int,
) -> None:
    batch = packed_batch(kit, layout)
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    bias = normal(kit.VOCAB, seed=2) if has_bias else None
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = 0.3 * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = log_probs_of_logits(batch, logits, ids)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    upstream = normal(*ids.shape, seed=3).detach()
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)

    settings: dict[str, Any] = {
        "logit_scale": 0.3,
        "softcap": softcap,
        "chunk_size": chunk_size,
    }
    for keep_logits in (False, True):
        actual = segment_logps(
            batch,
            hidden=hidden,
            weight=weight,
            bias=bias,
            ids=ids,
            keep_logits=keep_logits,
            **settings,
        )
        assert largest_difference([actual], [expected]) < 1e-12
        # Twice, as kept logits must not be overwritten.
        for _ in range(2):
            gradients = torch.autograd.grad(actual, leaves, upstream, retain_graph=True)
            assert largest_difference(gradients, expected_gradients) < 1e-12

    frozen = [None if leaf is None else leaf.detach() for leaf in (weight, bias)]
    actual = segment_logps(
        batch,
        hidden=hidden,
        weight=frozen[0],
        bias=frozen[1],
        ids=ids.int(),
        **settings,
    )
    assert largest_difference([actual], [expected]) < 1e-12
    gradients = torch.autograd.grad(actual, hidden, upstream)
    assert largest_difference(gradients, expected_gradients[:1]) < 1e-12


def test_from_logits(kit: SimpleNamespace) -> None:
    batch = packed_batch(kit)
    logits = normal(batch.num_tokens, kit.VOCAB)
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    expected = log_probs_of_logits(batch, logits, ids)
    of_rows = logits[batch.targets.rows]
    for values in (logits, logits[None], of_rows):
        actual = segment_logps(batch, logits=values, ids=ids.int())
        assert torch.equal(actual, expected)
    assert segment_logps(batch, logits=logits.bfloat16(), ids=ids).dtype == torch.float


def test_the_targets_as_ids_are_the_log_probs_of_the_targets(
    kit: SimpleNamespace,
) -> None:
    batch = packed_batch(kit)
    leaves = [normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)]
    hidden, weight = leaves
    of_targets = segment_logps(batch, hidden=hidden, weight=weight, per_token=True)
    ids = batch.targets.ids[:, None]
    of_ids = segment_logps(batch, hidden=hidden, weight=weight, ids=ids)
    assert of_ids.shape == (len(ids), 1)
    assert largest_difference([of_ids[:, 0]], [of_targets]) < 1e-12
    upstream = normal(len(ids), seed=3).detach()
    expected = torch.autograd.grad(of_targets, leaves, upstream)
    actual = torch.autograd.grad(of_ids, leaves, upstream[:, None])
    assert largest_difference(actual, expected) < 1e-12


def test_a_masked_vocabulary(kit: SimpleNamespace) -> None:
    """A bias of -inf: such ids have the log-prob -inf, and harm no gradient."""
    batch = packed_batch(kit)
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    bias = torch.zeros(kit.VOCAB, dtype=torch.float64)
    bias[:20] = -torch.inf
    ids = random_ids(len(batch.target_index), kit.VOCAB).clamp(min=20)
    expected = log_probs_of_logits(batch, hidden @ weight.T + bias, ids)
    settings: dict[str, Any] = {"bias": bias, "chunk_size": 40}
    actual = segment_logps(batch, hidden=hidden, weight=weight, ids=ids, **settings)
    assert largest_difference([actual], [expected]) < 1e-12
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight))
    gradients = torch.autograd.grad(actual.sum(), (hidden, weight))
    assert largest_difference(gradients, expected_gradients) < 1e-11
    masked = segment_logps(batch, hidden=hidden, weight=weight, ids=0 * ids, **settings)
    assert (masked == -torch.inf).all()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no product of operands of 16 bits that is summed in float32."""
    monkeypatch.setattr(logprobs, "operand_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(logprobs, "product", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(
        logprobs,
        "_add_product",
        lambda total, a, b: total.addmm_(a.float(), b.float()),
    )


@pytest.mark.parametrize("has_16_bit_products", [False, True])
@pytest.mark.parametrize("chunk_size", [100, 2**21])
def test_half_precision(
    kit: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    has_16_bit_products: bool,
    chunk_size: int,
) -> None:
    """The gradient is rounded once; with products of 16 bits, so are their operands."""
    batch = packed_batch(kit)
    half = [
        normal(batch.num_tokens, HIDDEN).detach().bfloat16().requires_grad_(),
        normal(kit.VOCAB, HIDDEN, seed=1).detach().bfloat16().requires_grad_(),
    ]
    exact = [leaf.detach().double().requires_grad_() for leaf in half]
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    upstream = normal(*ids.shape, seed=3).detach()
    expected = segment_logps(batch, hidden=exact[0], weight=exact[1], ids=ids)
    expected_gradients = torch.autograd.grad(expected, exact, upstream)

    if has_16_bit_products:
        as_on_a_gpu(monkeypatch)
    actual = segment_logps(
        batch, hidden=half[0], weight=half[1], ids=ids, chunk_size=chunk_size
    )
    assert actual.dtype == torch.float32
    assert largest_difference([actual], [expected]) < 2e-5
    gradients = torch.autograd.grad(actual, half, upstream.float())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        error = (gradient - expected_gradient).norm() / expected_gradient.norm()
        assert error < 2**-8


def test_a_sure_model_in_half_precision(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 - softmax of a target is not the difference of rounded numbers."""
    batch = packed_batch(kit)
    rows, ids = batch.targets.rows, batch.targets.ids
    weight = normal(kit.VOCAB, HIDDEN, seed=1).detach().bfloat16()
    hidden = torch.zeros(batch.num_tokens, HIDDEN, dtype=torch.bfloat16)
    of_targets = weight[ids].double()
    sure = 10 * of_targets / of_targets.norm(dim=1, keepdim=True).square()
    hidden[rows] = sure.bfloat16()
    exact_hidden = hidden.double().requires_grad_()
    ids_of_targets = ids[:, None].expand(-1, 2)
    expected = segment_logps(
        batch, hidden=exact_hidden, weight=weight.double(), ids=ids_of_targets
    )
    expected.sum().backward()
    as_on_a_gpu(monkeypatch)
    hidden.requires_grad_()
    actual = segment_logps(batch, hidden=hidden, weight=weight, ids=ids_of_targets)
    actual.sum().backward()
    gradient, exact = hidden.grad[rows].double(), exact_hidden.grad[rows]
    assert ((gradient - exact).norm(dim=1) / exact.norm(dim=1)).max() < 2**-6


def test_all_logits_are_never_in_memory(kit: SimpleNamespace) -> None:
    vocab = 300
    batch = packed_batch(kit)
    leaves = [normal(batch.num_tokens, 2), normal(vocab, 2, seed=1)]
    num_targets = len(batch.target_index)
    ids = random_ids(num_targets, vocab)
    with LargestTensor() as largest:
        logps = segment_logps(
            batch, hidden=leaves[0], weight=leaves[1], ids=ids, chunk_size=600
        )
        logps.sum().backward()
    assert largest.elements == 600 < num_targets * vocab / 10


def test_padding_targets_are_finite_and_change_no_gradient(
    kit: SimpleNamespace,
) -> None:
    batch = packed_batch(kit)
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    batch = with_ids(batch, ids)
    num_tokens = batch.num_tokens + 8
    padded = pad_batch(batch, num_tokens=num_tokens, num_targets=len(ids) + 6)
    hidden, weight = normal(num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    expected = segment_logps(
        batch, hidden=hidden[: batch.num_tokens], weight=weight, ids=ids
    )
    padded_ids = padded.token_columns["teacher"].ids
    actual = segment_logps(padded, hidden=hidden, weight=weight, ids=padded_ids)
    assert actual.isfinite().all()
    assert largest_difference([actual[: len(ids)]], [expected]) < 1e-12
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight))
    gradients = torch.autograd.grad(actual[: len(ids)].sum(), (hidden, weight))
    assert largest_difference(gradients, expected_gradients) < 1e-12


def test_context_shards(kit: SimpleNamespace) -> None:
    """The shards' rows are those of the batch."""
    batch = packed_batch(kit, "concat")
    batch = pad_batch(batch, num_tokens=batch.num_tokens + batch.num_tokens % 2)
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    batch = with_ids(batch, ids)
    hidden, weight = normal(batch.num_tokens, HIDDEN), normal(kit.VOCAB, HIDDEN, seed=1)
    expected = segment_logps(batch, hidden=hidden, weight=weight, ids=ids)
    split = ContextSplit.contiguous(batch.cu_seqlens, 2)
    of_shards = []
    for rank in range(2):
        shard = ContextShard.of(batch, split, rank, group=None)
        logps = segment_logps(
            shard,
            hidden=hidden[shard.index],
            weight=weight,
            ids=shard.token_columns["teacher"].ids,
        )
        of_shards.append(logps)
    assert largest_difference([torch.cat(of_shards)], [expected]) < 1e-12


def test_packed_logps_and_policy(kit: SimpleNamespace, exact: None) -> None:
    model = use_packed_attention(kit.tiny_model())
    batch = packed_batch(kit)
    ids = random_ids(len(batch.target_index), kit.VOCAB)
    batch = with_ids(batch, ids)
    logits = model(**batch.model_inputs()).logits
    expected = log_probs_of_logits(batch, logits[0], ids)
    policy = PackedPolicy(model, ids_of="teacher")
    for actual in (packed_logps(model, batch, ids_of="teacher"), policy(batch)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
        assert actual.requires_grad


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrapped_policies(kit: SimpleNamespace, one_rank: None, wrap: Any) -> None:
    model = use_packed_attention(kit.tiny_model())
    batch = packed_batch(kit)
    batch = with_ids(batch, random_ids(len(batch.target_index), kit.VOCAB))
    policy = PackedPolicy(model, ids_of="teacher")
    expected = policy(batch).detach()
    wrapped = wrap(policy)
    actual = wrapped(batch)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, in dynamo
def test_compiled(kit: SimpleNamespace) -> None:
    batch = packed_batch(kit)
    batch = with_ids(batch, random_ids(len(batch.target_index), kit.VOCAB))
    policy = PackedPolicy(use_packed_attention(kit.tiny_model()), ids_of="teacher")
    expected = policy(batch)
    torch._dynamo.reset()
    compiled = torch.compile(policy, backend="eager")
    torch.testing.assert_close(compiled(batch), expected, rtol=0, atol=1e-12)


def test_refusals(kit: SimpleNamespace) -> None:
    batch = packed_batch(kit)
    num_targets = len(batch.target_index)
    model = use_packed_attention(kit.tiny_model())
    with pytest.raises(ConfigError, match=r"ids_of='teacher'.*side="):
        packed_logps(model, batch, ids_of="teacher")
    numbers = batch.replace(token_columns={"teacher": torch.zeros(num_targets)})
    with pytest.raises(ConfigError, match=r"ids_of='teacher'.*found none"):
        PackedPolicy(model, ids_of="teacher")(numbers)

    ids = random_ids(num_targets, kit.VOCAB)
    settings = {"hidden": normal(batch.num_tokens, 8), "weight": normal(kit.VOCAB, 8)}
    for wrong in (ids[1:], ids[:, 0]):
        with pytest.raises(ConfigError, match=rf"ids=.*\[{num_targets}, k\]"):
            segment_logps(batch, ids=wrong, **settings)
    for wrong_id in (kit.VOCAB, -1):
        ids[3, 1] = wrong_id
        for inputs in (settings, {"logits": normal(batch.num_tokens, kit.VOCAB)}):
            with pytest.raises(CompatibilityError, match=f"below {kit.VOCAB}"):
                segment_logps(batch, ids=ids, **inputs)
    ids[3, 1] = kit.VOCAB
    with pytest.raises(CompatibilityError, match=r"'teacher'.*below 50"):
        check_ids(with_ids(batch, ids), model)
