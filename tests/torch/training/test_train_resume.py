"""Runs on one and two ranks, killed between and inside checkpoints: nothing of it can be seen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("peft", reason="LoRA needs peft")

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel

from packstore.cli import main
from packstore.testing import random_examples
from packstore.torch import train
from packstore.torch.training import checkpoint as checkpoint_module
from packstore.torch.training import loop as loop_module
from packstore.torch.training.checkpoint import checkpoints, read_state
from packstore.torch.training.sinks import JsonLines

STEPS = 12
CONFIGURED = {  # answers that `accelerate config` proposes for FSDP
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}

pytestmark = [  # PEFT's, with transformers 5.23 and with GPT-2's Conv1D
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]


@pytest.fixture(scope="module")
def base(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of two epochs, whose steps hold odd numbers of packs."""
    folder = tmp_path_factory.mktemp("resume")
    torch.manual_seed(0)
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    size = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**size, **off, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    GPT2LMHeadModel(config).double().save_pretrained(folder / "model")
    packs = kit.packed(random_examples(60, seed=3), [1, 4, 2, 3, 2] * 5, "shared_prefix")
    kit.write(str(folder / "data"), packs, layout="shared_prefix")
    kit.write(str(folder / "held"), kit.packed(random_examples(9, seed=4), [2, 3, 4], "concat"))
    return {
        "model": str(folder / "model"),
        "dataset": str(folder / "data"),
        "validation": str(folder / "held"),
        "dtype": "float64",
        "examples_per_step": 9,
        "epochs": 3,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "log_every": 1,
        "eval_every": 5,
        "save_every": 3,
    }


@pytest.fixture(scope="module")
def undisturbed(
    base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder of a run on one rank, and what it recorded."""
    output = tmp_path_factory.mktemp("undisturbed")
    train(**base, output=str(output))
    return output, recorded(output)


def recorded(output: Path) -> dict[str, Any]:
    """Values that are equal in every undisturbed run: losses, rates; not times."""
    records = [
        json.loads(x) for x in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    names = ("loss", "rewards/margins", "learning_rate", "grad_norm", "pairs")
    trained = [r for r in records if "loss" in r]
    return {
        "steps": [r["step"] for r in trained],
        "epochs": [r["epoch"] for r in trained],
        "values": np.array([[r[n] for n in names] for r in trained]),
        "validations": [r["step"] for r in records if "eval/loss" in r],
        "eval": np.array([r["eval/loss"] for r in records if "eval/loss" in r]),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("steps", "epochs", "validations"):
        assert found[name] == expected[name]
    assert np.abs(found["values"] - expected["values"]).max() < 1e-9
    assert np.abs(found["eval"] - expected["eval"]).max() < 1e-9


def launch(
    ranks: int, settings: dict[str, Any], kill: list[Any] | None = None, shard: bool = False
) -> list[int]:
    """Exit codes of the ranks of a run; all end when the first one is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = json.dumps({"settings": settings, "kill": kill, "shard": shard})
    running = []
    for rank in range(ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, __file__, task]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, encoding="utf-8"))
    first = running[0]
    try:
        said = first.communicate(timeout=300)[1]
        for other in running[1:]:
            if first.returncode < 0:
                other.kill()
            said += other.communicate(timeout=60)[1]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    assert kill or not any(codes), said
    return codes


@pytest.mark.slow
def test_killed_between_and_inside_checkpoints_on_1_2_1_ranks(
    base: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    settings = {**base, "output": str(tmp_path)}
    folder = tmp_path / "checkpoints"
    assert launch(1, settings, ["step", 5]) == [-signal.SIGKILL]
    assert [read_state(p).step for p in checkpoints(folder)] == [3]
    assert launch(2, settings, ["checkpoint", 9])[0] == -signal.SIGKILL
    assert [p.name for p in folder.glob(".*partial")] == [".step-00000009.partial"]
    assert 9 not in [read_state(p).step for p in checkpoints(folder)]
    result = train(**settings)
    assert result.step == STEPS
    assert_same(recorded(tmp_path), undisturbed[1])
    whole = [(p.name, read_state(p).score) for p in checkpoints(folder)]
    expected = [(p.name, read_state(p).score) for p in checkpoints(undisturbed[0] / "checkpoints")]
    assert [name for name, _ in whole] == [name for name, _ in expected]
    assert [s for _, s in whole] == pytest.approx([s for _, s in expected], abs=1e-9)


@pytest.mark.slow
def test_sharded_over_two_ranks(
    base: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """FSDP2 by Accelerate, and back: the tied weights are whole again in a checkpoint."""
    settings = {**base, "output": str(tmp_path)}
    launch(2, {**settings, "max_steps": STEPS}, ["checkpoint", 9], shard=True)
    assert read_state(checkpoints(tmp_path / "checkpoints")[-1]).step == 6
    train(**settings)
    assert_same(recorded(tmp_path), undisturbed[1])


def test_random_draws_go_on(base: dict[str, Any], tmp_path: Path) -> None:
    """Dropout of an adapter: on the same number of ranks, also its draws are as undisturbed."""
    settings = {**base, "validation": None, "eval_every": None}
    settings["lora"] = {"rank": 4, "dropout": 0.3, "targets": ["c_attn"]}
    settings |= {"learning_rate": 1e-2, "max_steps": 8}
    train(**settings, output=str(tmp_path / "a"))
    before = checkpoints(tmp_path / "a" / "checkpoints")[0]
    train(**settings, output=str(tmp_path / "b"), resume=str(before))
    losses = {}
    for name in "ab":
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[name] = {r["step"]: r["loss"] for r in map(json.loads, lines)}
    assert list(losses["b"]) == [7, 8]
    assert losses["b"] == {step: losses["a"][step] for step in (7, 8)}


def test_interrupted_inside_a_checkpoint(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Ctrl-C: exit code 130, one line, nothing half-written."""
    whole = checkpoint_module.save_file

    def interrupted(*args: Any) -> None:
        whole(*args)
        if (tmp_path / "checkpoints" / "step-00000003").is_dir():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "save_file", interrupted)
    flags = [
        flag
        for name, value in {**base, "output": str(tmp_path)}.items()
        for flag in (
            [f"--{name.replace('_', '-')}"]
            if value is True
            else [f"--{name.replace('_', '-')}", str(value)]
        )
    ]
    assert main(["train", *flags]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "packstore: interrupted"
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000003"]
    assert not (tmp_path / "model").exists()


def on_rank(task: dict[str, Any]) -> None:
    """Trains, and kills this process at a step before its checkpoint, or in its checkpoint."""
    torch.set_num_threads(1)
    where, at = task["kill"] or (None, 0)

    def dies(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if where == "step":
        write = JsonLines.write

        def write_or_die(self: JsonLines, record: Any) -> None:
            write(self, record)
            if record.get("loss") and record["step"] == at:
                dies()

        JsonLines.write = write_or_die  # type: ignore[method-assign]
    if where == "checkpoint":
        commit = checkpoint_module.commit

        def commit_or_die(partial: Path, final: Path) -> None:
            if final.name == f"step-{at:08d}":
                (partial / "optimizer.safetensors").unlink()
                dies()
            commit(partial, final)

        checkpoint_module.commit = commit_or_die
    if task["shard"]:
        os.environ |= CONFIGURED
        # Accelerate shards on accelerators only; the kind of ranks is all that it asks for.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    assert loop_module.save_checkpoint is checkpoint_module.save_checkpoint
    train(**task["settings"])


if __name__ == "__main__":
    on_rank(json.loads(sys.argv[1]))
