"""Compiled layers of published models: one graph, and the bytes that benchmarks count
with.

Needs no GPU, and proves no speed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from children import run_python

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))
predictions: Any = importlib.import_module("gpu.predictions")
MODELS = predictions.MODELS
CASES = [
    ("Qwen3-0.6B", "shared_prefix", 90),
    ("Qwen3-0.6B", "concat", 90),
    *(("Qwen3-0.6B", "shared_prefix", capability) for capability in (80, 100)),
    *((name, "shared_prefix", 90) for name in MODELS if name != "Qwen3-0.6B"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: make kernels",
)
@pytest.mark.parametrize(("name", "layout", "capability"), CASES)
def test_compiled_layers(
    name: str, layout: str, capability: int, tmp_path: Path
) -> None:
    """One graph, whose kernels compile for GPUs; what they move is what is expected of
    them.
    """
    script = ROOT / "tests" / "support" / "layer_kernels.py"
    caches = dict.fromkeys(
        ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(tmp_path)
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    done = run_python(
        script, name, layout, capability, env=caches | paths, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # shown by `make kernels`
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["frames"] == {"total": 1, "ok": 1}
    assert found["graph_breaks"] == 0
    assert (
        found["stack"] <= 256
    )  # one that torch tries, and measures beside others, spills
    _, compiled = predictions.LAYERS[MODELS[name]["hidden_size"]]
    if layout == "shared_prefix":
        assert found["bytes"] == pytest.approx(compiled, rel=0.01)
