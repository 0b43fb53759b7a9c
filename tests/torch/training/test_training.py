"""Training on packs with what people train with: checkpoints, compilation, adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packstore.torch import PackedBatch, check_isolation, use_packed_attention

LAYOUTS = ("concat", "shared_prefix")


def step(model: Any, batch: PackedBatch) -> tuple[Tensor, list[Tensor]]:
    """Logits, and gradients of a fixed random function of the supervised ones."""
    model.zero_grad()
    logits = model(**batch.model_inputs()).logits[0]
    rows = logits[batch.target_index - 1]
    generator = torch.Generator().manual_seed(0)
    (rows * torch.randn(rows.shape, generator=generator, dtype=rows.dtype)).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.requires_grad]


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert (found[0] - expected[0]).abs().max() < 1e-11
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kit: SimpleNamespace, reentrant: bool) -> None:
    model = use_packed_attention(kit.tiny_model("mistral"), "sdpa").train()
    batch = kit.row(4, "shared_prefix", seed=4)
    expected = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    attended = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: attended.append(1))
    assert_same(step(model, batch), expected)
    assert len(attended) == 2  # forward, and again in backward


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")  # torch's own, in dynamo
def test_a_compiled_model_serves_every_batch(kit: SimpleNamespace) -> None:
    """And compiles no more after the first few: no graph holds the segments of one batch."""
    torch._dynamo.reset()
    model = use_packed_attention(kit.tiny_family("llama", num_hidden_layers=1)).train()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(4):
        for layout in LAYOUTS:
            batch = kit.row(2 + seed, layout, seed=seed)
            expected = step(model, batch)
            with torch._dynamo.config.patch(error_on_recompile=seed >= 2):
                found = step(compiled, batch)
            assert_same(found, expected)


def test_fresh_memory_does_not_matter(kit: SimpleNamespace, request: pytest.FixtureRequest) -> None:
    model = use_packed_attention(kit.tiny_model("mistral"), "sdpa").train()
    batch = kit.row(4, "shared_prefix", seed=4)
    expected = step(model, batch)
    request.getfixturevalue("poisoned_memory")
    assert_same(step(model, batch), expected)


def test_inside_peft(kit: SimpleNamespace) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is optional")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(kit.tiny_model(), config)
    batch = kit.row(4, "shared_prefix", seed=4)
    assert use_packed_attention(model) is model
    logits, found = step(model, batch)
    assert len(found) == 8
    assert all(g.abs().max() > 0 for g in found)
    assert check_isolation(model) < 1e-4
    assert check_isolation(model, "reference") < 1e-4
    with model.disable_adapter():
        base = model(**batch.model_inputs()).logits[0]
    assert (base - logits).abs().max() > 1e-3
    plain = use_packed_attention(kit.tiny_model(), "reference")
    assert (plain(**batch.model_inputs()).logits[0] - base).abs().max() < 1e-4
