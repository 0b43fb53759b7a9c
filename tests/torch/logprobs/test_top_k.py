"""The k most probable ids of each target, against torch.topk of all log-probs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor, nn

from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    collate,
    packed_logps,
    packed_top_k,
    pad_batch,
    use_packed_attention,
)
from packstore.torch.logprobs import top_k
from packstore.torch.logprobs.head import logps_and_top_k
from packstore.torch.logprobs.tiles import Projection
from packstore.torch.logprobs.top_k import head_top_k

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    "phi": {},
    "cohere": {"logit_scale": 0.25},
}


@pytest.fixture(scope="module")
def batch(kit: SimpleNamespace) -> PackedBatch:
    packs = kit.packed(random_examples(4, seed=2), [2, 2], "shared_prefix")
    return collate(packs, "preference")


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_topk_of_all_log_probs(
    kit: SimpleNamespace,
    batch: PackedBatch,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    monkeypatch.setattr(top_k, "BLOCK", 300)  # several blocks in a tile
    model = use_packed_attention(kit.tiny_family(family, **FAMILIES[family]))
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        nn.init.normal_(bias)
    with torch.no_grad():
        logits = model(**batch.model_inputs()).logits[0]
    expected = logits[batch.targets.rows].log_softmax(-1).topk(7)
    of_targets = packed_logps(model, batch, per_token=True)
    for chunk_size in (40, 2**21):
        logps, top = logps_and_top_k(model, batch, 7, chunk_size=chunk_size)
        assert torch.equal(top.ids, expected.indices.int())
        assert top.logps.dtype == torch.float32
        torch.testing.assert_close(
            top.logps.double(), expected.values, rtol=0, atol=1e-5
        )
        torch.testing.assert_close(logps, of_targets, rtol=0, atol=1e-12)


def test_the_log_probs_of_the_targets_are_those_of_the_head(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    """To the bit, in the dtype of training."""
    model = use_packed_attention(kit.tiny_model(dtype=torch.bfloat16))
    logps, top = logps_and_top_k(model, batch, 3)
    with torch.no_grad():
        assert torch.equal(logps, packed_logps(model, batch, per_token=True))
    again = packed_top_k(model, batch, 3)
    assert torch.equal(again.ids, top.ids)
    assert not again.logps.requires_grad


def head_of_few_values(num_tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Hidden states and a head of small integers: exact products, and many ties."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-1, 2, (num_tokens, 4), generator=generator)
    weight = torch.randint(-1, 2, (vocab, 4), generator=generator)
    return hidden.float(), weight.float()


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    """For any size of the tiles, and of 0.0 and -0.0."""
    hidden, weight = head_of_few_values(num_tokens=30, vocab=75)
    scale = -1.0
    expected = (scale * hidden @ weight.T).sort(descending=True, stable=True).indices
    targets = torch.zeros(30, dtype=torch.long)
    for chunk_size in (16, 130, 700, 2**21):
        projection = Projection(scale=scale, chunk_size=chunk_size)
        _, top = head_top_k(hidden, weight, None, targets, projection, k=12)
        assert torch.equal(top.ids, expected[:, :12].int())
        assert (top.logps.diff() <= 0).all()
    _, whole = head_top_k(hidden, weight, None, targets, Projection(), k=75)
    torch.testing.assert_close(whole.logps.exp().sum(-1), torch.ones(30))


def test_a_log_prob_is_never_above_zero() -> None:
    hidden = torch.full((1, 1), 1000.0)
    weight = torch.tensor([[1.0], [0.0]])
    targets = torch.zeros(1, dtype=torch.long)
    logps, top = head_top_k(hidden, weight, None, targets, Projection(), k=2)
    assert top.logps.tolist() == [[0, -1000]]
    assert logps.tolist() == [0]


def test_all_logits_are_never_in_memory() -> None:
    hidden, weight = head_of_few_values(num_tokens=200, vocab=1000)
    targets = torch.zeros(200, dtype=torch.long)
    with LargestTensor() as largest:
        head_top_k(hidden, weight, None, targets, Projection(chunk_size=8192), k=4)
    assert largest.elements <= 8192


def test_padding_targets_are_finite(kit: SimpleNamespace, batch: PackedBatch) -> None:
    model = use_packed_attention(kit.tiny_model())
    num_targets = len(batch.target_index)
    padded = pad_batch(
        batch, num_tokens=batch.num_tokens + 4, num_targets=num_targets + 3
    )
    top = packed_top_k(model, padded, 3)
    assert top.ids.shape == (num_targets + 3, 3)
    assert top.logps.isfinite().all()
    assert torch.equal(top.ids[:num_targets], packed_top_k(model, batch, 3).ids)


@pytest.mark.parametrize("k", [0, 51])
def test_k_is_at_most_the_vocabulary(
    kit: SimpleNamespace, batch: PackedBatch, k: int
) -> None:
    model = use_packed_attention(kit.tiny_model())
    with pytest.raises(ConfigError, match="from 1 to 50"):
        packed_top_k(model, batch, k)
