"""Expects the seconds of a step by counting: no figure here was measured on a GPU.

Matrix products and attention count by their operations, elementwise passes by the bytes
that they read and write. A device does so much of each in a second as ``ceilings``
measures on it, times the shares below; without it, an H100's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gpu.sizes import GPU, LLAMA, LLAMA_8B, PROFILES, QWEN3, lengths

MODELS = {"Qwen3-0.6B": QWEN3, "Llama-3.2-1B": LLAMA, "Llama-3.1-8B": LLAMA_8B}
CEILINGS = {"product_tflops": 790.0, "copy_tb_per_second": 3.0}
"""Of an H100: a bfloat16 product of 8192 x 8192 x 8192, and a copy of 4 GiB."""

PRODUCTS, COPIES, FLASH, FLASH_BACKWARD = 0.89, 0.87, 0.42, 0.33
"""Shares of these that products, elementwise passes and FlashAttention 2 reach."""

TOLERANCE = 0.25
"""A figure that is off by more is to be explained before anything is tuned."""

HEADS = {
    "triton": (4, 8 + 14),
    "eager": (4, 24 + 45),
    "trl": (4, 4 + 10),
    "logits": (3, 14 + 22),
}
"""Way -> products of the head; bytes a logit that its passes move, forward and
backward. ``logits`` holds the logits of all tokens; the others make them twice, of
supervised tokens alone.
"""

LAYERS = {
    1024: (947_842, 162_435),
    2048: (973_955, 269_613),
    4096: (1_890_438, 506_434),
}
"""Width of a model -> bytes that the elementwise passes of a layer move by token,
forward and backward: eager and compiled layers of Qwen3-0.6B, Llama-3.2-1B and
Llama-3.1-8B, as ``tests/torch/models/test_layer_kernels.py`` counts them.
"""

REFERENCE = 0.3
"""Forward pass of a reference as a share of a step without one, counted 0.29 to 0.32.
"""

GATHERED = 8 + 2 + 1
"""Bytes that an element of a gathered key or value moves: two copies; its gradient,
read once; the sum, written once for about two copies.
"""


class Work(NamedTuple):
    """Operations of the layers' products, of one product of the head, and of
    attention's forward pass; how often the head multiplies; bytes of elementwise
    passes.
    """

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
    config: dict[str, Any],
    queries: Any,
    keys: Any,
    targets: int,
    head: str,
    compiled: bool = False,
) -> Work:
    """Counts a step.

    Args:
        config: of the model.
        queries, keys: lengths of the segments, and of the key runs that they see,
            `[S]`.
        targets: supervised tokens.
        head: a name of `HEADS`.
        compiled: count compiled layers in place of eager ones.
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
    moved = LAYERS.get(width, (0, 0))[compiled]
    traffic = tokens * layers * moved + rows * vocab * passes
    traffic += 6 * (
        layers * layer + vocab * width
    )  # gradients are added to the last ones
    if keys.sum() > tokens:
        traffic += keys.sum() * layers * kv_width * GATHERED
    return Work(
        layers=6 * tokens * layers * layer,
        head=2 * rows * width * vocab,
        attention=4 * layers * seen * q_width,
        times=times,
        traffic=traffic,
    )


def misses(expected: dict[str, float], figures: dict[str, Any]) -> list[str]:
    """Returns the figures that are off too far, as sentences."""
    parts = {
        n: figures[n] / v - 1 for n, v in expected.items() if figures.get(n) is not None
    }
    return [
        f"{n}: expected {expected[n]:.4g}, measured {figures[n]:.4g} ({part:+.0%})"
        for n, part in parts.items()
        if abs(part) > TOLERANCE
    ]


def ratios(compiled: bool) -> dict[tuple[str, str], dict[str, float]]:
    """Pairs a second with shared prefixes and the Triton head, over those of other
    ways.

    By model and length profile, then by way: the head of padding-free batches, with the
        same
    layers, or ``trainer``: TRL's with its defaults, 8 random pairs padded, eager
    layers, and a reference in each step, which ours has read from a file.
    """
    found = {}
    for name, config in MODELS.items():
        for profile in PROFILES:
            rows = lengths(profile, 4000, GPU.longest[profile])
            prompt, *responses = rows.T
            whole = np.concatenate([prompt + n for n in responses])
            stored = np.concatenate([prompt + responses[0], responses[1] + 1])
            padded = np.repeat(
                (prompt + np.maximum(*responses)).reshape(-1, 8).max(1), 16
            )
            targets = int(sum(map(np.sum, responses)))
            seconds = {
                head: work(config, whole, whole, targets, head, compiled).seconds()
                for head in ("triton", "trl", "logits")
            }
            default = work(config, padded, padded, targets, "trl").seconds()
            seconds["trainer"] = default * (1 + REFERENCE)
            ours = work(config, stored, whole, targets, "triton", compiled).seconds()
            found[name, profile] = {way: taken / ours for way, taken in seconds.items()}
    return found


def show() -> None:
    """Prints the ratios, with compiled and with eager layers."""
    print("counted, not measured: pairs a second with shared prefixes, over other ways")
    for compiled in (True, False):
        for names, over in ratios(compiled).items():
            layers = "compiled" if compiled else "eager"
            told = (f"{way} {x:.2f}" for way, x in over.items())
            print("{:14}{:15}".format(*names), f"{layers:10}", *told)
