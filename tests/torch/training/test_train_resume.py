"""Runs on one and two ranks, interrupted and resumed: nothing of it can be seen."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from ranks import launch
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_runs import checkpoints, losses, records
from transformers import TrainerCallback

from packstore.torch import PackedDataLoader, PackedDataset, train

STEPS = 12


@pytest.fixture
def base(stored: SimpleNamespace) -> dict[str, Any]:
    """Settings of a run of two epochs, whose steps hold odd numbers of packs."""
    return {
        "model": stored.model,
        "train_dataset": stored.data,
        "eval_dataset": stored.held,
        "dtype": "float64",
        "examples_per_step": 9,
        "num_train_epochs": 3,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_steps": 5,
        "save_steps": 3,
    }


def assert_same(found: Path, expected: Path) -> None:
    """All that is equal in every undisturbed run: losses, rates; not times."""
    names = (
        "loss",
        "rewards/margins",
        "learning_rate",
        "grad_norm",
        "examples",
        "num_tokens",
    )
    for metric, exact, close in (
        ("loss", ("step", "epoch"), names),
        ("eval_loss", ("step",), ()),
    ):
        here, there = records(found, metric), records(expected, metric)
        for name in exact:
            assert [r[name] for r in here] == [r[name] for r in there]
        for name in (metric, *close):
            gaps = np.subtract([r[name] for r in here], [r[name] for r in there])
            assert np.abs(gaps).max() < 1e-9, name
    names = [path.name for path in checkpoints(found)]
    assert names == [path.name for path in checkpoints(expected)]


def on_rank(settings: dict[str, Any]) -> int:
    """Trains; counts calls of `no_sync`."""
    warnings.simplefilter("ignore")
    unsynchronised = []
    no_sync = Accelerator.no_sync

    def counted(self: Accelerator, model: Any) -> Any:
        unsynchronised.append(1)
        return no_sync(self, model)

    Accelerator.no_sync = counted  # type: ignore[method-assign]
    train(**settings)
    return len(unsynchronised)


@pytest.mark.slow
def test_two_ranks_equal_one(base: dict[str, Any], tmp_path: Path) -> None:
    """And they exchange gradients once a step, after its last batch; work is spread
    evenly.
    """
    train(**base, output_dir=str(tmp_path / "one"))
    both = tmp_path / "both"
    counts = launch(__file__, {**base, "output_dir": str(both)}, 2, tmp_path)
    assert_same(both, tmp_path / "one")
    work = np.zeros((2, STEPS, 2))
    for rank, count in enumerate(counts):
        data, batches = (
            PackedDataset(base["train_dataset"], seed=42, rank=rank, world_size=2),
            [],
        )
        for epoch in range(base["num_train_epochs"]):
            data.set_epoch(epoch)
            step = base["examples_per_step"]
            batches += PackedDataLoader(data, examples_per_step=step, balance=True)
        last = [batch.step.last for batch in batches]
        steps = np.cumsum(last) - last
        assert count == sum(
            not end for end, step in zip(last, steps, strict=True) if step < STEPS
        )
        assert count > 0
        for step, batch in zip(steps[steps < STEPS], batches, strict=False):
            queries = batch.cu_seqlens.diff().numpy()
            keys = batch.lengths.numpy()
            squares = (queries * (2 * keys - queries)).sum()
            work[rank, step] += queries.sum(), squares
    slowest = work.max(0) / work.mean(0)
    assert slowest.max() > 1.05
    for i, name in enumerate(("slowest/tokens", "slowest/squares")):
        assert [r[name] for r in records(both)] == pytest.approx(slowest[:, i])
    assert all(
        0 <= r["data_wait"] <= r["slowest/data_wait"] <= 1 for r in records(both)
    )


def test_a_resumed_run_is_the_same_to_the_last_bit(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """Also the draws of dropout of an adapter, on the same number of ranks."""
    settings = {**base, "eval_dataset": None, "eval_steps": None}
    settings["peft_config"] = {
        "r": 4,
        "lora_dropout": 0.3,
        "target_modules": ["c_attn"],
    }
    settings |= {"learning_rate": 1e-2, "max_steps": 8, "save_total_limit": 9}
    train(**settings, output_dir=str(tmp_path / "a"))
    begun = checkpoints(tmp_path / "a")[0]
    train(**settings, output_dir=str(tmp_path / "b"), resume_from_checkpoint=str(begun))
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    weights = [tmp_path / name / "adapter_model.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    newest = str(checkpoints(tmp_path / "b")[-1])
    again = train(
        **settings, output_dir=str(tmp_path / "b"), resume_from_checkpoint=newest
    )
    assert again.step == 8


@pytest.mark.slow
def test_interrupted(base: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, one line, no model; and the same command goes on."""
    given = {**base, "output_dir": tmp_path, "num_train_epochs": 400, "max_steps": -1}
    given |= {"eval_steps": 5000}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "packstore", "train", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 7/" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == "packstore: interrupted"
    assert not (tmp_path / "config.json").exists()
    assert checkpoints(tmp_path)


class Finalized:
    """An object whose end may be watched by a weak reference."""


class SignalInAFinalizer(TrainerCallback):
    """Sends a signal after step 2, while an object is finalized: Python loses it."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.last_step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last_step = state.global_step
        if state.global_step == 2:
            value = Finalized()
            reference = weakref.ref(value, lambda _: signal.raise_signal(self.number))
            del value
            assert reference() is None


def end_by_exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, end_by_exit, SystemExit),
    ],
)
def test_a_signal_that_python_lost_ends_the_run_at_the_next_step(
    base: dict[str, Any], tmp_path: Path, number: Any, handler: Any, error: Any
) -> None:
    callback = SignalInAFinalizer(number)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(error):
            train(**{**base, "output_dir": str(tmp_path)}, callbacks=[callback])
        assert callback.last_step == 2
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_handler_that_returns_is_called_once(
    base: dict[str, Any], tmp_path: Path
) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        callback = SignalInAFinalizer(signal.SIGTERM)
        train(**{**base, "output_dir": str(tmp_path)}, callbacks=[callback])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]
    assert callback.last_step == STEPS


@pytest.mark.slow
def test_a_run_goes_on_with_the_settings_that_are_given(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """Those of the optimizer too, of which a checkpoint holds the former ones."""
    used: list[tuple[float, float]] = []

    def note(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        used.append((group["lr"], group["weight_decay"]))

    settings = {
        **base,
        "eval_dataset": None,
        "eval_steps": None,
        "output_dir": str(tmp_path),
    }
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0}
    train(**{**settings, "max_steps": 2})
    handle = register_optimizer_step_post_hook(note)
    more = {"max_steps": 3, "learning_rate": 2e-3, "weight_decay": 0.5}
    more["eval_dataset"] = base["eval_dataset"]
    try:
        assert "eval_loss" in train(**{**settings, **more}).evaluation
    finally:
        handle.remove()
    assert used[-1] == (2e-3, 0.5)
    assert [record["learning_rate"] for record in records(tmp_path)] == [
        1e-3,
        1e-3,
        2e-3,
    ]
