"""Models and adapters are loaded whole, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import run_python
from hub import folder_files, served
from safetensors.torch import load_file, save_file

from packstore.errors import ConfigError
from packstore.torch import train
from packstore.torch.models import load_model

pytestmark = [  # PEFT's, with transformers 5.23
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Settings of a short run."""
    return kit.short_run(tmp_path_factory.mktemp("run"))


def changed_copy(
    made: dict[str, Any], folder: Path, config: dict[str, Any], drop: str
) -> str:
    """The model with other values in its config, and without the weights named
    `drop`.
    """
    shutil.copytree(made["model"], folder)
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**told, **config}), encoding="utf-8"
    )
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: tensor for name, tensor in weights.items() if not drop or drop not in name
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("config", "drop", "named"),
    [
        ({}, "layers.1.mlp.up_proj", "layers.1.mlp.up_proj.weight"),
        ({"num_hidden_layers": 3}, "", "layers.2."),
        ({"tie_word_embeddings": False}, "lm_head", "lm_head.weight"),
        ({"intermediate_size": 56}, "", "model.layers.0."),
    ],
    ids=["a weight is gone", "more layers than weights", "no head", "another shape"],
)
def test_weights_that_are_missing_are_not_drawn_at_random(
    made: dict[str, Any], tmp_path: Path, config: dict[str, Any], drop: str, named: str
) -> None:
    folder = changed_copy(made, tmp_path / "model", config, drop)
    with pytest.raises(ConfigError, match=named):
        load_model(folder)


def test_weights_that_the_model_does_not_have_are_named(
    made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = (
        ({}, ""),
        ({"tie_word_embeddings": True}, "lm_head"),
        ({"num_hidden_layers": 1}, ""),
    )
    for number, (config, drop) in enumerate(changes):
        assert "weights" not in caplog.text
        folder = changed_copy(made, tmp_path / f"model{number}", config, drop)
        load_model(folder)
    assert "9 of the weights" in caplog.text


def test_an_adapter_without_all_of_its_weights(
    made: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT begins those that are missing anew, so that a part of the adapter does
    nothing.
    """
    how = {"peft_config": {"r": 2}, "max_steps": 1, "output_dir": str(tmp_path / "out")}
    folder = train(**made, **how).model
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({n: w for n, w in weights.items() if "layers.1.mlp" not in n}, file)
    with pytest.raises(ConfigError, match="adapter"):
        load_model(folder)


LOAD = """
import sys
from packstore.torch.models.load import load_model
for name in sys.argv[1:]:
    load_model(name)
"""


LOAD_BY_TRL = """
from trl import DPOConfig
from packstore.torch import PackedDPOTrainer
PackedDPOTrainer("me/modle", args=DPOConfig("dpo", use_cpu=True, bf16=False))
"""


@pytest.mark.slow
def test_a_hub_out_of_reach_is_not_waited_for(
    made: dict[str, Any], tmp_path: Path
) -> None:
    """What was loaded before is loaded again; of anything else the error says what to
    do.
    """
    cache = {"HF_HOME": str(tmp_path)}
    with served({"models/me/model": folder_files(Path(made["model"]))}) as (env, _):
        done = run_python("-c", LOAD, "me/model", env=env | cache)
        assert done.returncode == 0, done.stderr
        done = run_python("-c", LOAD, "me/modle", env=env | cache)
        assert "no connection" not in done.stderr.splitlines()[-1]
    done = run_python("-c", LOAD, "me/model", "me/modle", env=env | cache)
    assert "Retrying" not in done.stderr
    *_, line = done.stderr.splitlines()
    assert "model me/modle" in line
    assert env["HF_ENDPOINT"] in line
    assert "hf download me/modle" in line

    (weights,) = tmp_path.rglob("model.safetensors")
    weights.resolve().write_bytes(b"not weights")
    done = run_python("-c", LOAD, "me/model", env=env | cache)
    *_, line = done.stderr.splitlines()
    assert "model me/model" in line
    assert "no connection" not in line

    done = run_python("-c", LOAD_BY_TRL, env=env | cache)
    assert "Retrying" not in done.stderr
    assert "me/modle" in done.stderr.splitlines()[-1]
