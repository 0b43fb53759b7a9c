"""Settings of a run, and mistakes: each is a sentence, and none gives a model without a word."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("yaml", reason="config files need PyYAML")

import yaml
from safetensors.torch import load_file
from train_runs import change_state, checkpoints, losses, records, state_of

from packstore.cli import main
from packstore.errors import ConfigError, DivergedError, FormatError, StorageError
from packstore.torch import train

MUST = {"model": "m", "dataset": "d", "output": "o"}


@pytest.fixture(scope="module")
def made(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a short run."""
    return kit.short_run(tmp_path_factory.mktemp("run"))


def test_settings_are_recorded_and_read_again(
    made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From flags to the checkpoint, from there as YAML or JSON: the same run, which has ended."""
    flags = ["--lora", "rank=4", "--lora", "targets=q_proj,v_proj", "--learning-rate", "3e-7"]
    flags += ["--loss-parameter", "sft_weight=0.1", "--loss-parameter", "beta=0.3"]
    flags += ["--gradient-checkpointing", "--max-steps", "1", "--output", str(tmp_path / "run")]
    for name in ("model", "dataset", "examples_per_step"):
        flags += [f"--{name.replace('_', '-')}", str(made[name])]
    assert main(["train", *flags]) == 0
    (checkpoint,) = checkpoints(tmp_path / "run")
    config = state_of(checkpoint)["config"]
    expected = {
        "learning_rate": 3e-7,
        "lora": {"rank": 4, "targets": "q_proj,v_proj"},
        "loss_parameters": {"sft_weight": 0.1, "beta": 0.3},
        "gradient_checkpointing": True,
        "max_steps": 1,
    }
    assert {name: config[name] for name in expected} == expected
    assert len(config) <= 32
    for dump in (json.dumps, yaml.safe_dump):
        (tmp_path / "again.yaml").write_text(dump(config), encoding="utf-8")
        assert main(["train", str(tmp_path / "again.yaml")]) == 0
    assert "since the checkpoint" not in caplog.text
    assert len(records(tmp_path / "run", "step")) == 1


@pytest.mark.parametrize(
    ("name", "loss"), [("dpo", "dpo"), ("sft", "sft"), ("reward", "bradley_terry")]
)
def test_examples_of_configs_run(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, loss: str
) -> None:
    """Those that `packstore train --example` prints, from the installed package."""
    assert main(["train", "--example", name]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    flags = ["--model", made["model"], "--output", str(tmp_path / "run"), "--max-steps", "1"]
    flags += ["--dataset", made["dataset"], "--validation", made["dataset"], "--dtype", "float32"]
    flags += ["--mixed-precision", "none"]  # one for all runs of a process
    assert main(["train", str(tmp_path / "run.yaml"), *flags]) == 0
    assert state_of(checkpoints(tmp_path / "run")[0])["config"]["loss"] == loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, "setting dataset must be given: folder or URL of the packed"),
        ({**MUST, "examples_per_step": 0}, "examples_per_step must be at least 1; found 0"),
        ({**MUST, "epochs": 1.5}, "setting epochs must be a whole number; found 1.5"),
        ({**MUST, "dtype": "fp8"}, "setting dtype must be one of: float32, bfloat16, float64"),
        ({**MUST, "lora": {"alpha": 2}}, "setting lora: rank must be given: size of"),
        (
            {**MUST, "lora": {"rank": 2, "dropout": 1}},
            "setting lora: dropout must be below 1; found 1",
        ),
        ({**MUST, "lora": {"rnk": 2}}, "unknown setting 'rnk'.*mean 'rank'"),
        ({**MUST, "loss": {"dpo": "x"}}, "setting loss must be a string or a mapping"),
        ({**MUST, "eval_every": 5}, "setting eval_every: it needs a validation set"),
        # An empty output would be the folder that the command runs in.
        *(
            ({**MUST, name: ""}, f"setting {name} must not be empty")
            for name in ("output", "model", "dataset", "ref_logps")
        ),
    ],
)
def test_wrong_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**settings)


@pytest.mark.parametrize(("seed", "terminal"), [(-1, False), (2**63 - 1, True)])
def test_lines_on_the_console_with_a_seed_of_any_sign_and_size(
    made: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    terminal: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")  # read by Rich
    monkeypatch.setenv("COLUMNS", "180")
    caplog.set_level(logging.INFO, "packstore")
    given = {"validation": made["dataset"], "max_steps": 2, "log_every": 1, "seed": seed}
    train(**made, **given, output=str(tmp_path))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    expected = [
        r"step 1/2  loss 0\.6931  accuracy \d+\.\d%  margin 0\.000  .*fill \d+\.\d%  data wait",
        r"validation after step 2: loss 0\.\d{4}, accuracy [01]\.\d{4}, margin -?\d\.\d{4}",
    ]
    for line in expected:
        assert bool(re.search(line, caplog.text)) != terminal
        assert bool(re.search(line, shown)) == terminal
    assert ("━" in shown) == terminal  # of the progress bar


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_run_that_diverges_ends_with_an_error(
    made: dict[str, Any], tmp_path: Path, clip: float
) -> None:
    """Else it would leave a model of NaN behind, and exit code 0."""
    settings = {**made, "output": str(tmp_path), "learning_rate": 1e30, "warmup": 0}
    settings |= {"epochs": 3, "save_every": 1, "max_grad_norm": clip}
    with pytest.raises(DivergedError, match=r"step \d: loss and gradient must be finite; found"):
        train(**settings)
    assert not (tmp_path / "model").exists()
    last = records(tmp_path)[-1]
    assert last["loss"] is None or last.get("grad_norm", 0) is None
    for folder in checkpoints(tmp_path):
        weights = load_file(folder / "model" / "model.safetensors")
        assert all(w.isfinite().all() for w in weights.values())


def test_the_output_must_be_a_folder_of_its_own(made: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match="the output must be a folder"):
        train(**made, max_steps=1, output=str(tmp_path / "file"))
    shutil.copytree(made["model"], tmp_path / "mine" / "model")
    with pytest.raises(ConfigError, match="it must hold no model without checkpoints; found model"):
        train(**made, max_steps=1, output=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "model" / "config.json").exists()


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """This process writes no file beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_resumed_must_be_there_and_whole(made: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint that is damaged, that could not be written, or that comes from a GPU."""
    settings = {**made, "output": str(tmp_path), "log_every": 1}
    train(**settings, max_steps=1)
    with pytest.raises(FormatError, match="checkpoint nowhere: it must be a checkpoint"):
        train(**settings, max_steps=2, resume="nowhere")
    (newest,) = checkpoints(tmp_path)
    file = newest / "optimizer.safetensors"
    whole = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(whole[:100])):
        damage()
        with pytest.raises(FormatError, match="must hold the state of every weight"):
            train(**settings, max_steps=2)
    file.write_bytes(whole)
    with small_files(20_000), pytest.raises(StorageError, match="must be possible to write it"):
        train(**settings, max_steps=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    expected = losses(tmp_path)
    assert len(expected) == 2
    # Whether one kernel updates all weights is a matter of the device that goes on.
    groups = [{**group, "fused": True} for group in state_of(newest)["optimizer"]]
    change_state(newest, optimizer=groups)
    # Records that came after the checkpoint, and a line that was cut off, are forgotten.
    for torn in ("", '{"step": 3, "lo', "[1]", '{"a": 1}', '{"step": null}'):
        with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(torn)
        shutil.copytree(tmp_path, other := tmp_path.with_name(f"again{len(torn)}"))
        assert train(**{**settings, "output": str(other)}, max_steps=2).step == 2
        assert losses(other) == expected
        assert [record["step"] for record in records(other, "step")] == [1, 2]
    assert not state_of(checkpoints(other)[-1])["optimizer"][0]["fused"]
