"""What the attention function refuses, and the probe for one's own model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from packstore.errors import BackendError, CompatibilityError, UnknownNameError
from packstore.testing import random_examples
from packstore.torch import check_isolation, check_model, collate, use_packed_attention
from packstore.torch.attention import ATTENTION
from packstore.torch.model import _logged

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed_layout": None}, "the call must name the segments; found no layout"),
        ({"attention_mask": "ones"}, "the layout alone says .*; found attention_mask of shape"),
        ({"attention_mask": "4d"}, "the layout alone says .*; found attention_mask of shape"),
        ({"input_ids": "short"}, "the layout is of one row of .* tokens; found 1 rows of"),
        ({"input_ids": "rows"}, "the layout is of one row of .* tokens; found 2 rows of"),
        ({"past_key_values": "past", "use_cache": True}, "without a past; found"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_refused_calls(
    kit: SimpleNamespace, name: str, change: dict[str, Any], message: str
) -> None:
    model = use_packed_attention(kit.tiny_model(name, torch.float32))
    batch = collate(kit.packed(random_examples(2), [2], "concat"), "dpo")
    inputs = batch.model_inputs()
    past = DynamicCache(config=model.config)
    model(**{**inputs, "past_key_values": past, "use_cache": True})
    ids, positions, n = inputs["input_ids"], inputs["position_ids"], batch.num_tokens
    values = {
        "ones": torch.ones(1, n, dtype=torch.long),
        "4d": torch.ones(1, 1, n, n, dtype=torch.bool),
        "short": ids[:, 1:],
        "rows": ids.repeat(2, 1),
        "past": past,
    }
    change = {k: values.get(v, v) if isinstance(v, str) else v for k, v in change.items()}
    change["position_ids"] = positions[:, -change.get("input_ids", ids).shape[1] :]
    with pytest.raises(BackendError, match=f"packed attention: .*{message}"):
        model(**{**inputs, **change})


def test_dropout_is_refused_in_training_only(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_model(dtype=torch.float32, attention_dropout=0.1))
    inputs = collate(kit.packed(random_examples(2), [2], "concat"), "dpo").model_inputs()
    model.eval()(**inputs)
    with pytest.raises(BackendError, match=r"without dropout .*; found dropout 0.1"):
        model.train()(**inputs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: MambaForCausalLM(MambaConfig(**SMALL, **IDS)), "attention only; found linear_att"),
        (
            lambda: BloomForCausalLM(
                BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
            ),
            "transformers' attention registry; found an attention of its own",
        ),
        (lambda: nn.Linear(2, 2), "must be a Hugging Face model"),
    ],
    ids=["recurrent", "own attention", "no model"],
)
def test_refused_models(model: Any, message: str) -> None:
    with pytest.raises(BackendError, match=f"{message}.*Train it unpacked"):
        use_packed_attention(model())


def test_attention_sinks_are_refused(kit: SimpleNamespace) -> None:
    config = GptOssConfig(**SMALL, **HEADS, **IDS, intermediate_size=16, num_local_experts=2)
    model = use_packed_attention(GptOssForCausalLM(config))
    with pytest.raises(BackendError, match="found a model with s_aux"):
        model(**collate(kit.packed(random_examples(2), [2], "concat"), "dpo").model_inputs())


def test_unknown_backend(kit: SimpleNamespace) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown attention backend 'spda'.*mean 'sdpa'"):
        use_packed_attention(kit.tiny_model(), "spda")


def test_auto_is_logged_once(kit: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    _logged.cache_clear()
    with caplog.at_level(logging.INFO, "packstore"):
        for _ in range(2):
            use_packed_attention(kit.tiny_model())
    assert [r.getMessage() for r in caplog.records] == [
        "packed attention: backend 'auto' is 'sdpa'"
    ]


def test_auto_serves_soft_capped_models(kit: SimpleNamespace) -> None:
    config = Gemma2Config(**SMALL, **HEADS, **IDS, intermediate_size=48, sliding_window=4)
    model = Gemma2ForCausalLM(config)
    assert check_isolation(model, "auto") < 1e-5
    with pytest.raises(BackendError, match="soft-capped"):
        check_isolation(model, "sdpa")


@pytest.mark.parametrize("backend", list(ATTENTION))
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_probe_passes_and_leaves_the_model_as_it_was(
    kit: SimpleNamespace, name: str, backend: str
) -> None:
    model = kit.tiny_model(name, torch.float32).train()
    before = model.config._attn_implementation
    assert check_isolation(model, backend) < 1e-4
    assert model.config._attn_implementation == before
    assert model.training


def test_probe_finds_a_leak(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.float32)
    model.set_attn_implementation("plain_for_tests")  # one sequence per row, whatever the layout
    with pytest.raises(BackendError, match="layout concat: other tokens in one segment must not"):
        check_isolation(model)


def test_probe_finds_wrong_positions(kit: SimpleNamespace) -> None:
    class Deaf(nn.Module):
        """Drops the positions of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = use_packed_attention(kit.tiny_model(dtype=torch.float32))
            self.config = self.inner.config

        def forward(self, position_ids: torch.Tensor, **inputs: Any) -> Any:
            return self.inner(**inputs, position_ids=torch.arange(position_ids.shape[1])[None])

    # Rotary positions are relative, so only keys that a segment shares stand at wrong distances.
    with pytest.raises(BackendError, match="layout shared_prefix: a segment must have the logits"):
        check_isolation(Deaf())


def test_vocabulary(kit: SimpleNamespace, tmp_path: Any) -> None:
    data = kit.write(str(tmp_path / "ds"), kit.packed(random_examples(4), [2, 2], "concat"))
    model = kit.tiny_model()
    check_model(data, model)
    check_model(data.manifest, model.config)
    model.config.vocab_size = 49
    with pytest.raises(CompatibilityError, match="vocab_size of 49; found a tokenizer of 50 ids"):
        check_model(data, model)
