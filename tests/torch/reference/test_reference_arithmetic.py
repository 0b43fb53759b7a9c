"""Reference log-probs come from the arithmetic of the training, or are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from places import edit_manifest, manifest_path
from train_runs import records

from packstore.cli import main
from packstore.errors import CompatibilityError
from packstore.torch import (
    open_side,
    train,
)
from packstore.torch.attention import flash
from packstore.torch.reference import choose_precision, log_choice


@pytest.fixture(autouse=True)
def _accelerate() -> Iterator[None]:
    """Accelerate keeps its precision as long as the process lives."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Settings of one step of a float32 model under bf16 autocast, without a reference
    yet.
    """
    run = kit.short_run(tmp_path_factory.mktemp("arithmetic"), "shared_prefix")
    return {**run, "bf16": True, "max_steps": 1, "logging_steps": 1}


def precompute(made: dict[str, Any], side: Path, *flags: str) -> str:
    """`packstore ref-logps` of the model of the run."""
    command = ["ref-logps", made["train_dataset"], str(side), "--model", made["model"]]
    assert main([*command, "--use-cpu", *flags]) == 0
    return str(side)


def first_record(output: Path) -> dict[str, float]:
    return records(output)[0]


@pytest.mark.parametrize(
    ("flags", "name", "remedy"),
    [
        ("", "autocast_dtype", "--mixed-precision bf16"),
        pytest.param(
            "--dtype bfloat16",
            "weight_dtype",
            "--dtype float32",
            marks=pytest.mark.slow,
        ),
        (
            "--mixed-precision bf16 --attention reference",
            "attention",
            "--attention sdpa",
        ),
        ("--mixed-precision bf16 --compile layers", "compile", "--compile none"),
    ],
)
def test_other_arithmetic_is_refused(
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    name: str,
    remedy: str,
) -> None:

    def compile_it(layer: Any, **_: Any) -> None:  # a compiler would take long
        layer._compiled_call_impl = layer._call_impl

    monkeypatch.setattr(torch.nn.Module, "compile", compile_it)
    side = precompute(made, tmp_path / "ref", *flags.split())
    with pytest.raises(CompatibilityError, match=f"{name}.*{remedy}"):
        train(**made, ref_logps=side, output_dir=str(tmp_path / "refused"))
    if name == "compile":
        train(
            **made, ref_logps=side, compile="layers", output_dir=str(tmp_path / "taken")
        )


def test_a_side_dataset_that_does_not_say_is_refused(
    made: dict[str, Any], tmp_path: Path
) -> None:
    side = precompute(made, tmp_path / "ref", "--mixed-precision", "bf16")
    path = manifest_path(1, "side")
    edit_manifest(side, lambda m: m["provenance"].pop("autocast_dtype"), path)
    with pytest.raises(CompatibilityError, match="autocast_dtype"):
        train(**made, ref_logps=side, output_dir=str(tmp_path / "refused"))


def test_evaluation_computes_as_the_reference_did_or_says_so(
    made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    side = precompute(made, tmp_path / "ref", "--mixed-precision", "bf16")
    command = [
        "evaluate",
        made["train_dataset"],
        "--model",
        made["model"],
        "--ref-logps",
        side,
    ]
    command += ["--use-cpu", "--json"]
    capsys.readouterr()
    with caplog.at_level(logging.WARNING, logger="packstore"):
        assert main([*command, "--mixed-precision", "bf16"]) == 0
        same = json.loads(capsys.readouterr().out)["metrics"]
        assert same["rewards/margins"] == same["rewards/chosen"] == 0.0
        assert "was made with" not in caplog.text
        assert main(command) == 0
    other = json.loads(capsys.readouterr().out)["metrics"]
    assert other["rewards/chosen"] != 0.0
    assert "was made with autocast_dtype bfloat16" in caplog.text
    online = [*command[:4], "--reference-model", made["model"], *command[6:]]
    assert main([*online, "--mixed-precision", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == same


@pytest.mark.slow
def test_a_run_that_goes_on_in_other_arithmetic_says_so(
    made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = precompute(made, tmp_path / "ref", "--mixed-precision", "bf16")
    settings = {**made, "ref_logps": side, "output_dir": str(tmp_path / "out")}
    assert train(**settings).step == 1
    settings |= {"max_steps": 2, "attention": "reference"}
    with caplog.at_level(logging.WARNING, logger="packstore"):
        assert train(**settings).step == 2
    assert "was made with attention sdpa" in caplog.text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU of compute capability 9, as far as the choice of precision
    asks.
    """
    for memory in (flash.capability, log_choice):
        memory.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield monkeypatch
    for memory in (flash.capability, log_choice):
        memory.cache_clear()


def test_auto_is_bf16_where_kernels_want_it(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    caplog.set_level(logging.INFO, logger="packstore")
    for device, weights in (
        (cpu, torch.float32),
        (cuda, torch.bfloat16),
        (cuda, torch.float64),
    ):
        assert choose_precision("auto", device, weights) == "none"
        assert choose_precision("none", device, weights) == "none"
        assert choose_precision("bf16", device, weights) == "bf16"
    with gpu.context() as around:
        around.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert choose_precision("auto", cuda, torch.float32) == "none"
    assert not caplog.records
    for asked, chosen in (("auto", "bf16"), ("bf16", "bf16"), ("none", "none")) * 2:
        assert choose_precision(asked, cuda, torch.float32) == chosen  # type: ignore[arg-type]
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]  # once
    assert "mixed_precision 'auto' is 'bf16'" in caplog.text
    flash.capability.cache_clear()
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert choose_precision("auto", cuda, torch.float32) == "none"
    assert len(caplog.records) == 2


def test_training_reference_and_evaluation_choose_alike(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """By default, on a device whose choice is bf16: margins begin at exactly 0."""
    monkeypatch.setattr(flash, "runs_on", lambda device: True)  # no GPU here
    side = precompute(made, tmp_path / "ref", "--attention", "sdpa")
    provenance = open_side(side).manifest.provenance
    assert provenance["autocast_dtype"] == "bfloat16"
    default = {name: value for name, value in made.items() if name != "bf16"}
    default |= {"attention": "sdpa", "ref_logps": side}
    train(**default, output_dir=str(tmp_path / "run"))
    first = first_record(tmp_path / "run")
    assert first["rewards/margins"] == first["rewards/chosen"] == 0.0
    capsys.readouterr()
    command = [
        "evaluate",
        made["train_dataset"],
        "--model",
        made["model"],
        "--ref-logps",
        side,
    ]
    assert main([*command, "--attention", "sdpa", "--use-cpu", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["rewards/margins"] == metrics["rewards/chosen"] == 0.0
    AcceleratorState._reset_state(True)
    with pytest.raises(CompatibilityError, match="autocast_dtype"):
        train(**default | {"bf16": False}, output_dir=str(tmp_path / "no"))


@pytest.mark.slow
def test_a_resumed_run_keeps_its_precision(
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    default = {name: value for name, value in made.items() if name != "bf16"}
    default |= {"output_dir": str(tmp_path), "num_train_epochs": 2, "attention": "sdpa"}
    train(**default)
    monkeypatch.setattr(flash, "runs_on", lambda device: True)  # no GPU here
    AcceleratorState._reset_state(True)
    with caplog.at_level(logging.WARNING, logger="packstore"):
        train(**default | {"max_steps": 2})
    states = [
        json.loads(p.read_bytes()) for p in tmp_path.glob("checkpoint-*/packstore.json")
    ]
    assert [state["settings"]["mixed_precision"] for state in states] == ["no", "no"]
