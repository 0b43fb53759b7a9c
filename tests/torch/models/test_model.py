"""Models and calls that the attention function refuses."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)

from packstore.errors import BackendError, UnknownNameError
from packstore.torch import (
    PackedPolicy,
    check_isolation,
    packed_logps,
    use_packed_attention,
)
from packstore.torch.attention import ATTENTION

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "call", [packed_logps, lambda model, batch: PackedPolicy(model)(batch)]
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_that_is_not_prepared(
    kit: SimpleNamespace, name: str, call: Any
) -> None:
    """With its own attention, the answers of a shared prefix saw each other without a
    word.
    """
    model, batch = kit.tiny_model(name, torch.float32), kit.row()
    with pytest.raises(BackendError, match="use_packed_attention"):
        call(model, batch)
    call(use_packed_attention(model), batch)
    model.set_attn_implementation("eager")  # to generate, and forgotten
    with pytest.raises(BackendError, match="use_packed_attention"):
        call(model, batch)


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        ({"packed_layout": None}, "layout"),
        ({"attention_mask": "ones"}, "attention_mask"),
        ({"attention_mask": "4d"}, "attention_mask"),
        ({"input_ids": "short"}, "layout"),
        ({"input_ids": "rows"}, "layout"),
        ({"past_key_values": "past", "use_cache": True}, "past"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated"
)  # since transformers 5.24
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_refused_calls(
    kit: SimpleNamespace, name: str, change: dict[str, Any], mentioned: str
) -> None:
    model = use_packed_attention(kit.tiny_model(name, torch.float32))
    batch = kit.row()
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
    change = {
        k: values.get(v, v) if isinstance(v, str) else v for k, v in change.items()
    }
    change["position_ids"] = positions[:, -change.get("input_ids", ids).shape[1] :]
    with pytest.raises(BackendError, match=f"packed attention: .*{mentioned}"):
        model(**{**inputs, **change})


DROPPING: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4},
    "opt": {
        "dropout": 0.4,
        "attention_dropout": 0.4,
        "layerdrop": 0.5,
    },  # numbers, no modules
}


@pytest.mark.parametrize("name", list(DROPPING))
def test_dropout_is_disabled_with_a_note(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = kit.tiny_family(name, torch.float32, **DROPPING[name]).train()
    inputs = kit.row().model_inputs()
    with caplog.at_level("INFO", "packstore"):
        use_packed_attention(model)
    assert "dropout is disabled (disable_dropout=False keeps it): " in caplog.text
    assert "0.4" in caplog.text
    found = [model(**inputs).logits for _ in range(3)]
    expected = model.eval()(**inputs).logits
    assert all(torch.equal(logits, expected) for logits in found)
    assert model.config.to_dict().items() >= DROPPING[name].items()
    caplog.clear()
    use_packed_attention(model)
    assert not caplog.text


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT's
def test_dropout_that_was_asked_for_stays(kit: SimpleNamespace) -> None:
    settings = {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.0}
    model = kit.tiny_family("gpt2", torch.float32, **settings).train()
    inputs = kit.row().model_inputs()
    use_packed_attention(model, disable_dropout=False)
    check_isolation(model, "sdpa")
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    peft = pytest.importorskip("peft", reason="dropout of an adapter is PEFT's")
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            target_modules=["c_attn"], lora_dropout=0.3, fan_in_fan_out=True
        ),
    )
    use_packed_attention(adapted)
    dropouts = {
        n: m.p for n, m in adapted.named_modules() if isinstance(m, torch.nn.Dropout)
    }
    assert {p for n, p in dropouts.items() if "lora_" in n} == {0.3}
    assert {p for n, p in dropouts.items() if "lora_" not in n} == {0.0}


def test_dropout_is_refused_in_training_only(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.float32, attention_dropout=0.1)
    use_packed_attention(model, disable_dropout=False)
    inputs = kit.row().model_inputs()
    model.eval()(**inputs)
    with pytest.raises(BackendError, match="dropout"):
        model.train()(**inputs)


def test_refused_models(kit: SimpleNamespace) -> None:
    with pytest.raises(UnknownNameError, match=r"'spda'.*'sdpa'"):
        use_packed_attention(kit.tiny_model(), "spda")
    seq2seq = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=32, d_ff=32))
    for model, mentioned in ((nn.Linear(2, 2), "own-model"), (seq2seq, "decoder")):
        with pytest.raises(BackendError, match=mentioned):
            use_packed_attention(model)
    with pytest.raises(BackendError, match="own-model"):
        check_isolation(nn.Linear(2, 2))
    assert Path(__file__).parents[3].joinpath("docs", "own-model.md").exists()
    looks_ahead = use_packed_attention(kit.tiny_family("bert", torch.float32))
    with pytest.raises(BackendError, match="causal"):
        looks_ahead(**kit.row().model_inputs())
    by_sequence = use_packed_attention(
        kit.tiny_family("roberta", torch.float32, is_decoder=False)
    )
    with pytest.raises(BackendError, match="is_decoder=True"):
        check_isolation(by_sequence)


@pytest.mark.parametrize(
    ("name", "mentioned"),
    [
        ("bloom", "registry"),
        ("biogpt", "attention_mask"),
        ("doge", "mask"),
    ],
)
def test_models_that_run_whole_say_so(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture, name: str, mentioned: str
) -> None:
    """At once, or at the first call."""
    model = use_packed_attention(kit.tiny_family(name, torch.float32))
    check_isolation(model)
    assert re.search(f"once per sequence.*{mentioned}", caplog.text)


def test_the_backend_per_sequence_takes_any_model(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = use_packed_attention(
        kit.tiny_family("llama", torch.float32), "per_sequence"
    )
    check_isolation(model)
    assert "you asked for it" in caplog.text
    batch = kit.row(2, "shared_prefix")
    expected = packed_logps(model, batch)
    use_packed_attention(model, "sdpa")
    assert model.config._attn_implementation.startswith("packstore")
    assert torch.allclose(packed_logps(model, batch), expected, atol=1e-4)
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"


def test_autocast_reaches_the_backend(
    kit: SimpleNamespace, new_backend: Callable[[Any], str]
) -> None:
    """Rotary positions leave queries and keys in float32 beside values in bfloat16."""
    taken = set()

    def attend(q: Any, k: Any, v: Any, layout: Any, settings: Any) -> Any:
        taken.update((q.dtype, k.dtype, v.dtype))
        return ATTENTION.load("reference")(q, k, v, layout, settings)

    model = use_packed_attention(
        kit.tiny_model("qwen3", torch.float32), new_backend(attend)
    )
    inputs = kit.row(3, "shared_prefix").model_inputs()
    exact = model(**inputs).logits
    assert taken == {torch.float32}
    taken.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**inputs).logits
    assert taken == {torch.bfloat16}
    assert (found.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_two_windows_for_one_layer_are_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_family("mistral", torch.float32))
    batch = kit.row()
    model(**batch.model_inputs())
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config.sliding_window = 9
    with pytest.raises(BackendError, match="window"):
        model(**batch.model_inputs())


def test_a_model_that_names_no_scale_has_that_of_its_head_size(
    kit: SimpleNamespace,
) -> None:
    """As transformers' own attention functions."""
    model = use_packed_attention(kit.tiny_model("llama", torch.float32))
    attend = AttentionInterface()[model.config._attn_implementation]
    layer, layout = model.model.layers[0].self_attn, kit.row().layout
    heads = layer.config.num_attention_heads, layer.config.num_key_value_heads
    made = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, layout.num_queries, layer.head_dim, generator=made)
        for n in (heads[0], heads[1], heads[1])
    )
    unset, given = (
        attend(layer, q, k, v, None, packed_layout=layout, **scale)[0]
        for scale in ({}, {"scaling": layer.head_dim**-0.5})
    )
    assert torch.equal(unset, given)
