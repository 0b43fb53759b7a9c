"""Every causal LM of the installed transformers: as with its own attention, or refused.

Each family is made tiny, in its base form, with windows in half of its layers, and with RoPE tables
that depend on the longest position. Rows reach beyond windows and the limit of such tables.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sized_pairs import pairs
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from packstore.errors import BackendError
from packstore.torch import PackedBatch, collate, use_packed_attention

NAMES = [n for n in CONFIG_MAPPING if CONFIG_MAPPING[n] in MODEL_FOR_CAUSAL_LM_MAPPING]
LARGEST = 6_000_000
"""Weights of a model that is made for the test."""

LIMIT = 24
"""Tokens beyond which `longrope` and `dynamic` have other tables."""

PAIRS = ((4, 6, 9), (30, 8, 8), (20, 3, 2), (40, 12, 12), (2, 1, 1), (26, 9, 9))
"""Tokens of prompt, chosen and rejected."""

COMPOSITE = "several models in one, whose language model is a family of its own"
NOT_MADE = {
    **dict.fromkeys(("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4"), COMPOSITE),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified"), COMPOSITE),
    **dict.fromkeys(("gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama"), COMPOSITE),
    **dict.fromkeys(("moss_transcribe_diarize", "musicgen", "musicgen_melody"), COMPOSITE),
    **dict.fromkeys(("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), COMPOSITE),
    **dict.fromkeys(("blt", "dbrx", "dots3_note_text", "reformer", "xlnet"), "has no tiny config"),
    **dict.fromkeys(("blenderbot", "plbart", "roc_bert", "zamba"), "has no tiny config"),
}


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
    if "is_decoder" in known:
        yield "decoder", {"is_decoder": True}
    rope = getattr(config, "rope_parameters", None)
    if rope:
        kinds = [kind for kind, part in rope.items() if isinstance(part, dict)]
        for made in (longrope(name), {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}):
            parts = dict.fromkeys(kinds, made)
            yield made["rope_type"], {"rope_parameters": parts or made}


def longrope(name: str) -> dict[str, Any]:
    scales = {"long_mscale": 1.3, "short_mscale": 1.1} if name == "phimoe" else {}
    return {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 1.5],
        **scales,
    }


def made(kit: SimpleNamespace, name: str, settings: dict[str, Any]) -> Any:
    """The model; its frequencies are as many as its heads need."""
    settings = copy.deepcopy(settings)
    rope = settings.get("rope_parameters", {})
    parts = [
        part for part in (rope, *rope.values()) if isinstance(part, dict) and "long_factor" in part
    ]
    if "dynamic" in str(rope):
        settings["max_position_embeddings"] = LIMIT
    if name in ("phi3", "phimoe"):
        settings["original_max_position_embeddings"] = LIMIT
    if parts:
        plain = {k: v for k, v in settings.items() if k != "rope_parameters"}
        with torch.device("meta"):
            buffers = list(kit.tiny_family(name, torch.float32, **plain).named_buffers())
        for part in parts:
            kind = next((kind for kind, own in rope.items() if own is part), "")
            sizes = [len(x) for path, x in buffers if path.endswith(f"{kind}_inv_freq".lstrip("_"))]
            part["short_factor"] = [1.0] * sizes[0]
            part["long_factor"] = np.linspace(4, 1.5, sizes[0]).tolist()
    return kit.tiny_family(name, torch.float32, **settings).eval()


@torch.no_grad()
def alone(model: Any, batch: PackedBatch) -> list[Tensor]:
    """The logits of each sequence by the model's own attention, called in the plainest way."""
    sequences = batch.input_ids.split(batch.lengths.tolist())
    # Tables of `dynamic` depend on earlier calls.
    fresh = "dynamic" in str(getattr(model.config, "rope_parameters", ""))
    return [(copy.deepcopy(model) if fresh else model)(x[None]).logits[0] for x in sequences]


@torch.no_grad()
def difference(kit: SimpleNamespace, model: Any, own: list[Tensor] | None) -> float | None:
    """Largest difference of packed logits from `own`, over their largest; None without `own`."""
    use_packed_attention(model, "reference")
    worst = 0.0
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(pairs(*PAIRS), [len(PAIRS)], layout), "preference")
        found = model(**batch.model_inputs()).logits[0]
        if own is None:
            return None
        places = zip(batch.segment_ids, batch.position_ids, strict=True)
        expected = torch.stack([own[segment][position] for segment, position in places])
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def outcome(kit: SimpleNamespace, name: str, settings: dict[str, Any]) -> float | str | None:
    """The difference; or the refusal; None: the model does not run by itself either."""
    try:
        with torch.device("meta"):
            model = use_packed_attention(made(kit, name, settings))
    except BackendError as error:
        return str(error)
    assert sum(map(torch.numel, model.parameters())) < LARGEST
    model = made(kit, name, settings)
    try:
        own = alone(model, collate(kit.packed(pairs(*PAIRS), [len(PAIRS)], "concat"), "preference"))
    except Exception:  # whatever the model raises
        own = None
    try:
        return difference(kit, model, own)
    except BackendError as error:
        return str(error)
    except Exception:
        if own is None:
            return None
        raise


@pytest.mark.parametrize("name", NAMES)
def test_as_with_its_own_attention_or_refused(kit: SimpleNamespace, name: str) -> None:
    if name in NOT_MADE:
        pytest.skip(NOT_MADE[name])
    for variant, settings in variants(name):
        try:
            with torch.device("meta"):
                made(kit, name, settings)
        except Exception as error:  # whatever its config says to that variant
            if variant == "base":
                pytest.skip(f"has no tiny config: {error}")
            continue
        found = outcome(kit, name, settings)
        if isinstance(found, str):
            assert re.match("(packed attention|use_packed_attention)", found), (variant, found)
            assert "rain it unpacked" in found, (variant, found)
        else:
            assert found is not None or variant != "base"
            assert found is None or found < 1e-3, (variant, found)
