"""``benchmarks/gpu_session.py`` on CPU, with the packages that its GPU machine lacks blocked."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The modules of the script."""
    names = ("prepare", "session", "sizes")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{n: importlib.import_module(f"gpu.{n}") for n in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def data(gpu: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of ``--prepare``, tiny; packing needs numba, reading them does not."""
    folder = tmp_path_factory.mktemp("gpu") / "data"
    gpu.prepare.write_data(folder, gpu.sizes.DRY)
    return folder


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(BENCHMARKS / "gpu_session.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False
    )


def cases_of(out: Path, stage: int) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((out / f"stage{stage}.json").read_text("utf-8"))["cases"]
    assert cases
    return cases


def test_all_stages(data: Path, tmp_path: Path) -> None:
    """Also a training run that is killed and resumed; peers of the head may be absent."""
    pytest.importorskip("accelerate", reason="training needs accelerate")
    arguments = ("--cpu-dry-run", "--data", str(data), "--out", str(tmp_path))
    done = run(tmp_path, *arguments, "--stage", "1", "2", "3", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {n: c for stage in (1, 2, 3, 4) for n, c in cases_of(tmp_path, stage).items()}
    absent = {name for name, case in cases.items() if case["verdict"] == "absent"}
    assert all(name.startswith("head/") and "packstore" not in name for name in absent)
    assert cases["killed and resumed"]["right"]
    assert {"train/full", "train/full_online", "train/autocast", "train/lora"} <= cases.keys()


def test_an_exception_of_any_class_is_recorded(gpu: SimpleNamespace, tmp_path: Path) -> None:
    class OwnError(BaseException):
        pass

    def fail() -> None:
        raise OwnError("broken")

    def absent() -> None:
        import no_such_package  # noqa: F401

    session = gpu.session.Session(1, tmp_path, 100, gpu.sizes.DRY)
    assert not session.case("fails", fail)
    assert not session.case("absent", absent)
    assert not session.case("wrong", lambda: {"right": False})
    assert session.case("next", lambda: {"right": True})
    verdicts = {name: case["verdict"] for name, case in cases_of(tmp_path, 1).items()}
    assert verdicts == {"fails": "FAILED", "absent": "absent", "wrong": "WRONG", "next": "right"}
    assert "OwnError: broken" in session.cases["fails"]["why"]


def test_a_process_that_dies_is_followed_by_one_that_goes_on(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    script = tmp_path / "stage.py"
    script.write_text(
        "import os, signal, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from gpu.session import Session; from gpu.sizes import DRY\n"
        f"session = Session(1, Path({str(tmp_path)!r}), 100, DRY)\n"
        "session.case('first', lambda: None)\n"
        "session.case('crash', lambda: os.kill(os.getpid(), signal.SIGSEGV))\n"
        "session.case('last', lambda: None)\n",
        encoding="utf-8",
    )
    path = tmp_path / "stage1.json"
    assert gpu.session.supervise([sys.executable, str(script)], path, 100) == 0
    verdicts = {name: case["verdict"] for name, case in cases_of(tmp_path, 1).items()}
    assert verdicts == {"first": "measured", "crash": "unfinished", "last": "measured"}


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    told = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."
    assert done.stderr.splitlines() == [told]
