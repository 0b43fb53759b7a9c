"""PackedTrainer: what a Trainer does, on packs, and what it refuses; runs resume to the
bit.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import launch
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_runs import shard
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import packstore
from packstore.errors import (
    BackendError,
    CompatibilityError,
    ConfigError,
    FormatError,
    UnknownNameError,
)
from packstore.testing import random_examples
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PackedTrainer,
    PolicyLoss,
    PreferenceLoss,
    SideWriter,
    evaluate,
    use_packed_attention,
)
from packstore.torch.training.checkpoint_files import newest_checkpoint

RATE = 1e-3


def settings(stored: SimpleNamespace, output: Path, **more: Any) -> dict[str, Any]:
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
    base = {"model": stored.model, "train_dataset": stored.data, "dtype": "float64"}
    return {"arguments": arguments, **base, "examples_per_step": 9, **more}


def run(
    given: dict[str, Any], resume: Any = True, sharded: bool = False
) -> PackedTrainer:
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


def test_evaluation_and_predictions(stored: SimpleNamespace, tmp_path: Path) -> None:
    """Of every example once, and a model that transformers loads."""
    given = settings(
        stored, tmp_path, eval_dataset=stored.held, arguments={"max_steps": 3}
    )
    trainer = run(given)
    assert history(trainer)[0] == pytest.approx(math.log(2), abs=1e-12)
    names = {
        "rewards/accuracies",
        "logps/chosen",
        "grad_norm",
        "fill",
        "tokens_per_second",
    }
    assert names <= trainer.state.log_history[0].keys()
    rows = trainer.predict(stored.held).predictions
    assert rows["example_id"].to_pylist() == [*range(9)]
    loss = trainer.evaluate()["eval_loss"]
    assert loss == pytest.approx(np.mean(rows["loss"].to_pylist()), abs=1e-6)
    trainer.save_model(str(tmp_path / "model"))
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    )
    found = evaluate(
        use_packed_attention(saved), packstore.open(stored.held), loss="simpo"
    )
    assert found["metrics"]["logps/chosen"] == pytest.approx(
        np.mean([both[0] for both in rows["logps"].to_pylist()]), abs=1e-5
    )


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
    elif inside == "optimizer":
        save_tensors = torch.save

        def until_optimizer(content: Any, file: Any, *rest: Any) -> None:
            if "optimizer" in str(file):
                die()
            save_tensors(content, file, *rest)

        torch.save = until_optimizer
    elif inside:
        from transformers.trainer_callback import TrainerState

        save = TrainerState.save_to_json

        def torn(self: Any, path: str) -> None:
            if f"checkpoint-{inside}" in path:
                Path(path).write_text('{"global_st', encoding="utf-8")
                die()
            save(self, path)

        TrainerState.save_to_json = torn
    trainer = run(
        task["given"], task.get("resume", True), sharded=task.get("shard", False)
    )
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
    "mix": {
        "loss": {"dpo": 0.8, "bco_pair": 0.2},
        "loss_parameters": {"sft_weight": 0.3},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_resume_to_the_bit(
    stored: SimpleNamespace, tmp_path: Path, kind: str, ranks: int
) -> None:
    more = {**KINDS[kind], "arguments": {"eval_strategy": "steps", "eval_steps": 5}}
    one = settings(stored, tmp_path / "a", eval_dataset=stored.held, **more)
    two = settings(stored, tmp_path / "b", eval_dataset=stored.held, **more)
    expected = launch(__file__, {"given": one}, ranks, tmp_path)
    assert launch(__file__, {"given": two, "kill": 5}, ranks, tmp_path) == []
    assert launch(__file__, {"given": two, "inside": 9}, ranks, tmp_path) == []
    assert str(newest_checkpoint(str(tmp_path / "b"))).endswith("checkpoint-6")
    found = launch(__file__, {"given": two}, ranks, tmp_path)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2])
def test_killed_while_an_old_checkpoint_is_removed(
    stored: SimpleNamespace, tmp_path: Path, limit: int
) -> None:
    """What is left of it is removed as the run goes on, and no spare one in its
    place.
    """
    more = {"arguments": {"save_total_limit": limit, "save_steps": 2, "max_steps": 8}}
    given = settings(stored, tmp_path / "b", **more)
    assert launch(__file__, {"given": given, "inside": "removal"}, 1, tmp_path) == []
    assert len([*(tmp_path / "b").glob("checkpoint-*")]) == limit + 1
    whole = launch(
        __file__, {"given": settings(stored, tmp_path / "a", **more)}, 1, tmp_path
    )
    assert launch(__file__, {"given": given}, 1, tmp_path) == whole
    expected = ["checkpoint-6", "checkpoint-8"][-limit:]
    assert (
        sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*")) == expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "reward", "adapter"])
@pytest.mark.parametrize("sharded", [False, True])
def test_killed_on_2_1_2_ranks(
    stored: SimpleNamespace, tmp_path: Path, sharded: bool, kind: str
) -> None:
    """DDP, or FSDP2 in turn with one rank that is not sharded."""
    more = {
        "arguments": {"eval_strategy": "steps", "eval_steps": 5},
        "eval_dataset": stored.held,
    }
    more |= KINDS[kind]
    alone = launch(
        __file__, {"given": settings(stored, tmp_path / "a", **more)}, 1, tmp_path
    )[0]
    both = {"given": settings(stored, tmp_path / "b", **more), "shard": sharded}
    assert launch(__file__, {**both, "kill": 5}, 2, tmp_path) == []
    assert launch(__file__, {**both, "shard": False, "kill": 4}, 1, tmp_path) == []
    for found in launch(__file__, both, 2, tmp_path):
        for here, there in zip(found[:2], alone[:2], strict=True):
            print("gap", np.abs(np.subtract(here, there)).max())
            assert np.abs(np.subtract(here, there)).max() < 1e-9


def test_every_field_of_the_arguments_is_taken_or_refused(tmp_path: Path) -> None:
    from dataclasses import fields

    from packstore.torch.training.arguments import (
        REFUSED_WITH_DATASETS,
        check_settings,
    )

    pytest.importorskip("transformers", minversion="5.24")
    names = {field.name for field in fields(TrainingArguments)}
    assert {*REFUSED_WITH_DATASETS} <= names
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    check_settings(args, REFUSED_WITH_DATASETS)
    for name in REFUSED_WITH_DATASETS:
        other = TrainingArguments(str(tmp_path), use_cpu=True)
        object.__setattr__(other, name, "something else")
        with pytest.raises(
            ConfigError, match=f"setting {name}: it must be .*with packs; found"
        ):
            check_settings(other, REFUSED_WITH_DATASETS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_train_epochs", 0),
        ("accelerator_config", {"gradient_accumulation_kwargs": {"num_steps": 2}}),
    ],
)
def test_steps_that_are_none_or_several(
    stored: SimpleNamespace, tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"setting {name}.* must be"):
        run(settings(stored, tmp_path, arguments={name: value}))


@pytest.mark.parametrize("optimizer", ["adalomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_pass(
    stored: SimpleNamespace, tmp_path: Path, optimizer: str
) -> None:
    """A step has several backward passes."""
    with pytest.raises(ConfigError, match=f"optim.*all batches of a step.*{optimizer}"):
        run(settings(stored, tmp_path, arguments={"optim": optimizer}))


def test_what_is_meant_for_another_trainer(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """TRL's settings and misplaced arguments are refused, not passed over."""
    trl = pytest.importorskip("trl", reason="trl is in the extra train")
    own = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    plain, config = TrainingArguments(**own), trl.DPOConfig(**own)
    for name, value in {"beta": 5.0, "loss_type": ["ipo"], "max_length": 64}.items():
        args = trl.DPOConfig(**own, **{name: value})
        with pytest.raises(
            ConfigError, match=f"setting {name}: it must be a field of TrainingArg"
        ):
            PackedTrainer(stored.model, args, stored.data)
    with pytest.raises(
        ConfigError, match="args: it must be TrainingArguments; found '"
    ):
        PackedTrainer(stored.model, stored.data, plain)
    with pytest.raises(
        UnknownNameError, match=r"argument 'beta'.* Did you mean 'loss_parameters'"
    ):
        PackedTrainer(stored.model, plain, stored.data, beta=0.2)
    PackedTrainer(stored.model, config, stored.data, dtype="float64")


@pytest.mark.parametrize(
    "data", [[{"prompt": "Q", "chosen": "A", "rejected": "B"}], {"a": [1]}, 3]
)
def test_records_that_are_not_packed(
    stored: SimpleNamespace, tmp_path: Path, data: Any
) -> None:
    """As TRL's trainers take; also where only the evaluation is of such."""
    for part in ("train_dataset", "eval_dataset"):
        given = settings(stored, tmp_path, **{part: data})
        with pytest.raises(
            ConfigError, match=r"dataset: it must be packed; found .* Pack the records"
        ):
            run(given)


def test_what_would_train_nothing_or_something_else(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(stored.model)

    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], inference_mode=True)
    dpo, other = PreferenceLoss("dpo"), torch.optim.SGD(model().parameters())
    for given, message in (
        (
            {"model": model().requires_grad_(False), "dtype": None},
            "some of its weights must require gradients",
        ),
        ({"peft_config": adapter}, "some of its weights must require gradients"),
        (
            {"optimizers": (other, None)},
            "Make the optimizer from this model's parameters",
        ),
        (
            {"optimizers": (torch.optim.SGD, None)},
            "optimizers: it must be Optimizer; found type",
        ),
        (
            {"optimizers": other},
            r"optimizers: it must be Sequence; found SGD. Give \(optimizer, s",
        ),
        (
            {"model": model()},
            r"argument dtype: .*float64.*GPT2",
        ),
        (
            {"loss_parameters": ["beta"]},
            r"loss_parameters must be a mapping .*found \['beta'\]",
        ),
        (
            {"loss": lambda chosen, rejected: chosen},
            "it must take the pairs, and parameters with",
        ),
        (
            {"storage_options": "key"},
            "storage_options must be a mapping .*; found a text",
        ),
        (
            {"examples_per_step": "9"},
            "examples_per_step must be a whole number; found '9'",
        ),
        (
            {"eval_ref_logps": 3},
            "eval_ref_logps must be a list of strings; found a number",
        ),
        (
            {"reference": True},
            r"use_packed_attention\(bool\): it must be a Hugging Face model",
        ),
        (
            {"callbacks": TrainerCallback()},
            "callbacks: it must be Sequence; found TrainerCallback",
        ),
        (
            {"processing_class": "gpt2"},
            "processing_class: it must be a tokenizer, .*found 'gpt2'",
        ),
        (
            {"compute_metrics": print},
            "compute_metrics: it must be left out; found builtin",
        ),
        (
            {"train_dataset": {"a": stored.data}},
            "found dict.* several datasets, PackedDataset.mix",
        ),
        (
            {"eval_dataset": {"a": {"b": stored.held}}},
            "dataset: it must be packed; found dict.",
        ),
        (
            {"arguments": {"lr_scheduler_kwargs": {"a": 1}}},
            "settings: transformers must take them",
        ),
        (
            {"loss": dpo, "loss_parameters": {"beta": 5.0}},
            "argument loss_parameters: it must be left out",
        ),
        ({"compile": False}, "compile must be one of: auto, layers, none; found False"),
        (
            {"dtype": "bf16"},
            "dtype must be one of: float32, bfloat16, float64; found 'bf16'",
        ),
        ({"eval_ref_logps": "side"}, "argument eval_ref_logps: it needs a dataset"),
        ({"peft_config": "lora"}, "peft_config: it must be PeftConfig; found 'lora'"),
        (
            {
                "model": peft.get_peft_model(model(), adapter),
                "peft_config": {"r": 2},
                "dtype": None,
            },
            "the model must have no adapter",
        ),
    ):
        with pytest.raises(
            (ConfigError, CompatibilityError, BackendError), match=message
        ):
            run(settings(stored, tmp_path, **given))
    with pytest.raises(
        ConfigError, match="resume_from_checkpoint: it must be str; found int"
    ):
        run(settings(stored, tmp_path), resume=3)
    data = packstore.open(stored.data)
    with pytest.raises(
        ConfigError,
        match="loss must be a PreferenceLoss or DistillLoss; found PolicyLoss",
    ):
        evaluate(model(), data, loss=PolicyLoss())


def test_ids_beyond_the_vocabulary(stored: SimpleNamespace, tmp_path: Path) -> None:
    """Of records of ids nobody knows the tokenizer; a GPU would end the process."""
    packs = packstore.pack(
        [{"prompt": [1], "chosen": [2, 50], "rejected": [3]}] * 9,
        tmp_path / "ids",
        pack_size=64,
    )
    given = settings(stored, tmp_path / "run", train_dataset=packs.url)
    message = (
        "token ids must be below 50; found 50. Use the model that belongs to the ids"
    )
    with pytest.raises(CompatibilityError, match=message):
        run(given)
    model = use_packed_attention(AutoModelForCausalLM.from_pretrained(stored.model))
    with pytest.raises(CompatibilityError, match=message):
        evaluate(model, packs, loss="sft")


ANSWER, PAIR = (
    {"prompt": [1], "response": [2, 3]},
    {"prompt": [1], "chosen": [2], "rejected": [3]},
)


@pytest.mark.parametrize(
    ("loss", "records", "told"),
    [
        (
            "kto",
            [{**ANSWER, "score": s} for s in (0.5, 2)],
            "some answers must be good.* 40 good",
        ),
        (
            "bco",
            [{**ANSWER, "score": s} for s in (0, -1)],
            "found 0 good and 40 bad ones",
        ),
        ("kto", [{**ANSWER, "score": s} for s in (1, -1)], None),
        (
            "odpo",
            [{**PAIR, "chosen_reward": 1, "rejected_reward": 1}],
            "pairs must differ in",
        ),
        ("dpo", [{**PAIR, "chosen_reward": 1, "rejected_reward": 1}], None),
        ("odpo", [PAIR], None),
    ],
)
def test_data_of_one_side_is_told_once(
    stored: SimpleNamespace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    loss: str,
    records: list[Any],
    told: str | None,
) -> None:
    """Also where a step has no pairs: its loss is nothing, and no run diverges
    by it.
    """
    data = packstore.pack(
        records * (40 // len(records)), tmp_path / "data", pack_size=64
    )
    given = settings(
        stored,
        tmp_path / "run",
        train_dataset=data.url,
        loss=loss,
        arguments={"num_train_epochs": 1, "save_strategy": "no"},
    )
    trainer = run(given)
    assert all(map(math.isfinite, history(trainer)))
    found = [r for r in caplog.messages if r.startswith("data of PreferenceLoss")]
    assert len(found) == (told is not None)
    assert told is None or re.search(told, found[0])


def test_data_without_a_pair_is_named_before_the_first_step(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """Its loss would be no number, in an evaluation after hours; its log-probs are
    there.
    """
    alike = {"prompt": [1], "responses": [[2], [3]], "scores": [4, 4]}
    url = packstore.pack([alike] * 9, tmp_path / "data", pack_size=64).url
    message = (
        f"loss 'dpo' on {url}: some pairs must differ in score; found none that do"
    )
    more = {"arguments": {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}}
    for given in (
        {"train_dataset": url},
        {"eval_dataset": {"held": stored.held, "alike": url}},
    ):
        with pytest.raises(CompatibilityError, match=message):
            PackedTrainer(stored.model, loss="dpo", **given)
    trainer = run(settings(stored, tmp_path / "run", eval_dataset=stored.held, **more))
    with pytest.raises(CompatibilityError, match=message):
        trainer.evaluate(url)
    assert len(trainer.predict(url).predictions) == 9
    with pytest.raises(CompatibilityError, match=message):
        evaluate(trainer.model, packstore.open(url))
    run(
        settings(
            stored,
            tmp_path / "sft",
            train_dataset=url,
            loss_parameters={"sft_weight": 1.0},
        )
    )


def test_steps_called_by_hand(stored: SimpleNamespace, tmp_path: Path) -> None:
    """Of a callback, say: they add nothing to the records, and take what the loaders
    yield.
    """
    trainer = PackedTrainer(stored.model, TrainingArguments(str(tmp_path)), stored.data)
    step = next(iter(trainer.get_train_dataloader()))
    loss, logps, labels = trainer.prediction_step(trainer.model, step, False)
    assert loss == pytest.approx(math.log(2))
    assert len(logps) == sum(batch.num_segments for batch in step)
    assert labels is None
    trainer.log({"loss": 0.5})
    assert "rewards/margins" not in trainer.state.log_history[-1]
    assert trainer.num_examples(trainer.get_train_dataloader()) == 60
    for call in (trainer.prediction_step, trainer.training_step):
        with pytest.raises(
            ConfigError, match="inputs: it must be PackedBatch; found dict"
        ):
            call(trainer.model, {"input_ids": [1]}, False)
    with pytest.raises(ConfigError, match="inputs: it must be PackedBatch; found list"):
        trainer.compute_loss(trainer.model, step)


def test_subclasses(stored: SimpleNamespace, tmp_path: Path) -> None:
    """What they override is honoured, or refused by name."""
    own = PackedDataLoader(PackedDataset(stored.data), examples_per_step=9)
    twice = lambda self, *args, **kw: 2 * PackedTrainer.compute_loss(self, *args, **kw)  # noqa: E731
    given = settings(stored, tmp_path, arguments={"max_steps": 1})
    args = TrainingArguments(**given.pop("arguments"))
    for name, method, message in (
        (
            "get_train_dataloader",
            lambda _: own,
            "must yield whole steps; found 1 of the 3 batches",
        ),
        ("prediction_step", lambda *_: None, "Other: prediction_step"),
        ("compute_loss", twice, None),
    ):
        other = type("Other", (PackedTrainer,), {name: method})
        with (
            nullcontext()
            if message is None
            else pytest.raises(ConfigError, match=message)
        ):
            trainer = other(args=args, **given)
            trainer.train()
    assert history(trainer)[0] == pytest.approx(2 * math.log(2))


def test_a_loss_of_tokens(
    kit: SimpleNamespace, stored: SimpleNamespace, tmp_path: Path
) -> None:
    """GRPO's on scored answers, with its reference: at first ratios are 1, so it is
    that of A.
    """
    packs = kit.packed(
        random_examples(20, seed=4, kind="scored"), [1, 4, 2, 3] * 2, "concat"
    )
    kit.write(str(tmp_path / "scored"), packs, kind="scored")
    loss = PolicyLoss(average="sequence", kl_weight=0.1)
    given = settings(
        stored, tmp_path / "run", loss=loss, train_dataset=str(tmp_path / "scored")
    )
    trainer = run(given)
    assert len(history(trainer)) == trainer.state.global_step > 3
    assert np.ptp(history(trainer)) > 1e-4
    with pytest.raises(ConfigError, match=r"evaluation: .*PreferenceLoss"):
        trainer.evaluate(stored.data)

    # Stored log-probs take the place of the reference, and of the policy's own.
    side = str(tmp_path / "side")
    columns = dict.fromkeys(("old_logps", "ref_token_logps"), "token<float32>")
    with SideWriter(side, packstore.open(str(tmp_path / "scored")), columns) as writer:
        counts = packs.num_targets
        values = np.full(counts.sum(), -3.0)
        writer.write(
            packs.example_ids,
            dict.fromkeys(columns, values),
            packs.num_responses,
            counts,
        )
    data = PackedDataset(str(tmp_path / "scored"), side=side)
    from_stored = run(settings(stored, tmp_path / "b", loss=loss, train_dataset=data))
    assert from_stored._reference is None
    records = from_stored.state.log_history
    ratios = [record["ratio"] for record in records if "ratio" in record]
    assert abs(ratios[0] - 1) > 0.01
    assert abs(records[0]["kl"]) > 1e-4

    # Nobody compared them with the reference of this run.
    with pytest.raises(ConfigError, match=r"side: .*ref_token_logps.*as ref_logps"):
        run({**given, "side": side})


@pytest.mark.slow
def test_its_best_model_and_its_defaults(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """In bfloat16 by autocast, recomputed, resumed: policy and reference begin exactly
    equal.
    """
    how = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "bf16": True}
    how |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_rewards/margins",
    }
    how |= {"gradient_checkpointing": True, "max_steps": 8}
    more = {
        "dtype": "float32",
        "eval_dataset": {"held": stored.held, "more": stored.data},
    }
    how["metric_for_best_model"] = "eval_held_rewards/margins"
    logs = []
    for resume in (False, str(tmp_path / "checkpoint-4")):
        trainer = run(settings(stored, tmp_path, arguments=how, **more), resume)
        logs.append(trainer.state.log_history)
    assert trainer.accelerator.mixed_precision == "bf16"
    first = logs[0][0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == 0
    held = [
        entry["eval_held_rewards/margins"]
        for entry in logs[0]
        if "eval_held_loss" in entry
    ]
    assert len(held) == 4
    assert trainer.state.best_metric == max(held)
    for before, after in zip(logs[0], logs[1], strict=True):
        for name in {
            "loss",
            "rewards/chosen",
            "num_tokens",
            "eval_held_loss",
        } & before.keys():
            assert after[name] == pytest.approx(before[name], abs=1e-5), name


def test_batch_sizes_mean_what_they_mean_unpacked(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    other = settings(stored, tmp_path / "a", arguments={**sizes, "max_steps": 3})
    other["examples_per_step"] = None
    same = settings(stored, tmp_path / "b", arguments={"max_steps": 3})
    assert history(run(other)) == history(run(same))


def test_a_changed_position_is_refused(stored: SimpleNamespace, tmp_path: Path) -> None:
    """Its hash is beside it: a position that somebody or a disk changed would skip
    data.
    """
    given = settings(stored, tmp_path, arguments={"max_steps": 3})
    run(given)
    file = tmp_path / "checkpoint-3" / "packstore.json"
    text = file.read_text(encoding="utf-8")
    for number in re.findall(r"\d+", text)[:20]:
        other = text.replace(number, str(int(number) + 1), 1)
        file.write_text(other, encoding="utf-8")
        with pytest.raises(FormatError, match="other bytes than its hash says"):
            run(given, resume=str(file.parent))


def test_a_checkpoint_that_lost_a_part_is_refused(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """transformers begins anew in silence with the state of an optimizer that it does
    not find.
    """
    given = settings(stored, tmp_path, arguments={"max_steps": 3})
    run(given)
    files = [
        f for f in (tmp_path / "checkpoint-3").iterdir() if "state.json" not in f.name
    ]
    assert len(files) >= 8
    for file in files:
        whole = file.read_bytes()
        for part in (whole[: len(whole) // 2], b"", None):
            file.unlink()
            if part is not None:
                file.write_bytes(part)
            with pytest.raises(
                FormatError, match=rf"checkpoint-3: it must be whole.*{file.name}"
            ):
                run(given, resume=str(tmp_path / "checkpoint-3"))
        file.write_bytes(whole)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_again(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    """What was there before has the Trainer's state, and must not pass for whole with
    it.
    """
    given = settings(stored, tmp_path, arguments={"max_steps": 6})
    run(given)
    begun = str(tmp_path / "checkpoint-3")
    killed = {"given": given, "resume": begun, "inside": "optimizer"}
    assert newest_checkpoint(str(tmp_path)) != begun
    assert launch(__file__, killed, 1, tmp_path) == []
    assert newest_checkpoint(str(tmp_path)) == begun


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
def test_saved_for_sigterm_while_a_step_runs(
    stored: SimpleNamespace, tmp_path: Path, event: str
) -> None:
    """transformers then saves with the data of a step in hand, which is run anew on
    resuming.
    """
    pytest.importorskip("transformers.trainer_jit_checkpoint")

    def preempt(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(4)  # transformers waits for 3 s whether a kill follows

    arguments = {"enable_jit_checkpoint": True, "save_steps": 100}
    given = settings(stored, tmp_path / "a", arguments=arguments)
    killer = type("Preempted", (TrainerCallback,), {event: preempt})()
    run({**given, "callbacks": [killer]})
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["checkpoint-4"]
    resumed = history(run(given))
    assert resumed == history(
        run(settings(stored, tmp_path / "b", arguments=arguments))
    )
