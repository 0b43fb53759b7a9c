"""``benchmarks/gpu_session.py`` on CPU, with the packages that its GPU machine lacks blocked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from children import run_python

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LACKING = ("numba", "llvmlite", "polars", "datasets", "isal", "torchdata", "duckdb", "jsonschema")

BLOCKED = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {LACKING} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return run_python(BENCHMARKS / "gpu_session.py", *arguments, env=environment)


def cases_of(out: Path, stage: int) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((out / f"stage{stage}.json").read_text("utf-8"))["cases"]
    assert cases
    return cases


def test_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a training run that is killed and resumed; peers of the head may be absent."""
    pytest.importorskip("accelerate", reason="training needs accelerate")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import prepare, sizes

    data = tmp_path / "data"
    prepare.write_data(data, sizes.DRY)  # packing needs numba, reading does not
    done = run(tmp_path)
    told = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told + "\n")
    arguments = ("--cpu-dry-run", "--data", str(data), "--out", str(tmp_path))
    done = run(tmp_path, *arguments, "--stage", "1", "2", "3", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {n: c for stage in (1, 2, 3, 4) for n, c in cases_of(tmp_path, stage).items()}
    absent = {name for name, case in cases.items() if case["verdict"] == "absent"}
    assert all(name.startswith("head/") and "packstore" not in name for name in absent)
    assert cases["killed and resumed"]["right"]
    assert {"train/full", "train/full_online", "train/autocast", "train/lora"} <= cases.keys()
