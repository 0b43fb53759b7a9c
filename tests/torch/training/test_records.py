"""Records of a run: rates, epochs and what is logged when; and what a trainer says of
itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from amounts import slow_products
from train_runs import arguments_of
from transformers import TrainerCallback, TrainingArguments

import packstore
from packstore.errors import CompatibilityError, ConfigError, DivergedError
from packstore.torch import PackedTrainer, PolicyLoss, train

SIZE = 9
"""Examples of a step; the 60 of the dataset need seven steps or more."""


def packed_trainer(
    stored: SimpleNamespace, output: Path, *, loss: Any = "dpo", **more: Any
) -> Any:
    eval_dataset = more.pop("eval_dataset", None)
    callbacks = more.pop("callbacks", None)
    return PackedTrainer(
        stored.model,
        TrainingArguments(**arguments_of(output, **more)),
        stored.data,
        eval_dataset,
        loss=loss,
        dtype="float64",
        examples_per_step=SIZE,
        callbacks=callbacks,
    )


def dpo_trainer(stored: SimpleNamespace, output: Path, **more: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL's own trainer")
    from packstore.torch import PackedDPOTrainer

    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    config = trl.DPOConfig(
        **arguments_of(output, **sizes, bf16=False, max_length=None, **more)
    )
    return PackedDPOTrainer(stored.model, args=config, train_dataset=stored.data)


TRAINERS = {"PackedTrainer": packed_trainer, "PackedDPOTrainer": dpo_trainer}


def records(trainer: Any, name: str) -> list[dict[str, float]]:
    return [record for record in trainer.state.log_history if name in record]


@pytest.mark.parametrize(
    ("length", "name"), slow_products([(3, 1), (12, 2), (-1, 3)], TRAINERS)
)
def test_rates_and_epochs_are_those_of_the_steps_that_ran(
    stored: SimpleNamespace,
    tmp_path: Path,
    length: tuple[int, int],
    name: str,
) -> None:
    """In the result, the records, the state and its file, also after a resume."""
    max_steps, epochs = length
    make = TRAINERS[name]
    trainer = make(stored, tmp_path, max_steps=max_steps, save_steps=2)
    result = trainer.train()
    summary = records(trainer, "train_runtime")[-1]
    steps = trainer.state.global_step
    examples = sum(record["examples"] for record in records(trainer, "examples"))
    assert examples == 60 * epochs if max_steps < 0 else examples < 60 * epochs
    for figures in (summary, result.metrics):
        seconds = figures["train_runtime"]
        assert figures["train_samples_per_second"] == pytest.approx(
            examples / seconds, rel=1e-3
        )
        assert figures["train_steps_per_second"] == pytest.approx(
            steps / seconds, rel=1e-2
        )
    assert trainer.state.num_train_epochs == epochs
    assert epochs - 1 < trainer.state.epoch <= epochs
    trainer.save_state()
    saved = json.loads((tmp_path / "trainer_state.json").read_text(encoding="utf-8"))
    assert saved["num_train_epochs"] == epochs
    again = make(stored, tmp_path, max_steps=max_steps, save_steps=2)
    figures = again.train(str(tmp_path / "checkpoint-2")).metrics
    first = sum(record["examples"] for record in records(again, "examples")[:2])
    rest = (examples - first) / figures["train_runtime"]
    assert figures["train_samples_per_second"] == pytest.approx(rest, rel=1e-3)
    assert again.state.num_train_epochs == epochs


@pytest.mark.parametrize(
    ("strategy", "name"), slow_products(["steps", "epoch", "no"], TRAINERS)
)
def test_logging_strategy(
    stored: SimpleNamespace, tmp_path: Path, name: str, strategy: str
) -> None:
    """A record at the end of an epoch is of all its steps; without any, the summary has
    all.
    """
    make = TRAINERS[name]
    each = make(stored, tmp_path / "each", num_train_epochs=2)
    each.train()
    steps = records(each, "loss")
    more: dict[str, Any] = {
        "logging_strategy": strategy,
        "logging_steps": 500,
        "save_steps": 3,
    }
    trainer = make(stored, tmp_path / "run", num_train_epochs=2, **more)
    trainer.train()
    found = records(trainer, "loss")
    if strategy == "steps":  # the first ten, with what is saved, and the last
        assert [r["step"] for r in found][:10] == [*range(1, 11)]
        assert found[-1]["step"] == trainer.state.global_step
        return
    whole = records(trainer, "examples")
    if strategy == "no":
        assert not found
        assert [r["examples"] for r in whole] == [120]
        return
    assert [r["epoch"] for r in found] == [1, 2]
    for record in found:
        parts = [
            r for r in steps if record["epoch"] - 1 < r["epoch"] <= record["epoch"]
        ]
        sizes = [r["examples"] for r in parts]
        assert record["examples"] == sum(sizes) == 60
        for name in ("loss", "rewards/margins"):
            mean = np.average([r[name] for r in parts], weights=sizes)
            assert record[name] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(("strategy", "name"), slow_products(["epoch", "no"], TRAINERS))
def test_records_of_a_resumed_run_are_of_all_steps(
    stored: SimpleNamespace, tmp_path: Path, name: str, strategy: str
) -> None:
    """Also of those before the checkpoint, which no record held yet."""
    more: dict[str, Any] = {
        "logging_strategy": strategy,
        "save_steps": 3,
        "num_train_epochs": 2,
    }
    make = TRAINERS[name]
    undisturbed = make(stored, tmp_path, **more)
    undisturbed.train()
    for step in (3, 6, 9):
        resumed = make(stored, tmp_path, **more)
        resumed.train(str(tmp_path / f"checkpoint-{step}"))
        for name in ("loss", "examples", "num_tokens", "rewards/margins"):
            expected = [record[name] for record in records(undisturbed, name)]
            found = [record[name] for record in records(resumed, name)]
            assert found == pytest.approx(expected, abs=1e-6), name


def test_a_resume_without_a_checkpoint_says_that_it_starts_anew(
    stored: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = packed_trainer(stored, tmp_path, max_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert sum(str(tmp_path) in message for message in caplog.messages) == 1
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("data", ["url", "dataset", "named"])
def test_an_evaluation_set_beside_a_loss_of_tokens_is_refused_at_once(
    stored: SimpleNamespace, tmp_path: Path, data: str
) -> None:
    given = {
        "url": stored.held,
        "dataset": packstore.open(stored.held),
        "named": {"held": stored.held},
    }
    with pytest.raises(ConfigError, match="eval_dataset"):
        packed_trainer(stored, tmp_path, loss=PolicyLoss(), eval_dataset=given[data])


def test_callbacks_hear_of_each_batch_of_an_evaluation(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    lengths: list[int] = []

    class Count(TrainerCallback):
        def on_prediction_step(
            self,
            args: Any,
            state: Any,
            control: Any,
            eval_dataloader: Any = None,
            **_: Any,
        ) -> None:
            lengths.append(len(eval_dataloader))

    trainer = packed_trainer(
        stored, tmp_path, eval_dataset=stored.held, callbacks=[Count()]
    )
    metrics = trainer.evaluate()
    assert lengths == [3, 3, 3]
    seconds = metrics["eval_runtime"]
    assert metrics["eval_steps_per_second"] == pytest.approx(3 / seconds, rel=1e-2)
    metrics = trainer.predict(stored.held).metrics
    seconds = metrics["test_runtime"]
    assert metrics["test_steps_per_second"] == pytest.approx(3 / seconds, rel=1e-2)
    assert len(lengths) == 6


def test_a_search_is_refused_by_name(stored: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        packed_trainer(stored, tmp_path).hyperparameter_search(n_trials=1)


def test_a_resume_after_an_append_names_the_version(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    pair = {"prompt": [1], "chosen": [2], "rejected": [3]}
    data = packstore.pack([pair] * 20, tmp_path / "data", pack_size=64)
    stored = SimpleNamespace(model=stored.model, data=data.url)
    packed_trainer(stored, tmp_path / "run", max_steps=1).train()
    packstore.append(data.url, [{**pair, "chosen": [4]}] * 20)
    with pytest.raises(CompatibilityError, match="version="):
        packed_trainer(stored, tmp_path / "run", max_steps=2).train(True)
    stored.data = packstore.open(data.url, version=data.version)
    trainer = packed_trainer(stored, tmp_path / "run", max_steps=2)
    trainer.train(True)
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_the_result_of_train_counts_examples_of_any_records(
    stored: SimpleNamespace, tmp_path: Path, strategy: str
) -> None:
    result = train(
        model=stored.model,
        train_dataset=stored.data,
        output_dir=str(tmp_path),
        dtype="float64",
        examples_per_step=SIZE,
        logging_strategy=strategy,
    )
    assert result.examples == 60
    assert "rewards/margins" in result.metrics


@pytest.mark.parametrize("strategy", ["epoch", "no"])
@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_diverged_run_saves_no_weights_without_records_either(
    stored: SimpleNamespace, tmp_path: Path, strategy: str, save_strategy: str
) -> None:
    more = {
        "logging_strategy": strategy,
        "save_strategy": save_strategy,
        "save_steps": 2,
    }
    trainer = packed_trainer(stored, tmp_path, learning_rate=1e300, max_steps=2, **more)
    with pytest.raises(DivergedError, match="learning_rate"):
        trainer.train()
    assert not [*tmp_path.rglob("*.safetensors")]
