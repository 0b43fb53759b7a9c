"""Expects the seconds of a step by counting: no figure here was measured on a GPU.

Matrix products and attention count by their operations, elementwise passes by the bytes that they
read and write. A device does so much of each in a second as ``ceilings`` measures on it, times the
shares below; without it, an H100's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu.sizes import GPU, LLAMA, LLAMA_8B, PROFILES, QWEN3, lengths

CEILINGS = {"product_tflops": 790.0, "copy_tb_per_second": 3.0}
"""Of an H100: a bfloat16 product of 8192 x 8192 x 8192, and a copy of 4 GiB."""

PRODUCTS, COPIES, FLASH, FLASH_BACKWARD = 0.89, 0.87, 0.42, 0.33
"""Shares of these that products, elementwise passes and FlashAttention 2 reach."""

TOLERANCE = 0.25
"""A figure that is off by more is to be explained before anything is tuned."""

HEADS = {"triton": (4, 8 + 14), "eager": (4, 24 + 45), "trl": (4, 4 + 10), "logits": (3, 14 + 22)}
"""Way -> products of the head; bytes a logit that its passes move, forward and backward. ``logits``
holds the logits of all tokens; the others make them twice, of supervised tokens alone."""

GATHERED = 8 + 18 + 6
"""Bytes that an element of a gathered key or value moves: two copies; its gradient, widened and
added in float32; the sum, set to zero before and rounded after, once for about two copies."""


class Work(NamedTuple):
    """Operations of the layers' products, of one product of the head, and of attention's forward
    pass; how often the head multiplies; bytes of elementwise passes."""

    layers: float
    head: float
    attention: float
    times: int
    traffic: float

    def seconds(self, ceilings: Mapping[str, float] = CEILINGS) -> float:
        """Seconds of forward and backward."""
        operations = ceilings["product_tflops"] * 1e12
        flash = self.attention * (1 / FLASH + 2.5 / FLASH_BACKWARD)
        products = (self.layers + self.times * self.head) / PRODUCTS
        moved = self.traffic / (ceilings["copy_tb_per_second"] * 1e12 * COPIES)
        return (products + flash) / operations + moved

    @property
    def needed(self) -> float:
        """Operations without those that are done twice: what MFU counts."""
        return self.layers + 3 * self.head + 3.5 * self.attention


def work(
    family: str, config: dict[str, Any], queries: Any, keys: Any, targets: int, head: str
) -> Work:
    """Counts a step with eager layers.

    Args:
        family, config: of the model.
        queries, keys: lengths of the segments, and of the key runs that they see, `[S]`.
        targets: supervised tokens.
        head: a name of `HEADS`.
    """
    queries, keys = np.asarray(queries, float), np.asarray(keys, float)
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    width, layers, vocab = (config[name] for name in names)
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = 2 * config["num_key_value_heads"] * config["head_dim"]
    layer = width * (2 * q_width + kv_width + 3 * config["intermediate_size"])
    tokens = queries.sum()
    times, passes = HEADS[head]
    rows = tokens if head == "logits" else targets
    seen = (queries * keys - queries * (queries - 1) / 2).sum()
    traffic = tokens * layers * elementwise(family, **config) + rows * vocab * passes
    traffic += 6 * (layers * layer + vocab * width)  # gradients are added to the last ones
    if keys.sum() > tokens:
        traffic += keys.sum() * layers * kv_width * GATHERED
    return Work(
        layers=6 * tokens * layers * layer,
        head=2 * rows * width * vocab,
        attention=4 * layers * seen * q_width,
        times=times,
        traffic=traffic,
    )


class _Unread(torch.autograd.Function):
    """Stands for attention, of which the counter sees nothing."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*qkv)
        return torch.empty_like(qkv[0])

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _Traffic(TorchDispatchMode):
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


@cache
def elementwise(family: str, tokens: int = 8192, **config: Any) -> float:
    """Bytes that the elementwise passes of a layer move by token, forward and backward.

    Counted in transformers' eager layers on the device ``meta``, where nothing is computed.
    """
    import transformers

    transformers.AttentionInterface.register(
        "unread", lambda module, q, k, v, *_, **__: (_Unread.apply(q, k, v).transpose(1, 2), None)
    )

    def moved(layers: int) -> int:
        small = {**config, "num_hidden_layers": layers, "vocab_size": 8}
        made = getattr(transformers, f"{family}Config")(**small, use_cache=False)
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(made).bfloat16().model
            ids = torch.zeros(1, tokens, dtype=torch.int64)
        model.set_attn_implementation("unread")
        with _Traffic() as traffic:
            hidden = model(input_ids=ids, position_ids=ids).last_hidden_state
            hidden.backward(torch.empty_like(hidden))
        return traffic.moved

    return (moved(2) - moved(1)) / tokens


def misses(expected: dict[str, float], figures: dict[str, Any]) -> list[str]:
    """Returns the figures that are off too far, as sentences."""
    parts = {n: figures[n] / v - 1 for n, v in expected.items() if figures.get(n) is not None}
    return [
        f"{n}: expected {expected[n]:.4g}, measured {figures[n]:.4g} ({part:+.0%})"
        for n, part in parts.items()
        if abs(part) > TOLERANCE
    ]


def ratios() -> dict[tuple[str, str], dict[str, float]]:
    """Pairs a second with shared prefixes and the Triton head, over padding-free batches.

    By model and length profile, then by the head of the padding-free batches.
    """
    models = {"Qwen3-0.6B": ("Qwen3", QWEN3), "Llama-3.2-1B": ("Llama", LLAMA)}
    models["Llama-3.1-8B"] = ("Llama", LLAMA_8B)
    found = {}
    for name, (family, config) in models.items():
        for profile in PROFILES:
            prompt, *responses = lengths(profile, 4000, GPU.longest[profile]).T
            whole = np.concatenate([prompt + n for n in responses])
            stored = np.concatenate([prompt + responses[0], responses[1] + 1])
            targets = int(sum(map(np.sum, responses)))
            ours = work(family, config, stored, whole, targets, "triton").seconds()
            found[name, profile] = {
                head: work(family, config, whole, whole, targets, head).seconds() / ours
                for head in ("triton", "trl", "logits")
            }
    return found
