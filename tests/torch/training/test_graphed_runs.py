"""Runs with ``cuda_graphs`` against runs without, on a CPU (``recorded_graph.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import varlen_kernels
from recorded_graph import RecordedGraph
from torch import Tensor
from train_runs import arguments_of, checkpoints, losses, records
from transformers import TrainingArguments

from packstore.errors import BackendError, ConfigError
from packstore.testing import random_examples
from packstore.torch import PackedDataset, PackedTrainer, train


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraph]]:
    """The graphs that trainers make, which are recorded on the CPU."""
    graphs: list[RecordedGraph] = []

    def make_graph(device: torch.device) -> RecordedGraph:
        graphs.append(RecordedGraph(device))
        return graphs[-1]

    monkeypatch.setattr(PackedTrainer, "_make_graph", staticmethod(make_graph))
    with varlen_kernels.backend_on_cpu(monkeypatch):
        yield graphs


def run(
    stored: SimpleNamespace, output: Path, resume: bool = False, **settings: Any
) -> PackedTrainer:
    """Train for two epochs, with several batches a step."""
    settings = {
        "model": stored.model,
        "train_dataset": stored.data,
        "dtype": "float64",
        "attention": "torch_varlen",
        "examples_per_step": 9,
        **settings,
    }
    arguments = arguments_of(output, num_train_epochs=2, save_steps=3)
    arguments["lr_scheduler_type"] = "constant"
    arguments |= settings.pop("arguments", {})
    trainer = PackedTrainer(args=TrainingArguments(**arguments), **settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_state()
    return trainer


def weights_of(trainer: PackedTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def assert_same_records(expected: Path, actual: Path) -> None:
    """All metrics agree, but those of time."""
    both = zip(records(expected), records(actual), strict=True)
    for expected_record, actual_record in both:
        assert actual_record.keys() == expected_record.keys()
        for name, value in expected_record.items():
            if "second" not in name and "wait" not in name:
                assert actual_record[name] == pytest.approx(value, abs=1e-9), name


LORA = {"peft_config": {"r": 4, "target_modules": ["c_attn"]}}
CASES: dict[str, dict[str, Any]] = {
    "reference beside it": {},
    "adapter": LORA,
    "several packs a batch": {"packs_per_batch": 2},
    "term of likelihood": {"loss_parameters": {"sft_weight": 0.3}},
    "checkpointed layers": {"arguments": {"gradient_checkpointing": True}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_graphed_run_is_an_eager_run(
    stored: SimpleNamespace, tmp_path: Path, graphs: list[RecordedGraph], name: str
) -> None:
    eager = run(stored, tmp_path / "eager", **CASES[name])
    graphed = run(stored, tmp_path / "graphed", cuda_graphs=True, **CASES[name])
    assert_same_records(tmp_path / "eager", tmp_path / "graphed")
    assert (weights_of(eager) - weights_of(graphed)).abs().max() < 1e-9
    assert len(set(losses(tmp_path / "graphed"))) > 5
    used = [graph for graph in graphs if graph.num_replays]
    assert [graph.num_calls for graph in used] == [3]
    assert used[0].num_replays > graphed.state.global_step


def test_evaluation_between_steps_is_eager(
    stored: SimpleNamespace, tmp_path: Path, graphs: list[RecordedGraph]
) -> None:
    evaluations = []
    for name, is_graphed in (("eager", False), ("graphed", True)):
        run(
            stored,
            tmp_path / name,
            cuda_graphs=is_graphed,
            eval_dataset=stored.held,
            arguments={"eval_strategy": "steps", "eval_steps": 2},
        )
        history = records(tmp_path / name, "eval_loss")
        evaluations.append([record["eval_loss"] for record in history])
    assert len(evaluations[0]) > 2
    assert evaluations[1] == pytest.approx(evaluations[0], abs=1e-9)


def test_a_mix_of_datasets(
    kit: SimpleNamespace,
    stored: SimpleNamespace,
    tmp_path: Path,
    graphs: list[RecordedGraph],
) -> None:
    """Batches of both layouts have one size."""
    packs = kit.packed(random_examples(20, seed=8), [5, 2, 6, 3, 4], "concat")
    kit.write(str(tmp_path / "more"), packs)
    for name, is_graphed in (("eager", False), ("graphed", True)):
        mix = PackedDataset.mix({stored.data: 1, str(tmp_path / "more"): 1}, seed=1)
        run(stored, tmp_path / name, cuda_graphs=is_graphed, train_dataset=mix)
    assert_same_records(tmp_path / "eager", tmp_path / "graphed")


def test_a_resumed_run_ends_with_the_same_bits(
    stored: SimpleNamespace, tmp_path: Path, graphs: list[RecordedGraph]
) -> None:
    """Also with dropout of the adapter, of which warm-up draws nothing."""
    lora = {"peft_config": {**LORA["peft_config"], "lora_dropout": 0.2}}
    settings = {"cuda_graphs": True, **lora}
    whole = run(stored, tmp_path / "whole", **settings)
    run(stored, tmp_path / "cut", arguments={"max_steps": 3}, **settings)
    assert len(checkpoints(tmp_path / "cut")) == 1
    resumed = run(stored, tmp_path / "cut", resume=True, **settings)
    assert resumed.state.global_step == whole.state.global_step > 4
    assert torch.equal(weights_of(whole), weights_of(resumed))


def test_what_cannot_be_replayed_is_refused_before_training(
    kit: SimpleNamespace, stored: SimpleNamespace, tmp_path: Path
) -> None:
    settings = {"model": stored.model, "train_dataset": stored.data}
    with pytest.raises(BackendError, match=r"CUDA device.*cpu.*cuda_graphs"):
        train(**settings, output_dir=str(tmp_path / "run"), cuda_graphs=True)

    # A machine without a GPU names what one would refuse.
    packs = kit.packed(random_examples(9, kind="scored"), [4, 5], "concat")
    kit.write(str(tmp_path / "scored"), packs, "scored")
    settings["train_dataset"] = str(tmp_path / "scored")
    with pytest.raises(ConfigError, match=r"kind 'scored'"):
        train(**settings, output_dir=str(tmp_path / "run"), cuda_graphs=True)


def test_a_trainer_with_its_own_loss_is_refused(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    class OwnLoss(PackedTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    args = TrainingArguments(**arguments_of(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"compute_loss.*OwnLoss"):
        OwnLoss(stored.model, args, stored.data, cuda_graphs=True)
