"""transformers' Trainer on packs: its own defaults, and one divisor for a whole step."""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer needs it")

from accelerate.data_loader import DataLoaderDispatcher
from gradients import take_gradients
from ranks import launch
from trainers import logged, make_trainer
from transformers import AutoModelForCausalLM

from packstore import Dataset
from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    Metrics,
    PackCollator,
    PackedDataLoader,
    PackedDataset,
    PackedLoss,
    PackedPolicy,
    PreferenceLoss,
    collate,
    use_packed_attention,
)

SIZES = (3, 1, 2, 1, 1, 2, 1, 2)  # pairs of each pack: uneven over ranks, accumulation and steps
STEPS = 4
STEP_PACKS = 4

pytestmark = pytest.mark.filterwarnings("ignore")


def stored(kit: SimpleNamespace, folder: Path, kind: str = "preference") -> Dataset:
    examples = random_examples(sum(SIZES), seed=4, kind=kind)
    packs = kit.packed(examples, list(SIZES), "shared_prefix")
    data: Dataset = kit.write(str(folder / kind), packs, kind, "shared_prefix")
    return data


def whole(data: Dataset | str) -> PackedDataset:
    return PackedDataset(data, rank=0, world_size=1, shuffle=False)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_its_defaults(kit: SimpleNamespace, tmp_path: Path, precision: str) -> None:
    """Whole: metrics in training and evaluation, the best model, its files, and resuming."""
    data = stored(kit, tmp_path)
    how = {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_rewards/margins",
        "bf16": precision == "bf16",
        "gradient_checkpointing": True,
    }
    logs, best = [], []
    for resume in (None, str(tmp_path / "run" / "checkpoint-2")):
        model = use_packed_attention(kit.tiny_model(dtype=torch.float32))
        reference = copy.deepcopy(model).requires_grad_(False)
        loss = PackedLoss(PreferenceLoss("dpo", beta=0.3), reference)
        trainer = make_trainer(model, data, loss, tmp_path / "run", **how)
        trainer.train(resume_from_checkpoint=resume)
        logs.append(trainer.state.log_history)
        best.append(trainer.state.best_metric)
    trained = [entry for entry in logs[0] if "loss" in entry]
    assert trained[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    for name in ("chosen", "rejected", "margins"):  # one route: exactly equal before the first step
        assert trained[0][f"rewards/{name}"] == 0
    held_out = [entry for entry in logs[0] if "eval_loss" in entry]
    assert [entry["step"] for entry in held_out] == [*range(1, STEPS + 1)]
    assert best[0] == max(entry["eval_rewards/margins"] for entry in held_out) == best[1]
    ours = {"loss", "rewards/chosen", "rewards/accuracies", "logps/chosen", "logps/rejected"}
    assert all(ours <= entry.keys() for entry in trained)
    assert all({f"eval_{name}" for name in ours} <= entry.keys() for entry in held_out)
    for before, after in zip(logs[0], logs[1], strict=True):
        for name in ours & before.keys():
            assert after[name] == pytest.approx(before[name], abs=1e-5), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert {*again.state_dict()} == {*model.state_dict()}
    if precision == "float32":
        exact = Metrics()
        last = AutoModelForCausalLM.from_pretrained(
            tmp_path / "run" / "checkpoint-4", dtype=torch.float32
        )
        policies = [PackedPolicy(use_packed_attention(m)) for m in (last, reference)]
        with torch.no_grad():
            for batch in PackedDataLoader(whole(data), tail="pad"):
                logps, ref_logps = (policy(batch) for policy in policies)
                exact.add(loss.loss_fn(logps, batch, ref_logps).metrics)
        for name, value in exact.means().items():  # over pairs, though batches hold 8 packs
            assert held_out[-1][f"eval_{name}"] == pytest.approx(value, abs=1e-4), name


def test_logits_of_supervised_tokens_only(kit: SimpleNamespace, tmp_path: Path) -> None:
    """The same losses as from all logits, which metrics of the user's own still get."""
    data, losses, heights = stored(kit, tmp_path), [], []
    for metrics in (None, lambda _: {}):
        model = use_packed_attention(kit.tiny_model())
        model.lm_head.register_forward_hook(lambda _, args, __: heights.append(args[0].shape[1]))
        loss = PackedLoss(PreferenceLoss("dpo"), copy.deepcopy(model).requires_grad_(False))
        trainer = make_trainer(model, data, loss, tmp_path, metrics=metrics, max_steps=STEPS)
        trainer.train()
        losses.append([entry["loss"] for entry in logged(trainer)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    few, every = heights[: len(heights) // 2], heights[len(heights) // 2 :]
    assert sum(few) < 0.8 * sum(every)


def test_datasets_are_evaluated_by_url_too(kit: SimpleNamespace, tmp_path: Path) -> None:
    """As given, opened, by name: the metrics are those of the dataset given at the start."""
    data = stored(kit, tmp_path)
    loss = PackedLoss(PreferenceLoss("dpo"), use_packed_attention(kit.tiny_model()))
    trainer = make_trainer(use_packed_attention(kit.tiny_model()), data, loss, tmp_path)
    found = [trainer.evaluate(each) for each in (data.url, data, {"held": data})]
    losses = [m.get("eval_loss", m.get("eval_held_loss")) for m in found]
    assert losses == [losses[0]] * 3
    with pytest.raises(ConfigError, match=r"evaluate\(eval_dataset\); found predict"):
        trainer.predict(data.url)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sft", {}),
        pytest.param("sft", {"sft_average": "sequence_mean"}, marks=pytest.mark.slow),
        ("scored", {"pairs": "all"}),
    ],
)
def test_it_divides_by_what_the_loss_counts(
    kit: SimpleNamespace, tmp_path: Path, kind: str, settings: Any
) -> None:
    """Tokens of `sft`, pairs of scored responses: the logged loss is that of the whole step."""
    data = stored(kit, tmp_path, kind)
    name = "sft" if kind == "sft" else "simpo"
    loss_fn = PreferenceLoss(name, **settings)
    model = use_packed_attention(kit.tiny_model())
    with torch.no_grad():
        loader = PackedDataLoader(whole(data), packs_per_batch=len(SIZES))
        (batch,) = loader
        expected = float(loss_fn(PackedPolicy(model)(batch), batch).loss)
    how = {"max_steps": 1, "per_device_train_batch_size": 1, "save_strategy": "no"}
    how |= {"gradient_accumulation_steps": len(SIZES)}
    trainer = make_trainer(model, data, PackedLoss(loss_fn), tmp_path / "run", **how)
    trainer.train()
    assert logged(trainer)[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_every_rank_reads_its_own_packs(kit: SimpleNamespace, tmp_path: Path) -> None:
    """By default Accelerate's first rank slices batches for all, which packs do not allow."""
    loss = PackedLoss(PreferenceLoss("simpo"))
    model = use_packed_attention(kit.tiny_model())
    data = stored(kit, tmp_path)
    trainer = make_trainer(model, data, loss, tmp_path / "run")
    assert not isinstance(trainer.get_train_dataloader(), DataLoaderDispatcher)
    how = {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(ConfigError, match="dispatch_batches must be off"):
        make_trainer(model, data, loss, tmp_path / "run", **how)


REVIEWED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1
    adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics
    bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed
    disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps
    eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy
    hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing_factor learning_rate length_column_name liger_kernel_config
    load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha
    num_train_epochs optim optim_args optim_target_modules output_dir parallelism_config
    per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
    push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy
    save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
    trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel
    warmup_steps weight_decay
"""
"""Settings of TrainingArguments whose effect on packs somebody has thought about."""


def test_every_setting_of_its_arguments_was_reviewed() -> None:
    """A field that transformers adds fails here: is it taken, or refused by `REFUSED`?"""
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields <= set(REVIEWED.split()), fields - set(REVIEWED.split())


def test_refusals(kit: SimpleNamespace, tmp_path: Path) -> None:
    data = stored(kit, tmp_path, "scored")
    model = use_packed_attention(kit.tiny_model())
    loss = PackedLoss(PreferenceLoss("simpo"))
    trainer = make_trainer(model, data, loss, tmp_path / "run", PackCollator("scored"))
    with pytest.raises(ConfigError, match=r"Make it PackCollator\('scored', loss_fn=loss_fn\)"):
        trainer.train()
    part = PackedDataset(data, rank=1, world_size=2)
    with pytest.raises(ConfigError, match=r"rank 1 of 2\. Make it with rank=0, world_size=1"):
        make_trainer(model, part, loss, tmp_path)


def both(weights: Any) -> tuple[Any, Any]:
    """The policy, and a reference that differs from it."""
    policy, reference = (use_packed_attention(copy.deepcopy(weights)) for _ in range(2))
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.1)
    return policy, reference.requires_grad_(False)


def on_rank(task: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    """One step of plain descent at rate 1: what it takes from each parameter is the gradient."""
    policy, reference = both(task["model"])
    seen: list[int] = []

    def collator(packs: Any) -> Any:
        inputs = PackCollator("preference")(packs)
        seen.extend(inputs["labels"].batch.example_ids.tolist())
        return inputs

    trainer = make_trainer(
        policy,
        task["data"],
        PackedLoss(PreferenceLoss("dpo", **task["loss"]), reference),
        task["folder"],
        collator,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=STEP_PACKS // ranks,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer.train()
    gradients = {name: before[name] - p.detach() for name, p in policy.named_parameters()}
    return {"gradients": gradients, "logged": logged(trainer)[0], "seen": seen}


def assert_same(found: dict[str, Any], task: dict[str, Any]) -> None:
    """Loss, metrics and gradients are those of the whole step as one batch."""
    policy, reference = (PackedPolicy(model) for model in both(task["model"]))
    batch = collate(list(islice(whole(task["data"]), STEP_PACKS)), "preference")
    out = PreferenceLoss("dpo", **task["loss"])(policy(batch), batch, reference(batch))
    out.loss.backward()
    for name, gradient in take_gradients(policy).items():
        apart = (gradient - found["gradients"][name.removeprefix("model.")]).abs().max()
        assert apart < 1e-9 < 1e-6 < gradient.abs().max(), name
    metrics = Metrics()
    metrics.add(out.metrics)
    for name, value in metrics.means().items():
        if name.startswith(("loss", "rewards/", "logps/")):
            assert found["logged"][name] == pytest.approx(value, abs=1e-4), name


@pytest.fixture
def task(kit: SimpleNamespace, tmp_path: Path) -> dict[str, Any]:
    loss = {"beta": 0.3, "sft_weight": 0.3, "sft_average": "sequence_mean"}
    url = stored(kit, tmp_path).url
    return {"model": kit.tiny_model(), "data": url, "folder": tmp_path / "run", "loss": loss}


@pytest.mark.slow
def test_two_processes_under_the_trainer(task: dict[str, Any], tmp_path: Path) -> None:
    """Each rank gets its own packs, none twice, though Accelerate dispatches by default."""
    ranks = launch(__file__, task, 2, tmp_path)
    for found in ranks:
        assert_same(found, task)
    first, second = (set(found["seen"]) for found in ranks)
    assert not first & second
    assert set(range(sum(SIZES[:STEP_PACKS]))) <= first | second


def test_one_process_under_the_trainer(task: dict[str, Any]) -> None:
    assert_same(on_rank(task, 1), task)
