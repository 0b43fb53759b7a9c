"""A kill at any moment of removing an old checkpoint: the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packstore.torch.training.checkpoint import best_checkpoint, checkpoints, prune

KILLED = """
import os, sys
from pathlib import Path
calls, real = int(sys.argv[2]), {n: getattr(os, n) for n in ("unlink", "rename", "rmdir")}
def counted(name):
    def call(*given, **how):
        global calls
        if calls == 0:
            os._exit(9)
        calls -= 1
        return real[name](*given, **how)
    return call
for name in real:
    setattr(os, name, counted(name))
from packstore.torch.training.checkpoint import prune
prune(Path(sys.argv[1]))
"""


def save(folder: Path, step: int) -> None:
    path = folder / f"step-{step:08d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "weights").write_bytes(b"w")
    names = ("examples", "loader", "optimizer", "random", "config")
    values = {**dict.fromkeys(names), "evaluation": {"eval/loss": step}, "step": step}
    (path / "state.json").write_text(json.dumps({"format": 1, **values}), encoding="utf-8")


@pytest.mark.parametrize("calls", range(5))
def test_a_kill_while_an_old_checkpoint_is_removed(tmp_path: Path, calls: int) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(calls)]
    done = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 9
    left = checkpoints(tmp_path)
    assert [path.name[-1] for path in left if path.name[-1] in "134"] == ["1", "3", "4"]
    assert all((path / "model" / "weights").is_file() for path in left)
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000001"
    prune(tmp_path)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "3", "4"]


def test_a_checkpoint_that_was_half_removed_before(tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "state.json").unlink()
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["1", "3"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000001"
