"""No example is left out of a run, and none of its metrics."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import launch
from torch.nn.modules.module import register_module_forward_pre_hook
from train_runs import records, save_gpt2
from transformers import GPT2LMHeadModel

from packstore.testing import random_examples
from packstore.torch import train

PACKS = [1, 4, 2, 3, 2, 1, 3, 4, 3]
N = sum(PACKS)


@pytest.fixture(scope="module")
def run(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Settings of a run on 23 pairs in 9 packs, whose epochs end inside a step."""
    folder = tmp_path_factory.mktemp("every")
    kit.write(
        str(folder / "data"), kit.packed(random_examples(N, seed=3), PACKS, "concat")
    )
    files = {
        "model": save_gpt2(folder / "model"),
        "train_dataset": str(folder / "data"),
    }
    return {**files, "dtype": "float64", "examples_per_step": 5, "num_train_epochs": 2}


def on_rank(settings: dict[str, Any]) -> list[int]:
    """Trains; returns the examples of weight 1 that went through the model with
    gradients.
    """
    warnings.simplefilter("ignore")
    seen: list[int] = []

    def note(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, GPT2LMHeadModel) and torch.is_grad_enabled():
            seen.extend(args[0].example_ids[args[0].weights > 0].tolist())

    handle = register_module_forward_pre_hook(note)
    try:
        assert train(**settings).step
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_is_every_example_once(
    run: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    settings = {**run, "output_dir": str(tmp_path / "run")}
    parts = (
        [on_rank(settings)]
        if ranks == 1
        else launch(__file__, settings, ranks, tmp_path)
    )
    assert sorted(chain(*parts)) == sorted([*range(N)] * 2)
    assert sum(record["examples"] for record in records(tmp_path / "run")) == 2 * N


def test_a_run_resumed_with_other_steps_takes_what_is_left(
    run: dict[str, Any], tmp_path: Path
) -> None:
    """And no fewer steps than these, although the whole would have had fewer."""
    settings = {**run, "output_dir": str(tmp_path)}
    seen = on_rank({**settings, "max_steps": 3})
    seen += on_rank({**settings, "examples_per_step": 11})
    assert sorted(seen) == sorted([*range(N)] * 2)


def test_the_first_ten_steps_are_logged_and_then_means(
    run: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**run, "examples_per_step": 1, "learning_rate": 1e-3}
    for every in (1, 4):
        train(**settings, output_dir=str(tmp_path / str(every)), logging_steps=every)
    each, some = (records(tmp_path / str(every)) for every in (1, 4))
    assert [record["step"] for record in some] == [*range(1, 11), 12, 16, 18]
    first = 0
    for record in some:
        steps, first = each[first : record["step"]], record["step"]
        pairs = [step["examples"] for step in steps]
        assert record["examples"] == sum(pairs)
        losses = np.average([step["loss"] for step in steps], weights=pairs)
        assert record["loss"] == pytest.approx(losses, abs=1e-12)
