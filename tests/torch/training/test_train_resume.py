"""Runs on one and two ranks, killed between and inside checkpoints: nothing of it can be seen."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks import launch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.optim.optimizer import register_optimizer_step_post_hook

pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("peft", reason="LoRA needs peft")

from accelerate import Accelerator
from train_runs import checkpoints, losses, records, save_gpt2, shard, state_of
from transformers import AutoModelForCausalLM

from packstore.cli import main
from packstore.errors import FormatError, StorageError
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, train

STEPS = 12


@pytest.fixture(scope="module")
def base(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of two epochs, whose steps hold odd numbers of packs."""
    folder = tmp_path_factory.mktemp("resume")
    packs = kit.packed(random_examples(60, seed=3), [1, 4, 2, 3, 2] * 5, "shared_prefix")
    kit.write(str(folder / "data"), packs, layout="shared_prefix")
    kit.write(str(folder / "held"), kit.packed(random_examples(9, seed=4), [2, 3, 4], "concat"))
    return {
        "model": save_gpt2(folder / "model"),
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
def undisturbed(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank."""
    output = tmp_path_factory.mktemp("undisturbed")
    train(**base, output=str(output))
    return output


def assert_same(found: Path, expected: Path) -> None:
    """All that is equal in every undisturbed run: losses, rates; not times."""
    names = ("loss", "rewards/margins", "learning_rate", "grad_norm", "pairs")
    for metric, exact, close in (("loss", ("step", "epoch"), names), ("eval/loss", ("step",), ())):
        here, there = records(found, metric), records(expected, metric)
        for name in exact:
            assert [r[name] for r in here] == [r[name] for r in there]
        for name in (metric, *close):
            gaps = np.subtract([r[name] for r in here], [r[name] for r in there])
            assert np.abs(gaps).max() < 1e-9, name
    kept = [{path.name: state_of(path) for path in checkpoints(run)} for run in (found, expected)]
    assert kept[0].keys() == kept[1].keys()


def on_rank(task: dict[str, Any]) -> int:
    """Trains; ends this process after a step or inside a checkpoint; counts calls of `no_sync`.

    Returns -1 if a checkpoint cannot be written, as files of the rank `full` are limited.
    """
    warnings.simplefilter("ignore")
    where, place = task.get("kill", (None, 0))
    seen, unsynchronised = [], []

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def after_step(*_: Any) -> None:
        seen.append(1)
        if where == "step" and len(seen) == place:
            die()

    # A moment inside the writing of a checkpoint cannot be met from outside.
    rename, no_sync = Path.rename, Accelerator.no_sync

    def rename_or_die(self: Path, target: Path) -> Path:
        if where == "checkpoint" and target.name == f"step-{place:08d}":
            next(file for file in self.rglob("*.safetensors")).unlink()
            die()
        return rename(self, target)

    def counted(self: Accelerator, model: Any) -> Any:
        unsynchronised.append(1)
        return no_sync(self, model)

    Path.rename, Accelerator.no_sync = rename_or_die, counted  # type: ignore[assignment, method-assign]
    register_optimizer_step_post_hook(after_step)
    if task.get("shard"):
        shard()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if task.get("full") == int(os.environ["RANK"]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        train(**task["settings"])
    except StorageError:
        return -1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return len(unsynchronised)


def test_two_ranks_equal_one(base: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """And they exchange gradients once a step, after its last batch; work is spread evenly."""
    counts = launch(__file__, {"settings": {**base, "output": str(tmp_path)}}, 2, tmp_path)
    assert_same(tmp_path, undisturbed)
    work = np.zeros((2, STEPS, 2))
    for rank, count in enumerate(counts):
        data, batches = PackedDataset(base["dataset"], rank=rank, world_size=2), []
        for epoch in range(base["epochs"]):
            data.set_epoch(epoch)
            step = base["examples_per_step"]
            batches += PackedDataLoader(data, examples_per_step=step, balance=True)
        last = [batch.step.last for batch in batches]
        steps = np.cumsum(last) - last
        assert count == sum(not end for end, step in zip(last, steps, strict=True) if step < STEPS)
        assert count > 0
        for step, batch in zip(steps[steps < STEPS], batches, strict=False):
            lengths = batch.cu_seqlens.diff().numpy()
            work[rank, step] += lengths.sum(), (lengths**2).sum()
    slowest = work.max(0) / work.mean(0)
    assert slowest.max() > 1.05
    for i, name in enumerate(("slowest/tokens", "slowest/squares")):
        assert [r[name] for r in records(tmp_path)] == pytest.approx(slowest[:, i])
    assert all(0 <= r["data_wait"] <= r["slowest/data_wait"] <= 1 for r in records(tmp_path))


@pytest.mark.slow
def test_killed_between_and_inside_checkpoints_on_1_2_1_ranks(
    base: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    task = {"settings": {**base, "output": str(tmp_path)}}
    assert launch(__file__, {**task, "kill": ("step", 5)}, 1, tmp_path) == []
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    assert launch(__file__, {**task, "kill": ("checkpoint", 9)}, 2, tmp_path) == []
    assert [p.name for p in tmp_path.glob("checkpoints/.*partial")] == [".step-00000009.partial"]
    assert "step-00000009" not in [path.name for path in checkpoints(tmp_path)]
    assert train(**task["settings"]).step == STEPS
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_sharded_over_two_ranks_killed_and_resumed_on_2_1_2(
    base: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    """FSDP2 by Accelerate, whose ranks write their shares; one rank reads them, and they read its.

    They reduce the gradients of each batch, as they would else hold whole ones.
    """
    settings = {**base, "output": str(tmp_path)}
    sharded = {"settings": settings, "shard": True}
    assert launch(__file__, {**sharded, "full": 1}, 2, tmp_path) == [-1, -1]
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert launch(__file__, {**sharded, "kill": ("checkpoint", 6)}, 2, tmp_path) == []
    left = tmp_path / "checkpoints" / ".step-00000006.partial"
    assert left.is_dir()
    assert launch(__file__, {**sharded, "kill": ("checkpoint", 9)}, 2, tmp_path) == []
    newest = checkpoints(tmp_path)[-1]
    assert newest.name == "step-00000006"
    files = [file for file in newest.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".safetensors", ".json"}  # nothing is pickled
    assert not left.exists()

    (share,) = newest.glob("shards/shard-00002-model-00001-*")
    share.rename(tmp_path / "share")
    with pytest.raises(FormatError, match=r"the state of every weight; found \d+ of \d+ values"):
        train(**settings)
    (tmp_path / "share").rename(share)
    # A step of no effect, as it is resumed, and three more.
    assert launch(__file__, {"settings": settings, "kill": ("step", 5)}, 1, tmp_path) == []
    newest = checkpoints(tmp_path)[-1]
    assert newest.name == "step-00000009"
    assert (newest / "optimizer.safetensors").exists()
    assert launch(__file__, sharded, 2, tmp_path) == [0, 0]
    assert_same(tmp_path, undisturbed)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = {name: tensor.clone() for name, tensor in final.state_dict().items()}
    for tensor in final.parameters():
        tensor.data.zero_()
    reader = HuggingFaceStorageReader(str(checkpoints(tmp_path)[-1] / "shards"))
    with pytest.warns(UserWarning, match="in a single process"):
        load(found := final.state_dict(), storage_reader=reader, no_dist=True)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_a_resumed_run_is_the_same_to_the_last_bit(base: dict[str, Any], tmp_path: Path) -> None:
    """Also the draws of dropout of an adapter, on the same number of ranks."""
    settings = {**base, "validation": None, "eval_every": None}
    settings["lora"] = {"rank": 4, "dropout": 0.3, "targets": ["c_attn"]}
    settings |= {"learning_rate": 1e-2, "max_steps": 8}
    train(**settings, output=str(tmp_path / "a"))
    begun = checkpoints(tmp_path / "a")[0]
    train(**settings, output=str(tmp_path / "b"), resume=str(begun))
    assert [record["step"] for record in records(tmp_path / "b")] == [7, 8]
    assert losses(tmp_path / "b") == losses(tmp_path / "a")[6:]
    weights = [tmp_path / name / "model" / "adapter_model.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    newest = checkpoints(tmp_path / "b")[-1]
    assert train(**settings, output=str(tmp_path / "b"), resume=str(newest)).step == 8


def test_interrupted_inside_a_checkpoint(
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C: exit code 130, one line, nothing half-written."""
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if target.name == "step-00000006":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    given = {**base, "output": tmp_path}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert main(["train", *flags]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "packstore: interrupted"
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000003", "step-00000005"]
    assert not (tmp_path / "model").exists()


def test_a_run_goes_on_with_the_settings_that_are_given(
    base: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the optimizer too, of which a checkpoint holds the former ones."""
    used: list[tuple[float, float]] = []

    def note(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        used.append((group["lr"], group["weight_decay"]))

    settings = {**base, "validation": None, "eval_every": None, "output": str(tmp_path)}
    settings |= {"schedule": "constant", "warmup": 0}
    train(**{**settings, "max_steps": 2})
    handle = register_optimizer_step_post_hook(note)
    try:
        train(**{**settings, "max_steps": 3, "learning_rate": 2e-3, "weight_decay": 0.5})
    finally:
        handle.remove()
    assert used[-1] == (2e-3, 0.5)
    assert [record["learning_rate"] for record in records(tmp_path)] == [1e-3, 1e-3, 2e-3]
    assert "since the checkpoint, learning_rate was 0.001 and is 0.002" in caplog.text
