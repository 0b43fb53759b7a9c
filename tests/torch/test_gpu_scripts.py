"""The scripts for GPU machines, tried on CPU: every path of them, tiny."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str, script: str = "attention_gpu.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False
    )


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    done = run("--cpu-dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))
    cases = results["correctness"]
    assert len(cases) == 2 * 3 * 2  # backends, layouts, windows
    assert all(case["right"] for case in cases if case["backend"] == "reference")
    assert all(text.startswith("passed") for text in results["isolation"].values())
    speed = results["speed"]
    assert speed["spread_of_losses"] < 0.01
    assert all(way["pairs_per_second"] > 0 for way in speed["ways"].values())


@pytest.mark.slow
def test_dry_run_of_training(tmp_path: Path) -> None:
    """One way, as each starts three processes: killed and resumed, its losses are the same."""
    pytest.importorskip("accelerate", reason="training needs accelerate")
    out = tmp_path / "dry.json"
    arguments = ("--cpu-dry-run", "--ways", "full", "--out", str(out))
    done = run(*arguments, script="train_gpu.py")
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))
    way = results["ways"]["full"]
    assert way["resumed_differs_by"] == 0
    assert len(way["losses"]) == 4
    assert way["pairs_per_second"] > 0


@pytest.mark.parametrize("script", ["attention_gpu.py", "train_gpu.py"])
def test_without_a_gpu_it_says_so_in_one_line(script: str) -> None:
    done = run(script=script)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"{script} needs a CUDA GPU; --cpu-dry-run tries the script without one."
    ]
