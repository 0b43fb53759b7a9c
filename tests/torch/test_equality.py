"""Packing is invisible to training: loss and every gradient, packed or not, in any packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import alone, recompute_layers, take_gradients
from torch import Tensor

from packstore.format import Examples, to_offsets
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedPolicy,
    PreferenceLoss,
    collate,
    count_step,
    segment_logps,
    use_packed_attention,
)

BETA, SFT_WEIGHT = 0.1, 0.3
EXAMPLES = random_examples(6, seed=3)
REFERENCE = torch.from_numpy(np.random.default_rng(0).normal(-20, 3, EXAMPLES.num_sequences))
ORDER = np.array([4, 0, 2, 1])
"""The pairs of a step."""
PACKINGS: dict[str, list[int]] = {
    "unpacked": [1, 1, 1, 1],
    "[4]": [4],
    "[1, 3]": [1, 3],
    "[2, 2]": [2, 2],
    "[1, 1, 2]": [1, 1, 2],
}
Cell = tuple[str, int, str, str]
CELLS: list[Cell] = list(
    product(PACKINGS, (1, 2), ("concat", "shared_prefix"), ("reference", "sdpa"))
)
LAYOUTS = pytest.mark.parametrize("layout", ["concat", "shared_prefix"])


def unpacked(model: Any, examples: Examples, reference: Tensor, sft_weight: float = 0.0) -> Tensor:
    """The DPO loss with each sequence fed alone, as the paper states it."""
    logps, tokens = zip(*alone(model, examples), strict=True)
    gain = torch.stack(logps) - reference.to(logps[0].dtype)
    loss = -torch.sigmoid(BETA * (gain[0::2] - gain[1::2])).log().mean()
    return loss - sft_weight * torch.stack(logps[0::2]).sum() / sum(tokens[0::2])


def expected_step(model: Any, attention: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the step, unpacked, with an attention that is not packstore's."""
    model.set_attn_implementation(attention)
    examples, reference = EXAMPLES.take(np.arange(6)[ORDER]), REFERENCE.view(-1, 2)[ORDER]
    loss = unpacked(model, examples, reference.flatten(), SFT_WEIGHT)
    loss.backward()
    return loss.detach(), take_gradients(model)


def share(packing: str, layout: str, parts: int) -> Iterator[PackedBatch]:
    """The step as `parts` batches; where packs run out, one of weight 0 fills up."""
    sizes = PACKINGS[packing]
    starts = np.cumsum(sizes) - sizes
    for part in range(parts):
        mine = range(part, len(sizes), parts) or [0]
        pairs = ORDER[np.concatenate([starts[i] + np.arange(sizes[i]) for i in mine])]
        packs = fill(EXAMPLES.take(pairs), to_offsets(np.array([sizes[i] for i in mine])), layout)
        ref = REFERENCE.view(-1, 2)[torch.from_numpy(pairs)].flatten()
        batch = collate(packs, "preference", fillers=int(part >= len(sizes)))
        yield batch.replace(ref_logps=ref)


def step(model: Any, policy: Callable[[PackedBatch], Tensor], cell: Cell) -> Any:
    """Loss and gradients of the step in one cell of the matrix."""
    packing, accumulation, layout, backend = cell
    use_packed_attention(model, backend)
    batches = list(share(packing, layout, accumulation))
    loss_fn = PreferenceLoss("dpo", beta=BETA, sft_weight=SFT_WEIGHT)
    divisor = count_step(batches, loss_fn)
    losses = [loss_fn(policy(batch), batch, divisor=divisor).loss for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.detach() for loss in losses), take_gradients(model)


def assert_equal(found: Any, expected: Any, limit: float, what: Any) -> None:
    assert abs(found[0] - expected[0]) < limit, what
    for parameter, gradient in expected[1].items():
        assert (gradient - found[1][parameter]).abs().max() < limit, (what, parameter)
        assert gradient.abs().max() > 1e-6, parameter


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_every_way_to_pack(kit: SimpleNamespace, name: str) -> None:
    """Packs, accumulation, layout and backend, in float64, with an SFT term."""
    model = kit.tiny_model(name)
    expected = expected_step(model, "sdpa")
    policy = PackedPolicy(use_packed_attention(model))
    assert len(CELLS) == 40
    for cell in CELLS if name == "llama" else CELLS[12:28]:
        assert_equal(step(model, policy, cell), expected, 1e-9, cell)


@LAYOUTS
def test_float32_against_the_model_as_it_comes(kit: SimpleNamespace, layout: str) -> None:
    """By the default backend, from logits and from hidden states."""
    model = kit.tiny_model(dtype=torch.float32)
    expected = expected_step(model, "eager")

    def from_logits(batch: PackedBatch) -> Tensor:
        return segment_logps(batch, logits=model(**batch.model_inputs()).logits)

    for policy in (PackedPolicy(use_packed_attention(model)), from_logits):
        for packing in ("[4]", "[1, 1, 2]"):
            found = step(model, policy, (packing, 2, layout, "auto"))
            assert_equal(found, expected, 1e-5, packing)


@LAYOUTS
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_a_config_that_caches(
    kit: SimpleNamespace, layout: str, reentrant: bool
) -> None:
    model = use_packed_attention(kit.tiny_model(use_cache=True)).train()
    policy, cell = PackedPolicy(model), ("[1, 3]", 1, layout, "sdpa")
    plain, gradients = step(model, policy, cell)
    recompute_layers(model, reentrant)
    model.enable_input_require_grads()
    attended: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: attended.append(1))
    again, recomputed = step(model, policy, cell)
    assert torch.equal(again, plain)
    assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)
    assert len(attended) == 2  # forward, and again in backward


def test_fresh_memory_does_not_matter(kit: SimpleNamespace, request: pytest.FixtureRequest) -> None:
    model = use_packed_attention(kit.tiny_model("mistral")).train()
    policy, cell = PackedPolicy(model), ("[4]", 1, "shared_prefix", "sdpa")
    expected = step(model, policy, cell)
    request.getfixturevalue("poisoned_memory")
    assert_equal(step(model, policy, cell), expected, 1e-10, cell)


def test_padded_inputs_of_an_unchanged_model_give_the_same_loss(kit: SimpleNamespace) -> None:
    model = kit.tiny_model()
    loss_fn = PreferenceLoss("dpo", beta=BETA)
    expected = unpacked(model, EXAMPLES, REFERENCE)
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [2, 4], layout), "preference")
        logits = batch.unpad(model(**batch.model_inputs("padded")).logits)
        out = loss_fn(segment_logps(batch, logits=logits), batch, REFERENCE)
        assert abs(out.loss - expected) < 1e-6  # transformers' own mask adds float32 constants
