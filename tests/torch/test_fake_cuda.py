"""What steps of ``packstore train`` ask of a GPU, counted on CUDA tensors that hold nothing.

``tests/support/fake_cuda.cpp`` gives torch's CPU build a CUDA device for FakeTensorMode, so that
the whole loop runs: copies, reference, forward, loss, backward, clipping, fused AdamW, metrics.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"

KNOWN_WAITS: dict[str, int] = {}
"""Lines at which the host waits for the device in a planned step, and how often: none."""

LAUNCHES = {
    ("Llama", "concat", 0.0): 1448,
    ("Llama", "shared_prefix", 0.0): 1558,
    ("Qwen3", "concat", 0.2): 1740,
    ("Qwen3", "shared_prefix", 0.0): 1896,
}
"""Of a step of two batches with two layers: family, layout, weight of the SFT term."""

PEAK_MIB = {
    ("Llama", "concat", 0.0): 760,
    ("Llama", "shared_prefix", 0.0): 700,
    ("Qwen3", "concat", 0.2): 807,
    ("Qwen3", "shared_prefix", 0.0): 731,
}
"""Above weights, gradients and the optimizer's state; the logits of a batch would take 1500."""

SLACK = 1.03
"""Another torch or transformers may need a few kernels more."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled device."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: nothing is counted on fake CUDA tensors")
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA: the fake device is for CPU builds")
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = found.submodule_search_locations[0]
    made = tmp_path_factory.mktemp("fake") / "fake_cuda.so"
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", str(SUPPORT / "fake_cuda.cpp")]
    command += ["-o", str(made), f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, f"-Wl,-rpath,{root}/lib"], check=True)
    return made


def steps(library: Path, cases: list[Any], change: str = "") -> list[dict[str, Any]]:
    """Runs the cases in a process, as the device must be there before torch."""
    script = SUPPORT / "fake_cuda_steps.py"
    code = f"import runpy, sys\n{change}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(library), json.dumps(cases)],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_step(library: Path) -> None:
    found = dict(zip(LAUNCHES, steps(library, list(LAUNCHES)), strict=True))
    for case, own in found.items():
        assert own["waits"] == KNOWN_WAITS, case
        assert own["misaligned"] == {}, case
        assert own["products"] > 2 * 2 * (3 * 7 + 4)  # batches, layers, head: all are seen
        assert own["launches"] <= SLACK * LAUNCHES[case], case
        assert own["peak_mib"] <= SLACK * PEAK_MIB[case], case


BROKEN = """
import ctypes; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import packstore.torch.logprobs.fused_head as fused_head
import packstore.torch.metrics as metrics
add, kept = metrics.add_sums, []
def waiting_sums(sums, terms):
    float(next(iter(terms.values()))[0])
    kept.append(fused_head.torch.empty(2**28, dtype=fused_head.torch.uint8, device="cuda"))
    add(sums, terms)
def odd_tiles(n, vocab, chunk_size):
    cuts = [(a, min(a + 12345, vocab)) for a in range(0, vocab, 12345)]
    return ((slice(a, b), [slice(0, n)]) for a, b in cuts)
metrics.add_sums, fused_head.tiles = waiting_sums, odd_tiles
"""


def test_new_waits_odd_tiles_and_memory_are_noticed(library: Path) -> None:
    (found,) = steps(library, [["Llama", "concat", 0.0]], BROKEN)
    assert list(found["waits"].values()) == [2]  # once a batch
    assert "metrics.py:add" in next(iter(found["waits"]))
    assert sum(found["misaligned"].values()) > 10
    assert found["peak_mib"] > SLACK * PEAK_MIB["Llama", "concat", 0.0]
