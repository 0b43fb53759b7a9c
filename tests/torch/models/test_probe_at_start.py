"""Commands that run a model probe it first, and stop where packing would show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packstore.cli import main
from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import use_packed_attention
from packstore.torch.attention import ATTENTION
from packstore.torch.models.probe import probe_model
from packstore.torch.training.train import train

pytest.importorskip("accelerate", reason="training needs accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def leaking(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """A leak of one token over each border."""
    output = ATTENTION.load("reference")(q, k, v, layout, settings)
    return output + 0.2 * torch.nn.functional.pad(output, (0, 0, 0, 0, 1, -1))


@pytest.fixture
def made(kit: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    kit.tiny_family("llama", torch.float32).save_pretrained(tmp_path / "model")
    url = str(tmp_path / "data")
    kit.write(url, kit.packed(random_examples(4, seed=0), [2, 2], "concat"))
    return SimpleNamespace(model=str(tmp_path / "model"), url=url, out=str(tmp_path / "out"))


def test_train(made: SimpleNamespace, new_backend: Callable[[Any], str]) -> None:
    settings = {
        "model": made.model,
        "dataset": made.url,
        "output": made.out,
        "examples_per_step": 4,
    }
    settings |= {"attention": new_backend(leaking), "loss": "simpo"}
    with pytest.raises(BackendError, match="a sequence must have the logits"):
        train(**settings)


@pytest.mark.parametrize("command", ["ref-logps", "evaluate"])
def test_commands(
    made: SimpleNamespace,
    new_backend: Callable[[Any], str],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    where = {"ref-logps": [made.out], "evaluate": ["--loss", "simpo"]}[command]
    model = ["--model", made.model, "--attention", new_backend(leaking), "--device", "cpu"]
    assert main([command, made.url, *where, *model]) == 1
    assert "a sequence must have the logits" in " ".join(capsys.readouterr().err.split())
    assert main([command, made.url, *where, *model, "--no-probe"]) == 0


def test_what_the_probe_cannot_tell_is_logged(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention that hardly matters, in coarse numbers: a run may begin."""
    model = use_packed_attention(kit.tiny_model(dtype=torch.bfloat16))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0
    with caplog.at_level("INFO", "packstore"):
        probe_model(model)
    assert "the probe gave no result: " in caplog.text
    with caplog.at_level("INFO", "packstore"):
        probe_model(use_packed_attention(kit.tiny_model(dtype=torch.float32)))
    assert "probe: packed and unpacked logits differ by" in caplog.text
