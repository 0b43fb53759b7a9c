"""The seconds of a step that are expected by counting.

Matrix products and attention count by their operations, elementwise passes by the bytes
that they read and write, the host by its launches. A device does so much of each in a
second as ``ceilings`` measures on it, times the shares below; without it, an H100's.
Device and host work side by side, so that the slower one decides.

The shares of products and copies are assumed. Those of attention, of sums over heads,
of eager layers and of the host come from ``results/gpu_session.json``, the run on an
H200, and from published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.sizes import LLAMA, LLAMA_8B, QWEN3, Segments

Array = npt.NDArray[np.float64]

MODELS = {"Qwen3-0.6B": QWEN3, "Llama-3.2-1B": LLAMA, "Llama-3.1-8B": LLAMA_8B}
CEILINGS = {"product_tflops": 790.0, "copy_tb_per_second": 3.0}
"""Of an H100: a bfloat16 product of 8192 x 8192 x 8192, and a copy of 4 GiB."""

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200, by its data sheet."""

PRODUCTS = 0.89
"""Share of the rate of one large product that those of a step reach."""

BANDWIDTH = {
    "compiled layers": 0.87,
    "eager layers": 0.70,
    "head": 0.87,
    "gradients": 0.87,
    "copied keys": 0.87,
    "head sums": 0.33,
}
"""Share of the rate of one large copy that each kind of traffic reaches.

``eager layers``: on an H200 a step of Llama-3.2-1B took 33.1 ms more than with compiled
layers, padding-free 31.8; both mean 0.70. ``head sums``: 3.14 ms for 4.3 GB in the
profile of Qwen3-0.6B there.
"""


class FlashPass(NamedTuple):
    """A pass of FlashAttention 2: programs that go over tiles of scores.

    Attributes:
        rows, columns: queries and keys of a tile. A program of the forward pass has a
            block of queries and goes over keys, one of the backward pass the reverse.
        share: rate of full tiles, as a share of that of products.
        overhead: time of a program beside its tiles, in tiles.
    """

    rows: int
    columns: int
    share: float
    overhead: float


FLASH = {
    64: (FlashPass(128, 128, 0.39, 1.5), FlashPass(128, 128, 0.375, 2.0)),
    128: (FlashPass(128, 64, 0.48, 4.6), FlashPass(64, 128, 0.40, 3.0)),
}
"""Head size -> forward and backward pass. Tiles are those of the kernels' names.

Fitted to: for heads of 128, the profile of the H200 (segments like hh, 68.4 TFLOP/s
forward and 73.8 backward) and, for both sizes, published rates on an H100 at 16,384
tokens in sequences of 512 to 16,384 tokens, figures 5 and 6 of FlashAttention 3
(arXiv 2407.08608): 191 to 335 TFLOP/s forward (causal, heads of 128), 180 to 299 (of
64), 214 to 322 and 198 to 291 backward (not causal). The fit is within 20 % of each.
"""

TOLERANCE = 0.25
"""A figure that is off by more is to be explained before anything is tuned."""

HEADS = {
    "triton": (4, 8 + 14),
    "eager": (4, 24 + 45),
    "trl": (4, 4 + 10),
    "logits": (3, 14 + 22),
    "logsumexp": (3, 30 + 46),
}
"""Way -> products of the head; bytes a logit that its passes move, forward and
backward. ``logits`` and ``logsumexp`` hold the logits of all tokens; the others make
them twice, of supervised tokens alone.
"""

NEEDED_PRODUCTS = 3
"""Products of a head that computes no logits twice."""


class Layer(NamedTuple):
    """A layer without its attention.

    Attributes:
        eager_bytes, compiled_bytes: that elementwise passes move by token, forward and
            backward.
        compiled_kernels: forward and backward.
        weights: whose gradients are added to the last ones, a kernel each.
    """

    eager_bytes: int
    compiled_bytes: int
    compiled_kernels: int
    weights: int


LAYERS = {
    1024: Layer(968_334, 162_435, 40, 11),
    2048: Layer(988_313, 269_613, 36, 9),
    4096: Layer(1_919_154, 506_434, 36, 9),
}
"""Width of a model -> layers of Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B, as
``tests/torch/models/test_layer_kernels.py`` counts their bytes, and
``benchmarks/launches.py`` their kernels.
"""

ATTENTION_KERNELS = {"torch_varlen": (13, 7), "flash_attn": (13, 7), "ranges": (4, 3)}
"""Backend -> kernels of a layer's attention, forward and backward, with shared prefixes
and without, as ``benchmarks/launches.py`` counts them.
"""

OTHER_KERNELS = 620 - 61
"""Kernels of a step outside of its layers: embedding, head, loss, filling. In the
profile of Qwen3-0.6B, what the counts above leave of 2,583, less those that the loss
does not need any more.
"""

LAUNCH_SECONDS = 39e-6
"""Seconds of the host for a kernel of compiled layers, all that surrounds its launch
included: 101 ms for the 2,583 of the profiled step, in which the device idled 25 ms.

It is an upper bound: that step began and ended with an idle device. Launches of eager
layers were never timed, and count nothing.
"""

COPIED_KEY_BYTES = 8 + 2 + 1
"""Bytes that an element of a copied key or value moves: two copies; its gradient,
read once; the sum, written once for about two copies.
"""

REFERENCE = 0.3
"""Forward pass of a reference as a share of a step without one, counted 0.29 to 0.32.
"""


class Work(NamedTuple):
    """The work of a step.

    Attributes:
        layers: operations of the layers' products.
        head: operations of one product of the head.
        head_products: how often the head multiplies.
        attention: operations of attention's forward pass, seen scores only.
        flash: operations that products would do in the time of FlashAttention, forward
            and backward, at the measured rate of one large product.
        traffic: kind of `BANDWIDTH` -> bytes that elementwise passes move.
        kernels: that the host launches, where their time is known.
    """

    layers: float
    head: float
    head_products: int
    attention: float
    flash: float
    traffic: Mapping[str, float]
    kernels: int

    def parts(self, ceilings: Mapping[str, float] = CEILINGS) -> dict[str, float]:
        """Return the device's seconds of forward and backward by part."""
        rate = ceilings["product_tflops"] * 1e12
        bandwidth = ceilings["copy_tb_per_second"] * 1e12
        parts = {
            "products": self.layers / rate / PRODUCTS,
            "products of the head": self.head_products * self.head / rate / PRODUCTS,
            "attention": self.flash / rate,
        }
        for kind, moved in self.traffic.items():
            parts[kind] = moved / bandwidth / BANDWIDTH[kind]
        return parts

    def device_seconds(self, ceilings: Mapping[str, float] = CEILINGS) -> float:
        """Return the seconds of the kernels."""
        return sum(self.parts(ceilings).values())

    @property
    def host_seconds(self) -> float:
        """Seconds of the host for launches."""
        return self.kernels * LAUNCH_SECONDS

    def seconds(self, ceilings: Mapping[str, float] = CEILINGS) -> float:
        """Return the seconds of one of several steps in a row."""
        return max(self.device_seconds(ceilings), self.host_seconds)

    def limit(self, ceilings: Mapping[str, float]) -> float:
        """Return the seconds at the measured rates of one product and one copy,
        nothing overlapping.
        """
        operations = self.layers + self.head_products * self.head + 3.5 * self.attention
        moved = sum(self.traffic.values()) - self.traffic.get("head sums", 0)
        products = operations / (ceilings["product_tflops"] * 1e12)
        return products + moved / (ceilings["copy_tb_per_second"] * 1e12)

    @property
    def needed(self) -> float:
        """Operations without those that are done twice: what MFU counts."""
        head_products = min(self.head_products, NEEDED_PRODUCTS)
        return self.layers + head_products * self.head + 3.5 * self.attention


def count_step(
    config: Mapping[str, Any],
    segments: Segments,
    head: str,
    *,
    is_compiled: bool = False,
    is_trained: bool = True,
    attention: str = "torch_varlen",
    has_graphs: bool = False,
    copied_key_bytes: int = COPIED_KEY_BYTES,
) -> Work:
    """Count a step of forward and backward pass.

    Args:
        config: of the model.
        segments: of the row.
        head: a name of `HEADS`.
        is_compiled: layers are compiled.
        is_trained: weights have gradients; False: those of an adapter only, which
            counts nothing.
        attention: backend; ``ranges`` copies no keys and sums no gradients of heads.
        has_graphs: the step is one CUDA graph, which the host launches.
        copied_key_bytes: bytes that an element of a copied key or value moves.
    """
    width, num_layers, vocab = (
        config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = 2 * config["num_key_value_heads"] * config["head_dim"]
    weights = width * (2 * q_width + kv_width + 3 * config["intermediate_size"])
    num_tokens = int(segments.queries.sum())
    layer = LAYERS.get(width, Layer(0, 0, 0, 0))

    head_products, bytes_of_logit = HEADS[head]
    has_all_logits = head in ("logits", "logsumexp")
    num_logit_rows = num_tokens if has_all_logits else segments.targets.sum()

    traffic = {"head": num_logit_rows * vocab * bytes_of_logit}
    if is_compiled:
        traffic["compiled layers"] = num_tokens * num_layers * layer.compiled_bytes
    else:
        traffic["eager layers"] = num_tokens * num_layers * layer.eager_bytes
    if is_trained:
        # Gradients are added to those of the micro-batches before.
        traffic["gradients"] = 6 * (num_layers * weights + vocab * width)
    attention_work = count_attention(
        config,
        segments,
        attention,
        num_layers=num_layers,
        copied_key_bytes=copied_key_bytes,
    )
    kernels = 0
    if has_graphs:
        kernels = 1
    elif is_compiled:
        kernels = num_layers * (layer.compiled_kernels + layer.weights)
        kernels += attention_work.kernels + OTHER_KERNELS
    return Work(
        layers=(6 if is_trained else 4) * num_tokens * num_layers * weights,
        head=2 * num_logit_rows * width * vocab,
        head_products=head_products if is_trained else head_products - 1,
        attention=attention_work.attention,
        flash=attention_work.flash,
        traffic={**traffic, **attention_work.traffic},
        kernels=kernels,
    )


def count_attention(
    config: Mapping[str, Any],
    segments: Segments,
    attention: str,
    *,
    num_layers: int = 1,
    copied_key_bytes: int = COPIED_KEY_BYTES,
) -> Work:
    """Count forward and backward pass of attention alone.

    Args:
        config: with heads and their size.
        segments: of the row.
        attention: backend, see :func:`count_step`.
        num_layers: number of calls.
        copied_key_bytes: bytes that an element of a copied key or value moves.

    Raises:
        KeyError: the kernels of the backend were never counted.
    """
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = 2 * config["num_key_value_heads"] * config["head_dim"]
    queries, keys = segments.queries.astype(float), segments.keys.astype(float)
    num_keys = keys.sum()
    is_shared = num_keys > queries.sum()
    kernels_shared, kernels_alone = ATTENTION_KERNELS[attention]
    traffic = {}
    if attention != "ranges":
        if is_shared:
            copied_elements = num_keys * num_layers * kv_width
            traffic["copied keys"] = copied_elements * copied_key_bytes
        if 2 * q_width > kv_width:
            # Gradients of keys and values for each query head are read, and their sums
            # over the heads of a group written.
            traffic["head sums"] = num_keys * num_layers * 2 * (2 * q_width + kv_width)
    return Work(
        layers=0,
        head=0,
        head_products=0,
        attention=4 * num_layers * q_width * seen_scores(queries, keys),
        flash=num_layers * count_flash(config, queries, keys),
        traffic=traffic,
        kernels=num_layers * (kernels_shared if is_shared else kernels_alone),
    )


def seen_scores(queries: Array, keys: Array) -> float:
    """Return the number of scores of causal attention.

    Args:
        queries, keys: lengths of segments and of their keys, which end together, `[S]`.
    """
    return float((queries * keys - queries * (queries - 1) / 2).sum())


def count_flash(config: Mapping[str, Any], queries: Array, keys: Array) -> float:
    """Return the operations that products would do in the time of a layer's attention,
    forward and backward, see :class:`Work`.
    """
    forward, backward = FLASH[64 if config["head_dim"] <= 64 else 128]
    operations = 4 * config["num_attention_heads"] * config["head_dim"]
    forward_scores = tile_scores(forward, *tiles_of_queries(forward, queries, keys))
    backward_scores = tile_scores(backward, *tiles_of_keys(backward, queries, keys))
    return operations * (forward_scores + 2.5 * backward_scores)


def tile_scores(flash: FlashPass, num_tiles: float, num_programs: float) -> float:
    """Return the scores that products would compute in the time of a pass."""
    num_tiles += flash.overhead * num_programs
    return num_tiles * flash.rows * flash.columns / flash.share


def tiles_of_queries(
    flash: FlashPass, queries: Array, keys: Array
) -> tuple[float, float]:
    """Return the tiles and programs of a forward pass: each has a block of queries, and
    goes over the keys before its last query.
    """
    segment, block = blocks_of(queries, flash.rows)
    last_query = np.minimum((block + 1) * flash.rows, queries[segment])
    last_key = keys[segment] - queries[segment] + last_query
    return float(np.ceil(last_key / flash.columns).sum()), len(segment)


def tiles_of_keys(flash: FlashPass, queries: Array, keys: Array) -> tuple[float, float]:
    """Return the tiles and programs of a backward pass: each has a block of keys, and
    goes over the queries from its first key on.
    """
    segment, block = blocks_of(keys, flash.columns)
    keys_before = keys[segment] - queries[segment]
    first_query = np.maximum(block * flash.columns - keys_before, 0)
    num_blocks = np.ceil(queries[segment] / flash.rows)
    return float((num_blocks - first_query // flash.rows).sum()), len(segment)


def blocks_of(
    lengths: Array, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the segment of each block, and the block's number in its segment."""
    counts = np.ceil(lengths / size).astype(np.int64)
    segment = np.repeat(np.arange(len(lengths)), counts)
    starts = np.cumsum(counts) - counts
    return segment, np.arange(counts.sum()) - starts[segment]


def count_head(num_rows: int, vocab: int, width: int, head: str) -> Work:
    """Count forward and backward pass of a head alone.

    Args:
        num_rows: hidden states, each with a target.
        vocab, width: shape of the weights.
        head: a name of `HEADS`.
    """
    head_products, bytes_of_logit = HEADS[head]
    return Work(
        layers=0,
        head=2 * num_rows * vocab * width,
        head_products=head_products,
        attention=0,
        flash=0,
        traffic={"head": num_rows * vocab * bytes_of_logit},
        kernels=0,
    )


def misses(expected: Mapping[str, float], figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that are off by more than `TOLERANCE`, as sentences."""
    sentences = []
    for name, expected_value in expected.items():
        measured = figures.get(name)
        if measured is None:
            continue
        deviation = measured / expected_value - 1
        if abs(deviation) > TOLERANCE:
            sentences.append(
                f"{name}: expected {expected_value:.4g}, measured {measured:.4g} "
                f"({deviation:+.0%})"
            )
    return sentences
