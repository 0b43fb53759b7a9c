"""Every causal LM of the installed transformers: as with its own attention, or refused.

Each family is made tiny: in its base form, with windows in half of its layers, in
chunks, as a decoder, and with RoPE tables that depend on the longest position. Rows
reach beyond windows, chunks and the limit of such tables. docs/models.md says how each
family runs. Log-probs without logits are those of the logits, or the head is refused.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sized_pairs import LAYOUTS, alone, in_row, row_of
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText,
)

from packstore.errors import BackendError, CompatibilityError
from packstore.torch import (
    PackedBatch,
    check_isolation,
    packed_logps,
    segment_logps,
    use_packed_attention,
)

NAMES = [n for n in CONFIG_MAPPING if CONFIG_MAPPING[n] in MODEL_FOR_CAUSAL_LM_MAPPING]
FEW = (
    "bloom",
    "doge",
    "gemma3_text",
    "gpt_oss",
    "lfm2",
    "llama",
    "llama4_text",
    "mamba",
    "phimoe",
)
EXACT = (
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "llama",
    "minimax",
    "mixtral",
    "qwen3",
    "qwen3_next",
)
LARGEST = 6_000_000
"""Weights of a model that is made for the test."""

LIMIT = 24
"""Tokens beyond which `dynamic` has other tables; `longrope` is in test_mixers.py."""

PAIRS = ((4, 6, 9), (30, 8, 8), (20, 3, 2), (40, 12, 12), (2, 1, 1), (20, 9, 3))
"""Tokens of prompt, chosen and rejected; the last pair is on both sides of the limit.
"""

SHORT = ((2, 1, 1), (4, 6, 9), (12, 3, 2))
"""The same, for gradients: a tree of depth 3."""

COMPOSITE = "several models in one, whose language model is a family of its own"
NOT_MADE = {
    **dict.fromkeys(
        ("dots3_note", "emu3", "fuyu", "gemma3n", "gemma4", "git"), COMPOSITE
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified", "got_ocr2", "llama4"), COMPOSITE
    ),
    **dict.fromkeys(
        ("gemma4_unified_assistant", "mllama", "moss_transcribe_diarize"), COMPOSITE
    ),
    **dict.fromkeys(
        ("musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5"), COMPOSITE
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen4_exp"), COMPOSITE),
    **dict.fromkeys(("blt", "dbrx", "zamba", "zamba2"), "has no tiny config"),
    **dict.fromkeys(
        ("dots3_note_text", "reformer"), "has no tiny config that runs by itself"
    ),
    "gemma3": "tested as a vision-language model",
}
OTHER_HEADS = (
    "camembert",
    "data2vec-text",
    "modernbert-decoder",
    "prophetnet",
    "roberta",
)
OTHER_HEADS += (
    "roberta-prelayernorm",
    "roc_bert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
OTHER_HEADS += ("inkling_text",)
"""Most have further layers before the last product; `inkling_text` leaves out columns
of it.
"""

FIXED_VOCABULARY = ("xlstm",)
"""Families whose vocabulary transformers cannot resize."""

WRITTEN = (5, 24)
"""The transformers of the page: in older ones a family may run another way."""

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < WRITTEN
if OLD:
    NOT_MADE["longcat_flash"] = "its tiny config makes 1e9 weights in old transformers"
    NOT_MADE["moshi"] = "in old transformers it looks ahead by itself without a mask"


def listed() -> dict[str, str]:
    """How each family runs, from the page."""
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    ways = ("packed", "mixers by sequence", "whole model by sequence", "refused")
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    text = dict(zip([x.lower() for x in parts[1::2]], parts[2::2], strict=True))
    return {name: way for way in ways for name in re.findall(r"`([\w-]+)`", text[way])}


def variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings over those of the tiny family."""
    yield "base", {}
    config = CONFIG_MAPPING[name]()
    known = set(vars(config))
    if "sliding_window" in known:
        window: dict[str, Any] = {"sliding_window": 4}
        if "use_sliding_window" in known:
            window["use_sliding_window"] = True
        if getattr(config, "layer_types", None):
            window["layer_types"] = ["sliding_attention", "full_attention"]
        yield "window", window
    if "attention_chunk_size" in known:
        yield "chunk", {"attention_chunk_size": 5}
    if "is_decoder" in known:
        yield "decoder", {"is_decoder": True}
    rope = getattr(config, "rope_parameters", None)
    if rope:
        kinds = [kind for kind, part in rope.items() if isinstance(part, dict)]
        dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        yield "dynamic", {"rope_parameters": dict.fromkeys(kinds, dynamic) or dynamic}


def made(kit: SimpleNamespace, name: str, settings: dict[str, Any]) -> Any:
    """The model; tables of RoPE change at the limit."""
    if "dynamic" in str(settings):
        settings = {**copy.deepcopy(settings), "max_position_embeddings": LIMIT}
    return kit.tiny_family(name, torch.float32, **settings).eval()


def compare(
    model: Any,
    backends: tuple[str, ...],
    sizes: Any = SHORT,
    tolerance: tuple[float, float] = (1e-4, 1e-3),
) -> None:
    """Logits, and gradients of chosen less rejected log-probs in every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = alone(model, row_of(sizes, "concat"))
    for backend in backends:
        use_packed_attention(model, backend)
        for layout in LAYOUTS:
            batch = row_of(sizes, layout)
            expected = in_row(own, batch)
            found = model(**batch.model_inputs()).logits[0]
            largest = expected.abs().max()
            assert (found - expected).abs().max() < tolerance[0] * largest, (
                backend,
                layout,
            )
            if not torch.is_grad_enabled():
                continue
            gradients = []
            for logits in (found, expected):
                logps = segment_logps(batch, logits=logits[None])
                loss = (logps * torch.tensor([1.0, -1.0]).repeat(len(sizes))).sum()
                keep = {"retain_graph": True, "allow_unused": True}
                gradients.append(torch.autograd.grad(loss, parameters, **keep))
            scale = max(float(g.abs().max()) for g in gradients[1] if g is not None)
            for a, b in zip(*gradients, strict=True):
                difference = (0 if a is None else a) - (0 if b is None else b)
                assert a is b or difference.abs().max() < tolerance[1] * scale, (
                    backend,
                    layout,
                )


def check(
    kit: SimpleNamespace, name: str, variant: str, settings: dict[str, Any]
) -> str | None:
    """How the variant runs; None: it does not run by itself either."""
    with torch.device("meta"):
        size = sum(map(torch.numel, made(kit, name, settings).parameters()))
    assert size < LARGEST, "make it smaller, in SPECIAL of conftest.py"
    model = made(kit, name, settings)
    try:
        with torch.no_grad():
            copy.deepcopy(model)(torch.arange(1, 9)[None], use_cache=False)
    except Exception:  # whatever the model raises
        return None
    try:
        if variant == "dynamic":
            with torch.no_grad():
                compare(model, ("reference",), PAIRS, (1e-3, 0))
        else:
            compare(model, ("reference",))
    except BackendError as error:
        if not re.search("looks ahead|window of a layer", str(error)):
            raise
        return "refused"
    if variant == "base":
        check_head(name, model, row_of(SHORT))
    return way_of(model, [row_of(SHORT[:n], "concat") for n in (1, 3)])


@torch.no_grad()
def check_head(name: str, model: Any, batch: PackedBatch) -> None:
    """Compares log-probs with and without logits, also of a vocabulary that grew."""
    if name in OTHER_HEADS:
        with pytest.raises(CompatibilityError, match="segment_logps"):
            packed_logps(model, batch)
        return
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    for grown in (0,) if name in FIXED_VOCABULARY else (0, 6):
        if grown:
            size = model.get_input_embeddings().weight.shape[0] + grown
            model.resize_token_embeddings(size, mean_resizing=False)
        expected = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
        found = packed_logps(model, batch)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), grown


@torch.no_grad()
def way_of(model: Any, rows: list[PackedBatch]) -> str:
    """From the modules that are called three times as often for three times the
    sequences.
    """
    counts: list[Counter[Any]] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: counts[-1].update([module]))
    for batch in rows:
        counts.append(Counter())
        model(**batch.model_inputs())
    repeated = {module for module, n in counts[0].items() if counts[1][module] == 3 * n}
    if model.get_input_embeddings() in repeated:
        return "whole model by sequence"
    return "mixers by sequence" if repeated else "packed"


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_as_with_its_own_attention_or_refused(kit: SimpleNamespace, name: str) -> None:
    if name in NOT_MADE:
        pytest.skip(NOT_MADE[name])
    ways = {}
    for variant, settings in variants(name):
        try:
            with torch.device("meta"):
                made(kit, name, settings)
        except Exception as error:  # whatever its config says to that variant
            if variant == "base":
                pytest.skip(f"has no tiny config: {error}")
            continue
        ways[variant] = check(kit, name, variant, settings)
    # Families with a mode that looks ahead are language models as decoders.
    way = ways.get("decoder") or ways["base"]
    assert way is not None
    if OLD and listed().get(name) != way:
        pytest.skip(
            f"exact; in transformers {transformers.__version__} it runs as: {way}"
        )
    assert listed().get(name) == way, "docs/models.md must say so"


@pytest.mark.parametrize("name", EXACT)
def test_in_float64_and_by_the_probe(
    kit: SimpleNamespace, exact: None, name: str
) -> None:
    """In training mode, by every backend of a CPU; flex has no gradients there."""
    torch._dynamo.reset()
    settings = {"layer_types": ["linear_attention", "full_attention"]}
    model = kit.tiny_family(name, **(settings if name == "qwen3_next" else {})).train()
    backends = ("reference",) if name == "gemma2" else ("reference", "sdpa")
    compare(model, backends, SHORT, (1e-11, 1e-11))
    if name in ("gemma2", "llama", "deepseek_v3"):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            compare(model, ("flex",), SHORT, (1e-11, 0))
    assert check_isolation(model, "auto") < 1e-3


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    **HEADS,
    "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
    }
}
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
SEEN = {**SIGHT, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
QWEN_SEEN = {**SIGHT, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
QWEN_IDS = {"image_token_id": 49, "video_token_id": 48, "vision_start_token_id": 47}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, **WINDOW},
        "vision_config": SEEN,
        "mm_tokens_per_image": 4,
        "image_token_id": 49,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**SEEN, "model_type": "pixtral", "head_dim": 8},
        "image_token_id": 49,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **SECTIONS},
        "vision_config": {**QWEN_SEEN, "fullatt_block_indexes": [0]},
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **SECTIONS},
        "vision_config": {**QWEN_SEEN, "deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
}


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in VISION if n != "gemma3"),
    ],
)
def test_vision_language_models_take_text(
    kit: SimpleNamespace, exact: None, name: str
) -> None:
    """As by their own attention, from logits and from the head; images are refused."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**VISION[name])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    model.set_attn_implementation("eager")
    compare(model, ("reference",), SHORT, (1e-11, 1e-11))
    assert check_isolation(model) < 1e-3
    batch = row_of(SHORT)
    logps = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
    torch.testing.assert_close(
        packed_logps(model, batch), logps, rtol=1e-11, atol=1e-11
    )
    for each in (model, use_packed_attention(model, "per_sequence")):
        with pytest.raises(BackendError, match="pixel_values"):
            each(**batch.model_inputs(), pixel_values=torch.zeros(1, 3, 8, 8))
