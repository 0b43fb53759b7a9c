"""Bytes that the layers of published models move, which ``benchmarks/gpu/predictions.py`` expects.

Needs no GPU, and proves no speed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from gpu.predictions import LAYERS
from gpu.sizes import LLAMA, LLAMA_8B, QWEN3

MODELS = {"Qwen3-0.6B": ("Qwen3", QWEN3), "Llama-3.2-1B": ("Llama", LLAMA)}
MODELS["Llama-3.1-8B"] = ("Llama", LLAMA_8B)
TOKENS = 2048


class Unread(torch.autograd.Function):
    """Stands for attention, of which the counter sees nothing."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        return torch.empty_like(qkv[0])

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operators read and write; views and products move none."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not any(x in name for x in ("mm", "empty", "detach", "view")):
            for x in tree_leaves((args, kwargs, made)):
                if isinstance(x, torch.Tensor):  # one that is broadcast is read once
                    self.moved += min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
        return made


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_eager_layers(name: str) -> None:
    """Of transformers' layers on the device ``meta``, where nothing is computed."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register(
        "unread", lambda module, q, k, v, *_, **__: (Unread.apply(q, k, v).transpose(1, 2), None)
    )
    family, config = MODELS[name]

    def moved(layers: int) -> int:
        small = {**config, "num_hidden_layers": layers, "vocab_size": 8}
        made = getattr(transformers, f"{family}Config")(**small, use_cache=False)
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(made).bfloat16().model
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        model.set_attn_implementation("unread")
        with Traffic() as traffic:
            hidden = model(input_ids=ids, position_ids=ids).last_hidden_state
            hidden.backward(torch.empty_like(hidden))
        return traffic.moved

    eager, _ = LAYERS[config["hidden_size"]]
    assert (moved(2) - moved(1)) / TOKENS == pytest.approx(eager, rel=0.01)
