"""Model families on packed rows, against transformers' own attention on each sequence alone."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packstore.testing import random_examples
from packstore.torch import PackedBatch, check_isolation, collate, use_packed_attention

FAMILIES = re.findall(
    r"\S+",
    """
    afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe ctrl deepseek_v2
    deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared
    helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna lfm2
    llama mellum minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe
    opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open
    starcoder2 vaultgemma
    """,
)
CAPPED = {"gemma2", "vaultgemma"}
EXAMPLES = random_examples(3, seed=3)


def unpacked(model: Any, batch: PackedBatch) -> Tensor:
    """Logits of the tokens that predict a supervised one, each sequence run by itself."""
    ids = batch.input_ids if batch.kv_index is None else batch.input_ids[batch.kv_index]
    sequences = torch.split(ids, batch.lengths.tolist())
    logits = [model(input_ids=x[None], use_cache=False).logits[0] for x in sequences]
    rows = batch.target_index - 1
    places = zip(batch.segment_ids[rows], batch.position_ids[rows], strict=True)
    return torch.stack([logits[segment][position] for segment, position in places])


def gradients(model: Any, output: Tensor) -> list[Tensor | None]:
    """Of a fixed random function of `output`, in every parameter."""
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((output * upstream).sum(), parameters, allow_unused=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_the_unpacked_model(
    kit: SimpleNamespace, exact: None, name: str
) -> None:
    model = kit.tiny_family(name).train()
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [3], layout), "preference")
        model.set_attn_implementation("eager")
        expected = unpacked(model, batch)
        expected_gradients = gradients(model, expected)
        scale = max(float(g.abs().max()) for g in expected_gradients if g is not None)
        for backend in ("reference",) if name in CAPPED else ("reference", "sdpa"):
            use_packed_attention(model, backend)
            found = model(**batch.model_inputs()).logits[0, batch.target_index - 1]
            assert (found - expected).abs().max() < 1e-11, (layout, backend)
            for a, b in zip(gradients(model, found), expected_gradients, strict=True):
                assert (a is None) == (b is None)
                assert a is None or (a - b).abs().max() < 1e-11 * scale, (layout, backend)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "phi3", "deepseek_v3"])
def test_flex_has_the_same_logits(kit: SimpleNamespace, exact: None, name: str) -> None:
    torch._dynamo.reset()
    model = kit.tiny_family(name)
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [3], layout), "preference")
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = unpacked(model, batch)
            use_packed_attention(model, "flex")
            found = model(**batch.model_inputs()).logits[0, batch.target_index - 1]
        assert (found - expected).abs().max() < 1e-11


@pytest.mark.parametrize("name", [*FAMILIES, "phimoe"])  # phimoe draws its experts at random
def test_isolation(kit: SimpleNamespace, name: str) -> None:
    """In float32, with experts computed as transformers does by default."""
    model = kit.tiny_family(name, torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(None)
    check_isolation(model, "reference" if name in CAPPED else "sdpa")
