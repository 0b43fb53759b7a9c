"""`packstore.torch.train` against a plain loop without packs, and what a run leaves."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import alone
from huggingface_hub import ModelCard
from torch import Tensor
from torch.nn.functional import logsigmoid
from train_runs import checkpoints, losses, records, save_gpt2, step_of
from transformers import AutoModelForCausalLM

from packstore import open as open_dataset
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetNotFoundError,
    UnknownNameError,
)
from packstore.format.arrays import Examples
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, train

N, BETA, RATE = 40, 0.1, 1e-3
PACKS = {"single": [1] * N, "mixed": [1, 4, 2, 3] * 4, "large": [8] * 5}


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A model, and the same examples in several packs."""
    folder = tmp_path_factory.mktemp("train")
    examples = random_examples(N, seed=3)
    urls = {}
    for name, sizes in PACKS.items():
        for layout in ("concat", "shared_prefix"):
            url = str(folder / f"{name}-{layout}")
            kit.write(url, kit.packed(examples, sizes, layout), layout=layout)
            urls[name, layout] = url
    sft, urls["sft", "concat"] = (
        random_examples(N, seed=4, kind="sft"),
        str(folder / "sft"),
    )
    kit.write(
        urls["sft", "concat"], kit.packed(sft, PACKS["mixed"], "concat"), kind="sft"
    )
    model = save_gpt2(folder / "model")
    return SimpleNamespace(model=model, examples=examples, sft=sft, urls=urls)


def settings(made: SimpleNamespace, output: Path, **others: Any) -> dict[str, Any]:
    base = {
        "model": made.model,
        "train_dataset": made.urls["mixed", "concat"],
        "output_dir": str(output),
        "dtype": "float64",
        "examples_per_step": 8,
        "learning_rate": RATE,
        "logging_steps": 1,
    }
    return {**base, **others}


def steps_of(run: dict[str, Any]) -> list[list[int]]:
    """Example ids of each step of a run, as a loader of the same settings gives
    them.
    """
    loader = PackedDataLoader(
        PackedDataset(run["train_dataset"], seed=42),
        examples_per_step=run["examples_per_step"],
        packs_per_batch=run.get("packs_per_batch"),
    )
    steps: list[list[int]] = [[]]
    for epoch in range(run.get("num_train_epochs", 1)):
        loader.set_epoch(epoch)
        for batch in loader:
            steps[-1] += batch.example_ids[batch.weights > 0].tolist()
            if batch.step is not None and batch.step.last:
                steps.append([])
    return steps[:-1]


def margins_of(model: Any, examples: Examples) -> Tensor:
    """Log-prob of the chosen less that of the rejected of each pair, a sequence at a
    time.
    """
    logps = torch.stack([logp for logp, _ in alone(model, examples)])
    return logps[0::2] - logps[1::2]


def plain_model(folder: Any) -> Any:
    """The model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).double()


def plain_loop(
    made: SimpleNamespace, steps: list[list[int]], warmup: int, sft: bool, decay: float
) -> Iterator[float]:
    """DPO (Rafailov et al., 2023, equation 7), or a mean over the tokens of
    each step.
    """
    model, reference = plain_model(made.model).train(), plain_model(made.model).eval()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": decay}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for number, ids in enumerate(steps):
        if sft:
            logps, tokens = zip(
                *alone(model, made.sft.take(np.array(ids))), strict=True
            )
            loss = -sum(logps) / sum(tokens)
        else:
            pairs = made.examples.take(np.array(ids))
            with torch.no_grad():
                before = margins_of(reference, pairs)
            loss = -logsigmoid(BETA * (margins_of(model, pairs) - before)).mean()
        yield float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        through = (number - warmup) / (len(steps) - warmup)
        rising = number / max(warmup, 1)
        share = rising if number < warmup else (1 + math.cos(math.pi * through)) / 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        optimizer.step()


@pytest.mark.parametrize(
    ("packs", "layout", "others"),
    [
        pytest.param(
            "single", "concat", {"packs_per_batch": 3}, marks=pytest.mark.slow
        ),
        (
            "mixed",
            "shared_prefix",
            {"packs_per_batch": 2, "num_train_epochs": 2, "warmup_steps": 3},
        ),
        ("large", "concat", {"weight_decay": 0.5, "warmup_steps": 0.5}),  # of all steps
        pytest.param(
            "mixed",
            "concat",
            {"activation_checkpointing": True},
            marks=pytest.mark.slow,
        ),
        (
            "sft",
            "concat",
            {"loss": "sft"},
        ),  # whose batches hold unequal numbers of tokens
    ],
)
def test_losses_are_those_of_a_plain_loop(
    made: SimpleNamespace,
    tmp_path: Path,
    packs: str,
    layout: str,
    others: dict[str, Any],
) -> None:
    given = {"warmup_steps": 0, "num_train_epochs": 1, "weight_decay": 0.0, **others}
    run = settings(made, tmp_path, train_dataset=made.urls[packs, layout], **given)
    train(**run)
    steps = steps_of(run)
    warmup = given["warmup_steps"]
    whole = warmup if warmup >= 1 else math.ceil(warmup * len(steps))
    expected = list(
        plain_loop(made, steps, whole, packs == "sft", given["weight_decay"])
    )
    found = losses(tmp_path)
    assert len(found) >= 4
    assert packs == "sft" or expected[0] == pytest.approx(math.log(2), abs=1e-12)
    assert np.abs(np.subtract(found, expected)).max() < 1e-9
    assert np.ptp(found) > 1e-3


def test_validation_is_of_every_pair_once(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    """In other packs than the training; equal to the plain mean over all pairs."""
    given = {
        "eval_dataset": made.urls["large", "shared_prefix"],
        "warmup_steps": 0,
        "eval_steps": 2,
    }
    result = train(**settings(made, tmp_path, **given))
    with torch.no_grad():
        after, before = (
            margins_of(plain_model(folder).eval(), made.examples)
            for folder in (result.model, made.model)
        )
    losses = -logsigmoid(BETA * (after - before))
    assert result.evaluation["eval_loss"] == pytest.approx(
        float(losses.mean()), abs=1e-10
    )
    share = float((after > before).double().mean())
    assert result.evaluation["eval_rewards/accuracies"] == pytest.approx(share)
    assert [record["step"] for record in records(tmp_path, "eval_loss")] == [
        *range(2, result.step, 2),
        result.step,
    ]


@pytest.mark.parametrize(
    "others",
    [
        {
            "loss": {"dpo": 0.8, "bco_pair": {"weight": 0.2, "beta": 0.3}},
            "loss_parameters": {"sft_weight": 0.5, "sft_average": "sequence_mean"},
        },
        {"loss": "simpo", "reference": "mine"},
    ],
    ids=["mix", "no reference"],
)
def test_other_losses_run(
    made: SimpleNamespace,
    tmp_path: Path,
    others: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = train(**settings(made, tmp_path, max_steps=3, **others))
    assert result.step == 3
    assert math.isfinite(result.metrics["loss"])
    unused = f"the loss has no reference; not used: {others.get('reference')}"
    assert (unused in caplog.text) == (others.get("loss") == "simpo")


def test_lora_starts_at_its_reference(made: SimpleNamespace, tmp_path: Path) -> None:
    """The adapter switched off is the reference."""
    given = {"peft_config": {"r": 4}, "learning_rate": 1e-2, "warmup_steps": 0}
    given |= {"activation_checkpointing": True}
    result = train(**settings(made, tmp_path, **given))
    found = losses(tmp_path)
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    assert min(found) < 0.69
    assert (result.model / "adapter_config.json").is_file()
    adapted = AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float64)
    before = AutoModelForCausalLM.from_pretrained(made.model).double().eval()
    adapted.set_attn_implementation("eager")
    ids = torch.arange(12)[None]
    assert (adapted(ids).logits - before(ids).logits).abs().max() > 1e-3


@pytest.mark.slow
def test_an_adapter_is_trained_further_against_itself(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    """As it was is the reference, under the name `ref`."""
    given = {
        "train_dataset": made.urls["sft", "concat"],
        "loss": "sft",
        "peft_config": {"r": 4},
    }
    first = train(
        **settings(made, tmp_path / "sft", **given, learning_rate=1e-2, max_steps=3)
    )
    dpo = settings(
        made,
        tmp_path / "dpo",
        model=str(first.model),
        learning_rate=1e-2,
        warmup_steps=0,
    )
    train(**dpo)
    found = losses(tmp_path / "dpo")
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    assert min(found) < 0.69


def test_what_a_run_leaves(made: SimpleNamespace, tmp_path: Path) -> None:
    """The model with its card and tokenizer, and checkpoints, of which the best is
    kept.
    """
    started = tmp_path / "started"
    shutil.copytree(made.model, started)
    (started / "tokenizer.json").write_bytes(b"{}")
    given = {
        "eval_dataset": made.urls["large", "concat"],
        "save_steps": 1,
        "eval_steps": 1,
    }
    given |= {"load_best_model_at_end": True, "model": str(started)}
    output = tmp_path / "run"
    markup = tmp_path / "<img src=x>|![a](b)"
    shutil.copytree(made.urls["mixed", "concat"], markup)
    given["train_dataset"] = str(markup)
    result = train(**settings(made, output, **given))
    evals = {x["step"]: x["eval_loss"] for x in records(output, "eval_loss")}
    best = min(evals, key=lambda step: evals[step])
    kept = {step_of(path) for path in checkpoints(output)}
    assert {best, result.step} <= kept
    assert len(kept) == 2
    card = (result.model / "README.md").read_text(encoding="utf-8")
    fingerprint = open_dataset(made.urls["mixed", "concat"]).manifest.fingerprint
    for said in (
        fingerprint,
        "PreferenceLoss(dpo",
        "eval_rewards/accuracies",
        '"learning_rate": 0.001',
    ):
        assert said in card
    (row,) = [line for line in card.splitlines() if line.startswith("| dataset |")]
    assert "<img" not in row
    assert "![" not in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    front = ModelCard(card).data
    assert (front.base_model, front.tags) == (str(started), ["packstore"])
    assert (result.model / "tokenizer.json").read_bytes() == b"{}"
    config = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert "packstore" not in json.dumps(config)
    names = {
        "examples_per_second",
        "tokens_per_second",
        "fill",
        "data_wait",
        "learning_rate",
    }
    assert names <= set(records(output)[0])


def test_the_same_command_goes_on_and_only_that(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    given = {"save_steps": 1, "save_total_limit": 9}
    result = train(**settings(made, tmp_path, **given))
    assert train(**settings(made, tmp_path, **given)).step == result.step
    for changed in (
        {"loss": "ipo"},
        {"loss_parameters": {"beta": 0.2}},
        {"optim": "sgd"},
    ):
        with pytest.raises(
            ConfigError, match=r"checkpoint-\d+: .* must keep its (loss|optimizer), "
        ):
            train(**settings(made, tmp_path, **changed, **given))
    with pytest.raises(ConfigError, match=r"must keep its (weights|reference)"):
        train(**settings(made, tmp_path, peft_config={"r": 2}, **given))
    first = str(checkpoints(tmp_path)[0])
    with pytest.raises(
        ConfigError,
        match=r"it must be the newest of its output_dir; found .*checkpoint-",
    ):
        train(**settings(made, tmp_path, resume_from_checkpoint=first, **given))
    longer = train(**settings(made, tmp_path, num_train_epochs=2, **given))
    assert longer.examples == 2 * result.examples == 2 * N


def test_a_metric_that_no_evaluation_has_is_named(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    often = {
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "max_steps": 1,
    }
    given = {
        "eval_dataset": made.urls["mixed", "concat"],
        "metric_for_best_model": "acc",
        **often,
    }
    with pytest.raises(ConfigError, match="setting metric_for_best_model"):
        train(**settings(made, tmp_path, **given))


@pytest.mark.parametrize(
    ("others", "kind", "message"),
    [
        (
            {"model": "./nowhere"},
            ConfigError,
            r"model ./nowhere: .*found no such folder",
        ),
        ({"loss": "dpoo"}, ConfigError, r"unknown loss 'dpoo'.*Did you mean 'dpo'"),
        (
            {"loss_parameters": {"bta": 1.0}},
            ConfigError,
            r"it takes: beta. Did you mean 'beta'",
        ),
        ({"train_dataset": "./nowhere"}, DatasetNotFoundError, r"nowhere"),
        (
            {"train_dataset": "sft"},
            CompatibilityError,
            r"responses to compare; found kind 'sft'",
        ),
        (
            {"train_dataset": "sft", "loss": "kto"},
            CompatibilityError,
            r"must have a score; found kind",
        ),
        (
            {"peft_config": {"r": 2, "target_modules": ["nope"]}},
            ConfigError,
            "found .*nope",
        ),
        (
            {"peft_config": {"r": "two"}},
            ConfigError,
            "peft_config: PEFT must be able to add it",
        ),
        (
            {"peft_config": {"rank": 2}},
            UnknownNameError,
            "unknown member of peft_config 'rank'",
        ),
        (
            {"per_device_train_batch_size": 2},
            ConfigError,
            "must then be left out; found 2 a rank",
        ),
        ({"fp16": True}, ConfigError, "setting fp16: it must be False with packs"),
        (
            {"report_to": ["wandbb"]},
            ConfigError,
            "transformers must take them; found .*wandbb",
        ),
        ({"optim": "adamm"}, ConfigError, "transformers must take them; found .*adamm"),
        (
            {"learning_rat": 1.0},
            UnknownNameError,
            "unknown setting 'learning_rat'.*learning_rate",
        ),
        (
            {"adam_beta9": 1.0},
            UnknownNameError,
            "unknown setting 'adam_beta9'.*mean .*adam_beta",
        ),
    ],
)
def test_errors_are_sentences(
    made: SimpleNamespace,
    tmp_path: Path,
    others: dict[str, Any],
    kind: type,
    message: str,
) -> None:
    if others.get("train_dataset") == "sft":
        others = {**others, "train_dataset": made.urls["sft", "concat"]}
    with pytest.raises(kind, match=message):
        train(**settings(made, tmp_path, **others))
