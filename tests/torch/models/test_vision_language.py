"""Vision-language models on text: as by their own attention; images are refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    check_isolation,
    collate,
    packed_logps,
    segment_logps,
    use_packed_attention,
)

TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
SEEN = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_SEEN = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
}
QWEN_IDS = {"image_token_id": 49, "video_token_id": 48, "vision_start_token_id": 47}
MODELS: dict[str, dict[str, Any]] = {
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


def made(name: str, dtype: torch.dtype = torch.float64) -> Any:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no family {name}")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**MODELS[name])
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


def batch_of(kit: SimpleNamespace, layout: str) -> PackedBatch:
    # Ids above 45 begin or stand for images.
    examples = random_examples(3, seed=3)
    examples.input_ids[:] %= 45
    return collate(kit.packed(examples, [3], layout), "preference")


@pytest.mark.parametrize("name", list(MODELS))
def test_text_as_by_its_own_attention(kit: SimpleNamespace, exact: None, name: str) -> None:
    """Log-probs, and their gradients, from logits and from the head."""
    own, model = made(name), made(name)
    use_packed_attention(model, "reference")
    for layout in ("concat", "shared_prefix"):
        batch = batch_of(kit, layout)
        ids = batch.input_ids if batch.kv_index is None else batch.input_ids[batch.kv_index]
        rows = [
            own(input_ids=x[None], use_cache=False).logits[0]
            for x in ids.split(batch.lengths.tolist())
        ]
        places = zip(batch.segment_ids, batch.position_ids, strict=True)
        logits = torch.stack([rows[segment][position] for segment, position in places])
        expected = segment_logps(batch, logits=logits)
        found = packed_logps(model, batch)
        from_logits = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(from_logits, expected, rtol=1e-11, atol=1e-11)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(batch.num_segments // 2)
        gradients = [
            torch.autograd.grad(
                (logps * signs).sum(), [*each.parameters()], allow_unused=True, retain_graph=True
            )
            for logps, each in ((found, model), (expected, own))
        ]
        assert any(g is not None for g in gradients[1])
        scale = max(float(g.abs().max()) for g in gradients[1] if g is not None)
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or (a - b).abs().max() < 1e-11 * scale


@pytest.mark.parametrize("name", list(MODELS))
def test_the_probe_passes_and_images_are_refused(kit: SimpleNamespace, name: str) -> None:
    model = use_packed_attention(made(name, torch.float32), "sdpa")
    assert check_isolation(model) < 1e-3
    batch = batch_of(kit, "concat")
    images = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    message = r"packed row: inputs must be text; found pixel_values\. Call the model with \*\*batch"
    whole = use_packed_attention(copy.deepcopy(model), "per_sequence")
    for each in (model, whole):
        with pytest.raises(BackendError, match=message):
            each(**batch.model_inputs(), **images)
