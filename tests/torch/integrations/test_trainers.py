"""One divisor for a whole optimizer step under transformers' Trainer, in one process and two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradients import take_gradients
from ranks import launch
from torch import Tensor
from torch.utils.data import IterableDataset

from packstore.format import Packs, to_offsets
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import (
    Metrics,
    PackCollator,
    PackedBatch,
    PackedLoss,
    PackedPolicy,
    PackedTrainerMixin,
    PreferenceLoss,
    collate,
)
from packstore.torch import use_packed_attention as prepare

PACKS = (3, 1, 2, 1, 1, 2, 1, 1)  # pairs of each: uneven over ranks, accumulation and steps
EXAMPLES = random_examples(sum(PACKS), seed=5)
REFERENCE = torch.from_numpy(np.random.default_rng(0).normal(-20, 3, 2 * sum(PACKS))).float()
ACCUMULATION = 2
STEP_PACKS = 4


def batches(rank: int = 0, world: int = 1) -> list[PackedBatch]:
    """Batches of one pack, dealt out in turn."""
    ends = np.cumsum(PACKS)
    made = []
    for size, end in list(zip(PACKS, ends, strict=True))[rank::world]:
        pairs = np.arange(end - size, end)
        packs = fill(EXAMPLES.take(pairs), to_offsets(np.array([size])), "shared_prefix")
        ref = REFERENCE.view(-1, 2)[pairs].flatten()
        made.append(collate(packs, "preference").replace(ref_logps=ref))
    return made


def loss_of(**settings: Any) -> PreferenceLoss:
    return PreferenceLoss("dpo", beta=0.3, **settings)


def whole_step(model: Any, loss_fn: PreferenceLoss, count: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first `count` packs as one batch."""
    model.zero_grad()
    pairs = np.arange(sum(PACKS[:count]))
    packs = fill(EXAMPLES.take(pairs), to_offsets(np.array([len(pairs)])), "concat")
    batch = collate(packs, "preference")
    out = loss_fn(PackedPolicy(model)(batch), batch, REFERENCE[: 2 * len(pairs)])
    out.loss.backward()
    return float(out.loss.detach()), take_gradients(model)


def logged_by(model: Any, loss_fn: PreferenceLoss, count: int) -> dict[str, float]:
    """Means of the metrics of the first `count` packs, under TRL's names."""
    metrics = Metrics()
    for batch in batches()[:count]:
        with torch.no_grad():
            metrics.add(loss_fn(PackedPolicy(model)(batch), batch).metrics)
    return {n: v for n, v in metrics.means().items() if n.startswith(("rewards/", "logps/"))}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() < 1e-9, name
        assert gradient.abs().max() > 1e-6, name


class Dealt(IterableDataset[Packs]):
    """All packs, as a dataset that knows no ranks: Accelerate deals them."""

    def __iter__(self) -> Iterator[Packs]:
        ends = np.cumsum(PACKS)
        for size, end in zip(PACKS, ends, strict=True):
            pairs = np.arange(end - size, end)
            packs = fill(EXAMPLES.take(pairs), to_offsets(np.array([size])), "shared_prefix")
            yield replace(packs, ref_logps=REFERENCE.view(-1, 2)[pairs].flatten().numpy())


def under_collator(model: Any, loss_fn: PreferenceLoss, folder: str) -> dict[str, Any]:
    """The gradient as what one step of plain descent at rate 1 takes away, and what is logged."""
    from transformers import Trainer

    class PackedTrainer(PackedTrainerMixin, Trainer):
        pass

    seen: list[int] = []
    world = dist.get_world_size() if dist.is_initialized() else 1

    def collator(packs: Any) -> Any:
        inputs = PackCollator("preference")(packs)
        seen.extend(inputs["labels"].batch.example_ids.tolist())
        return inputs

    trainer = PackedTrainer(
        model,
        one_step(folder, STEP_PACKS // world),
        train_dataset=Dealt(),
        data_collator=collator,
        packed_loss=PackedLoss(loss_fn),
    )
    return {**descended(trainer, model), "seen": seen}


def one_step(folder: str, accumulation: int) -> Any:
    """The arguments of one step of plain descent at rate 1."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=1,
        dataloader_pin_memory=False,
    )


def descended(trainer: Any, model: Any) -> dict[str, Any]:
    """Trains; returns the change of every parameter, and the logs of the step."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    found = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"gradients": found, "logged": logged}


def on_rank(task: dict[str, Any]) -> dict[str, Any]:
    """One of two processes."""
    return under_collator(prepare(task["model"]), loss_of(), task["folder"])


@pytest.mark.slow
def test_two_processes_under_the_trainer(kit: SimpleNamespace, tmp_path: Path) -> None:
    """Each rank gets its own packs, none twice, though Accelerate dispatches by default."""
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    task = {"model": kit.tiny_model(), "folder": str(tmp_path / "trainer")}
    ranks = launch(__file__, task, 2, tmp_path)
    model = prepare(kit.tiny_model())
    loss, expected = whole_step(model, loss_of(), STEP_PACKS)
    for found in ranks:
        assert_equal(found["gradients"], expected)
        assert found["logged"]["loss"] == pytest.approx(loss, abs=1e-4)
        for name, value in logged_by(model, loss_of(), STEP_PACKS).items():
            assert found["logged"][name] == pytest.approx(value, abs=1e-6), name
    first, second = (set(found["seen"]) for found in ranks)
    assert not first & second
    assert set(range(sum(PACKS[:STEP_PACKS]))) <= first | second


def test_one_process_under_the_trainer(kit: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    loss_fn = loss_of(sft_weight=0.3, sft_average="sequence_mean")
    model = prepare(kit.tiny_model())
    loss, expected = whole_step(model, loss_fn, STEP_PACKS)
    found = under_collator(model, loss_fn, str(tmp_path))
    assert_equal(found["gradients"], expected)
    assert found["logged"]["loss"] == pytest.approx(loss, abs=1e-4)
