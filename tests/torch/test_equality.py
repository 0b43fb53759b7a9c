"""Packing is invisible to training: loss and every gradient, packed or not, in any
packs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradients import alone, recompute_layers, take_gradients
from ranks import launch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from packstore.format import Examples, to_offsets
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedPolicy,
    PreferenceLoss,
    collate,
    compile_layers,
    count_step,
    segment_logps,
    use_packed_attention,
)

BETA, SFT_WEIGHT = 0.1, 0.3
EXAMPLES = random_examples(6, seed=3)
REFERENCE = torch.from_numpy(
    np.random.default_rng(0).normal(-20, 3, EXAMPLES.num_sequences)
)
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


def unpacked(
    model: Any, examples: Examples, reference: Tensor, sft_weight: float = 0.0
) -> Tensor:
    """The DPO loss with each sequence fed alone, as the paper states it."""
    logps, tokens = zip(*alone(model, examples), strict=True)
    gain = torch.stack(logps) - reference.to(logps[0].dtype)
    loss = -torch.sigmoid(BETA * (gain[0::2] - gain[1::2])).log().mean()
    return loss - sft_weight * torch.stack(logps[0::2]).sum() / sum(tokens[0::2])


def expected_step(model: Any, attention: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the step, unpacked, with an attention that is not
    packstore's.
    """
    model.set_attn_implementation(attention)
    examples, reference = (
        EXAMPLES.take(np.arange(6)[ORDER]),
        REFERENCE.view(-1, 2)[ORDER],
    )
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
        packs = fill(
            EXAMPLES.take(pairs), to_offsets(np.array([sizes[i] for i in mine])), layout
        )
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


def ddp(policy: PackedPolicy) -> Any:
    return DistributedDataParallel(policy)


def fsdp(policy: PackedPolicy) -> Any:
    """By torch's ``fully_shard``, and its defaults."""
    for layer in policy.model.model.layers:
        fully_shard(layer)
    return fully_shard(policy)


@cache
def accelerator() -> Any:
    """With the answers that ``accelerate config`` proposes for FSDP."""
    from accelerate import Accelerator
    from train_runs import shard

    shard()
    return Accelerator(cpu=True)


def fsdp_by_accelerate(policy: PackedPolicy) -> Any:
    policy._no_split_modules = policy.model._no_split_modules  # type: ignore[assignment]
    return accelerator().prepare(policy, torch.optim.AdamW(policy.parameters()))[0]


WRAPPERS: dict[str, Callable[[PackedPolicy], Any]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp by accelerate": fsdp_by_accelerate,
}
OnRanks = tuple[str, bool, bool, bool, int, str]
"""Wrapper, tied weights, gradient checkpointing, compiled layers, batches a rank,
layout.
"""
ON_RANKS: list[OnRanks] = [
    (*cell, layout)
    for i, cell in enumerate(product(WRAPPERS, (0, 1), (0, 1), (0, 1), (1, 2)))
    for layout in [("concat", "shared_prefix")[i % 2]]
]


def on_rank(task: dict[str, Any]) -> list[Any]:
    """Loss and gradients of the step on one of the ranks, in each cell."""
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor"
    )  # the compiler's
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for wrapper, tied, recomputes, compiled, accumulation, layout in task["cells"]:
        model = use_packed_attention(deepcopy(task["models"][tied]), "sdpa").train()
        if recomputes:
            recompute_layers(model)
        policy = PackedPolicy(model)
        if compiled:
            compile_layers(model, backend="eager")
        names = [name for name, _ in policy.named_parameters()]
        policy = WRAPPERS[wrapper](policy)
        batches = list(share("[1, 1, 2]", layout, world * accumulation))[rank::world]
        loss_fn = PreferenceLoss("dpo", beta=BETA, sft_weight=SFT_WEIGHT)
        divisor, total = count_step(batches, loss_fn).averaged(world), torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            waits = number < len(batches) and wrapper == "ddp"
            with policy.no_sync() if waits else nullcontext():
                loss = loss_fn(policy(batch), batch, divisor=divisor).loss
                loss.backward()
            total = total + loss.detach() / world
        dist.all_reduce(total)
        weights = {
            n.removeprefix("module."): w.grad for n, w in policy.named_parameters()
        }
        assert list(weights) == names  # also tied ones
        for name in names:
            grad = weights.pop(name)
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            weights[name.removeprefix("model.")] = whole
        found.append((total, weights))
    return found


@pytest.mark.parametrize(
    "cells",
    [ON_RANKS[13::16], pytest.param(ON_RANKS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_every_way_to_share_among_ranks(
    kit: SimpleNamespace, tmp_path: Path, cells: list[OnRanks]
) -> None:
    models = [kit.tiny_model(tie_word_embeddings=tied) for tied in (False, True)]
    expected = [expected_step(deepcopy(model), "sdpa") for model in models]
    for rank in launch(__file__, {"models": models, "cells": cells}, 2, tmp_path):
        for cell, found in zip(cells, rank, strict=True):
            assert_equal(found, expected[cell[1]], 1e-9, cell)


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
def test_float32_against_the_model_as_it_comes(
    kit: SimpleNamespace, layout: str
) -> None:
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


def test_fresh_memory_does_not_matter(
    kit: SimpleNamespace, request: pytest.FixtureRequest
) -> None:
    model = use_packed_attention(kit.tiny_model("mistral")).train()
    policy, cell = PackedPolicy(model), ("[4]", 1, "shared_prefix", "sdpa")
    expected = step(model, policy, cell)
    request.getfixturevalue("poisoned_memory")
    assert_equal(step(model, policy, cell), expected, 1e-10, cell)


def test_padded_inputs_of_an_unchanged_model_give_the_same_loss(
    kit: SimpleNamespace,
) -> None:
    model = kit.tiny_model()
    loss_fn = PreferenceLoss("dpo", beta=BETA)
    expected = unpacked(model, EXAMPLES, REFERENCE)
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [2, 4], layout), "preference")
        logits = batch.unpad(model(**batch.model_inputs("padded")).logits)
        out = loss_fn(segment_logps(batch, logits=logits), batch, REFERENCE)
        assert (
            abs(out.loss - expected) < 1e-6
        )  # transformers' own mask adds float32 constants
