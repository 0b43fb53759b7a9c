"""`packstore.torch.train` against a plain loop without packs, and what a run leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("peft", reason="LoRA needs peft")

from gradients import alone
from huggingface_hub import ModelCard
from train_runs import checkpoints, losses, records, save_gpt2, state_of
from transformers import AutoModelForCausalLM

from packstore import open as open_dataset
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetNotFoundError,
    MissingExtraError,
    UnknownNameError,
)
from packstore.format import Examples
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, train

N, BETA, RATE = 40, 0.1, 1e-3
PACKS = {"single": [1] * N, "mixed": [1, 4, 2, 3] * 4, "large": [8] * 5}


@pytest.fixture(scope="module")
def made(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model, and the same examples in several packs."""
    folder = tmp_path_factory.mktemp("train")
    examples = random_examples(N, seed=3)
    urls = {}
    for name, sizes in PACKS.items():
        for layout in ("concat", "shared_prefix"):
            url = str(folder / f"{name}-{layout}")
            kit.write(url, kit.packed(examples, sizes, layout), layout=layout)
            urls[name, layout] = url
    others = {kind: random_examples(N, seed=4, kind=kind) for kind in ("sft", "scored")}
    for kind, of_kind in others.items():
        urls[kind, "concat"] = str(folder / kind)
        packs = kit.packed(of_kind, PACKS["mixed"], "concat")
        kit.write(urls[kind, "concat"], packs, kind=kind)
    model = save_gpt2(folder / "model")
    return SimpleNamespace(model=model, examples=examples, sft=others["sft"], urls=urls)


def settings(made: SimpleNamespace, output: Path, **others: Any) -> dict[str, Any]:
    base = {
        "model": made.model,
        "dataset": made.urls["mixed", "concat"],
        "output": str(output),
        "dtype": "float64",
        "examples_per_step": 8,
        "learning_rate": RATE,
        "log_every": 1,
    }
    return {**base, **others}


def steps_of(run: dict[str, Any]) -> list[list[int]]:
    """Example ids of each step of a run, as a loader of the same settings gives them."""
    loader = PackedDataLoader(
        PackedDataset(run["dataset"]),
        examples_per_step=run["examples_per_step"],
        packs_per_batch=run.get("packs_per_batch"),
    )
    steps: list[list[int]] = [[]]
    for epoch in range(run.get("epochs", 1)):
        loader.set_epoch(epoch)
        for batch in loader:
            steps[-1] += batch.example_ids[batch.weights > 0].tolist()
            if batch.step is not None and batch.step.last:
                steps.append([])
    return steps[:-1]


def margins_of(model: Any, examples: Examples) -> Tensor:
    """Log-prob of the chosen less that of the rejected of each pair, a sequence at a time."""
    logps = torch.stack([logp for logp, _ in alone(model, examples)])
    return logps[0::2] - logps[1::2]


def plain_model(folder: Any) -> Any:
    """The model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()


def plain_loop(
    made: SimpleNamespace, steps: list[list[int]], warmup: int, sft: bool, decay: float
) -> Iterator[float]:
    """DPO (Rafailov et al., 2023, equation 7), or a mean over the tokens of each step."""
    model, reference = plain_model(made.model).train(), plain_model(made.model).eval()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": decay}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for number, ids in enumerate(steps):
        if sft:
            logps, tokens = zip(*alone(model, made.sft.take(np.array(ids))), strict=True)
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
        pytest.param("single", "concat", {"packs_per_batch": 3}, marks=pytest.mark.slow),
        ("mixed", "shared_prefix", {"packs_per_batch": 2, "epochs": 2, "warmup": 3}),
        ("large", "concat", {"weight_decay": 0.5, "warmup": 1}),
        ("large", "concat", {"schedule": "cosine", "warmup": 0.5}),  # of all steps
        pytest.param("mixed", "concat", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        ("sft", "concat", {"loss": "sft"}),  # whose batches hold unequal numbers of tokens
    ],
)
def test_losses_are_those_of_a_plain_loop(
    made: SimpleNamespace, tmp_path: Path, packs: str, layout: str, others: dict[str, Any]
) -> None:
    given = {"warmup": 0, "epochs": 1, "weight_decay": 0.0, **others}
    run = settings(made, tmp_path, dataset=made.urls[packs, layout], **given)
    train(**run)
    steps = steps_of(run)
    warmup = given["warmup"]
    whole = warmup if warmup >= 1 else int(warmup * len(steps))
    expected = list(plain_loop(made, steps, whole, packs == "sft", given["weight_decay"]))
    found = losses(tmp_path)
    assert len(found) >= 4
    assert packs == "sft" or expected[0] == pytest.approx(math.log(2), abs=1e-12)
    assert np.abs(np.subtract(found, expected)).max() < 1e-9
    assert np.ptp(found) > 1e-3


def test_validation_is_of_every_pair_once(made: SimpleNamespace, tmp_path: Path) -> None:
    """In other packs than the training; equal to the plain mean over all pairs."""
    given = {"validation": made.urls["large", "shared_prefix"], "warmup": 0, "eval_every": 2}
    result = train(**settings(made, tmp_path, **given))
    with torch.no_grad():
        after, before = (
            margins_of(plain_model(folder).eval(), made.examples)
            for folder in (result.model, made.model)
        )
    losses = -logsigmoid(BETA * (after - before))
    assert result.evaluation["eval/loss"] == pytest.approx(float(losses.mean()), abs=1e-10)
    share = float((after > before).double().mean())
    assert result.evaluation["eval/rewards/accuracies"] == pytest.approx(share)
    assert [record["step"] for record in records(tmp_path, "eval/loss")] == [
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
        {"loss": "simpo", "reference_model": "mine"},
        {"dataset": "scored", "loss_parameters": {"pairs": "all"}},
        {"dataset": "scored", "loss": "kto", "loss_parameters": {"baseline": 0.1}},
    ],
    ids=["mix", "no reference", "scored", "single answers"],
)
def test_other_losses_run(
    made: SimpleNamespace, tmp_path: Path, others: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if others.get("dataset") == "scored":
        others = {**others, "dataset": made.urls["scored", "concat"]}
    result = train(**settings(made, tmp_path, max_steps=3, **others))
    assert result.step == 3
    assert math.isfinite(result.metrics["loss"])
    unused = f"the loss has no reference; not used: {others.get('reference_model')}"
    assert (unused in caplog.text) == (others.get("loss") == "simpo")


def test_lora_starts_at_its_reference(made: SimpleNamespace, tmp_path: Path) -> None:
    """The adapter switched off is the reference."""
    given = {"lora": {"rank": 4}, "learning_rate": 1e-2, "warmup": 0}
    given |= {"gradient_checkpointing": True}
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


def test_an_adapter_is_trained_further_against_itself(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    """As it was is the reference, under the name `ref`."""
    given = {"dataset": made.urls["sft", "concat"], "loss": "sft", "lora": {"rank": 4}}
    first = train(**settings(made, tmp_path / "sft", **given, learning_rate=1e-2, max_steps=3))
    dpo = settings(made, tmp_path / "dpo", model=str(first.model), learning_rate=1e-2, warmup=0)
    train(**dpo)
    found = losses(tmp_path / "dpo")
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    assert min(found) < 0.69


def test_what_a_run_leaves(made: SimpleNamespace, tmp_path: Path) -> None:
    given = {"validation": made.urls["large", "concat"], "save_every": 1, "eval_every": 1}
    result = train(**settings(made, tmp_path, **given))
    kept = checkpoints(tmp_path)
    evals = {x["step"]: x["eval/loss"] for x in records(tmp_path, "eval/loss")}
    best = min(evals, key=lambda step: evals[step])
    expected = {best, result.step - 1, result.step}
    assert {state_of(path)["step"] for path in kept} == expected
    card = (result.model / "README.md").read_text(encoding="utf-8")
    fingerprint = open_dataset(made.urls["mixed", "concat"]).manifest.fingerprint
    for said in (fingerprint, 'loss: "dpo"', "eval/rewards/accuracies", "learning_rate: 0.001"):
        assert said in card
    front = ModelCard(card).data
    assert (front.base_model, front.tags) == (made.model, ["packstore"])
    config = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert "packstore" not in json.dumps(config)
    names = {"pairs_per_second", "tokens_per_second", "fill", "data_wait", "learning_rate"}
    assert names <= set(records(tmp_path)[0])
    assert not [p for p in tmp_path.rglob("*") if "partial" in p.name]
    assert train(**settings(made, tmp_path, **given)).step == result.step
    with pytest.raises(ConfigError, match=r"output .*: it must be new; found step-"):
        train(**settings(made, tmp_path, resume="never", **given))
    with pytest.raises(ConfigError, match=r"must keep its model and loss; found loss was 'dpo'"):
        train(**settings(made, tmp_path, loss="ipo", **given))
    with pytest.raises(ConfigError, match=r"must have no later checkpoints; found step-"):
        train(**settings(made, tmp_path, resume=str(kept[0]), **given))
    assert train(**settings(made, tmp_path, epochs=2, **given)).step == 2 * result.step


def test_trackers_are_told_every_record(
    made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Accelerate calls them."""
    from accelerate import Accelerator, tracking

    said: list[Any] = []

    class Told(tracking.GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory = "wandb", False
        tracker = None

        def __init__(self, run_name: str, **_: Any) -> None:
            said.append(run_name)

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            said.append(values["learning_rate"])

        def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
            said.append({"step": step, **values})

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Told)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda *_: ["wandb"])
    monkeypatch.setenv("WANDB_PROJECT", "some-project")
    monkeypatch.setattr(Accelerator, "end_training", lambda self: None)
    train(**settings(made, tmp_path, max_steps=2, trackers=["wandb"]))
    assert said == ["some-project", "0.001", *records(tmp_path, "step")]


@pytest.mark.parametrize(
    ("others", "kind", "message"),
    [
        ({"model": "./nowhere"}, ConfigError, r"model ./nowhere: .*found no such folder"),
        ({"loss": "dpoo"}, ConfigError, r"unknown loss 'dpoo'.*Did you mean 'dpo'"),
        ({"loss_parameters": {"bta": 1.0}}, ConfigError, r"no parameter 'bta'; it takes: beta"),
        ({"dataset": "./nowhere"}, DatasetNotFoundError, r"nowhere"),
        ({"dataset": "sft"}, CompatibilityError, r"responses to compare; found kind 'sft'"),
        ({"loss_parameters": {"gradients": "sum"}}, ConfigError, r"loss_parameters: gradients"),
        ({"lora": {"rank": 2, "targets": ["nope"]}}, ConfigError, r"modules named nope"),
        pytest.param(
            {"trackers": ("wandb",)},
            MissingExtraError,
            r"needs the package 'wandb'.*pip install wandb",
            marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is there"),
        ),
        ({"trackers": ("mlfow",)}, UnknownNameError, r"tracker 'mlfow'; choose from: .*mlflow"),
    ],
)
def test_errors_are_sentences(
    made: SimpleNamespace, tmp_path: Path, others: dict[str, Any], kind: type, message: str
) -> None:
    if others.get("dataset") == "sft":
        others = {"dataset": made.urls["sft", "concat"]}
    with pytest.raises(kind, match=message):
        train(**settings(made, tmp_path, **others))
