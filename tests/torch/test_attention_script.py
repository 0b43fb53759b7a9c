"""The script for GPU machines, tried on CPU: every path of it, tiny."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    done = run("--cpu-dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    cases = results["correctness"]
    assert len(cases) == 2 * 3 * 2  # backends, layouts, windows
    assert all(case["right"] for case in cases if case["backend"] == "reference")
    assert all(text.startswith("passed") for text in results["isolation"].values())
    speed = results["speed"]
    assert speed["spread_of_losses"] < 0.01
    assert all(way["pairs_per_second"] > 0 for way in speed["ways"].values())


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "attention_gpu.py needs a CUDA GPU; --cpu-dry-run tries the script without one."
    ]
