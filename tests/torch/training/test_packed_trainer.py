"""PackedTrainer: the Trainer's steps are those of a loop without packs; runs resume to the bit."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import alone
from ranks import launch
from torch.nn.functional import logsigmoid
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_runs import save_gpt2, shard
from transformers import AutoModelForCausalLM, TrainingArguments

from packstore.errors import DivergedError
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.torch.training.trainer import PackedTrainer, newest_checkpoint

RATE = 1e-3


@pytest.fixture(scope="module")
def made(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("packed-trainer")
    examples = random_examples(60, seed=3)
    held = random_examples(9, seed=4)
    packs = kit.packed(examples, [1, 4, 2, 3, 2] * 5, "shared_prefix")
    kit.write(str(folder / "data"), packs, layout="shared_prefix")
    kit.write(str(folder / "held"), kit.packed(held, [2, 3, 4], "concat"))
    model = save_gpt2(folder / "model")
    return SimpleNamespace(
        model=model, data=str(folder / "data"), held=str(folder / "held"), examples=examples, kept=held
    )


def settings(made: SimpleNamespace, output: Path, **more: Any) -> dict[str, Any]:
    arguments = {
        "output_dir": str(output),
        "num_train_epochs": 2,
        "learning_rate": RATE,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **more.pop("arguments", {}),
    }
    base = {"model": made.model, "train_dataset": made.data, "dtype": "float64"}
    return {"arguments": arguments, **base, "examples_per_step": 9, **more}


def run(given: dict[str, Any], resume: bool = True) -> PackedTrainer:
    given = dict(given)
    lora = given.pop("lora", None)
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(**lora)
    trainer = PackedTrainer(args=TrainingArguments(**given.pop("arguments")), **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def history(trainer: Any, name: str = "loss") -> list[float]:
    return [record[name] for record in trainer.state.log_history if name in record]


def weights(trainer: Any) -> dict[str, bytes]:
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {n: t.detach().cpu().numpy().tobytes() for n, t in state.items()}


def margins(model: Any, examples: Any) -> torch.Tensor:
    logps = torch.stack([logp for logp, _ in alone(model, examples)])
    return logps[0::2] - logps[1::2]


def plain(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()


def test_losses_are_those_of_a_plain_loop(made: SimpleNamespace, tmp_path: Path) -> None:
    trainer = run(settings(made, tmp_path, eval_dataset=made.held))
    loader = PackedDataLoader(PackedDataset(made.data, seed=42), examples_per_step=9)
    model, reference = plain(made.model).train(), plain(made.model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    expected, steps, total, ids = [], 0, loader.plan(2).steps, []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            ids += batch.example_ids[batch.weights > 0].tolist()
            if not batch.step.last:
                continue
            pairs = made.examples.take(np.array(ids))
            with torch.no_grad():
                before = margins(reference, pairs)
            loss = -logsigmoid(0.1 * (margins(model, pairs) - before)).mean()
            expected.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - steps / total)
            optimizer.step()
            steps, ids = steps + 1, []
    found = history(trainer)
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    assert len(found) == total
    print("plain gap", np.abs(np.subtract(found, expected)).max())
    assert np.abs(np.subtract(found, expected)).max() < 1e-9
    assert np.ptp(found) > 1e-3
    assert {"rewards/accuracies", "logps/chosen", "grad_norm"} <= trainer.state.log_history[0].keys()
    with torch.no_grad():
        gap = margins(model.eval(), made.kept) - margins(reference, made.kept)
    figures = trainer.evaluate()
    assert figures["eval_loss"] == pytest.approx(float(-logsigmoid(0.1 * gap).mean()), abs=1e-10)
    rows = trainer.predict(made.held).predictions
    assert rows.num_rows == 9
    trainer.save_model(str(tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def on_rank(task: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    seen: list[int] = []
    place, inside = task.get("kill", 0), task.get("inside")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def after_step(*_: Any) -> None:
        seen.append(1)
        if len(seen) == place:
            die()

    register_optimizer_step_post_hook(after_step)
    if task.get("shard"):
        shard()
    if inside:
        from transformers.trainer_callback import TrainerState

        save = TrainerState.save_to_json

        def torn(self: Any, path: str) -> None:
            if f"checkpoint-{inside}" in path:
                Path(path).write_text('{"global_st')
                die()
            save(self, path)

        TrainerState.save_to_json = torn
    trainer = run(task["given"])
    losses = history(trainer), history(trainer, "eval_loss"), history(trainer, "epoch")
    return *losses, {} if task.get("shard") else weights(trainer)


KINDS = {
    "whole": {},
    "lora": {"lora": {"r": 4, "lora_dropout": 0.3, "target_modules": ["c_attn"]}},
    "reward": {"loss": "bradley_terry"},
    "float32": {"dtype": "float32"},
    "mix": {"loss": {"dpo": 0.8, "bco_pair": 0.2}, "loss_parameters": {"sft_weight": 0.3}},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_resume_to_the_bit(
    made: SimpleNamespace, tmp_path: Path, kind: str, ranks: int
) -> None:
    more = {**KINDS[kind], "arguments": {"eval_strategy": "steps", "eval_steps": 5}}
    one = settings(made, tmp_path / "a", eval_dataset=made.held, **more)
    two = settings(made, tmp_path / "b", eval_dataset=made.held, **more)
    expected = launch(__file__, {"given": one}, ranks, tmp_path)
    assert launch(__file__, {"given": two, "kill": 5}, ranks, tmp_path) == []
    assert launch(__file__, {"given": two, "inside": 9}, ranks, tmp_path) == []
    assert str(newest_checkpoint(str(tmp_path / "b"))).endswith("checkpoint-6")
    found = launch(__file__, {"given": two}, ranks, tmp_path)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_make_no_difference(made: SimpleNamespace, tmp_path: Path, sharded: bool) -> None:
    more = {"arguments": {"eval_strategy": "steps", "eval_steps": 5}, "eval_dataset": made.held}
    alone = launch(__file__, {"given": settings(made, tmp_path / "a", **more)}, 1, tmp_path)[0]
    both = {"given": settings(made, tmp_path / "b", **more), "shard": sharded}
    assert launch(__file__, {**both, "kill": 5}, 2, tmp_path) == []
    if not sharded:
        assert launch(__file__, {**both, "kill": 4}, 1, tmp_path) == []
    for found in launch(__file__, both, 2, tmp_path):
        for here, there in zip(found[:2], alone[:2], strict=True):
            print("gap", np.abs(np.subtract(here, there)).max())
            assert np.abs(np.subtract(here, there)).max() < 1e-9


def test_a_diverged_run_writes_no_weights(made: SimpleNamespace, tmp_path: Path) -> None:
    given = settings(made, tmp_path, arguments={"learning_rate": 1e30, "save_steps": 1})
    with pytest.raises(DivergedError, match="must be finite"):
        run(given)
    from safetensors.torch import load_file

    for folder in tmp_path.glob("checkpoint-*"):
        assert all(w.isfinite().all() for w in load_file(folder / "model.safetensors").values())
    assert json
