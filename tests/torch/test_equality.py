"""Packing is invisible to training: loss and every gradient, packed or not, in any packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from packstore.format.arrays import Examples, to_offsets
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PreferenceLoss,
    collate,
    segment_logps,
    use_packed_attention,
)
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.divisor import count_step
from packstore.torch.models.load import checkpoint_gradients

BETA = 0.1
EXAMPLES = random_examples(6, seed=3)
REFERENCE = torch.from_numpy(np.random.default_rng(0).normal(-20, 3, EXAMPLES.num_sequences))
PACKINGS: dict[str, list[list[int]]] = {  # batches of packs, each with so many pairs
    "one pack": [[6]],
    "two packs": [[1, 5]],
    "packs of one": [[1, 1, 1, 1, 1, 1]],
    "accumulated": [[2, 1], [3]],
    "accumulated, one pair each": [[1], [1], [1], [1], [1], [1]],
}

FOUR: dict[str, list[int]] = {  # the packs of a step of four pairs
    "unpacked": [1, 1, 1, 1],
    "[4]": [4],
    "[1, 3]": [1, 3],
    "[2, 2]": [2, 2],
    "[1, 1, 2]": [1, 1, 2],
}
CELLS = list(product(FOUR, (1, 2), ("concat", "shared_prefix"), ("reference", "sdpa")))
SFT_WEIGHT = 0.3


def unpacked(model: Any, examples: Examples, reference: Tensor, sft_weight: float = 0.0) -> Tensor:
    """The DPO loss with each sequence fed alone, as the paper states it."""
    logps, tokens = [], 0
    for i in range(examples.num_sequences):
        own = slice(*examples.sequence_offsets[i : i + 2])
        ids = torch.from_numpy(examples.input_ids[own].astype(np.int64))
        supervised = torch.from_numpy(examples.supervised[own])
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logps.append(scores[torch.arange(len(ids) - 1), ids[1:]][supervised[1:]].sum())
        tokens += int(supervised[1:].sum()) * (i % 2 == 0)
    gain = torch.stack(logps) - reference.to(logps[0].dtype)
    loss = -torch.sigmoid(BETA * (gain[0::2] - gain[1::2])).log().mean()
    return loss - sft_weight * torch.stack(logps[0::2]).sum() / tokens


def gradients(model: Any, loss: Tensor | None = None) -> dict[str, Tensor]:
    if loss is not None:
        loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def train_step(
    kit: SimpleNamespace, model: Any, batches: Sequence[Sequence[int]], layout: str, chunk: int = 0
) -> Tensor:
    """Loss of one optimizer step over `batches`; the pairs come in another order."""
    order = np.array([4, 0, 5, 2, 1, 3])
    examples = EXAMPLES.take(order)
    reference = REFERENCE.view(-1, 2)[torch.from_numpy(order)]
    loss_fn = PreferenceLoss("dpo", beta=BETA)
    total = torch.zeros((), dtype=torch.float64)
    done = 0
    for sizes in batches:
        here = np.arange(done, done + sum(sizes))
        done += len(here)
        batch = collate(kit.packed(examples.take(here), sizes, layout), "preference")
        out = loss_fn(
            model_logps(model, batch, chunk), batch, reference[here].flatten(), divisor=len(order)
        )
        out.loss.backward()
        total += out.loss.detach()
    return total


def model_logps(model: Any, batch: PackedBatch, chunk: int = 0) -> Tensor:
    if not chunk:
        return segment_logps(batch, logits=model(**batch.model_inputs()).logits)
    hidden = model.model(**batch.model_inputs()).last_hidden_state
    return segment_logps(batch, hidden=hidden, weight=model.lm_head.weight, chunk_size=chunk)


def share(packing: str, layout: str, parts: int) -> Iterator[PackedBatch]:
    """A step of four pairs as `parts` batches; where packs run out, one of weight 0 fills up."""
    sizes = FOUR[packing]
    starts = np.cumsum(sizes) - sizes
    for part in range(parts):
        mine = range(part, len(sizes), parts) or [0]
        pairs = np.concatenate([starts[i] + np.arange(sizes[i]) for i in mine])
        packs = fill(EXAMPLES.take(pairs), to_offsets(np.array([sizes[i] for i in mine])), layout)
        ref = REFERENCE.view(-1, 2)[torch.from_numpy(pairs)].flatten()
        batch = collate(packs, "preference", fillers=int(part >= len(sizes)))
        yield batch.replace(ref_logps=ref)


def cell_gradients(
    model: Any, policy: Any, cell: tuple[str, int, str, str], rank: int = 0, world: int = 1
) -> dict[str, Tensor]:
    """One optimizer step of one cell of the matrix, on one rank."""
    packing, accumulation, layout, backend = cell
    use_packed_attention(model, backend)
    batches = list(share(packing, layout, accumulation * world))[rank::world]
    loss_fn = PreferenceLoss("dpo", beta=BETA, sft_weight=SFT_WEIGHT)
    divisor = count_step(batches, loss_fn).averaged(world)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last or world == 1 else policy.no_sync():
            loss_fn(policy(batch), batch, divisor=divisor).loss.backward()
    return gradients(model)


def on_rank(model: Any) -> dict[tuple[str, int, str, str], dict[str, Tensor]]:
    """The cells of a backend on one of several ranks, under DDP."""
    policy = DistributedDataParallel(PackedPolicy(use_packed_attention(model)))
    where = dist.get_rank(), dist.get_world_size()
    cells = [cell for cell in CELLS if cell[-1] == "sdpa"]
    return {cell: cell_gradients(model, policy, cell, *where) for cell in cells}


@pytest.mark.parametrize("world", [1, 2])
def test_matrix(kit: SimpleNamespace, tmp_path: Path, world: int) -> None:
    model = kit.tiny_model()
    if world == 1:
        policy = PackedPolicy(use_packed_attention(model))
        ranks = [{cell: cell_gradients(model, policy, cell) for cell in CELLS}]
    else:
        ranks = launch(__file__, model, world, tmp_path)
    model.set_attn_implementation("plain_for_tests")
    four = EXAMPLES.take(np.arange(4))
    expected = gradients(model, unpacked(model, four, REFERENCE[:8], SFT_WEIGHT))
    assert len(CELLS) == 40
    for cells in ranks:
        for cell, found in cells.items():
            for parameter, gradient in expected.items():
                assert (gradient - found[parameter]).abs().max() < 1e-9, (cell, parameter)
                assert gradient.abs().max() > 1e-6, parameter


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_float64(kit: SimpleNamespace, name: str, backend: str, layout: str) -> None:
    model = kit.tiny_model(name)
    model.set_attn_implementation("plain_for_tests")
    loss = unpacked(model, EXAMPLES, REFERENCE)
    expected = gradients(model, loss)
    use_packed_attention(model, backend)
    for packing, sizes in PACKINGS.items():
        assert abs(train_step(kit, model, sizes, layout) - loss) < 1e-9, packing
        for parameter, gradient in gradients(model).items():
            assert (gradient - expected[parameter]).abs().max() < 1e-9, (packing, parameter)
            assert gradient.abs().max() > 1e-6, parameter


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_float32_against_the_model_as_it_comes(kit: SimpleNamespace, layout: str) -> None:
    """By the default backend, from logits and from hidden states."""
    model = kit.tiny_model(dtype=torch.float32)
    model.set_attn_implementation("eager")
    loss = unpacked(model, EXAMPLES, REFERENCE)
    expected = gradients(model, loss)
    use_packed_attention(model)
    for sizes, chunk in product(PACKINGS.values(), (0, 4)):
        assert abs(train_step(kit, model, sizes, layout, chunk) - loss) < 1e-5
        for parameter, gradient in gradients(model).items():
            assert (gradient - expected[parameter]).abs().max() < 1e-5, parameter


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_gradient_checkpointing_and_a_config_that_caches(kit: SimpleNamespace, layout: str) -> None:
    model = use_packed_attention(kit.tiny_model(use_cache=True)).train()
    plain = train_step(kit, model, [[6]], layout)
    expected = gradients(model)
    checkpoint_gradients(model)
    assert torch.equal(train_step(kit, model, [[6]], layout), plain)
    for parameter, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[parameter]), parameter


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_segment_sees_another(
    kit: SimpleNamespace, name: str, backend: str, layout: str
) -> None:
    model = use_packed_attention(kit.tiny_model(name), backend)
    packs = kit.packed(EXAMPLES, [2, 4], layout)
    batch = collate(packs, "preference")
    shared = np.maximum.reduceat(packs.segment_offsets, np.arange(0, 12, 2)).repeat(2)
    with torch.no_grad():
        before = model_logps(model, batch)
        for segment in range(batch.num_segments):
            other = torch.where(
                (batch.segment_ids == segment) & (batch.position_ids >= int(shared[segment])),
                (batch.input_ids + 7) % kit.VOCAB,
                batch.input_ids,
            )
            logits = model(**{**batch.model_inputs(), "input_ids": other[None]}).logits
            moved = segment_logps(batch, logits=logits) != before
            assert moved.nonzero().flatten().tolist() == [segment]


def test_padded_inputs_of_an_unchanged_model_give_the_same_loss(kit: SimpleNamespace) -> None:
    model = kit.tiny_model()
    model.set_attn_implementation("sdpa")
    loss_fn = PreferenceLoss("dpo", beta=BETA)
    expected = unpacked(model, EXAMPLES, REFERENCE)
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [2, 4], layout), "preference")
        logits = batch.unpad(model(**batch.model_inputs("padded")).logits)
        out = loss_fn(segment_logps(batch, logits=logits), batch, REFERENCE)
        assert abs(out.loss - expected) < 1e-6  # transformers' own mask adds float32 constants
