"""Bytes that the layers of published models move and keep, which the docs and benchmarks tell.

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
from children import run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))
predictions: Any = importlib.import_module("gpu.predictions")
MODELS = predictions.MODELS
TOKENS = 2048


class Unread(torch.autograd.Function):
    """Stands for attention, of which the counter sees nothing."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        ctx.save_for_backward(*qkv)
        return torch.empty_like(qkv[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operators read and write; views and products move none."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not any(x in name for x in ("mm", "empty", "detach", "view")):
            for x in tree_leaves((args, kwargs, made)):
                if isinstance(x, Tensor):  # one that is broadcast is read once
                    self.moved += min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
        return made


def made(name: str, layers: int) -> tuple[Any, Tensor]:
    """A trunk on the device ``meta``, where nothing is computed, and ids for it."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register(
        "unread", lambda module, q, k, v, *_, **__: (Unread.apply(q, k, v).transpose(1, 2), None)
    )
    config, family = MODELS[name], name.split("-")[0]
    small = {**config, "num_hidden_layers": layers, "vocab_size": 8}
    settings = getattr(transformers, f"{family}Config")(**small, use_cache=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(settings).bfloat16().train().model
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    model.set_attn_implementation("unread")
    return model, ids


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_eager_layers(name: str) -> None:
    def moved(layers: int) -> int:
        model, ids = made(name, layers)
        with Traffic() as traffic:
            hidden = model(input_ids=ids, position_ids=ids).last_hidden_state
            hidden.backward(torch.empty_like(hidden))
        return traffic.moved

    eager, _ = predictions.LAYERS[MODELS[name]["hidden_size"]]
    assert (moved(2) - moved(1)) / TOKENS == pytest.approx(eager, rel=0.01)


CASES = [
    ("Qwen3-0.6B", "shared_prefix", 90),
    ("Qwen3-0.6B", "concat", 90),
    *(("Qwen3-0.6B", "shared_prefix", capability) for capability in (80, 100)),
    *((name, "shared_prefix", 90) for name in MODELS if name != "Qwen3-0.6B"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: make kernels"
)
@pytest.mark.parametrize(("name", "layout", "capability"), CASES)
def test_compiled_layers(name: str, layout: str, capability: int, tmp_path: Path) -> None:
    """One graph, whose kernels compile for GPUs; what they move is what is expected of them."""
    script = ROOT / "tests" / "support" / "layer_kernels.py"
    caches = dict.fromkeys(("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(tmp_path))
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    done = run_python(script, name, layout, capability, env=caches | paths, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # shown by `make kernels`
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["frames"] == {"total": 1, "ok": 1}
    assert found["graph_breaks"] == 0
    assert found["stack"] <= 256  # one that torch tries, and measures beside others, spills
    _, compiled = predictions.LAYERS[MODELS[name]["hidden_size"]]
    if layout == "shared_prefix":
        assert found["bytes"] == pytest.approx(compiled, rel=0.01)
