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
from torch import Tensor

from packstore.testing import random_examples
from packstore.torch import Metrics, PackedPolicy, PreferenceLoss, collate, use_packed_attention
from packstore.torch.attention import flash
from packstore.torch.batch.batch import StepInfo
from packstore.torch.logprobs import head
from packstore.torch.losses.divisor import count_step
from packstore.torch.losses.figures import GroupedMetrics
from packstore.torch.losses.pairs import index_pairs


@pytest.fixture
def policy(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackedPolicy]:
    monkeypatch.setattr(flash, "DEVICES", ("meta",))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # there is none on meta
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())

    def make(name: str, **settings: Any) -> PackedPolicy:
        model = kit.tiny_family(name, torch.bfloat16, **settings).to("meta")
        use_packed_attention(model, "torch_varlen")
        output = model.get_output_embeddings()
        monkeypatch.setitem(head._PROVED, model, head.Head(model.model, output, 1.0, None))
        return PackedPolicy(model)

    return make


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {}), ("mistral", {"sliding_window": 4}), ("qwen3", {"attention_dropout": 0.0})],
)
def test_a_planned_step(
    kit: SimpleNamespace, policy: Any, name: str, settings: dict[str, Any], layout: str
) -> None:
    trained, frozen = policy(name, **settings), policy(name, **settings).requires_grad_(False)
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
    packs = kit.packed(random_examples(4, kind="ranked"), [4], "concat")
    on_cpu = collate(packs, "ranked")
    divisor = count_step([on_cpu], loss_fn, device=torch.device("meta"))
    assert divisor.count > 4
    batch = on_cpu.to("meta")
    with torch.no_grad():
        ref_logps = trained(batch)
    out = loss_fn(trained(batch), batch, ref_logps, divisor=divisor)
    out.loss.backward()
    chosen, exact = (index_pairs(b, pairs)[0] for b in (batch, on_cpu))
    assert chosen.shape == exact.shape
    assert len(exact) == divisor.count


@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_an_evaluation(kit: SimpleNamespace, policy: Any, kind: str) -> None:
    """Metrics of all examples by input file, and of each example: read at the end only."""
    trained, loss_fn = policy("llama"), PreferenceLoss("dpo", sft_weight=0.2)
    dataset: Any = SimpleNamespace(manifest=SimpleNamespace(source_names=[]))
    grouped = GroupedMetrics(loss_fn, dataset, "file")
    packs = kit.packed(random_examples(4, kind=kind), [4], "concat")
    on_cpu = collate(packs, kind)
    batch = on_cpu.to("meta")
    with torch.no_grad():
        logps = trained(batch)
        grouped.add(logps, batch, logps, on_cpu)
        loss_fn.per_example(logps, batch, logps)


def test_values_of_this_device_cannot_be_read() -> None:
    mask = torch.ones(3, device="meta", dtype=torch.bool)
    reads: tuple[Callable[[Tensor], Any], ...] = (
        Tensor.item,
        bool,
        Tensor.tolist,
        Tensor.cpu,
        Tensor.nonzero,
        lambda x: x[x],
        lambda x: x.repeat_interleave(x.int()),
    )
    for read in reads:
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(mask[:1] if read in reads[:2] else mask)
