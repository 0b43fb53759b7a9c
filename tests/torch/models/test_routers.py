"""The load-balancing loss of experts: left out, and never without a word."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from packstore.errors import CompatibilityError
from packstore.testing import random_examples
from packstore.torch import PackedBatch, PackedPolicy, collate, packed_logps, use_packed_attention

WARNING = "router_aux_loss_coef 0.02 in the config), which TRL adds to DPO, is not part of the loss"


@pytest.fixture
def batch(kit: SimpleNamespace) -> PackedBatch:
    return collate(kit.packed(random_examples(2, seed=0), [2], "concat"), "preference")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_warning_once_a_model_that_is_trained(
    kit: SimpleNamespace, batch: PackedBatch, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    model = use_packed_attention(
        kit.tiny_family("mixtral", torch.float32, router_aux_loss_coef=0.02)
    )
    policy = PackedPolicy(model)
    with torch.no_grad():
        packed_logps(model, batch)
    model.requires_grad_(False)
    packed_logps(model, batch)
    assert WARNING not in caplog.text  # a reference, an evaluation
    model.requires_grad_(True)
    for _ in range(3):
        policy(batch) if wrapped else packed_logps(model, batch)
    assert caplog.text.count(WARNING) == 1


def test_no_word_about_models_without_that_loss(
    kit: SimpleNamespace, batch: PackedBatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed_logps(use_packed_attention(kit.tiny_family("llama", torch.float32)), batch)
    off = kit.tiny_family("mixtral", torch.float32, router_aux_loss_coef=0.0)
    packed_logps(use_packed_attention(off), batch)
    assert "load-balancing" not in caplog.text


def test_a_config_that_asks_for_it_is_refused(kit: SimpleNamespace, batch: PackedBatch) -> None:
    model = kit.tiny_family("mixtral", torch.float32, output_router_logits=True)
    use_packed_attention(model)
    with torch.no_grad():
        packed_logps(model, batch)  # an evaluation has no such loss
    with pytest.raises(CompatibilityError, match=r"output_router_logits=True .*Set it to False"):
        packed_logps(model, batch)
    model.config.output_router_logits = False
    packed_logps(model, batch)
