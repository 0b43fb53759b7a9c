"""Mistakes of people who train: each is a sentence, and none gives a model without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="training needs accelerate")

from safetensors.torch import load_file

from packstore.config.training import TrainConfig
from packstore.errors import (
    ConfigError,
    DivergedError,
    FormatError,
    StorageError,
)
from packstore.torch import train
from packstore.torch.training import checkpoint as checkpoint_module
from packstore.torch.training.checkpoint import checkpoints
from packstore.torch.training.sinks import JsonLines

pytestmark = [  # PEFT's, with transformers 5.23
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

MUST = {"model": "m", "dataset": "d", "output": "o"}


@pytest.fixture(scope="module")
def made(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a short run."""
    return kit.short_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_run_that_diverges_ends_with_an_error(
    made: dict[str, Any], tmp_path: Path, clip: float
) -> None:
    """Else it would leave a model of NaN behind, and exit code 0."""
    settings = {**made, "output": str(tmp_path / "out"), "learning_rate": 1e30, "warmup": 0}
    settings |= {"epochs": 3, "save_every": 1, "max_grad_norm": clip}
    with pytest.raises(DivergedError, match=r"step \d: loss and gradient must be finite; found"):
        train(**settings)
    assert not (tmp_path / "out" / "model").exists()
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] is None or last.get("grad_norm", 0) is None
    for folder in checkpoints(tmp_path / "out" / "checkpoints"):
        weights = load_file(folder / "model" / "model.safetensors")
        assert all(w.isfinite().all() for w in weights.values())


@pytest.mark.parametrize("name", ["output", "model", "dataset", "ref_logps"])
def test_an_empty_text_is_no_setting(name: str) -> None:
    """An empty output would be the folder that the command runs in."""
    with pytest.raises(ConfigError, match=f"setting {name} must not be empty"):
        TrainConfig(**{**MUST, name: ""})


def test_a_seed_of_any_sign_and_size(made: dict[str, Any], tmp_path: Path) -> None:
    for number, seed in enumerate((-1, 2**63 - 1)):
        train(**made, seed=seed, max_steps=1, output=str(tmp_path / str(number)))


def test_the_output_must_be_a_folder_of_its_own(made: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the output must be a folder"):
        train(**made, max_steps=1, output=str(tmp_path / "file"))
    shutil.copytree(made["model"], tmp_path / "mine" / "model")
    with pytest.raises(ConfigError, match="it must hold no model without checkpoints; found model"):
        train(**made, max_steps=1, output=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "model" / "config.json").exists()


def test_what_is_resumed_must_be_there_and_whole(made: dict[str, Any], tmp_path: Path) -> None:
    settings = {**made, "output": str(tmp_path / "out")}
    train(**settings, max_steps=1)
    with pytest.raises(FormatError, match="checkpoint nowhere: it must be a checkpoint"):
        train(**settings, max_steps=2, resume="nowhere")
    newest = checkpoints(tmp_path / "out" / "checkpoints")[-1]
    file = newest / "optimizer.safetensors"
    whole = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(whole[:100])):
        damage()
        with pytest.raises(FormatError, match="must hold the optimizer's state"):
            train(**settings, max_steps=2)
    file.write_bytes(whole)
    assert train(**settings, max_steps=2).step == 2


def test_lines_that_are_no_records_end_the_kept_ones(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for line in ("{", "[1]", '{"a": 1}', '{"step": null}', "3"):
        file.write_text(f'{{"step": 1}}\n{line}\n')
        JsonLines(file, 5).close()
        assert file.read_text() == '{"step": 1}\n'


def test_a_full_disk_leaves_the_checkpoints_before(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**made, "output": str(tmp_path / "out"), "save_every": 1}
    train(**settings, max_steps=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", full)
        with pytest.raises(StorageError, match=r"it must be possible to write it; found .* space"):
            train(**settings, max_steps=2)
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000001"]
    assert train(**settings, max_steps=2).step == 2
