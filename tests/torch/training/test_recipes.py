"""What docs/training.md shows: callbacks, early stopping, TensorBoard, upload
to a hub.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import run_python
from hub import Hubs, served
from train_runs import checkpoints, step_of
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from packstore.testing import random_examples
from packstore.torch import PackedTrainer


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return kit.short_run(tmp_path_factory.mktemp("recipes"))


def arguments(output: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "max_steps": 6,
    }
    return TrainingArguments(str(output), **{**defaults, **settings})


def test_a_callback_of_ones_own_sees_every_metric_and_stops(
    made: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[dict[str, float]] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
        ) -> None:
            seen.append(logs)
            control.should_training_stop = state.global_step >= 2

    trainer = PackedTrainer(args=arguments(tmp_path), callbacks=[Stop()], **made)
    trainer.train()
    assert trainer.state.global_step == 2
    assert {"rewards/margins", "rewards/accuracies", "fill", "grad_norm"} <= seen[
        0
    ].keys()


def test_early_stopping_keeps_the_best_model(
    made: dict[str, Any], kit: SimpleNamespace, tmp_path: Path
) -> None:
    """On held-out pairs of random tokens, of which training on others learns nothing
    for long.
    """
    held = str(tmp_path / "held")
    kit.write(held, kit.packed(random_examples(8, seed=9), [4, 4], "concat"))
    args = arguments(
        tmp_path / "run", max_steps=40, learning_rate=3e-2, eval_strategy="steps", eval_steps=1,
        save_steps=1, save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer = PackedTrainer(
        args=args, eval_dataset=held, callbacks=[EarlyStoppingCallback(2)], **made
    )
    trainer.train()
    losses = [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r]
    assert trainer.state.global_step < 40
    assert min(losses) not in losses[-2:]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)
    assert step_of(checkpoints(tmp_path / "run")[0]) == 1 + losses.index(min(losses))


def test_trackers_get_every_record(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pytest.importorskip("tensorboard", reason="the tracker of this recipe")
    assert board
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    args = arguments(tmp_path / "run", report_to=["tensorboard"])
    trainer = PackedTrainer(args=args, **made)
    trainer.train()
    (folder,) = {file.parent for file in (tmp_path / "logs").rglob("events*")}
    written = EventAccumulator(str(folder)).Reload()
    margins = [
        (event.step, event.value) for event in written.Scalars("train/rewards/margins")
    ]
    history = [r for r in trainer.state.log_history if "rewards/margins" in r]
    assert margins == [
        (r["step"], pytest.approx(r["rewards/margins"])) for r in history
    ]
    assert len(margins) == 6


@pytest.mark.slow
def test_a_model_is_pushed_to_the_hub(made: dict[str, Any], tmp_path: Path) -> None:
    """By `packstore train`, in a process whose hub is on this machine."""
    output = tmp_path / "run"
    flags = {
        "model": made["model"], "train-dataset": made["train_dataset"], "max-steps": 2,
        "output-dir": output, "push-to-hub": "true", "hub-model-id": "me/run",
        "hub-token": "hf_secret",
    }  # fmt: skip
    command = ["-m", "packstore", "train", *(f"--{n}={x}" for n, x in flags.items())]
    repos: Hubs = {}
    with served(repos) as (env, _):
        done = run_python(*command, env={**env, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    files = repos["models/me/run"]
    assert files["model.safetensors"] == (output / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "PackedTrainer" in card
    assert "hf_secret" not in card + done.stdout + done.stderr
