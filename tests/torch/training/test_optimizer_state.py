"""A resumed run goes on with all that its optimizer keeps, also in ``param_groups``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amounts import slow_except, slow_products
from ranks import launch
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_runs import checkpoints, losses, shard
from transformers import AutoModelForCausalLM, TrainingArguments

from packstore.torch import PackedTrainer, train

STEPS = 6

pytestmark = pytest.mark.filterwarnings("ignore")


class CountingSGD(torch.optim.Optimizer):
    """SGD whose step size and direction depend on counters in ``param_groups``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "k": 0,
            "d": 1e-2,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = group["d"] * 1.5 + 1e-3 * group["k"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault(
                    "average", torch.zeros_like(weight)
                )
                average.lerp_(weight.grad, 1 - group["betas"][0])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(average, alpha=-group["lr"] * group["d"])


def counting(model: Any) -> dict[str, Any]:
    return {"optimizers": (CountingSGD(model.parameters()), None)}


def schedule_free(_: Any) -> dict[str, Any]:
    pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    return {
        "arguments": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    }


def prodigy(model: Any) -> dict[str, Any]:
    package = pytest.importorskip("prodigyopt", reason="prodigyopt is not installed")
    # Bias correction reads the step count of the group; the estimate of the distance
    # hardly moves on a few random pairs.
    optimizer = package.Prodigy(
        model.parameters(), lr=1.0, d0=1e-3, use_bias_correction=True
    )
    return {"optimizers": (optimizer, None)}


def one_cycle(model: Any) -> dict[str, Any]:
    """A schedule that owns a beta of the optimizer, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "optimizers": (
            optimizer,
            OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1),
        )
    }


def plateau(_: Any) -> dict[str, Any]:
    schedule = {"mode": "min", "patience": 0, "factor": 0.5, "threshold": 0.9}
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": schedule,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
    }
    return {"arguments": arguments}


OPTIMIZERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "counting": counting,
    "schedule_free": schedule_free,
    "prodigy": prodigy,
    "one_cycle": one_cycle,
    "plateau": plateau,
}


def arguments_of(output: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_steps": 1,
        "save_only_model": False,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }


def packed_run(
    stored: SimpleNamespace,
    output: Path,
    kind: str,
    resume: str | None = None,
    **changed: Any,
) -> Any:
    """Trains by PackedTrainer; returns its losses and weights."""
    model = AutoModelForCausalLM.from_pretrained(stored.model, dtype=torch.float64)
    more = OPTIMIZERS[kind](model)
    arguments = arguments_of(output, **more.pop("arguments", {}), **changed)
    trainer = PackedTrainer(
        model,
        TrainingArguments(**arguments),
        stored.data,
        stored.held,
        examples_per_step=9,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def dpo_run(
    stored: SimpleNamespace,
    output: Path,
    kind: str,
    resume: str | None = None,
    **changed: Any,
) -> Any:
    """Trains by PackedDPOTrainer; returns its losses and weights."""
    trl = pytest.importorskip("trl", reason="TRL's own trainer")
    from packstore.torch import PackedDPOTrainer

    model = AutoModelForCausalLM.from_pretrained(stored.model, dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(stored.model, dtype=torch.float64)
    more = OPTIMIZERS[kind](model)
    arguments = {**arguments_of(output), **more.pop("arguments", {}), **changed}
    arguments |= {"bf16": False, "max_length": None, "per_device_train_batch_size": 9}
    trainer = PackedDPOTrainer(
        model,
        reference,
        trl.DPOConfig(**arguments),
        train_dataset=stored.data,
        eval_dataset=stored.held,
        processing_class=tokenizer(),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def tokenizer() -> Any:
    """A tokenizer that TRL asks for; the data is packed already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(49)} | {"</s>": 49}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="</s>", pad_token="</s>"
    )


def outcome(trainer: Any) -> tuple[list[float], dict[str, bytes]]:
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    weights = {name: value.numpy().tobytes() for name, value in state.items()}
    history = [
        record["loss"] for record in trainer.state.log_history if "loss" in record
    ]
    return history, weights


RUNS = {"PackedTrainer": packed_run, "PackedDPOTrainer": dpo_run}


@pytest.mark.parametrize(("kind", "door"), slow_products(OPTIMIZERS, RUNS))
def test_resumed_at_each_step_to_the_last_bit(
    stored: SimpleNamespace, tmp_path: Path, kind: str, door: str
) -> None:
    run = RUNS[door]
    expected = run(stored, tmp_path / "undisturbed", kind)
    assert len(expected[0]) == STEPS
    saved = checkpoints(tmp_path / "undisturbed")
    assert len(saved) == STEPS
    for checkpoint in saved[:-1]:
        shutil.rmtree(tmp_path / "resumed", ignore_errors=True)
        assert run(stored, tmp_path / "resumed", kind, str(checkpoint)) == expected, (
            checkpoint
        )


def test_the_command_resumes_a_schedule_free_run(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    settings = {
        "model": stored.model,
        "train_dataset": stored.data,
        "dtype": "float64",
        "examples_per_step": 9,
        "max_steps": STEPS,
        "optim": "schedule_free_adamw",
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": 9,
    }
    train(**settings, output_dir=str(tmp_path / "undisturbed"))
    for checkpoint in checkpoints(tmp_path / "undisturbed")[:-1]:
        output = tmp_path / f"from-{checkpoint.name}"
        train(
            **settings, output_dir=str(output), resume_from_checkpoint=str(checkpoint)
        )
        assert losses(output) == losses(tmp_path / "undisturbed")
        files = [
            folder / "model.safetensors"
            for folder in (output, tmp_path / "undisturbed")
        ]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("kind", slow_except(["counting", "plateau"], "plateau"))
def test_a_resumed_run_has_its_own_settings(
    stored: SimpleNamespace, tmp_path: Path, kind: str
) -> None:
    """Rate, betas and decay are those of the new run; a rate that was reduced
    stays so.
    """
    used: list[dict[str, Any]] = []

    def note(optimizer: Any, *_: Any) -> None:
        used.append({**optimizer.param_groups[0], "params": None})

    packed_run(stored, tmp_path / "a", kind)
    checkpoint = str(checkpoints(tmp_path / "a")[3])
    handle = register_optimizer_step_post_hook(note)
    try:
        packed_run(stored, tmp_path / "b", kind, checkpoint)
        same = used.copy()
        used.clear()
        changed = {"weight_decay": 0.5}
        if kind == "plateau":
            changed |= {"learning_rate": 2e-2, "adam_beta1": 0.5}
        packed_run(stored, tmp_path / "c", kind, checkpoint, **changed)
    finally:
        handle.remove()
    assert len(used) == len(same) == STEPS - 4
    if kind == "counting":
        assert [group["k"] for group in used] == [5, 6]
        return
    assert used[0]["weight_decay"] == 0.5
    assert used[0]["betas"] == (0.5, 0.999)
    assert same[0]["lr"] < 1e-2
    assert used[0]["lr"] == 2 * same[0]["lr"]


def on_rank(task: dict[str, Any]) -> Any:
    """Trains sharded or not; returns losses, and the counters of the optimizer."""
    arguments = TrainingArguments(**task["arguments"])
    if task["shard"]:
        arguments.device.type  # noqa: B018 (sets up the ranks, of whose kind it then keeps a state)
        shard()
    trainer = PackedTrainer(
        task["model"],
        arguments,
        task["data"],
        examples_per_step=9,
        dtype="float64",
        optimizer_cls_and_kwargs=(CountingSGD, {"lr": 1e-2}),
    )
    trainer.train(resume_from_checkpoint=True)
    history = [
        record["loss"] for record in trainer.state.log_history if "loss" in record
    ]
    counters = [(group["k"], group["d"]) for group in trainer.optimizer.param_groups]
    return history, counters


@pytest.mark.slow
def test_sharded_and_whole_checkpoints_keep_counters(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """Of a run that is sharded on two ranks, goes on whole on one, and sharded
    again.
    """

    def run(folder: str, ranks: int, steps: int) -> Any:
        arguments = arguments_of(tmp_path / folder, lr_scheduler_type="constant")
        arguments["max_steps"] = steps
        task = {"model": stored.model, "data": stored.data, "arguments": arguments}
        return launch(__file__, {**task, "shard": ranks > 1}, ranks, tmp_path)[0]

    expected_losses, expected_counters = run("undisturbed", 1, STEPS)
    run("resumed", 2, 2)
    run("resumed", 1, 4)
    history, counters = run("resumed", 2, STEPS)
    assert counters == expected_counters
    assert history == pytest.approx(expected_losses, rel=1e-9)
