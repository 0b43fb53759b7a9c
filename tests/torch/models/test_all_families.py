"""Every causal LM of the installed transformers: as with its own attention, or refused.

Each family is made tiny: in its base form, with windows in half of its layers, in chunks, as a
decoder, and with RoPE tables that depend on the longest position. Rows reach beyond windows,
chunks and the limit of such tables. docs/models.md says how each family runs;
``PACKSTORE_WRITE_MODELS=1`` writes its rows of the families that are tested.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sized_pairs import pairs
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from packstore.errors import BackendError
from packstore.torch import PackedBatch, collate, segment_logps, use_packed_attention
from packstore.torch.models.row import mixers

NAMES = [n for n in CONFIG_MAPPING if CONFIG_MAPPING[n] in MODEL_FOR_CAUSAL_LM_MAPPING]
LARGEST = 6_000_000
"""Weights of a model that is made for the test."""

LIMIT = 24
"""Tokens beyond which `longrope` and `dynamic` have other tables."""

PAIRS = ((4, 6, 9), (30, 8, 8), (20, 3, 2), (40, 12, 12), (2, 1, 1), (26, 9, 9))
"""Tokens of prompt, chosen and rejected."""

SHORT = ((4, 6, 9), (10, 3, 2), (2, 1, 1))
"""The same, for gradients."""

LOGITS, GRADIENTS = 1e-4, 1e-3
"""Tolerances in float32, over the largest logit and the largest gradient."""

PAGE = Path(__file__).parents[3] / "docs/models.md"

COMPOSITE = "several models in one, whose language model is a family of its own"
NOT_MADE = {
    **dict.fromkeys(("dots3_note", "emu3", "fuyu", "gemma3n", "gemma4"), COMPOSITE),
    "gemma3": "tested in test_vision_language.py",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified"), COMPOSITE),
    **dict.fromkeys(("gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama"), COMPOSITE),
    **dict.fromkeys(("moss_transcribe_diarize", "musicgen", "musicgen_melody"), COMPOSITE),
    **dict.fromkeys(("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), COMPOSITE),
    **dict.fromkeys(("blt", "dbrx", "zamba", "zamba2"), "has no tiny config"),
    **dict.fromkeys(("dots3_note_text", "reformer"), "has no tiny config that runs by itself"),
}
WRITTEN = (5, 23)
"""The transformers of the page: in older ones a family may run another way."""

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < WRITTEN
if OLD:
    NOT_MADE["longcat_flash"] = "its tiny config makes 1e9 weights in old transformers"
    NOT_MADE["moshi"] = "in old transformers it looks ahead by itself without a mask"


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


def rows_of(own: list[Tensor], batch: PackedBatch) -> Tensor:
    """The row's logits `[T, V]`, from those of each sequence."""
    places = zip(batch.segment_ids, batch.position_ids, strict=True)
    return torch.stack([own[segment][position] for segment, position in places])


def alone(model: Any, batch: PackedBatch) -> list[Tensor]:
    """The logits of each sequence by the model's own attention, called in the plainest way."""
    sequences = batch.input_ids.split(batch.lengths.tolist())
    # Tables of `dynamic` depend on earlier calls.
    fresh = "dynamic" in str(getattr(model.config, "rope_parameters", ""))
    models = (copy.deepcopy(model) if fresh else model for _ in sequences)
    calls = zip(models, sequences, strict=True)
    return [each(x[None], use_cache=False).logits[0] for each, x in calls]


def made_of(kit: SimpleNamespace, sizes: Any, layout: str) -> PackedBatch:
    return collate(kit.packed(pairs(*sizes), [len(sizes)], layout), "preference")


def check_logits(kit: SimpleNamespace, model: Any) -> None:
    """Compares logits, beyond the limit of tables."""
    with torch.no_grad():
        own = alone(model, made_of(kit, PAIRS, "concat"))
        use_packed_attention(model, "reference")
        for layout in ("concat", "shared_prefix"):
            batch = made_of(kit, PAIRS, layout)
            found, expected = model(**batch.model_inputs()).logits[0], rows_of(own, batch)
            assert (found - expected).abs().max() < 1e-3 * expected.abs().max(), layout


def check_loss(kit: SimpleNamespace, model: Any, backend: str) -> None:
    """Compares log-probs of chosen less rejected, and their gradient in every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = alone(model, made_of(kit, SHORT, "concat"))
    use_packed_attention(model, backend)
    for layout in ("concat", "shared_prefix"):
        batch = made_of(kit, SHORT, layout)
        found, expected = model(**batch.model_inputs()).logits[0], rows_of(own, batch)
        assert (found - expected).abs().max() < LOGITS * expected.abs().max(), layout
        gradients = []
        for logits in (found, expected):
            logps = segment_logps(batch, logits=logits[None])
            loss = (logps * torch.tensor([1.0, -1.0]).repeat(len(SHORT))).sum()
            gradients.append(
                torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            )
        scale = max(float(g.abs().max()) for g in gradients[1] if g is not None)
        for a, b in zip(*gradients, strict=True):
            difference = (0 if a is None else a) - (0 if b is None else b)
            assert a is b or difference.abs().max() < GRADIENTS * scale, layout


def way(model: Any) -> tuple[str, str]:
    """How a prepared model runs, and why."""
    reason = model.forward.serving.reason.removeprefix("packed attention: ")
    if reason:
        return "whole model by sequence", reason
    names = sorted({type(module).__name__ for module in mixers(model).values()})
    return ("mixers by sequence", ", ".join(names)) if names else ("packed", "")


def check(kit: SimpleNamespace, name: str, variant: str, settings: dict[str, Any]) -> Any:
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
        if variant in ("longrope", "dynamic"):
            check_logits(kit, model)
        else:
            check_loss(kit, model, "reference")
    except BackendError as error:
        if not re.search("looks ahead|share the tables|window of a layer", str(error)):
            raise
        return "refused", str(error).partition("; found ")[2].partition(".")[0]
    return way(model)


@pytest.mark.parametrize("name", NAMES)
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
    found = ways.get("decoder") or ways["base"]
    assert found is not None
    row = f"| {name} | {found[0]} | {found[1]} |"
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("PACKSTORE_WRITE_MODELS"):
        lines = [x for x in page.splitlines() if not x.startswith(f"| {name} |")]
        first = lines.index("|---|---|---|") + 1
        PAGE.write_text("\n".join([*lines[:first], *sorted([*lines[first:], row])]) + "\n")
    elif OLD and row not in page.splitlines():
        pytest.skip(f"exact; in transformers {transformers.__version__} it runs as: {found}")
    else:
        assert row in page.splitlines(), "run it with PACKSTORE_WRITE_MODELS=1"
