"""Router losses in ``packstore train`` and in the Trainer: those of single sequences,
logged.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from train_runs import records

from packstore import open as open_dataset
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    collate,
    train,
)

COEFFICIENT = 0.5

pytestmark = pytest.mark.filterwarnings("ignore")


def moe(kit: SimpleNamespace, **settings: Any) -> Any:
    settings = {"router_aux_loss_coef": COEFFICIENT, **settings}
    return kit.tiny_family("mixtral", torch.float32, **settings)


@torch.no_grad()
def aux_losses(model: Any, packs: Any) -> dict[int, float]:
    """Of each example, the mean of transformers' loss over its two sequences."""
    batch = collate(packs, "preference")
    losses: list[Tensor] = []
    for row in batch.input_ids.split(batch.lengths.tolist()):
        losses.append(model(row[None], output_router_logits=True).aux_loss)
    pairs = torch.stack(losses).view(-1, 2).mean(1).tolist()
    return dict(zip(batch.example_ids.tolist(), pairs, strict=True))


def test_train_logs_and_adds_them(kit: SimpleNamespace, tmp_path: Path) -> None:
    settings = kit.short_run(tmp_path)
    moe(kit).save_pretrained(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = aux_losses(
        plain, list(open_dataset(str(tmp_path / "data")).iter_packs())
    )
    settings |= {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-9}
    found_by = {}
    for coefficient in (None, 0.0):
        output = tmp_path / f"run-{coefficient}"
        given = {} if coefficient is None else {"router_aux_loss_coef": coefficient}
        train(**settings, output_dir=str(output), loss_parameters=given)
        found_by[coefficient] = records(output)
    data = PackedDataset(settings["train_dataset"], seed=42)
    batches = list(
        PackedDataLoader(data, examples_per_step=settings["examples_per_step"])
    )
    steps = [[b for b in batches if b.step.index == step] for step in (0, 1)]
    ids = [
        [i for b in step for i in b.example_ids[b.weights > 0].tolist()]
        for step in steps
    ]
    for own, found, without in zip(ids, found_by[None], found_by[0.0], strict=True):
        mean = sum(expected[i] for i in own) / len(own)
        assert found["aux_loss"] == pytest.approx(mean, abs=1e-5)
        assert found["loss"] == pytest.approx(
            math.log(2) + COEFFICIENT * mean, abs=1e-5
        )
        assert found["grad_norm"] > without["grad_norm"] + 0.01
        assert "aux_loss" not in without
        assert without["loss"] == pytest.approx(math.log(2), abs=1e-5)
