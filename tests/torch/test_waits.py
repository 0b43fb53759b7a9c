"""A planned DPO step reads no value of a tensor: on a GPU the host never waits for it.

It runs on the `meta` device, whose tensors have shapes and no values: `item`, `tolist`,
copies to the CPU, `nonzero`, masks as indices and `repeat_interleave` without a size
raise there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packstore.testing import random_examples
from packstore.torch import (
    GraphedStep,
    Metrics,
    PackedPolicy,
    PolicyLoss,
    PreferenceLoss,
    StepDivisor,
    count_step,
    pack_in_memory,
    pad_batch,
    use_packed_attention,
)
from packstore.torch.attention import flash
from packstore.torch.losses.step_loss import StepLoss


@pytest.fixture
def policy(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PackedPolicy]:
    monkeypatch.setattr(
        flash, "DEVICES", ("meta",)
    )  # no kernel takes tensors without values
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *_: False
    )  # there is none on meta
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())

    def make(name: str, attention: str = "torch_varlen") -> PackedPolicy:
        model = kit.tiny_family(name, torch.bfloat16)
        made = PackedPolicy(
            use_packed_attention(model, "sdpa")
        )  # looks at the head's values
        use_packed_attention(model, attention)
        return made.to("meta")

    return make


@pytest.mark.parametrize(
    ("name", "layout", "attention"),
    [
        ("llama", "concat", "torch_varlen"),
        ("mistral", "shared_prefix", "torch_varlen"),
        ("qwen3", "shared_prefix", "torch_varlen"),
        ("llama", "concat", "ranges"),
        ("qwen3", "shared_prefix", "ranges"),
    ],
)
def test_a_planned_step(policy: Any, name: str, layout: Any, attention: str) -> None:
    trained = policy(name, attention)
    frozen = policy(name, attention).requires_grad_(False)
    loss_fn, metrics = PreferenceLoss("dpo", beta=0.1, sft_weight=0.2), Metrics()
    optimizer = torch.optim.AdamW(trained.parameters())
    batches = pack_in_memory(random_examples(7), 100, layout, kind="preference")
    assert len(batches) > 1
    for batch in batches:
        batch = batch.to("meta")
        with torch.no_grad():
            ref_logps = frozen(batch)
        out = loss_fn(
            trained(batch), batch, ref_logps, divisor=count_step([batch], loss_fn)
        )
        out.loss.backward()
        metrics.add(out.metrics)
    torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("pairs", ["best_vs_rest", "all", "adjacent"])
def test_a_step_of_scores_that_is_counted_before_it_is_copied(
    kit: SimpleNamespace, policy: Any, pairs: Any
) -> None:
    """And the figures of each example."""
    trained, loss_fn = (
        policy("llama"),
        PreferenceLoss("dpo", pairs=pairs, sft_weight=0.2),
    )
    on_cpu = kit.row(4, kind="scored")
    divisor = count_step([on_cpu], loss_fn, device=torch.device("meta"))
    assert divisor.count > 4
    batch = on_cpu.to("meta")
    with torch.no_grad():
        ref_logps = trained(batch)
        loss_fn.per_example(ref_logps, batch, ref_logps)
    loss_fn(trained(batch), batch, ref_logps, divisor=divisor).loss.backward()


class UncapturedGraph:
    """Runs what a CUDA graph would capture."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "meta"

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def capture(self, function: Callable[[], Any]) -> None:
        function()

    def replay(self) -> None:
        """Do nothing: tensors on `meta` have no values to compute again."""


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [
        (PreferenceLoss("dpo", sft_weight=0.2, weight_field="w"), "preference"),
        (PreferenceLoss("simpo", reduction="pack_mean"), "preference"),
        (PreferenceLoss("sft"), "sft"),
        (PreferenceLoss("kto"), "scored"),
        (PolicyLoss(average="group"), "scored"),
    ],
)
def test_a_captured_step(
    policy: Any, loss_fn: StepLoss, kind: str, layout: Any
) -> None:
    """Neither capture nor replay reads a value, which would end the capture."""
    trained = policy("llama")
    trained.settings = dict(loss_fn.head_settings)
    frozen = policy("llama").requires_grad_(False)
    frozen.settings = trained.settings
    step = GraphedStep(trained, loss_fn, reference=frozen, graph=UncapturedGraph)
    sizes = {"num_tokens": 500, "num_segments": 80, "num_keys": 900, "num_runs": 300}
    if kind == "scored":
        sizes["num_examples"] = 30
    if layout == "concat":
        del sizes["num_keys"], sizes["num_runs"]
    for batch in pack_in_memory(random_examples(7, kind=kind), 100, layout, kind=kind):
        weights = torch.ones(batch.num_examples)
        batch = batch.replace(columns={"w": weights})
        batch = pad_batch(batch, **sizes, num_targets=300, max_seqlen=60, num_packs=1)
        output = step(batch, divisor=StepDivisor(5, 5, 5))
        assert output.loss.is_meta
