"""Layers of published models: compiled, one graph; and the bytes that benchmarks count
with, compiled and eager.

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
import torch
import transformers
from children import run_python
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packstore.torch import use_packed_attention
from packstore.torch.attention import flash

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))
predictions: Any = importlib.import_module("gpu.predictions")
sizes: Any = importlib.import_module("gpu.sizes")
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
    compiled = predictions.LAYERS[MODELS[name]["hidden_size"]].compiled_bytes
    if layout == "shared_prefix":
        assert found["bytes"] == pytest.approx(compiled, rel=0.01)


class Traffic(TorchDispatchMode):
    """Add up the bytes that elementwise operators read and write."""

    OTHERS = ("mm", "varlen", "varlen_backward", "device", "detach", "_unsafe_view")
    """Products, attention, and what launches no kernel."""

    SUMS_OF_GRADIENTS = ("add_",)
    """A step's gradients of weights, added to the last step's: not by token."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name:
            return result
        if name not in self.OTHERS + self.SUMS_OF_GRADIENTS:
            leaves = tree_leaves((args, kwargs, result))
            self.moved += sum(map(stored_bytes, leaves))
        return result


def stored_bytes(leaf: Any) -> int:
    """Return the bytes of a tensor; one that is broadcast is read once."""
    if not isinstance(leaf, Tensor):
        return 0
    return min(leaf.numel() * leaf.itemsize, leaf.untyped_storage().nbytes())


def eager_traffic(name: str, num_layers: int) -> tuple[int, int]:
    """Return the bytes that eager layers move, forward and backward, and the tokens."""
    rows = sizes.cut(sizes.lengths("hh", 500, 500), "shared_prefix", 1024)[0]
    batch = sizes.batch_of(rows, "shared_prefix", 64)
    inputs = batch.model_inputs()
    _ = batch.layout.places  # computed from values
    family = name.split("-")[0]
    config = getattr(transformers, f"{family}Config")(
        **{**MODELS[name], "num_hidden_layers": num_layers, "vocab_size": 64},
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with FakeTensorMode(allow_non_fake_inputs=True), Traffic() as traffic:
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
        use_packed_attention(model, "torch_varlen")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        traffic.moved = 0
        hidden = model.model(**inputs).last_hidden_state
        hidden.backward(torch.empty_like(hidden))
    return traffic.moved, batch.num_tokens


@pytest.mark.parametrize("name", MODELS)
def test_eager_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The elementwise passes of a layer move what is expected of them."""
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "capability", lambda _: (9, 0))
    moved_by_two, num_tokens = eager_traffic(name, 2)
    moved_by_one, _ = eager_traffic(name, 1)
    eager = predictions.LAYERS[MODELS[name]["hidden_size"]].eager_bytes
    moved = (moved_by_two - moved_by_one) / num_tokens
    assert moved == pytest.approx(eager, rel=0.01)
