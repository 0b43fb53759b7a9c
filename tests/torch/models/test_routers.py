"""The load-balancing loss of experts: that of each sequence alone, in any pack and
layout.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forests import examples_of, random_forest
from gradients import recompute_layers, take_gradients
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

from packstore.errors import CompatibilityError, ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    Metrics,
    PackedBatch,
    PackedPolicy,
    PreferenceLoss,
    StepDivisor,
    collate,
    count_step,
    packed_logps,
    pad_batch,
    pad_segments,
    use_packed_attention,
)

BETA, COEFFICIENT, PAIRS = 0.3, 0.5, 7

FAMILIES = ("mixtral", "minimax_m2", "gpt_oss")
"""With softmax and sigmoid routers, and sinks."""

OTHERS = ("qwen2_moe", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe", "flex_olmo")
OTHERS += ("granitemoeshared", "mellum", "laguna", "qwen3_moe")


def moe(kit: SimpleNamespace, name: str = "mixtral", **settings: Any) -> Any:
    settings = {"router_aux_loss_coef": COEFFICIENT, **settings}
    return kit.tiny_family(name, **settings)


def written_out(model: Any, logits: tuple[Tensor, ...]) -> Tensor:
    """Equations 4 to 6 of Switch Transformers over all layers; transformers counts in
    float32.
    """
    chances = torch.cat(logits).double().softmax(-1)
    chosen = chances.topk(model.num_experts_per_tok).indices
    frequency = torch.bincount(
        chosen.flatten(), minlength=model.num_experts
    ).double() / float(len(chances))
    return model.num_experts * (frequency @ chances.mean(0))


def alone(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and router losses `[S]` by transformers: a call for each sequence."""
    whole = batch.to_concat()
    sizes = whole.lengths.tolist()
    logps, losses = [], []
    for row, labels in zip(
        whole.input_ids.split(sizes), whole.labels.split(sizes), strict=True
    ):
        on = labels[1:] >= 0
        outputs = model(row[None], output_router_logits=True)
        logps.append(
            outputs.logits[0, :-1]
            .log_softmax(-1)
            .gather(1, row[1:, None])[:, 0][on]
            .sum()
        )
        losses.append(written_out(model, outputs.router_logits))
        torch.testing.assert_close(
            losses[-1], outputs.aux_loss.double(), rtol=1e-6, atol=1e-6
        )
    return torch.stack(logps), torch.stack(losses)


def batches_of(
    kit: SimpleNamespace, layout: str, *sizes: int, kind: str = "preference"
) -> list[PackedBatch]:
    """The pairs, so many in each batch."""
    examples = random_examples(sum(sizes), seed=5, kind=kind)
    if layout == "forest":
        examples = examples_of(random_forest(5, size=2 * sum(sizes)), kind)
    ends = np.cumsum(sizes)
    parts = [
        (examples.take(np.arange(e - n, e)), n)
        for n, e in zip(sizes, ends, strict=True)
    ]
    return [collate(kit.packed(part, [n], layout), kind) for part, n in parts]


def plain_step(
    model: Any, batches: list[PackedBatch], coefficient: float
) -> tuple[float, Any]:
    """DPO without a reference over the pairs of all batches, a sequence at a time."""
    logps, losses = map(
        torch.cat, zip(*(alone(model, batch) for batch in batches), strict=True)
    )
    loss = (
        -logsigmoid(BETA * (logps[::2] - logps[1::2])).mean()
        + coefficient * losses.mean()
    )
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), take_gradients(model)


def one_step(
    policy: Any, model: Any, batches: list[PackedBatch], loss_fn: PreferenceLoss
) -> Any:
    """Loss, router loss and gradient of one step of these batches, as a loop computes
    them.
    """
    divisor, metrics = count_step(batches, loss_fn), Metrics()
    for batch in batches:
        out = loss_fn(policy(batch), batch, divisor=divisor)
        out.loss.backward()
        metrics.add(out.metrics)
    return metrics.means(), take_gradients(model)


def assert_equal(
    found: dict[str, Tensor], expected: dict[str, Tensor], limit: float
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < limit * (
            1 + gradient.abs().max()
        ), name


@pytest.mark.parametrize(
    ("name", "layout", "backend"),
    [
        ("mixtral", "concat", "per_sequence"),
        *((name, "shared_prefix", "reference") for name in FAMILIES),
        ("mixtral", "forest", "reference"),
        pytest.param("mixtral", "concat", "reference", marks=pytest.mark.slow),
        *(
            pytest.param(n, "shared_prefix", "reference", marks=pytest.mark.slow)
            for n in OTHERS
        ),
    ],
)
def test_values_and_gradients_are_those_of_single_sequences(
    kit: SimpleNamespace, exact: None, name: str, layout: str, backend: str
) -> None:
    model = moe(kit, name).train()
    plain = copy.deepcopy(model)
    use_packed_attention(model, backend)
    loss_fn = PreferenceLoss("cpo", beta=BETA)
    whole = batches_of(kit, layout, PAIRS)
    expected, gradients = plain_step(plain, whole, COEFFICIENT)
    without, others = plain_step(plain, whole, 0.0)
    assert abs(without - expected) > 0.1
    routing = [n for n in gradients if (gradients[n] - others[n]).abs().max() > 1e-3]
    assert any("gate" in n or "router" in n for n in routing)
    for sizes in ((PAIRS,), (1, 4, 2)):
        batches = batches_of(kit, layout, *sizes)
        metrics, found = one_step(PackedPolicy(model), model, batches, loss_fn)
        assert metrics["loss"] == pytest.approx(expected, abs=1e-9)
        assert metrics["aux_loss"] == pytest.approx(
            (expected - without) / COEFFICIENT, abs=1e-9
        )
        assert_equal(found, gradients, 1e-9)


def test_padding_does_not_count(kit: SimpleNamespace) -> None:
    model = use_packed_attention(moe(kit, dtype=torch.float32), "reference")
    batch, loss_fn = kit.row(3, "shared_prefix"), PreferenceLoss("cpo")
    padded = pad_batch(
        pad_segments(batch, 8), num_tokens=2 * batch.num_tokens, num_segments=20
    )
    a, b = (loss_fn(packed_logps(model, each), each) for each in (batch, padded))
    assert a.router_count == b.router_count == 3
    torch.testing.assert_close(a.router_sum, b.router_sum, rtol=1e-5, atol=0)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "loss_fn"),
    [
        ("sft", PreferenceLoss("sft")),
        ("scored", PreferenceLoss("cpo", pairs="all", sft_weight=0.3)),
        ("preference", PreferenceLoss("cpo", reduction="pack_mean")),
    ],
    ids=["sft", "scored", "pack_mean"],
)
def test_each_example_weighs_the_same_whatever_the_loss_counts(
    kit: SimpleNamespace, exact: None, kind: str, loss_fn: PreferenceLoss
) -> None:
    """Of an example it is the mean over its sequences; not over pairs, tokens
    or packs.
    """
    model = use_packed_attention(moe(kit), "reference")
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    batches = batches_of(kit, "concat", 1, 3, kind=kind)
    with torch.no_grad():
        values = [
            alone(plain, batch)[1].split(batch.num_responses.tolist())
            for batch in batches
        ]
    expected = float(
        torch.stack([each.mean() for own in values for each in own]).mean()
    )
    losses = {}
    for coefficient in (None, 0.0):
        loss_fn.router_aux_loss_coef = coefficient
        losses[coefficient], _ = one_step(PackedPolicy(model), model, batches, loss_fn)
    assert losses[None]["aux_loss"] == pytest.approx(expected, abs=1e-9)
    assert "aux_loss" not in losses[0.0]
    added = losses[None]["loss"] - losses[0.0]["loss"]
    assert added == pytest.approx(COEFFICIENT * expected, abs=1e-9)
    if kind != "preference" or loss_fn.reduction == "pack_mean":
        loss_fn.router_aux_loss_coef, loss_fn.sft_weight = None, 0.0
        with pytest.raises(ConfigError, match="router losses"):
            loss_fn(packed_logps(model, batches[0]), batches[0], divisor=StepDivisor(3))


@pytest.mark.filterwarnings("ignore")  # PEFT's and torch's own
def test_checkpointing_and_adapters_keep_its_gradient(kit: SimpleNamespace) -> None:
    peft = pytest.importorskip("peft", reason="adapters")
    batches, loss_fn = batches_of(kit, "shared_prefix", 2, 1), PreferenceLoss("cpo")
    model = use_packed_attention(moe(kit, dtype=torch.float32), "reference").train()
    expected, gradients = one_step(PackedPolicy(model), model, batches, loss_fn)
    recompute_layers(model)
    metrics, found = one_step(PackedPolicy(model), model, batches, loss_fn)
    assert metrics == pytest.approx(expected, abs=1e-5)
    assert_equal(found, gradients, 1e-5)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(CompatibilityError, match="use_reentrant"):
        packed_logps(model, batches[0])
    model.gradient_checkpointing_disable()
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config)
    (with_it, moved), (plain, unmoved) = (
        one_step(
            PackedPolicy(adapted), adapted, batches, PreferenceLoss("cpo", **settings)
        )
        for settings in ({}, {"router_aux_loss_coef": 0.0})
    )
    added = COEFFICIENT * with_it["aux_loss"]
    assert with_it["loss"] - plain["loss"] == pytest.approx(added, abs=1e-5)
    assert all(
        "lora" in n and (moved[n] - unmoved[n]).abs().max() > 1e-6 for n in unmoved
    )
    with adapted.disable_adapter(), torch.no_grad():
        assert (
            "aux_loss"
            not in loss_fn(packed_logps(adapted, batches[0]), batches[0]).metrics
        )


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_wrappers_pass_it_on(kit: SimpleNamespace, one_rank: None) -> None:
    model = moe(kit, dtype=torch.float32, num_hidden_layers=1)
    use_packed_attention(model, "reference")
    (batch,) = batches_of(kit, "shared_prefix", 2)
    policy, loss_fn = PackedPolicy(model), PreferenceLoss("cpo")
    expected = loss_fn(policy(batch), batch).loss
    assert not policy(batch)._is_view()  # of which FSDP2 warns
    for settings in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(
            policy, **settings
        )  # may output another tensor
        torch.testing.assert_close(loss_fn(wrapped(batch), batch).loss, expected)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(policy, mesh=mesh)
    torch.testing.assert_close(loss_fn(sharded(batch), batch).loss, expected)


def test_when_it_is_added(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """As in TRL: by the config's coefficient, for a model that is trained."""
    caplog.set_level(logging.INFO)
    (batch,) = batches_of(kit, "concat", 2)
    loss_fn = PreferenceLoss("cpo")

    def metrics(model: Any, loss: PreferenceLoss = loss_fn) -> set[str]:
        return set(loss(packed_logps(model, batch), batch).metrics)

    model = use_packed_attention(moe(kit, dtype=torch.float32))
    for _ in range(2):
        assert "aux_loss" in metrics(model)
    assert caplog.text.count("with coefficient 0.5") == 1
    assert "aux_loss" not in metrics(
        model, PreferenceLoss("cpo", router_aux_loss_coef=0.0)
    )
    with torch.no_grad():
        assert "aux_loss" not in metrics(model)
    assert "aux_loss" not in metrics(model.requires_grad_(False))
    model.requires_grad_(True)
    model.config.router_aux_loss_coef = 0.0
    model.config.output_router_logits = True
    assert "aux_loss" not in metrics(model)
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        metrics(model, PreferenceLoss("cpo", router_aux_loss_coef=0.1))
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        PreferenceLoss(router_aux_loss_coef=-1.0)
    for name in ("llama", "deepseek_v3", "jetmoe"):  # without that loss, without a word
        assert "aux_loss" not in metrics(
            use_packed_attention(kit.tiny_family(name, torch.float32))
        )
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_log_probs_that_no_loss_took_are_told_once(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = use_packed_attention(moe(kit, dtype=torch.float32))
    model.__class__ = type("Unheard", (type(model),), {})  # once for each class
    for _ in range(2):
        packed_logps(model, kit.row()).sum().backward()
    assert caplog.text.count("experts of Unheard: their load-balancing loss") == 1


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1}, {"num_experts": 8}])
def test_other_routers_are_refused(
    kit: SimpleNamespace, changes: dict[str, int]
) -> None:
    """A model whose forward call counts otherwise than its config says."""
    model = use_packed_attention(moe(kit, dtype=torch.float32))
    sound, forward = {name: vars(model)[name] for name in changes}, type(model).forward

    def unchanged(*args: Any, **kwargs: Any) -> Any:
        vars(model).update(sound)
        try:
            return forward(model, *args, **kwargs)
        finally:
            vars(model).update(changes)

    model.forward = unchanged
    vars(model).update(changes)
    with pytest.raises(CompatibilityError, match="router_aux_loss_coef"):
        PackedPolicy(model)


NO_LOSS = "aux_loss"


@pytest.mark.parametrize(
    ("name", "settings", "mentioned"),
    [
        ("deepseek_v3", {"router_aux_loss_coef": 0.001}, NO_LOSS),
        ("llama4_text", {}, NO_LOSS),  # by default
        ("flint", {}, "router_logits"),
        (
            "jetmoe",
            {"output_router_logits": True},
            "router_aux_loss_coef",
        ),
    ],
)
def test_a_loss_that_cannot_be_computed_is_refused(
    kit: SimpleNamespace, name: str, settings: dict[str, Any], mentioned: str
) -> None:
    """In a model that is trained, and whose config asks for it."""
    if name == "deepseek_v3":  # whose config has no such loss in earlier releases
        pytest.importorskip("transformers", minversion="5.17")
    model, batch = use_packed_attention(kit.tiny_family(name, torch.float32)), kit.row()
    vars(model.config).update(settings)
    for use in (PackedPolicy, lambda model: packed_logps(model, batch)):
        with pytest.raises(CompatibilityError, match=mentioned):
            use(model)
    model.config.router_aux_loss_coef = 0.0
    assert (
        "aux_loss"
        not in PreferenceLoss("cpo")(packed_logps(model, batch), batch).metrics
    )
    if mentioned == NO_LOSS:
        model.config.router_aux_loss_coef = 0.001
        PackedPolicy(model.requires_grad_(False))
