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

from huggingface_hub import ModelCard
from train_runs import checkpoints, losses, records, save_gpt2, state_of
from transformers import AutoModelForCausalLM

from packstore import open as open_dataset
from packstore.cli import main
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
    sft = random_examples(N, seed=4, kind="sft")
    urls["sft"] = str(folder / "sft")
    kit.write(urls["sft"], kit.packed(sft, PACKS["mixed"], "concat"), kind="sft")
    ranked = random_examples(N, seed=5, kind="ranked")
    urls["ranked"] = str(folder / "ranked")
    kit.write(urls["ranked"], kit.packed(ranked, PACKS["mixed"], "concat"), kind="ranked")
    model = save_gpt2(folder / "model")
    return SimpleNamespace(
        folder=folder, model=model, examples=examples, sft=sft, urls=urls, write=kit.write
    )


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


def sequence_logps(model: Any, examples: Examples, example: int) -> list[Tensor]:
    """Log-probs of the sequences of an example, each alone through transformers' own attention."""
    first, last = examples.example_offsets[example : example + 2]
    found = []
    for s in range(first, last):
        part = slice(*examples.sequence_offsets[s : s + 2])
        ids = torch.from_numpy(examples.input_ids[part].astype(np.int64))
        on = torch.from_numpy(examples.supervised[part].copy())[1:]
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logps.gather(1, ids[1:, None])[:, 0][on].sum())
    return found


def plain_loop(made: SimpleNamespace, steps: list[list[int]], warmup: int) -> Iterator[float]:
    """DPO (Rafailov et al., 2023, equation 7), one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(made.model, attn_implementation="eager")
    model = model.double().train()
    ref = plain_reference(made)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for number, ids in enumerate(steps):
        losses = []
        for example in ids:
            chosen, rejected = sequence_logps(model, made.examples, example)
            margin = chosen - rejected - (ref[example][0] - ref[example][1])
            losses.append(-logsigmoid(BETA * margin))
        loss = torch.stack(losses).mean()
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


@torch.no_grad()
def plain_reference(made: SimpleNamespace) -> dict[int, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(made.model, attn_implementation="eager").double()
    model.eval()
    every = range(made.examples.num_examples)
    return {i: [float(x) for x in sequence_logps(model, made.examples, i)] for i in every}


@pytest.mark.parametrize(
    ("packs", "layout", "others"),
    [
        pytest.param("single", "concat", {"packs_per_batch": 3}, marks=pytest.mark.slow),
        ("mixed", "shared_prefix", {"packs_per_batch": 2, "epochs": 2, "warmup": 3}),
        ("large", "concat", {"schedule": "cosine", "warmup": 0.5}),  # of all steps
        pytest.param("mixed", "concat", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_a_plain_loop(
    made: SimpleNamespace, tmp_path: Path, packs: str, layout: str, others: dict[str, Any]
) -> None:
    given = {"warmup": 0, "epochs": 1, **others}
    run = settings(made, tmp_path, dataset=made.urls[packs, layout], **given)
    train(**run)
    steps = steps_of(run)
    warmup = given["warmup"]
    whole = warmup if warmup >= 1 else int(warmup * len(steps))
    expected = list(plain_loop(made, steps, warmup=whole))
    found = losses(tmp_path)
    assert len(found) >= 4
    assert expected[0] == pytest.approx(math.log(2), abs=1e-12)
    assert np.abs(np.subtract(found, expected)).max() < 1e-9
    assert np.ptp(found) > 1e-3


def test_sft_of_a_step_is_a_mean_over_its_tokens(made: SimpleNamespace, tmp_path: Path) -> None:
    """Over all batches of the step, which hold unequal numbers of them."""
    given = {"loss": "sft", "dataset": made.urls["sft"], "schedule": "constant", "warmup": 0}
    run = settings(made, tmp_path, **given)
    train(**run)
    model = AutoModelForCausalLM.from_pretrained(made.model, attn_implementation="eager").double()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0.0)
    examples, found = made.sft, records(tmp_path)
    for ids, record in zip(steps_of(run), found, strict=True):
        logps = torch.stack([sequence_logps(model, examples, i)[0] for i in ids])
        offsets = examples.sequence_offsets
        tokens = sum(int(examples.supervised[offsets[i] + 1 : offsets[i + 1]].sum()) for i in ids)
        loss = -logps.sum() / tokens
        assert abs(float(loss.detach()) - record["loss"]) < 1e-9
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_validation_is_of_every_pair_once(made: SimpleNamespace, tmp_path: Path) -> None:
    """In other packs than the training; equal to the plain mean over all pairs."""
    given = {"validation": made.urls["large", "shared_prefix"], "warmup": 0, "eval_every": 2}
    result = train(**settings(made, tmp_path, **given))
    trained = AutoModelForCausalLM.from_pretrained(result.model, attn_implementation="eager")
    trained, ref = trained.double().eval(), plain_reference(made)
    margins = []
    with torch.no_grad():
        for i in range(N):
            chosen, rejected = sequence_logps(trained, made.examples, i)
            margins.append(float(chosen - rejected) - (ref[i][0] - ref[i][1]))
    losses = -logsigmoid(BETA * torch.tensor(margins, dtype=torch.float64))
    assert result.evaluation["eval/loss"] == pytest.approx(float(losses.mean()), abs=1e-10)
    share = sum(m > 0 for m in margins) / N
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
        {"dataset": "ranked", "loss_parameters": {"pairs": "all"}},
    ],
    ids=["mix", "no reference", "ranked"],
)
def test_other_losses_run(
    made: SimpleNamespace, tmp_path: Path, others: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if others.get("dataset") == "ranked":
        others = {**others, "dataset": made.urls["ranked"]}
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
    """As it was is the reference, under the name `ref`; and it goes on after a checkpoint."""
    given = {"dataset": made.urls["sft"], "loss": "sft", "lora": {"rank": 4}}
    first = train(**settings(made, tmp_path / "sft", **given, learning_rate=1e-2, max_steps=3))
    dpo = settings(made, tmp_path / "dpo", model=str(first.model), learning_rate=1e-2, warmup=0)
    train(**dpo, save_every=2)
    found = losses(tmp_path / "dpo")
    assert found[0] == pytest.approx(math.log(2), abs=1e-12)
    begun = checkpoints(tmp_path / "dpo")[0]
    again = train(**{**dpo, "output": str(tmp_path / "re")}, resume=str(begun))
    assert losses(tmp_path / "re") == found[state_of(begun)["step"] :]
    assert again.step == len(found)


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
        ({"dataset": "sft"}, CompatibilityError, r"compares responses.*found kind 'sft'"),
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
        others = {"dataset": made.urls["sft"]}
    with pytest.raises(kind, match=message):
        train(**settings(made, tmp_path, **others))


def test_command_line(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(
        f"model: {made.model}\ndataset: {made.urls['mixed', 'concat']}\nlearning_rate: 1e-4\n"
        f"output: {tmp_path / 'run'}\nexamples_per_step: 8\nmax_steps: 2\nloss: ipo\n"
    )
    assert main(["train", str(file), "--loss", "dpo", "--loss-parameter", "beta=0.3"]) == 0
    assert "rewards/accuracies" in capsys.readouterr().out
    config = state_of(checkpoints(tmp_path / "run")[-1])["config"]
    assert config["loss"] == "dpo"
    assert config["loss_parameters"] == {"beta": 0.3}
    assert config["learning_rate"] == 1e-4
    assert main(["train", str(file), "--model", "./nowhere", "--output", str(tmp_path / "x")]) == 1
    assert (
        "packstore: error: model ./nowhere: it must be a folder or hub name"
        in capsys.readouterr().err
    )
