"""A row shared by ranks gives the log-probs, the loss and the gradients of one
process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist
from forests import forest_packs
from gradients import recompute_layers
from ranks import launch
from torch import Tensor

from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PreferenceLoss,
    collate,
    context_shard,
    count_step,
    pad_batch,
    pad_segments,
    padding_multiple,
    reduce_segment_sums,
    segment_logps,
)
from packstore.torch import use_packed_attention as prepare

EXAMPLES = random_examples(5, seed=4)
REFERENCE = np.linspace(-25, -15, EXAMPLES.num_sequences).astype(np.float32)


class Case(NamedTuple):
    """One way to train on the batch."""

    model: str = "llama"
    backend: str = "reference"
    layout: str = "concat"
    how: str = "zigzag"
    loss: str = "dpo"
    static: bool = False
    fused: bool = False
    checkpointing: bool = False


CASES = (
    Case(),
    Case(backend="sdpa", loss="ipo", static=True),
    Case(layout="shared_prefix", loss="simpo", fused=True),
    Case(layout="shared_prefix", backend="sdpa", how="contiguous"),
    Case(model="mistral", layout="shared_prefix", checkpointing=True),
    Case(layout="forest", backend="sdpa", static=True),
    Case(layout="forest", how="contiguous", loss="simpo", fused=True),
    Case(
        model="mistral", backend="sdpa", how="contiguous", loss="dpo_norm", static=True
    ),
)


Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Log-probs, loss and gradients."""


def outcome(
    model: Any, case: Case, batch: PackedBatch, row: Any, shared: bool
) -> Outcome:
    """One step on `row`: the batch, or a share of it."""
    prepare(model, case.backend)
    model.train()
    if case.checkpointing:
        recompute_layers(model)
    inputs = row.model_inputs()
    if case.fused:
        hidden = model.model(**inputs).last_hidden_state
        logps = segment_logps(row, hidden=hidden, weight=model.lm_head.weight)
    else:
        logps = segment_logps(row, logits=model(**inputs).logits)
    logps = reduce_segment_sums(logps) if shared else logps
    loss = PreferenceLoss(case.loss, sft_weight=0.1)(logps, batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logps.detach(), loss.detach(), gradients


def on_rank(tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: globals()[name](**task) for name, task in tasks.items()}


def one_group(models: dict[str, Any], batches: list[PackedBatch]) -> list[Outcome]:
    """All ranks share every batch."""
    outcomes = []
    for case, batch in zip(CASES, batches, strict=True):
        model = models[case.model]
        model.zero_grad()
        found = outcome(model, case, batch, context_shard(batch, how=case.how), True)
        average(model)
        outcomes.append(found)
    return outcomes


def two_by_two(model: Any, batches: list[PackedBatch]) -> list[dict[str, Tensor]]:
    """Ranks 0 and 1 share a batch, and 2 and 3 another; gradients with both ways to
    count.
    """
    rank = dist.get_rank()
    context = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    batch, loss_fn = batches[rank // 2], PreferenceLoss("ipo", sft_weight=0.1)
    prepare(model, "sdpa")
    found = []
    for divisor in (
        count_step([batch], loss_fn, group=data).averaged(2),
        count_step([batch], loss_fn).averaged(4),
    ):
        model.zero_grad()
        shard = context_shard(batch, context)
        logps = segment_logps(shard, logits=model(**shard.model_inputs()).logits)
        loss_fn(
            reduce_segment_sums(logps, context), batch, divisor=divisor
        ).loss.backward()
        average(model)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def average(model: Any) -> None:
    """Gradients over all ranks, as DDP has them."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def padded(batch: PackedBatch, case: Case, ranks: int) -> PackedBatch:
    if case.how == "zigzag":
        batch = pad_segments(batch, padding_multiple(context_parallel=ranks))
    if case.how == "contiguous" or case.static:
        batch = pad_batch(
            batch, num_tokens=60 * ranks * (-(-batch.num_tokens // (60 * ranks)))
        )
    return batch


def one_group_task(kit: SimpleNamespace, ranks: int) -> dict[str, Any]:
    models = {name: kit.tiny_model(name) for name in ("llama", "mistral")}
    batches = [
        padded(b, case, ranks) for b, case in zip(plain(kit), CASES, strict=True)
    ]
    return {"models": models, "batches": batches}


def plain(kit: SimpleNamespace) -> list[PackedBatch]:
    batches = []
    for case in CASES:
        if case.layout == "forest":
            _, packs = forest_packs(4, "preference", size=6)
        else:
            packs = kit.packed(EXAMPLES, [2, 3], case.layout)
        reference = np.linspace(-25, -15, len(packs.lengths)).astype(np.float32)
        batches.append(collate(packs, "preference", ref_logps=reference))
    return batches


def compare(kit: SimpleNamespace, results: list[dict[str, Any]]) -> None:
    """Compares the results of each rank of one group with those of one process."""
    for i, (case, batch) in enumerate(zip(CASES, plain(kit), strict=True)):
        logps, loss, gradients = outcome(
            kit.tiny_model(case.model), case, batch, batch, False
        )
        for result in results:
            found_logps, found_loss, found_gradients = result["one_group"][i]
            real = found_logps[: batch.num_segments]
            assert (real - logps).abs().max() < 1e-9, case
            assert not found_logps[batch.num_segments :].any(), case
            assert abs(found_loss - loss) < 1e-9, case
            for name, gradient in gradients.items():
                assert (found_gradients[name] - gradient).abs().max() < 1e-9, (
                    case,
                    name,
                )


def test_two_ranks(kit: SimpleNamespace, tmp_path: Path) -> None:
    compare(kit, launch(__file__, {"one_group": one_group_task(kit, 2)}, 2, tmp_path))


@pytest.mark.slow
def test_four_ranks(kit: SimpleNamespace, tmp_path: Path) -> None:
    """One group; then two data ranks of two context ranks each, with unequal
    batches.
    """
    packs = kit.packed(EXAMPLES, [1, 4], "concat")
    rows = [collate(packs.row(0), "preference", ref_logps=REFERENCE[:2])]
    rows += [collate(packs.row(1), "preference", ref_logps=REFERENCE[2:])]
    both = {
        "model": kit.tiny_model(),
        "batches": [pad_segments(row, 4) for row in rows],
    }
    tasks = {"one_group": one_group_task(kit, 4), "two_by_two": both}
    results = launch(__file__, tasks, 4, tmp_path)
    compare(kit, results)
    whole = collate(packs, "preference", ref_logps=REFERENCE)
    *_, gradients = outcome(kit.tiny_model(), Case(loss="ipo"), whole, whole, False)
    for result in results:
        for found in result["two_by_two"]:
            for name, gradient in gradients.items():
                assert (found[name] - gradient).abs().max() < 1e-9, name
