"""One divisor for a whole optimizer step under transformers' Trainer, in one process and two."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import take_gradients
from ranks import launch
from trainers import logged, make_trainer

from packstore.testing import random_examples
from packstore.torch import (
    Metrics,
    PackCollator,
    PackedDataset,
    PackedLoss,
    PackedPolicy,
    PreferenceLoss,
    collate,
    use_packed_attention,
)

pytest.importorskip("accelerate", reason="the Trainer needs it")

PACKS = (3, 1, 2, 1, 1, 2, 1, 1)  # pairs of each: uneven over ranks, accumulation and steps
STEP_PACKS = 4


def models(weights: Any) -> tuple[Any, Any]:
    """The policy, and a reference that differs from it."""
    policy, reference = (use_packed_attention(copy.deepcopy(weights)) for _ in range(2))
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.1)
    return policy, reference.requires_grad_(False)


def on_rank(task: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    """One step of plain descent at rate 1: what it takes from each parameter is the gradient."""
    policy, reference = models(task["model"])
    seen: list[int] = []

    def collator(packs: Any) -> Any:
        inputs = PackCollator("preference")(packs)
        seen.extend(inputs["labels"].batch.example_ids.tolist())
        return inputs

    trainer = make_trainer(
        policy,
        task["data"],
        PackedLoss(PreferenceLoss("dpo", **task["loss"]), reference),
        task["folder"],
        collator,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=STEP_PACKS // ranks,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer.train()
    gradients = {name: before[name] - p.detach() for name, p in policy.named_parameters()}
    return {"gradients": gradients, "logged": logged(trainer)[0], "seen": seen}


def assert_same(found: dict[str, Any], task: dict[str, Any]) -> None:
    """Loss, metrics and gradients are those of the whole step as one batch."""
    policy, reference = (PackedPolicy(model) for model in models(task["model"]))
    data = PackedDataset(task["data"], rank=0, world_size=1, shuffle=False)
    batch = collate(list(islice(data, STEP_PACKS)), "preference")
    out = PreferenceLoss("dpo", **task["loss"])(policy(batch), batch, reference(batch))
    out.loss.backward()
    for name, gradient in take_gradients(policy).items():
        apart = (gradient - found["gradients"][name.removeprefix("model.")]).abs().max()
        assert apart < 1e-9 < 1e-6 < gradient.abs().max(), name
    metrics = Metrics()
    metrics.add(out.metrics)
    for name, value in metrics.means().items():
        if name.startswith(("loss", "rewards/", "logps/")):
            assert found["logged"][name] == pytest.approx(value, abs=1e-4), name


@pytest.fixture
def task(kit: SimpleNamespace, tmp_path: Path) -> dict[str, Any]:
    packs = kit.packed(random_examples(sum(PACKS), seed=5), PACKS, "shared_prefix")
    data = kit.write(str(tmp_path / "data"), packs, layout="shared_prefix")
    loss = {"beta": 0.3, "sft_weight": 0.3, "sft_average": "sequence_mean"}
    return {"model": kit.tiny_model(), "data": data.url, "folder": tmp_path / "run", "loss": loss}


@pytest.mark.slow
def test_two_processes_under_the_trainer(task: dict[str, Any], tmp_path: Path) -> None:
    """Each rank gets its own packs, none twice, though Accelerate dispatches by default."""
    ranks = launch(__file__, task, 2, tmp_path)
    for found in ranks:
        assert_same(found, task)
    first, second = (set(found["seen"]) for found in ranks)
    assert not first & second
    assert set(range(sum(PACKS[:STEP_PACKS]))) <= first | second


def test_one_process_under_the_trainer(task: dict[str, Any]) -> None:
    assert_same(on_rank(task, 1), task)
