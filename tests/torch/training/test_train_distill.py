"""A student is trained on what a teacher's most probable ids were, from files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import launch
from train_runs import arguments_of, checkpoints, losses, records
from transformers import TrainingArguments

import packstore
from packstore import open as open_dataset
from packstore.cli import main
from packstore.errors import CompatibilityError, ConfigError, UnknownNameError
from packstore.testing import random_examples
from packstore.torch import (
    DistillLoss,
    PackedDataLoader,
    PackedDataset,
    PackedTrainer,
    PolicyLoss,
    SideWriter,
    TopK,
    evaluate,
    packed_top_k,
    train,
    use_packed_attention,
    write_ref_logps,
)
from packstore.torch.models.load import load_model

K = 8


@torch.no_grad()
def write_teacher(model: Any, data: str, url: str, shift: int = 0) -> str:
    """Writes the `K` most probable ids of each token, each id raised by `shift`."""
    dataset = open_dataset(data)
    with SideWriter(url, dataset, {"ref_top_k": f"token<top{K},float16>"}) as writer:
        for batch in PackedDataLoader(PackedDataset(dataset, shuffle=False)):
            ids, logps = packed_top_k(model, batch, K)
            values = {"ref_top_k": TopK(ids.numpy() + shift, logps.numpy())}
            counts = batch.num_targets.numpy()
            writer.write(batch.example_ids.numpy(), values, num_targets=counts)
    return url


@pytest.fixture(scope="module")
def run(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Settings of a run whose files were made elsewhere: data, a teacher's side data of
    it and of held-out data, and a smaller student.
    """
    made, here = (tmp_path_factory.mktemp(name) for name in ("made", "here"))
    teacher = use_packed_attention(
        kit.tiny_model("qwen3", torch.float32, hidden_size=48, num_hidden_layers=3)
    )
    for name, number in (("data", 40), ("held", 12)):
        examples = random_examples(number, seed=number, kind="sft")
        packs = kit.packed(examples, [4] * (number // 4), "concat")
        kit.write(str(made / name), packs, kind="sft")
        write_teacher(teacher, str(made / name), str(made / f"{name}-teacher"))
    kit.tiny_model("llama", torch.float32).save_pretrained(made / "student")
    shutil.copytree(made, here, dirs_exist_ok=True)
    shutil.rmtree(made)
    return {
        "model": str(here / "student"),
        "train_dataset": str(here / "data"),
        "eval_dataset": str(here / "held"),
        "loss": "distill",
        "side": (str(here / "data-teacher"),),
        "eval_side": (str(here / "held-teacher"),),
        "examples_per_step": 8,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "use_cpu": True,
    }


def other_teacher(run: dict[str, Any], folder: Path) -> str:
    """Side data of the student itself."""
    model = load_model(run["model"])
    url = str(folder / "other-teacher")
    write_ref_logps(model, open_dataset(run["train_dataset"]), url, top_k=K)
    return url


def test_a_student_comes_closer_to_its_teacher_and_resumes_to_the_bit(
    run: dict[str, Any], tmp_path: Path
) -> None:
    result = train(
        **run,
        output_dir=str(tmp_path / "a"),
        eval_steps=4,
        save_steps=4,
        save_total_limit=9,
    )
    assert losses(tmp_path / "a")[-1] < 0.8 * losses(tmp_path / "a")[0]
    kl = [record["eval_kl"] for record in records(tmp_path / "a", "eval_kl")]
    first = records(tmp_path / "a")[0]
    assert kl[-1] < kl[0]
    assert 0 < first["agreement"] < 1
    assert 0 < first["student_mass"] < 1
    assert 0.3 < first["teacher_mass"] < 1

    begun = checkpoints(tmp_path / "a")[0]
    train(
        **run,
        output_dir=str(tmp_path / "b"),
        eval_steps=4,
        save_steps=4,
        resume_from_checkpoint=str(begun),
    )
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    weights = [tmp_path / name / "model.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    with pytest.raises(ConfigError, match="keep its loss"):
        train(
            **run,
            output_dir=str(tmp_path / "c"),
            loss_parameters={"direction": "reverse"},
            resume_from_checkpoint=str(begun),
        )
    with pytest.raises(ConfigError, match="keep its side data"):
        train(
            **{**run, "side": other_teacher(run, tmp_path)},
            output_dir=str(tmp_path / "c"),
            resume_from_checkpoint=str(begun),
        )

    model = load_model(result.model)
    figures = evaluate(
        model,
        open_dataset(run["eval_dataset"]),
        loss="distill",
        side=run["eval_side"],
        by="file",
        rows=True,
    )
    metrics = figures["metrics"]
    assert metrics["loss"] == pytest.approx(kl[-1], rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl[-1], rel=1e-5)
    assert "perplexity" not in metrics
    rows = figures["rows"]
    assert len(rows) == 12
    assert set(rows.column_names) == {"example_id", "loss"}
    assert all(loss > 0 for loss in rows["loss"].to_pylist())


def test_side_data_may_be_a_folder_of_values(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    """The log-probs of rollouts that were packed with them: all -1 here."""
    records_of_rollouts = [
        {"prompt": [1, 2], "response": [3 + i, 4], "logps": [-1.0, -1.0]}
        for i in range(8)
    ]
    data = str(tmp_path / "data")
    packstore.pack(
        records_of_rollouts,
        data,
        pack_size=16,
        token_values={"old_logps": "logps"},
    )
    ratios = []
    for side in ((), f"{data}-values"):
        args = TrainingArguments(
            **arguments_of(tmp_path / "run", max_steps=1, save_strategy="no")
        )
        model = kit.tiny_model("llama", torch.float32)
        trainer = PackedTrainer(
            model, args, data, loss=PolicyLoss(), side=side, examples_per_step=8
        )
        trainer.train()
        ratios.append(trainer.state.log_history[0]["ratio"])
    assert ratios[0] == 1
    assert abs(ratios[1] - 1) > 0.1
    with pytest.raises(ConfigError, match="PackedDataset"):
        PackedTrainer(
            model, args, PackedDataset(data), loss=PolicyLoss(), side=f"{data}-values"
        )


def on_rank(settings: dict[str, Any]) -> None:
    train(**settings)


@pytest.mark.slow
def test_two_ranks_equal_one(run: dict[str, Any], tmp_path: Path) -> None:
    run = {**run, "dtype": "float64", "max_steps": 4, "loss_parameters": {}}
    run["loss_parameters"]["average"] = "sequence"
    train(**run, output_dir=str(tmp_path / "one"))
    launch(__file__, {**run, "output_dir": str(tmp_path / "two")}, 2, tmp_path)
    gaps = np.subtract(losses(tmp_path / "one"), losses(tmp_path / "two"))
    assert np.abs(gaps).max() < 1e-6
    one, two = (
        records(tmp_path / name, "eval_loss")[-1]["eval_kl"] for name in ("one", "two")
    )
    assert abs(one - two) < 1e-6


@pytest.mark.slow
def test_the_command_line_takes_the_same_settings(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**run, "output_dir": str(tmp_path / "api"), "max_steps": 2}
    settings["loss_parameters"] = {"direction": "reverse", "rest": "renormalize"}
    train(**settings)
    flags = []
    for name, value in {**run, "output_dir": str(tmp_path / "cli")}.items():
        text = value[0] if isinstance(value, tuple) else str(value).lower()
        text = value if isinstance(value, str) else text
        flags += [f"--{name.replace('_', '-')}", text]
    flags += ["--max-steps", "2", "--loss-parameter", "direction=reverse"]
    flags += ["--loss-parameter", "rest=renormalize"]
    assert main(["train", *flags]) == 0
    assert losses(tmp_path / "cli") == losses(tmp_path / "api")

    capsys.readouterr()
    flags = ["--model", str(tmp_path / "cli"), "--loss", "distill", "--use-cpu"]
    flags += ["--side", run["eval_side"][0], "--loss-parameter", "direction=reverse"]
    assert main(["evaluate", run["eval_dataset"], *flags, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert 0 < metrics["kl"] < math.inf


def test_eight_bits_are_too_coarse_for_the_rest_in_reverse(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for dtype, rest, number in (
        ("uint8", "outcome", 1),
        ("uint8", "renormalize", 0),
        ("float16", "outcome", 0),
    ):
        caplog.clear()
        loss_fn = DistillLoss(direction="reverse", rest=rest)  # type: ignore[arg-type]
        loss_fn.check_side({"ref_top_k": f"token<top16,{dtype}>"}, "data")
        assert caplog.text.count("rest='renormalize'") == number
    DistillLoss().check_side({"ref_top_k": "token<top16,uint8>"}, "data")
    assert not caplog.text


def test_mistakes_end_before_the_first_step(
    run: dict[str, Any], kit: SimpleNamespace, tmp_path: Path
) -> None:
    run = {**run, "output_dir": str(tmp_path), "max_steps": 1}
    with pytest.raises(ConfigError, match=r"token<topK,…>.*none.*--top-k 16"):
        train(**{**run, "side": ()})
    with pytest.raises(ConfigError, match=r"'other'.*ref_top_k: token<top8,float16>"):
        train(**run, loss_parameters={"column": "other"})
    with pytest.raises(ConfigError, match=r"'ref_top_k'.*none.*held"):
        train(**{**run, "eval_side": ()})
    with pytest.raises(UnknownNameError, match="'direction'"):
        train(**run, loss_parameters={"directoin": "reverse"})
    with pytest.raises(UnknownNameError, match="Did you mean 'distill'"):
        train(**{**run, "loss": "distil"})
    with pytest.raises(UnknownNameError, match="DistillLoss"):
        train(**{**run, "loss": {"distill": 0.5, "sft": 0.5}})
    with pytest.raises(ConfigError, match="eval_side"):
        train(**{**run, "eval_dataset": None})

    teacher = use_packed_attention(kit.tiny_model("qwen3", torch.float32))
    far = write_teacher(teacher, run["train_dataset"], str(tmp_path / "far"), 90)
    with pytest.raises(CompatibilityError, match=r"'ref_top_k'.*below 50"):
        train(**{**run, "side": far})
    with pytest.raises(ConfigError, match=r"'ref_top_k'"):
        evaluate(
            load_model(run["model"]),
            open_dataset(run["eval_dataset"]),
            loss=DistillLoss(),
        )
