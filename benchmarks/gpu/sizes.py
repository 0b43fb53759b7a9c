"""Sizes on a GPU and in a dry run on a CPU, and batches of given lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Lengths = npt.NDArray[np.int64]
"""Tokens of prompt, chosen and rejected: of pairs, `[n, 3]`, or of rollouts,
`[n, turns, 3]`. From the second turn on, the prompt is what a tool answered.
"""


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
    "agents": (200, 80, 80),
}
"""Medians of the tokens of prompt, chosen and rejected; log-normal with sigma 0.9."""

TURNS = {"agents": 6}
"""Profile -> turns of a rollout: each is a pair whose prompt is all that was chosen
before, so that a pack has a tree of prefixes as deep.
"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Devices and sizes."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    backends: tuple[
        str, ...
    ]  # of attention: that of `auto` first, the slowest to compile last
    timed_backends: tuple[str, ...]  # beside each other
    heads: tuple[
        tuple[int, int, int], ...
    ]  # query heads, key heads and head size, for kernels
    row: int  # tokens of the rows in cases of correctness
    models: dict[str, tuple[str, dict[str, Any]]]  # name -> model family and config
    timed_models: tuple[str, ...]  # those whose parts are timed
    adapted_models: tuple[str, ...]  # those trained by LoRA, their weights frozen
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
        "ranges",
        "sdpa",
        "flash_attn",
        "flash_attn_3",
        "flex",
    ),
    timed_backends=("torch_varlen", "ranges", "flash_attn", "flash_attn_3"),
    heads=((32, 8, 64), (8, 8, 128), (16, 1, 128), (8, 2, 256)),
    row=2000,
    models={
        "llama-1.2b": ("Llama", LLAMA),
        "qwen3-0.6b": ("Qwen3", QWEN3),
        "llama-8b": ("Llama", LLAMA_8B),
    },
    timed_models=("llama-1.2b", "qwen3-0.6b"),
    adapted_models=("llama-8b",),
    small=SMALL,
    tokens=(8192, 32768),
    head_tokens=(7, 4105, (1, 8193)),
    head_shapes=((128256, 2048), (151936, 1024)),
    longest={"hh": 2048, "ultrafeedback": 2048, "long": 8192, "agents": 2048},
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
    backends=("sdpa", "ranges", "flash_attn", "reference"),
    timed_backends=("sdpa", "ranges", "flash_attn"),
    heads=((4, 2, 16),),
    row=80,
    models={
        "llama-1.2b": ("Llama", TINY),
        "qwen3-0.6b": ("Qwen3", TINY),
        "llama-8b": ("Llama", TINY),
    },
    timed_models=("llama-1.2b", "qwen3-0.6b"),
    adapted_models=("llama-8b",),
    small=TINY,
    tokens=(256, 512),
    head_tokens=(7, 33, (1,)),
    head_shapes=((100, 32),),
    longest={"hh": 40, "ultrafeedback": 40, "long": 60, "agents": 12},
    rounds=1,
    micro_batches=2,
    pairs=32,
    pairs_per_step=4,
    steps=4,
    pack_size=256,
    window=8,
)


def lengths(profile: str, n: int, longest: int, seed: int = 0) -> Lengths:
    """Return the tokens of `n` pairs or rollouts, each part at most `longest`."""
    rng = np.random.default_rng(seed)
    turns = TURNS.get(profile)
    shape = (n, 3) if turns is None else (n, turns, 3)
    drawn = rng.lognormal(np.log(PROFILES[profile]), 0.9, shape)
    return np.clip(np.rint(drawn), 2, longest).astype(np.int64)


class Segments(NamedTuple):
    """Segments of a row, `[S]` each.

    Attributes:
        queries: tokens in the row.
        keys: tokens of the whole sequence, which the last query sees.
        targets: supervised tokens, the last ones.
        parents: distance to the segment whose sequence it begins like; 0: none.
    """

    queries: Lengths
    keys: Lengths
    targets: Lengths
    parents: Lengths


def segments_of(rows: Lengths, packing: str) -> Segments:
    """Return the segments of a row with these pairs, or turns of rollouts, in order."""
    turns = rows.reshape(len(rows), -1, 3)
    prompt, chosen, rejected = np.moveaxis(turns, 2, 0)
    ends = np.cumsum(prompt + chosen, axis=1)
    starts = ends - prompt - chosen  # tokens before a turn
    contexts = starts + prompt

    targets = np.stack([chosen, rejected], axis=2)
    keys = contexts[..., None] + targets
    omitted = np.zeros_like(keys)
    if packing == "shared_prefix":
        # The last token of a context is stored again, to predict the first rejected.
        omitted = np.stack([starts, contexts - 1], axis=2)
    elif packing.startswith("padded"):
        keys = np.full_like(keys, keys.max())
    parents = np.where(omitted > 0, np.array([2, 1]), 0)
    queries = keys - omitted
    return Segments(*(x.ravel() for x in (queries, keys, targets, parents)))


def tokens_of(rows: Lengths, packing: str) -> int:
    """Return the tokens that pairs fill; of padded rows, their padding counts."""
    return int(segments_of(rows, packing).queries.sum())


def batch_of(rows: Lengths, layout: str, vocab_size: int) -> Any:
    """Return one pack of these pairs, or of the pairs of these rollouts.

    The tokens follow from the lengths, the same in every layout.
    """
    from packstore.format.arrays import Packs, to_offsets
    from packstore.torch import collate

    segments = segments_of(rows, layout)
    ids, labels = [], []
    for turns in rows.reshape(len(rows), -1, 3).tolist():
        rng = np.random.default_rng(turns[0])
        context = np.zeros(0, np.int64)
        for prompt, *responses in turns:
            context = np.concatenate([context, rng.integers(0, vocab_size, prompt)])
            answers = [rng.integers(0, vocab_size, n) for n in responses]
            for answer in answers:
                ids.append(np.concatenate([context, answer]))
                labels.append(np.concatenate([np.full(len(context), -100), answer]))
            context = np.concatenate([context, answers[0]])
    stored = list(zip(segments.queries.tolist(), ids, labels, strict=True))
    row_ids = np.concatenate([x[-n:] for n, x, _ in stored])
    row_labels = np.concatenate([x[-n:] for n, _, x in stored])
    num_segments = len(ids)
    num_pairs = num_segments // 2
    packs = Packs(
        signed_ids=np.where(row_labels >= 0, row_ids, ~row_ids).astype(np.int32),
        reward=np.tile(np.array([1, 0], np.float32), num_pairs),
        lengths=segments.keys.astype(np.int32),
        seq_boundaries=to_offsets(segments.queries).astype(np.int32),
        parent_distances=segments.parents.astype(np.int32),
        example_ids=np.arange(num_pairs),
        num_responses=np.full(num_pairs, 2, np.int32),
        token_offsets=np.array([0, len(row_ids)]),
        sequence_offsets=np.array([0, num_segments]),
        example_offsets=np.array([0, num_pairs]),
    )
    return collate(packs, "preference")


def cut(rows: Lengths, packing: str, size: int) -> list[Lengths]:
    """Return runs of pairs or rollouts, as many in each as `size` tokens hold.

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
