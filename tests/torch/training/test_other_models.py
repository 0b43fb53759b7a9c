"""Models that are not attention alone, trained on real pairs, beside a loop without packs."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import packstore
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    PreferenceLoss,
    use_packed_attention,
)
from packstore.torch.models.row import mixers

STEPS, BETA, VOCAB = 100, 0.1, 2000
TOLERANCE = 1e-8
"""In float64, on the loss of each step."""

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 16},
}
"""Linear attention with experts; sinks and windows with experts; Mamba-2 beside attention."""


@pytest.fixture(scope="module")
def batches(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[PackedBatch]]:
    """One for each step, by layout: an epoch, and the beginning of it again."""
    found = {}
    for layout in ("concat", "shared_prefix"):
        dataset = packstore.pack(
            str(shared_data / "pairs" / "hh_harmless.jsonl.gz"),
            str(tmp_path_factory.mktemp(layout)),
            tokenizer=str(shared_data / "tokenizers" / "small_bpe" / "tokenizer.json"),
            pack_size=192,
            max_length=64,
            layout=layout,
            max_drop_rate=1.0,  # nearly all are longer
        )
        packs = PackedDataset(dataset.url, rank=0, world_size=1, seed=0)
        epoch = list(PackedDataLoader(packs))
        found[layout] = [epoch[i % len(epoch)] for i in range(STEPS)]
    return found


def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sequences(batch: PackedBatch) -> list[tuple[Tensor, Tensor]]:
    """The tokens of each sequence, and its labels."""
    index = torch.arange(batch.num_tokens) if batch.kv_index is None else batch.kv_index
    sizes = batch.cu_seqlens_k.diff().tolist()
    pairs = zip(batch.input_ids[index].split(sizes), batch.labels[index].split(sizes), strict=True)
    return list(pairs)


def alone(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-prob of a sequence and its router loss, by the model's own forward call."""
    asked = {"output_router_logits": True} if model.config.router_aux_loss_coef else {}
    outputs = model(input_ids=ids[None], use_cache=False, **asked)
    on = labels[1:] >= 0
    logps = outputs.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][on].sum()
    return logps, balance(model, outputs.router_logits) if asked else torch.zeros(())


def balance(model: Any, logits: tuple[Tensor, ...]) -> Tensor:
    """`aux_loss` in float64: transformers counts in float32, which 100 steps would enlarge."""
    chances = torch.cat(logits).softmax(-1)
    chosen = chances.topk(model.num_experts_per_tok).indices
    counts = torch.bincount(chosen.flatten(), minlength=model.num_experts).double()
    return model.num_experts * (counts / len(chances) @ chances.mean(0))


def plain_losses(model: Any, batches: list[PackedBatch]) -> list[float]:
    """DPO, a sequence at a time; the reference is the model at the start."""
    reference, updates, losses = copy.deepcopy(model).eval(), optimizer(model), []
    for batch in batches:
        rows = sequences(batch)
        logps, routers = map(torch.stack, zip(*(alone(model, *row) for row in rows), strict=True))
        with torch.no_grad():
            ref = torch.stack([alone(reference, *row)[0] for row in rows])
        ratios = logps - ref
        loss = -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()
        loss = loss + (model.config.router_aux_loss_coef or 0.0) * routers.mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def packed_losses(model: Any, batches: list[PackedBatch]) -> list[float]:
    """The same by packstore."""
    reference = use_packed_attention(copy.deepcopy(model).eval())
    policy, frozen = PackedPolicy(use_packed_attention(model)), PackedPolicy(reference)
    updates, loss_fn, losses = optimizer(model), PreferenceLoss("dpo", beta=BETA), []
    for batch in batches:
        with torch.no_grad():
            ref = frozen(batch)
        out = loss_fn(policy(batch), batch, ref_logps=ref)
        out.loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(float(out.loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_next", "concat"), *((name, "shared_prefix") for name in MODELS)]
)
def test_a_hundred_steps_are_those_of_the_unpacked_loop(
    kit: SimpleNamespace,
    exact: None,
    batches: dict[str, list[PackedBatch]],
    name: str,
    layout: str,
) -> None:
    model = kit.tiny_family(name, vocab_size=VOCAB, max_position_embeddings=64, **MODELS[name])
    if not hasattr(model.config, "router_aux_loss_coef"):
        model.config.router_aux_loss_coef = 0.0
    model.train()
    steps = batches[layout]
    assert sum(batch.num_segments for batch in steps) > 4 * STEPS  # several pairs in a step
    expected = plain_losses(copy.deepcopy(model), steps)
    found = packed_losses(model, steps)
    assert bool(mixers(model)) == (name != "gpt_oss")
    gaps = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    text = f"first {gaps[0]:.1e}, last {gaps[-1]:.1e}, largest {max(gaps):.1e}"
    print(f"\n{name} {layout}: {text}; loss {expected[0]:.3f} to {expected[-1]:.3f}")
    assert max(gaps) < TOLERANCE
    assert sum(expected[-20:]) < sum(expected[:20])  # it learns
