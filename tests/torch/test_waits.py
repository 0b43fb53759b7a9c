"""A planned DPO step reads no value of a tensor: on a GPU the host never waits for it.

It runs on the `meta` device, whose tensors have shapes and no values: `item`, `tolist`, copies to
the CPU, `nonzero`, masks as indices and `repeat_interleave` without a size raise there.
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
    Head,
    Metrics,
    PackedPolicy,
    PreferenceLoss,
    collate,
    count_step,
    use_packed_attention,
)
from packstore.torch.attention import flash
from packstore.torch.batch.batch import StepInfo
from packstore.torch.logprobs import head
from packstore.torch.losses.figures import GroupedMetrics


@pytest.fixture
def policy(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackedPolicy]:
    monkeypatch.setattr(flash, "DEVICES", ("meta",))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # there is none on meta
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())

    def make(name: str) -> PackedPolicy:
        model = kit.tiny_family(name, torch.bfloat16).to("meta")
        use_packed_attention(model, "torch_varlen")
        output = model.get_output_embeddings()
        monkeypatch.setitem(head._PROVED, model, Head(model.model, output, 1.0, None))
        return PackedPolicy(model)

    return make


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "concat"), ("mistral", "shared_prefix"), ("qwen3", "shared_prefix")],
)
def test_a_planned_step(kit: SimpleNamespace, policy: Any, name: str, layout: str) -> None:
    trained, frozen = policy(name), policy(name).requires_grad_(False)
    loss_fn, metrics = PreferenceLoss("dpo", beta=0.1, sft_weight=0.2), Metrics()
    optimizer = torch.optim.AdamW(trained.parameters())
    counts = {"best_tokens": 40}
    for number in range(2):
        packs = kit.packed(random_examples(3 + number, seed=number), [3 + number], layout)
        info = StepInfo(index=0, batch=number, batches=2, examples=7, counts=counts)
        batch = collate(packs, "preference").to("meta").replace(step=info)
        with torch.no_grad():
            ref_logps = frozen(batch)
        out = loss_fn(trained(batch), batch, ref_logps, divisor=count_step([batch], loss_fn))
        out.loss.backward()
        metrics.add(out.metrics)
    torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("pairs", ["best_vs_rest", "all", "adjacent"])
def test_a_ranked_step_that_is_counted_before_it_is_copied(
    kit: SimpleNamespace, policy: Any, pairs: Any
) -> None:
    trained, loss_fn = policy("llama"), PreferenceLoss("dpo", pairs=pairs, sft_weight=0.2)
    on_cpu = kit.row(4, kind="ranked")
    divisor = count_step([on_cpu], loss_fn, device=torch.device("meta"))
    assert divisor.count > 4
    batch = on_cpu.to("meta")
    with torch.no_grad():
        ref_logps = trained(batch)
    loss_fn(trained(batch), batch, ref_logps, divisor=divisor).loss.backward()


@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_an_evaluation(kit: SimpleNamespace, policy: Any, kind: str) -> None:
    """Metrics of all examples by input file, and of each example: read at the end only."""
    trained, loss_fn = policy("llama"), PreferenceLoss("dpo", sft_weight=0.2)
    dataset: Any = SimpleNamespace(manifest=SimpleNamespace(source_names=[]))
    grouped = GroupedMetrics(loss_fn, dataset, "file")
    on_cpu = kit.row(4, kind=kind)
    batch = on_cpu.to("meta")
    with torch.no_grad():
        logps = trained(batch)
        grouped.add(logps, batch, logps, on_cpu)
        loss_fn.per_example(logps, batch, logps)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:1].item(),
        *(lambda x: x[:1] and None, lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x[x]),
        *(lambda x: x.nonzero(), lambda x: x.repeat_interleave(x.int())),
    ],
)
def test_values_of_this_device_cannot_be_read(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(3, device="meta", dtype=torch.bool))
