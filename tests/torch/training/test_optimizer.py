"""AdamW: one kernel on GPUs, and nothing of that on a CPU or in a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("accelerate", reason="training needs accelerate")

from packstore.config.training import TrainOptimizerConfig
from packstore.torch.training.checkpoint import OPTIMIZER, RunState, load_optimizer, optimizer_state
from packstore.torch.training.setup import fuse_updates, make_optimizer


def weights(*devices: str) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.empty(2, 3, device=device)) for device in devices)


def fused(optimizer: torch.optim.Optimizer) -> list[bool | None]:
    return [group["fused"] for group in optimizer.param_groups]


def test_updates_are_fused_where_all_weights_are_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainOptimizerConfig()
    caplog.set_level(logging.INFO, logger="packstore")
    with FakeTensorMode():
        frozen = weights("cuda", "cpu")
        frozen[1].requires_grad_(False)
        for model, expected in (
            (weights("cpu", "cpu"), None),
            (weights("cuda", "cpu"), None),
            (weights("cuda", "cuda"), True),
            (frozen, True),
        ):
            assert (len(caplog.records) > 0) == (model is frozen)
            optimizer = make_optimizer(model, config)
            fuse_updates(optimizer)
            assert set(fused(optimizer)) == {expected}
    assert "AdamW is fused" in caplog.text


@pytest.mark.parametrize("before", [None, True])
def test_a_checkpoint_of_a_gpu_goes_on_here(tmp_path: Path, before: bool | None) -> None:
    """And the other way: the run's own device decides, the rest is restored."""
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))

    def stepped() -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, TrainOptimizerConfig(learning_rate=0.5))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return optimizer

    tensors, groups = optimizer_state(model, stepped())
    save_file(tensors, tmp_path / OPTIMIZER)
    nothing: dict[str, Any] = dict.fromkeys(RunState.__dataclass_fields__)
    state = RunState(**nothing | {"optimizer": [{**g, "fused": before} for g in groups]})
    model.zero_grad()
    for own in (None, True):
        optimizer = make_optimizer(model, TrainOptimizerConfig(learning_rate=0.1))
        for group in optimizer.param_groups:
            group["fused"] = own
        load_optimizer(model, optimizer, tmp_path, state)
        assert set(fused(optimizer)) == {own}
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}
        again, _ = optimizer_state(model, optimizer)
        assert {n: t.tolist() for n, t in again.items()} == {
            n: t.tolist() for n, t in tensors.items()
        }
