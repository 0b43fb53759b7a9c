"""Random packs, datasets of them, and tiny random models of every family."""

from __future__ import annotations

import itertools
import locale
import os
import sys
import tempfile
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
from forests import examples_of, random_forest
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from packstore import Dataset, open
from packstore.config import PackConfig
from packstore.format import Examples, Packs, to_offsets
from packstore.io.dataset import put_index
from packstore.io.manifest import Records, build_manifest
from packstore.io.manifest.commit import commit
from packstore.io.shards import PackShape
from packstore.io.store import Location
from packstore.io.versions import ShardWriter
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import collate
from packstore.torch.attention import ATTENTION

torch.set_num_threads(1)  # threads cost more than they bring on tensors of this size

VOCAB = 50
NUMBERS = itertools.count()

if (
    len(tempfile.gettempdir()) > 70
):  # torch's workers would wait for ever, on sockets there
    tempfile.tempdir = tempfile.mkdtemp(dir="/tmp")


def packed(examples: Examples, sizes: Sequence[int], layout: str) -> Packs:
    """The examples in order, `sizes` of them to each pack.

    In layout ``forest`` the examples of a pack share prefixes.
    """
    edges = to_offsets(np.array(sizes))
    if layout == "forest":
        return fill(examples, edges, "shared_prefix", share="pack")
    return fill(examples, edges, layout)


def row(
    pairs: int = 2, layout: str = "concat", kind: str = "preference", seed: int = 0
) -> Any:
    """A batch of one pack with so many random examples, or, in layout ``forest``, of
    the sequences of a random forest.
    """
    examples = random_examples(pairs, seed=seed, kind=kind)
    if layout == "forest":
        examples = examples_of(random_forest(seed, size=3 * pairs), kind)
    return collate(packed(examples, [examples.num_examples], layout), kind)


WINDOWED = ["sliding_attention", "full_attention"]
MLA = {
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 4),
    "v_head_dim": 6,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "num_key_value_heads": 4,
}
INDEXED = {**MLA, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}
INKLING = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    "swa_head_dim": 8,
    "unpadded_vocab_size": VOCAB,
}
LAYERS = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 1}
SEQ2SEQ = {
    **LAYERS,
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
}
DECODER = {"is_decoder": True, "pad_token_id": 0}
GEMMA = {
    "layer_types": WINDOWED,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OTHER_NAMES = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads"), ...
)
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"), MLA
    ),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash"), MLA
    ),
    **dict.fromkeys(("minicpm3", "youtu"), MLA),
    **dict.fromkeys(("axk2", "hy_v4"), INDEXED),
    **{
        n: {"mamba_n_heads": 4, "mamba_d_head": 16}
        for n in ("bamba", "granitemoehybrid")
    },
    "bart": {"decoder_layers": 2, "encoder_layers": 1},
    **{n: {**SEQ2SEQ, "decoder_ffn_dim": 48} for n in ("blenderbot", "plbart")},
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), DECODER
    ),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), DECODER),
    **{n: {"rotary_dim": 8} for n in ("codegen", "gptj")},
    "cohere_compass_text": {
        "layer_types": WINDOWED,
        "rope_parameters": dict.fromkeys(WINDOWED, ROPE),
    },
    "cwm": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {"head_dim": ...},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "gemma3_text": {"layer_types": WINDOWED},
    "gemma3n_text": {
        **GEMMA,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    **{
        n: {**GEMMA, "global_head_dim": 8}
        for n in ("gemma4_text", "gemma4_unified_text")
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "num_layers": 2,
        "num_hidden_layers": ...,
    },
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), INKLING),
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "modernbert-decoder": {
        **dict.fromkeys(("pad_token_id", "cls_token_id", "bos_token_id"), 0),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "prophetnet": {
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "num_hidden_layers": ...,
        "pad_token_id": 0,
    },
    "sarvam_mla": {**MLA, "head_dim": ...},
    "roc_bert": {
        **DECODER,
        "pronunciation_vocab_size": VOCAB,
        "shape_vocab_size": VOCAB,
    },
    "whisper": {**SEQ2SEQ, "num_attention_heads": ...},
    "xlm": {
        "causal": True,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "pad_token_id": 0,
        **OTHER_NAMES,
    },
    "xlnet": {
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 48,
        **OTHER_NAMES,
        "max_position_embeddings": ...,
    },
    "xmod": {**DECODER, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of a family of transformers beyond those of all; ``...``: leave it alone."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "sliding_window"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(
        ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8
    ),
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


def tiny_family(
    name: str, dtype: torch.dtype = torch.float64, head: str = "logits", **settings: Any
) -> Any:
    """A random model of any family, with transformers' own plain attention, without
    dropout.

    `head`: ``logits``, or ``score`` for a reward model.
    """
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no family {name}")
    config_class = CONFIG_MAPPING[name]
    known = config_class()
    small = {key: value for key, value in SMALL.items() if has(known, key)}
    small |= {key: 0.0 for key in vars(known) if "dropout" in key or "pdrop" in key}
    chosen = {**small, **SPECIAL.get(name, {}), **settings}
    config = config_class(
        **{key: value for key, value in chosen.items() if value is not ...}
    )
    torch.manual_seed(0)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING
    if head == "score":
        classes, config.num_labels = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, 1
    model = classes[config_class](config).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no float64
    model.set_attn_implementation("eager")
    return model


def tiny_model(
    name: str = "llama", dtype: torch.dtype = torch.float64, **settings: Any
) -> Any:
    """A random model as it comes, whose norms compute in float64 if it does."""
    model = tiny_family(name, dtype, **{"max_position_embeddings": 2048, **settings})
    model.set_attn_implementation("sdpa")
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if type(module).__name__.endswith("RMSNorm"):
                    exact = nn.RMSNorm(
                        len(module.weight), module.variance_epsilon, dtype=dtype
                    )
                    setattr(parent, child, exact)
    return model


class Exact(TorchFunctionMode):
    """Keeps float64 where model code goes down to float32 (norms, softmax, routers)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            casts = (Tensor.to, Tensor.type)
            if func is Tensor.float or (func in casts and torch.float32 in args):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if (
                func is Tensor.matmul
            ):  # by positions, which were int64 (transformers < 5.20)
                args = (args[0], args[1].double(), *args[2:])
        return func(*args, **kwargs)


@pytest.fixture
def exact() -> Iterator[None]:
    """Models in float64 compute in float64."""
    with Exact():
        yield


@pytest.fixture
def new_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Makes a function an attention backend, for one test; gives its name.

    The registry is closed to users: there is no other way to a backend that leaks.
    """

    def register(attend: Any) -> str:
        name = f"for_tests_{next(NUMBERS)}"
        module: Any = ModuleType(name)
        module.attend = attend
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(ATTENTION, name, f"{name}:attend")
        return name

    return register


@pytest.fixture
def inductor() -> None:
    """Skips under an ASCII locale: torch's compiler reads its own files as the locale's
    text.
    """
    if locale.getpreferredencoding(False).lower() != "utf-8":
        pytest.skip("torch's compiler cannot read its own files under this locale")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group, of this process alone."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, in torch's own C++ as well: what reads it before writing
    shows.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def write(
    url: str, packs: Packs, kind: str = "preference", layout: str = "concat"
) -> Dataset:
    """A committed dataset with row groups of a few packs."""
    location = Location(url)
    size = int(np.diff(packs.token_offsets).max())
    shape = PackShape(
        kind=kind, layout=layout, pack_size=size, carry={}, vocab_size=VOCAB
    )
    config = PackConfig.of(row_group_tokens=100, shard_tokens=600, pack_size=size)
    provenance = {"sources": [], "tokenizer": {"vocab_size": VOCAB}, "settings": {}}
    provenance["package_version"] = "0"
    with ShardWriter(location, shape, config, "0123456789ab") as writer:
        writer.write(packs)
        finished = writer.finish()
        number = len(packs.example_ids)
        records = Records(read=number, packed=number, dropped={}, noted={})
        manifest = build_manifest(shape, config, finished, records, {}, provenance)
        index = put_index(location, (part.sizes for part in finished), 1)
        commit(location, replace(manifest, pack_index=index).to_json(), 1)
    return open(url)


def short_run(folder: Path, layout: str = "concat") -> dict[str, Any]:
    """Saves a model and 24 pairs in 10 packs; returns settings to train on them."""
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    packs = packed(random_examples(24, seed=3), [1, 4, 2, 3, 2] * 2, layout)
    write(str(folder / "data"), packs, layout=layout)
    files = {"model": str(folder / "model"), "train_dataset": str(folder / "data")}
    return {**files, "examples_per_step": 8}


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    return SimpleNamespace(
        VOCAB=VOCAB,
        packed=packed,
        row=row,
        short_run=short_run,
        tiny_family=tiny_family,
        tiny_model=tiny_model,
        write=write,
    )
