"""Training, evaluating and reference log-probs call nothing that is deprecated."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("peft", reason="adapters")
from transformers import AutoModelForCausalLM, TrainingArguments

from packstore.cli import main
from packstore.torch import PackedTrainer


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")
def test_no_command_warns_of_a_deprecation(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """An adapter is added, resumed and loaded."""
    run = str(tmp_path / "run")
    data = ["--train-dataset", stored.data, "--eval-dataset", stored.held]
    train = ["train", "--model", stored.model, *data, "--output-dir", run]
    train += ["--activation-checkpointing", "--peft-config", "r=2", "--save-steps", "1"]
    assert main([*train, "--max-steps", "1"]) == 0
    assert main([*train, "--max-steps", "2"]) == 0
    side = str(tmp_path / "side")
    assert main(["ref-logps", stored.held, side, "--model", run]) == 0
    assert main(["evaluate", stored.held, "--model", run, "--ref-logps", side]) == 0


def test_packed_trainer_warns_of_no_deprecation(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to="none", use_cpu=True
    )
    model = AutoModelForCausalLM.from_pretrained(stored.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        trainer = PackedTrainer(
            model, args, stored.data, loss="dpo", eval_dataset=stored.held
        )
        trainer.train()
        trainer.evaluate()
