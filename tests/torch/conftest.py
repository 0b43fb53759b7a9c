"""Random packs, tiny random models, and the plain attention that everything is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from packstore.config import PackConfig
from packstore.io.dataset import Dataset, open
from packstore.io.manifest import PackShape, build_manifest, commit_manifest
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.pack.fill import fill
from packstore.records import Examples, Packs, Tally, to_offsets

torch.set_num_threads(1)  # threads cost more than they bring on tensors of this size

VOCAB = 50
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 8, "sliding_window": 4}),
}


def packed(examples: Examples, sizes: Sequence[int], layout: str) -> Packs:
    """The examples in order, `sizes` of them to each pack."""
    return fill(examples, to_offsets(np.array(sizes)), layout)


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T) v over one whole sequence, in the dtype of the model."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    back = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    seen = (back >= 0) & (back < (sliding_window or len(back)))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("plain_for_tests", plain_attention)
AttentionMaskInterface.register("plain_for_tests", lambda *_, **__: None)


def tiny_model(name: str = "llama", dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A random model of two layers, whose norms compute in float64 if it does."""
    model_class, config_class, special = MODELS[name]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **{**special, **settings},
    )
    torch.manual_seed(0)
    model = model_class(config).to(dtype)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if type(module).__name__.endswith("RMSNorm"):
                    exact = nn.RMSNorm(len(module.weight), module.variance_epsilon, dtype=dtype)
                    setattr(parent, child, exact)
    return model


def write(url: str, packs: Packs, kind: str = "dpo", layout: str = "concat") -> Dataset:
    """A committed dataset with row groups of a few packs."""
    location = Location(url)
    size = int(np.diff(packs.token_offsets).max())
    shape = PackShape(kind=kind, layout=layout, pack_size=size, carry={}, vocab_size=VOCAB)
    config = PackConfig.of(row_group_tokens=100, shard_bytes=6000, pack_size=size)
    provenance = {"sources": [], "tokenizer": {"vocab_size": VOCAB}, "settings": {}}
    provenance["package_version"] = "0"
    with ShardWriter(location, shape, config, "0123456789ab") as writer:
        writer.write(packs)
        shards = writer.close()
        tally = Tally(read=writer.counter.examples)
        manifest = build_manifest(shape, config, shards, writer.counter, tally, {}, provenance)
        commit_manifest(location, manifest)
    return open(url)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    return SimpleNamespace(VOCAB=VOCAB, packed=packed, tiny_model=tiny_model, write=write)
