"""Layers and models that run once per sequence: wrappers, copies, recomputation,
refusals.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import recompute_layers
from sized_pairs import LAYOUTS, alone, in_row, row_of
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from packstore.errors import BackendError
from packstore.torch import (
    ContextShard,
    ContextSplit,
    packed_logps,
    pad_batch,
    pad_segments,
    use_packed_attention,
)

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "mamba": {},
}
PAIRS = ((4, 6, 9), (10, 3, 2), (2, 1, 1))


def gradients(model: Any, logits: Tensor) -> list[Tensor]:
    """Of a fixed random function of the logits, in every trained parameter."""
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(logits.shape, generator=generator, dtype=torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(
        torch.autograd.grad((logits * upstream.to(logits.dtype)).sum(), parameters)
    )


@pytest.mark.parametrize(
    ("name", "reentrant"),  # without and with the layout in calls
    [("mamba", True), ("qwen3_next", False)],
)
def test_recomputed_layers_know_their_own_row(
    kit: SimpleNamespace, name: str, reentrant: bool
) -> None:
    """Two rows of one length before the first backward pass."""
    model = use_packed_attention(
        kit.tiny_family(name, torch.float32, **HYBRIDS[name])
    ).train()
    batches = [row_of([(4, a, b)], "concat") for a, b in ((6, 9), (9, 6))]
    expected = [
        gradients(model, model(**batch.model_inputs()).logits[0]) for batch in batches
    ]
    recompute_layers(model, reentrant)
    model.enable_input_require_grads()
    logits = [model(**batch.model_inputs()).logits[0] for batch in batches]
    for found, before in zip(logits, expected, strict=True):
        generator = torch.Generator().manual_seed(0)
        model.zero_grad()
        (found * torch.randn(found.shape, generator=generator)).sum().backward()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert (
                parameter.grad - gradient
            ).abs().max() < 1e-3 * gradient.abs().max() + 1e-6


def test_replaced_layers_know_their_own_row(kit: SimpleNamespace) -> None:
    """Wrapped by torch, to recompute them, after a row was trained on."""
    model = use_packed_attention(kit.tiny_family("mamba", torch.float32)).train()
    inputs = row_of(PAIRS).model_inputs()
    expected = gradients(model, model(**inputs).logits[0])
    layers = model.backbone.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    recomputed = gradients(model, model(**inputs).logits[0])
    for gradient, expected_gradient in zip(recomputed, expected, strict=True):
        assert torch.equal(gradient, expected_gradient)


def test_an_unknown_recomputation_is_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_family("mamba", torch.float32))
    inputs = row_of(PAIRS).model_inputs()
    del inputs["packed_layout"]
    with pytest.raises(BackendError, match="layout"):
        model(**inputs)
    other = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(BackendError):
        model(**{**row_of(PAIRS).model_inputs(), "input_ids": other})


def test_rows_that_are_split_over_ranks_are_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_family("mamba", torch.float32))
    batch = row_of(PAIRS)
    shard = ContextShard.of(batch, ContextSplit.contiguous(batch.cu_seqlens, 1), 0)
    with pytest.raises(BackendError, match="ranks"):
        model(**shard.model_inputs())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_under_autocast_and_peft(kit: SimpleNamespace) -> None:
    peft = pytest.importorskip("peft")
    model = kit.tiny_family("qwen3_next", torch.float32, **HYBRIDS["qwen3_next"])
    config = peft.LoraConfig(
        r=2,
        target_modules=["in_proj_qkvz", "q_proj"],
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    adapted, batch = peft.get_peft_model(model, config), row_of(PAIRS)
    for enabled, tolerance in ((True, 3e-2), (False, 1e-4)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            own, packed = (
                copy.deepcopy(adapted),
                use_packed_attention(copy.deepcopy(adapted)),
            )
            expected = in_row(alone(own, batch), batch)
            found = packed(**batch.model_inputs()).logits[0]
        assert (found - expected).abs().max() < tolerance * expected.abs().max()
    assert packed_logps(packed, batch).shape == (batch.num_segments,)


def test_nothing_is_left_in_a_saved_model(kit: SimpleNamespace, tmp_path: Path) -> None:
    own = kit.tiny_family("mamba", torch.float32)
    model = use_packed_attention(copy.deepcopy(own))
    for folder, each in ((tmp_path / "own", own), (tmp_path / "packed", model)):
        each.save_pretrained(folder)
    for file in (tmp_path / "own").iterdir():
        assert file.read_bytes() == (tmp_path / "packed" / file.name).read_bytes()


def test_copies_run_their_own_weights(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_family("mamba", torch.float32))
    inputs = row_of(PAIRS).model_inputs()
    first = model(**inputs).logits
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(each(**inputs).logits, first) for each in copies)
    assert not model(**inputs).logits.any()


def test_the_model_generates_with_its_own_attention(kit: SimpleNamespace) -> None:
    own = kit.tiny_family("qwen3_next", torch.float32, **HYBRIDS["qwen3_next"]).eval()
    prompt = torch.arange(5, 11)[None]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = own.generate(prompt, **settings)
    model = use_packed_attention(own)
    inputs = row_of(PAIRS).model_inputs()
    logits = model(**inputs).logits
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert torch.equal(model(**inputs).logits, logits)
    with pytest.raises(BackendError, match="set_attn_implementation"):
        model(input_ids=prompt)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(prompt, **settings), expected)


LIMIT = 24
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    **DYNAMIC,
    "rope_type": "longrope",
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
}
SCALED = {**LONGROPE, "long_mscale": 1.3, "short_mscale": 1.1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", LONGROPE),
        ("llama", DYNAMIC),
        ("phi3", LONGROPE),
        ("phimoe", SCALED),
    ],
)
def test_rope_tables_are_those_of_the_sequence_alone(
    kit: SimpleNamespace, name: str, rope: dict[str, Any], layout: str
) -> None:
    """Whatever was computed before; padding is no part of a length."""
    settings: dict[str, Any] = {
        "rope_parameters": dict(rope),
        "max_position_embeddings": LIMIT,
    }
    if name != "llama":
        settings |= {"original_max_position_embeddings": LIMIT}
    model = kit.tiny_family(name, torch.float32, **settings).eval()
    batch = row_of(((20, 3, 8), (40, 12, 9), (26, 9, 2)), layout)
    expected = in_row(alone(model, batch), batch)
    use_packed_attention(model)
    for _ in range(2):
        found = model(**batch.model_inputs()).logits[0]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    logps = packed_logps(model, batch)
    padded = pad_batch(pad_segments(batch, 32), num_tokens=512)
    assert padded.max_seqlen_k > LIMIT
    assert (packed_logps(model, padded)[: len(logps)] - logps).abs().max() < 1e-4
