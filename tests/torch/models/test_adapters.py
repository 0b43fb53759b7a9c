"""PEFT adapters on packed rows: each of its types does to a sequence what it does to it
alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sized_pairs import alone, in_row

from packstore.errors import CompatibilityError
from packstore.torch import PackedBatch, find_head, packed_logps, segment_logps
from packstore.torch import use_packed_attention as prepare

peft = pytest.importorskip("peft", reason="adapters")
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT's

COMMON = {"LORA", "IA3", "LN_TUNING", "TRAINABLE_TOKENS", "OFT"}
"""Types that `make test` tries; the others are slow in number."""

MIXED = {"ADAMSS", "LILY", "POLY", "SHADOW", "XLORA"}
MIXED |= {"CARTRIDGE", "CPT", "PREFIX_TUNING", "P_TUNING"}
MIXED |= {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING"}
"""Types that read the row or add tokens to it; or (AdaMSS) need a package that is not
here.
"""

SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 10},
    "GRALORA": {"r": 8},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 10},
}


def adapted(model: Any, kind: str, **settings: Any) -> Any:
    """The model with a trained adapter: of random weights, so that it does
    something.
    """
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    given = {
        "target_modules": ["q_proj", "o_proj"],
        **SETTINGS.get(kind, {}),
        **settings,
    }
    wrapped = (
        peft.get_peft_model(model, config(task_type="CAUSAL_LM", **given))
        .double()
        .eval()
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += (
                    0.3 * torch.randn(parameter.shape, generator=generator).double()
                )
    return wrapped


def logps_alone(model: Any, batch: PackedBatch) -> torch.Tensor:
    """The log-probs of each sequence by a call of its own, before the model is
    prepared.
    """
    return segment_logps(batch, logits=in_row(alone(model, batch), batch))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in COMMON))
        for kind in sorted({kind.value for kind in peft.PeftType} - MIXED)
    ],
)
def test_packed_as_alone(kit: SimpleNamespace, kind: str) -> None:
    batch, base = kit.row(), kit.tiny_model(dtype=torch.float32)
    with torch.no_grad():
        plain = logps_alone(base, batch)
        model = adapted(base, kind)
        expected = logps_alone(model, batch)
        assert (expected - plain).abs().max() > 1e-3
        torch.testing.assert_close(packed_logps(prepare(model), batch), expected)


@pytest.mark.parametrize("kind", sorted(MIXED))
def test_types_that_are_not_known_to_do_so_are_refused(
    kit: SimpleNamespace, kind: str
) -> None:
    model = kit.tiny_model()
    model.peft_config = {"default": SimpleNamespace(peft_type=peft.PeftType(kind))}
    with pytest.raises(CompatibilityError, match=kind):
        prepare(model)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("LILY", {"r": 4}), ("LORA", {"alora_invocation_tokens": [3, 4]})],
    ids=["Lily", "aLoRA"],
)
def test_an_adapter_that_reads_the_row_is_refused(
    kit: SimpleNamespace, kind: str, settings: Any
) -> None:
    """At every door, also where the model was prepared and its head proved before."""
    batch, model = kit.row(), prepare(kit.tiny_model())
    find_head(model)
    wrapped = adapted(model, kind, **settings)
    for call in (
        prepare,
        find_head,
        lambda m: packed_logps(m, batch),
        lambda m: m(**batch.model_inputs()).logits,
    ):
        with pytest.raises(CompatibilityError, match=kind):
            call(wrapped)
