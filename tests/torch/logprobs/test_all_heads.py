"""The head of every causal LM of transformers: log-probs without logits are the model's own.

Each family in its tiny base form, with a bias in its head where it has one, as it is and with a
vocabulary that grew after the model was prepared; a head of another form is refused in a sentence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from packstore.errors import BackendError, CompatibilityError
from packstore.testing import random_examples
from packstore.torch import PackedBatch, collate, packed_logps, segment_logps, use_packed_attention

NAMES = [n for n in CONFIG_MAPPING if CONFIG_MAPPING[n] in MODEL_FOR_CAUSAL_LM_MAPPING]
LARGEST = 6_000_000
"""Weights of a model that is made for the test."""

TRANSFORM = "its logits must be its hidden states times its head"
REFUSED = dict.fromkeys(
    (
        *("camembert", "data2vec-text", "modernbert-decoder", "prophetnet", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        "inkling_text",
    ),
    TRANSFORM,
)
"""Families that attention accepts and whose heads are refused, and the reason: most have further
layers before the last product; `inkling_text` leaves out columns of its head."""

FIXED = ("xlstm",)
"""Families whose vocabulary transformers cannot resize."""


@pytest.fixture(scope="module")
def batch(kit: SimpleNamespace) -> PackedBatch:
    packs = kit.packed(random_examples(3, seed=2), [3], "shared_prefix")
    return collate(packs, "preference")


def accepted(kit: SimpleNamespace, name: str, batch: PackedBatch) -> Any:
    """The model, prepared; skips a family that is not made, or that attention refuses."""
    try:
        with torch.device("meta"):
            small = kit.tiny_family(name, torch.float32)
            size = sum(map(torch.numel, small.parameters()))
            use_packed_attention(small)
    except BackendError as error:
        pytest.skip(str(error))
    except Exception as error:  # whatever its config says
        pytest.skip(f"has no tiny config: {error}")
    if size > LARGEST:
        pytest.skip("has no tiny config")
    model = use_packed_attention(kit.tiny_family(name, torch.float32).eval(), "reference")
    try:
        model(**batch.model_inputs())
    except BackendError as error:
        pytest.skip(str(error))
    except Exception as error:  # it does not run by itself either, see test_families.py
        pytest.skip(f"does not run: {error}")
    return model


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_its_head(kit: SimpleNamespace, batch: PackedBatch, name: str) -> None:
    model = accepted(kit, name, batch)
    if name in REFUSED:
        with pytest.raises(CompatibilityError, match=REFUSED[name] + ".*Use logits: segment_logps"):
            packed_logps(model, batch)
        return
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        nn.init.normal_(bias)
    for grown in (0,) if name in FIXED else (0, 6):
        if grown:
            model.resize_token_embeddings(kit.VOCAB + grown, mean_resizing=False)
        expected = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
        found = packed_logps(model, batch)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), grown
