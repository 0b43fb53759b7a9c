"""Sizes on a GPU and in a dry run on a CPU, and batches of given lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def _config(
    vocab: int,
    width: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    **further: Any,
) -> dict[str, Any]:
    """A config by vocabulary, widths, layers; query heads, key heads and their size."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        **further,
    }


LLAMA = _config(128256, 2048, 8192, 16, (32, 8, 64), tie_word_embeddings=True)
"""Llama-3.2-1B."""

QWEN3 = _config(151936, 1024, 3072, 28, (16, 8, 128), tie_word_embeddings=True)
"""Qwen3-0.6B."""

LLAMA_8B = _config(128256, 4096, 14336, 32, (32, 8, 128))
"""Llama-3.1-8B."""

SMALL = _config(1024, 256, 512, 2, (8, 2, 64), initializer_range=0.05)
"""For comparisons with float32: weights so large that attention matters, and so small
that 16 bits suffice.
"""

TINY = _config(100, 32, 48, 2, (4, 2, 8), initializer_range=0.05)

PROFILES = {
    "hh": (94, 32, 32),
    "ultrafeedback": (121, 288, 288),
    "long": (4096, 256, 256),
}
"""Medians of the tokens of prompt, chosen and rejected; log-normal with sigma 0.9."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Devices and sizes."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    backends: tuple[
        str, ...
    ]  # of attention: that of `auto` first, the slowest to compile last
    heads: tuple[
        tuple[int, int, int], ...
    ]  # query heads, key heads and head size, for kernels
    row: int  # tokens of the rows in cases of correctness
    models: dict[str, tuple[str, dict[str, Any]]]  # name -> model family and config
    small: dict[str, Any]  # config of the models in cases of correctness
    tokens: tuple[int, int]  # of a micro-batch, the smaller and the larger
    head_tokens: tuple[
        int, int, tuple[int, ...]
    ]  # a few, many, and sizes at the edges of tiles
    head_shapes: tuple[tuple[int, int], ...]  # vocabulary and width of the head
    longest: dict[str, int]  # longest prompt or response by length profile
    rounds: int  # timed, each with all pairs
    micro_batches: int  # those with shared prefixes in a round
    pairs: int  # packed
    pairs_per_step: int
    steps: int
    pack_size: int
    window: int

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device == "cuda"

    @property
    def vocab(self) -> int:
        """Token ids that all models know."""
        return min(config["vocab_size"] for _, config in self.models.values())


GPU = Sizes(
    device="cuda",
    backends=(
        "torch_varlen",
        "sdpa",
        "flash_attn",
        "flash_attn_3",
        "flex",
    ),
    heads=((32, 8, 64), (8, 8, 128), (16, 1, 128), (8, 2, 256)),
    row=2000,
    models={"llama-1.2b": ("Llama", LLAMA), "qwen3-0.6b": ("Qwen3", QWEN3)},
    small=SMALL,
    tokens=(8192, 32768),
    head_tokens=(7, 4105, (1, 8193)),
    head_shapes=((128256, 2048), (151936, 1024)),
    longest={"hh": 2048, "ultrafeedback": 2048, "long": 8192},
    rounds=5,
    micro_batches=8,
    pairs=1200,
    pairs_per_step=64,
    steps=15,
    pack_size=8192,
    window=64,
)
DRY = Sizes(
    device="cpu",
    backends=("sdpa", "flash_attn", "reference"),
    heads=((4, 2, 16),),
    row=80,
    models={"llama-1.2b": ("Llama", TINY), "qwen3-0.6b": ("Qwen3", TINY)},
    small=TINY,
    tokens=(256, 512),
    head_tokens=(7, 33, (1,)),
    head_shapes=((100, 32),),
    longest={"hh": 40, "ultrafeedback": 40, "long": 60},
    rounds=1,
    micro_batches=2,
    pairs=32,
    pairs_per_step=4,
    steps=4,
    pack_size=256,
    window=8,
)


def lengths(profile: str, n: int, longest: int, seed: int = 0) -> np.ndarray:
    """Tokens of prompt, chosen and rejected of `n` pairs, int `[n, 3]`."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(PROFILES[profile]), 0.9, (n, 3))
    return np.clip(np.rint(drawn), 2, longest).astype(np.int64)


def batch_of(rows: np.ndarray, layout: str, vocab_size: int) -> Any:
    """One pack of these pairs; the tokens follow from the lengths, the same in every
    layout.
    """
    from packstore.format.arrays import Packs, to_offsets
    from packstore.torch import collate

    ids, labels, whole = [], [], []
    for prompt, *responses in rows.tolist():
        rng = np.random.default_rng([prompt, *responses])
        shared = rng.integers(0, vocab_size, prompt)
        for i, response in enumerate(responses):
            own = rng.integers(0, vocab_size, response)
            start = prompt - 1 if i and layout == "shared_prefix" else 0
            ids.append(np.concatenate([shared, own])[start:])
            labels.append(np.concatenate([np.full(prompt, -100), own])[start:])
            whole.append(prompt + response)
    segments, pairs, tokens = len(ids), len(rows), np.concatenate(ids)
    is_shared = layout == "shared_prefix" and rows[:, 0] > 1
    distances = np.stack([np.zeros(pairs), np.ones(pairs) * is_shared], axis=1)
    packs = Packs(
        signed_ids=np.where(np.concatenate(labels) >= 0, tokens, ~tokens).astype(
            np.int32
        ),
        reward=np.tile(np.array([1, 0], np.float32), pairs),
        lengths=np.array(whole, np.int32),
        seq_boundaries=to_offsets(np.array([len(x) for x in ids])).astype(np.int32),
        parent_distances=distances.ravel().astype(np.int32),
        example_ids=np.arange(pairs),
        num_responses=np.full(pairs, 2, np.int32),
        token_offsets=np.array([0, sum(map(len, ids))]),
        sequence_offsets=np.array([0, segments]),
        example_offsets=np.array([0, pairs]),
    )
    return collate(packs, "preference")


def tokens_of(rows: np.ndarray, packing: str) -> int:
    """Tokens that pairs fill; of padded rows, their padding counts."""
    p, c, r = rows.T
    if packing.startswith("padded"):
        return 2 * len(p) * int((p + np.maximum(c, r)).max())
    return int((p + 1 + c + r if packing == "shared_prefix" else 2 * p + c + r).sum())


def cut(rows: np.ndarray, packing: str, size: int) -> list[np.ndarray]:
    """Runs of pairs, as many in each as `size` tokens hold.

    ``padded_grouped`` are pairs of similar length, the runs in random order.
    """
    grouped = packing == "padded_grouped"
    if grouped:
        rows = rows[np.argsort(rows[:, 0] + rows[:, 1:].max(1), kind="stable")]
    runs, start = [], 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or tokens_of(rows[start : stop + 1], packing) > size:
            runs.append(rows[start:stop])
            start = stop
    if grouped:
        np.random.default_rng(0).shuffle(runs)
    return runs


def make_model(
    family: str, config: dict[str, Any], sizes: Sizes, dtype: Any = None
) -> Any:
    """A random model in training mode, the same for every dtype."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**config, use_cache=False)
    kind = getattr(transformers, f"{family}ForCausalLM")
    with torch.device(sizes.device):
        return kind(settings).to(dtype or sizes.dtype).train()
