"""``benchmarks/gpu_session.py`` on CPU, with the packages that its GPU machine lacks blocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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

STAGE = """
import os, signal, sys
from pathlib import Path
folder, benchmarks = Path(__file__).parent, %r
sys.path.insert(0, benchmarks)
from gpu.session import Session, supervise
from gpu.sizes import DRY

class OwnError(BaseException):
    pass

def fail():
    raise OwnError("broken")

def absent():
    import no_such_package

if sys.argv[1:]:
    session = Session(1, folder, 100, DRY)
    session.case("first", lambda: None)
    session.case("fails", fail)
    session.case("absent", absent)
    session.case("wrong", lambda: {"right": False})
    session.case("crash", lambda: os.kill(os.getpid(), signal.SIGSEGV))
    session.case("last", lambda: {"right": True})
else:
    sys.exit(supervise([sys.executable, __file__, "stage"], folder / "stage1.json", 100))
"""


def run(tmp_path: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False
    )


def cases_of(out: Path, stage: int) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((out / f"stage{stage}.json").read_text("utf-8"))["cases"]
    assert cases
    return cases


def test_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a training run that is killed and resumed; peers of the head may be absent."""
    pytest.importorskip("accelerate", reason="training needs accelerate")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import prepare, sizes

    data, script = tmp_path / "data", BENCHMARKS / "gpu_session.py"
    prepare.write_data(data, sizes.DRY)  # packing needs numba, reading does not
    done = run(tmp_path, script)
    told = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told + "\n")
    arguments = ("--cpu-dry-run", "--data", str(data), "--out", str(tmp_path))
    done = run(tmp_path, script, *arguments, "--stage", "1", "2", "3", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {n: c for stage in (1, 2, 3, 4) for n, c in cases_of(tmp_path, stage).items()}
    absent = {name for name, case in cases.items() if case["verdict"] == "absent"}
    assert all(name.startswith("head/") and "packstore" not in name for name in absent)
    assert cases["killed and resumed"]["right"]
    assert {"train/full", "train/full_online", "train/autocast", "train/lora"} <= cases.keys()


def test_what_fails_or_dies_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    script = tmp_path / "stage.py"
    script.write_text(STAGE % str(BENCHMARKS), encoding="utf-8")
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = cases_of(tmp_path, 1)
    assert {name: case["verdict"] for name, case in cases.items()} == {
        "first": "measured",
        "fails": "FAILED",
        "absent": "absent",
        "wrong": "WRONG",
        "crash": "unfinished",
        "last": "right",
    }
    assert "OwnError: broken" in cases["fails"]["why"]
