"""PackedTrainer: the Trainer's steps are those of a loop without packs; runs resume to the bit."""

from __future__ import annotations

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

from packstore.errors import ConfigError, DivergedError
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
    urls = {name: str(folder / name) for name in ("data", "held")}
    return SimpleNamespace(model=model, **urls, examples=examples, kept=held)


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


def run(given: dict[str, Any], resume: bool = True, sharded: bool = False) -> PackedTrainer:
    given = dict(given)
    args = TrainingArguments(**given.pop("arguments"))
    if sharded:
        args.device.type  # noqa: B018 (sets up the ranks, of whose kind it then keeps a state)
        shard()
    lora = given.pop("lora", None)
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(**lora)
    trainer = PackedTrainer(args=args, **given)
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
    names = {"rewards/accuracies", "logps/chosen", "grad_norm", "fill", "tokens_per_second"}
    assert names <= trainer.state.log_history[0].keys()
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
    if inside == "removal":
        import shutil

        def half_removed(folder: Any, *_: Any, **__: Any) -> None:
            (Path(folder) / "model.safetensors").unlink()
            die()

        shutil.rmtree = half_removed  # type: ignore[assignment]
    elif inside:
        from transformers.trainer_callback import TrainerState

        save = TrainerState.save_to_json

        def torn(self: Any, path: str) -> None:
            if f"checkpoint-{inside}" in path:
                Path(path).write_text('{"global_st', encoding="utf-8")
                die()
            save(self, path)

        TrainerState.save_to_json = torn
    trainer = run(task["given"], sharded=task.get("shard", False))
    losses = history(trainer), history(trainer, "eval_loss"), history(trainer, "epoch")
    if task.get("shard"):
        assert trainer.accelerator.is_fsdp2
        assert type(next(trainer.model.parameters()).data).__name__ == "DTensor"
    return *losses, {} if task.get("shard") else weights(trainer)


KINDS = {
    "whole": {},
    "lora": {"lora": {"r": 4, "lora_dropout": 0.3, "target_modules": ["c_attn"]}},
    "adapter": {"lora": {"r": 4, "target_modules": ["c_attn"]}},
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


def test_killed_while_an_old_checkpoint_is_removed(made: SimpleNamespace, tmp_path: Path) -> None:
    more = {"arguments": {"save_total_limit": 1, "save_steps": 2, "max_steps": 8}}
    given = settings(made, tmp_path / "b", **more)
    assert launch(__file__, {"given": given, "inside": "removal"}, 1, tmp_path) == []
    assert len([*(tmp_path / "b").glob("checkpoint-*")]) == 2
    whole = launch(__file__, {"given": settings(made, tmp_path / "a", **more)}, 1, tmp_path)
    assert launch(__file__, {"given": given}, 1, tmp_path) == whole
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "reward", "adapter"])
@pytest.mark.parametrize("sharded", [False, True])
def test_killed_on_2_1_2_ranks(
    made: SimpleNamespace, tmp_path: Path, sharded: bool, kind: str
) -> None:
    """DDP, or FSDP2 in turn with one rank that is not sharded."""
    more = {"arguments": {"eval_strategy": "steps", "eval_steps": 5}, "eval_dataset": made.held}
    more |= KINDS[kind]
    alone = launch(__file__, {"given": settings(made, tmp_path / "a", **more)}, 1, tmp_path)[0]
    both = {"given": settings(made, tmp_path / "b", **more), "shard": sharded}
    assert launch(__file__, {**both, "kill": 5}, 2, tmp_path) == []
    assert launch(__file__, {**both, "shard": False, "kill": 4}, 1, tmp_path) == []
    for found in launch(__file__, both, 2, tmp_path):
        for here, there in zip(found[:2], alone[:2], strict=True):
            print("gap", np.abs(np.subtract(here, there)).max())
            assert np.abs(np.subtract(here, there)).max() < 1e-9


TAKEN = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1
adam_beta2 adam_epsilon bf16 data_seed dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout
debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_delay eval_on_start
eval_steps eval_strategy fsdp fsdp_config full_determinism gradient_checkpointing
gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token include_num_input_tokens_seen learning_rate
liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica
log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy
lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
num_train_epochs optim optim_args optim_target_modules output_dir prediction_loss_only project
push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy
save_total_limit seed skip_memory_metrics tf32 torch_compile_backend torch_compile_mode
trackio_bucket_id trackio_space_id trackio_static_space_id use_cache use_cpu use_liger_kernel
warmup_steps weight_decay
"""
"""Fields of TrainingArguments that are honoured."""


def test_every_field_of_the_arguments_is_taken_or_refused(tmp_path: Path) -> None:
    """A new transformers with another field needs a look."""
    from dataclasses import fields

    from packstore.torch.training.arguments import REFUSED, check_arguments

    names = {field.name for field in fields(TrainingArguments)}
    assert names == {*TAKEN.split(), *REFUSED}
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    check_arguments(args)
    for name in REFUSED:
        other = TrainingArguments(str(tmp_path), use_cpu=True)
        object.__setattr__(other, name, "something else")
        with pytest.raises(ConfigError, match=f"setting {name}: it must be .*with packs; found"):
            check_arguments(other)


def test_a_diverged_run_writes_no_weights(made: SimpleNamespace, tmp_path: Path) -> None:
    given = settings(made, tmp_path, arguments={"learning_rate": 1e30, "save_steps": 1})
    with pytest.raises(DivergedError, match="must be finite"):
        run(given)
    from safetensors.torch import load_file

    for folder in tmp_path.glob("checkpoint-*"):
        assert all(w.isfinite().all() for w in load_file(folder / "model.safetensors").values())
