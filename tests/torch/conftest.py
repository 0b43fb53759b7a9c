"""Random packs, tiny random models, and the plain attention that everything is compared with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
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
from packstore.format.arrays import Examples, Packs, Tally, to_offsets
from packstore.io.dataset.dataset import Dataset, open
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.manifest import PackShape, build_manifest, commit_manifest
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch.attention import ATTENTION
from packstore.torch.models.model import _register

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


MLA = {
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "num_key_value_heads": 4,
}
INDEXED = {**MLA, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}
SEQ2SEQ = {
    "d_model": 32,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "encoder_layers": 1,
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
}
DECODER = {"is_decoder": True, "pad_token_id": 0}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "bailing_hybrid": MLA,
    **dict.fromkeys(("axk2", "dots3_note_text", "hy_v4"), INDEXED),
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "bart": {"decoder_layers": 2, "encoder_layers": 1},
    "camembert": DECODER,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cwm": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "data2vec-text": DECODER,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    **dict.fromkeys(("blenderbot", "plbart"), SEQ2SEQ),
    "falcon": {"head_dim": ...},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_hidden_layers": ...,
        "num_heads": 4,
    },
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "kimi_linear": MLA,
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "longcat_flash": MLA,
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "minicpm3": MLA,
    "modernbert-decoder": {
        **dict.fromkeys(("pad_token_id", "cls_token_id", "bos_token_id"), 0),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "prophetnet": {
        "num_hidden_layers": ...,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "pad_token_id": 0,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "pad_token_id": 0,
        "attn_layers": ["local", "local"],
        "num_hidden_layers": ...,
    },
    "roc_bert": {**DECODER, "pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB},
    "roberta": DECODER,
    "roberta-prelayernorm": DECODER,
    "whisper": {
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        "num_attention_heads": ...,
        "d_model": 32,
        "decoder_layers": 2,
        "encoder_layers": 1,
    },
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xlm": {
        "causal": True,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "pad_token_id": 0,
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), ...),
    },
    "xlnet": {
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 48,
        "max_position_embeddings": ...,
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), ...),
    },
    "xmod": {**DECODER, "default_language": "en_XX"},
    "youtu": MLA,
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "num_mem_blocks": 1},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
"""What a family of transformers needs beyond the settings of all; ``...``: leave it alone."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "sliding_window"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}


def has(config: Any, name: str) -> bool:
    """Also where the value differs by layer, which transformers tells with an error."""
    try:
        return hasattr(config, name)
    except RuntimeError as error:
        return "per-layer attribute" in str(error)


def tiny_family(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A random model of any family, with transformers' own plain attention, without dropout."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no family {name}")
    config_class = CONFIG_MAPPING[name]
    known = config_class()
    small = {key: value for key, value in SMALL.items() if has(known, key)}
    small |= {key: 0.0 for key in vars(known) if "dropout" in key or "pdrop" in key}
    chosen = {**small, **SPECIAL.get(name, {}), **settings}
    config = config_class(**{key: value for key, value in chosen.items() if value is not ...})
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no float64
    model.set_attn_implementation("eager")
    return model


class Exact(TorchFunctionMode):
    """Keeps float64 where model code goes down to float32 (norms, softmax, routers)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            casts = (Tensor.to, Tensor.type)
            if func is Tensor.float or (func in casts and torch.float32 in args):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func is Tensor.matmul:  # by positions, which were int64 (transformers < 5.20)
                args = (args[0], args[1].double(), *args[2:])
        return func(*args, **kwargs)


@pytest.fixture
def exact() -> Iterator[None]:
    """Models in float64 compute in float64."""
    with Exact():
        yield


@pytest.fixture
def new_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], str]]:
    """Makes a function an attention backend, for one test; gives its name."""

    def register(attend: Any) -> str:
        module = ModuleType("backend_for_tests")
        module.attend = attend
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(ATTENTION._entries, "for_tests", f"{module.__name__}:attend")
        _register.cache_clear()
        return "for_tests"

    yield register
    _register.cache_clear()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, in torch's own C++ as well: what reads it before writing shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def write(url: str, packs: Packs, kind: str = "preference", layout: str = "concat") -> Dataset:
    """A committed dataset with row groups of a few packs."""
    location = Location(url)
    size = int(np.diff(packs.token_offsets).max())
    shape = PackShape(kind=kind, layout=layout, pack_size=size, carry={}, vocab_size=VOCAB)
    config = PackConfig.of(row_group_tokens=100, shard_tokens=600, pack_size=size)
    provenance = {"sources": [], "tokenizer": {"vocab_size": VOCAB}, "settings": {}}
    provenance["package_version"] = "0"
    with ShardWriter(location, shape, config, "0123456789ab") as writer:
        writer.write(packs)
        finished = writer.finish()
        shards = [part.shard for part in finished]
        tally = Tally(read=writer.counter.examples)
        manifest = build_manifest(shape, config, shards, writer.counter, tally, {}, provenance)
        index = put_index(location, (part.sizes for part in finished), 1)
        commit_manifest(location, replace(manifest, pack_index=index))
    return open(url)


def short_run(folder: Path, layout: str = "concat") -> dict[str, Any]:
    """Saves a model and 24 pairs in 10 packs; returns settings to train on them."""
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    packs = packed(random_examples(24, seed=3), [1, 4, 2, 3, 2] * 2, layout)
    write(str(folder / "data"), packs, layout=layout)
    return {
        "model": str(folder / "model"),
        "dataset": str(folder / "data"),
        "examples_per_step": 8,
    }


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    return SimpleNamespace(
        VOCAB=VOCAB,
        packed=packed,
        short_run=short_run,
        tiny_family=tiny_family,
        tiny_model=tiny_model,
        write=write,
    )
