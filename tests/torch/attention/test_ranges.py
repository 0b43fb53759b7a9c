"""Backend `ranges` around its kernels: the operators, what it refuses, and who chooses
it.

The kernels are stand-ins that compute by the definition of KeyRanges
(``range_kernels.py``); Triton's are tested in ``test_range_kernels.py``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import range_kernels
import torch
import varlen_kernels
from gradients import recompute_layers
from ranks import launch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.utils import _apply_to_tensors

from packstore.errors import BackendError, MissingExtraError
from packstore.torch import PackedPolicy, use_packed_attention
from packstore.torch.attention import ATTENTION, Settings, flash
from packstore.torch.batch import AttentionLayout

LAYOUTS = pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins, of `torch_varlen` too; a GPU seems to be there."""
    with (
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        monkeypatch.setattr(flash, "runs_on", lambda _: True)
        yield


def draw(layout: AttentionLayout, num_key_heads: int = 2) -> list[Tensor]:
    """Queries, keys, values and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, num_key_heads, num_key_heads, 4)
    return [
        torch.randn(
            layout.num_queries, n, 8, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for n in heads
    ]


def run(
    backend: str, inputs: list[Tensor], layout: AttentionLayout, settings: Settings
) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    *qkv, upstream = inputs
    output = ATTENTION.load(backend)(*qkv, layout, settings)
    return [output, *torch.autograd.grad(output, qkv, upstream.detach())]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    pairs = zip(a, b, strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@LAYOUTS
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("num_key_heads", [1, 4])
def test_values_and_gradients(
    kit: SimpleNamespace, kernels: None, layout: str, window: int, num_key_heads: int
) -> None:
    segments = kit.row(5, layout).layout
    inputs, settings = draw(segments, num_key_heads), Settings(0.3, window)
    actual = run("ranges", inputs, segments, settings)
    expected = run("reference", inputs, segments, settings)
    assert largest_difference(actual, expected) < 1e-12


def test_operators_are_complete(kit: SimpleNamespace, kernels: None) -> None:
    """Shapes without values, schemas and gradients agree with the calls, by torch's own
    checks.
    """
    from packstore.torch.attention.ranges import attend_ranges

    for layout in ("concat", "shared_prefix"):
        segments = kit.row(3, layout).layout
        q, k, v, _ = (x.detach().float().requires_grad_() for x in draw(segments))
        args = (q, k, v, *segments.ranges, 0.3, -1)
        torch.library.opcheck(attend_ranges, args)


def test_rows_that_are_not_contiguous(kit: SimpleNamespace, kernels: None) -> None:
    """Neither those of the inputs, nor the gradient of a sum, which repeats one
    number.
    """
    segments = kit.row(3, "shared_prefix").layout
    q, k, v, _ = draw(segments)
    outputs = []
    for backend in ("ranges", "reference"):
        turned = [
            x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
        ]
        for x in turned:
            assert x.stride(-1) != 1
            x.requires_grad_()
        output = ATTENTION.load(backend)(*turned, segments, Settings(0.3))
        outputs.append([output, *torch.autograd.grad(output.sum(), turned)])
    assert largest_difference(*outputs) < 1e-12


def test_only_rows_are_saved_for_backward(kit: SimpleNamespace, kernels: None) -> None:
    """The copies of other backends grow with the depth of a tree."""
    segments = kit.row(8, "forest").layout
    q, k, v, _ = draw(segments)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x) or x, lambda x: x
    ):
        ATTENTION.load("ranges")(q, k, v, segments, Settings(0.3))
    numbers = [x for x in saved if x.is_floating_point()]
    rows = (q, k, v, q)  # the output, too
    assert sum(x.numel() for x in numbers) == sum(x.numel() for x in rows) + 4 * len(q)


@pytest.mark.parametrize("way", ["plain", "checkpointing", "inference", "autocast"])
def test_a_model(kit: SimpleNamespace, kernels: None, way: str) -> None:
    """Log-probs and gradients of backend `reference`."""
    results = []
    for backend in ("auto_ranges", "reference"):
        dtype = torch.float32 if way == "autocast" else torch.float64
        model = kit.tiny_family("llama", dtype).train()
        if way == "checkpointing":
            recompute_layers(model)
        policy = PackedPolicy(use_packed_attention(model, backend))
        batch = kit.row(3, "forest", seed=2)
        enabled = way == "autocast"
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            if way == "inference":
                with torch.inference_mode():
                    results.append([policy(batch)])
                continue
            logps = policy(batch)
        gradients = torch.autograd.grad(logps.sum(), list(model.parameters()))
        results.append([logps, *gradients])
    for actual, expected in zip(*results, strict=True):
        limit = 5e-2 if way == "autocast" else 1e-9
        assert (actual - expected).norm() <= limit * expected.norm()


def test_a_layout_that_fsdp_copied(kit: SimpleNamespace, kernels: None) -> None:
    """FSDP2 copies dataclasses field by field."""
    segments = kit.row(3, "forest").layout
    copied = _apply_to_tensors(torch.clone, segments)
    assert copied.ranges is not segments.ranges
    inputs = draw(segments)
    expected = run("ranges", inputs, segments, Settings(0.3))
    actual = run("ranges", inputs, copied, Settings(0.3))
    assert largest_difference(actual, expected) == 0


def gradients_of(policy: Any, batch: Any) -> dict[str, Tensor]:
    """Gradients of the sum of all log-probs, whole if weights are sharded."""
    policy(batch).sum().backward()
    gradients = {}
    for name, weight in policy.named_parameters():
        grad = weight.grad
        is_sharded = hasattr(grad, "full_tensor")
        gradients[name] = grad.full_tensor() if is_sharded else grad
    return gradients


def on_rank(task: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients on a rank, with sharded layers that are recomputed."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        monkeypatch.setattr(flash, "runs_on", lambda _: True)
        model = use_packed_attention(task["model"], "auto_ranges").train()
        recompute_layers(model)
        policy = PackedPolicy(model)
        for layer in model.model.layers:
            fully_shard(layer)
        return gradients_of(fully_shard(policy), task["batch"])


def test_layers_that_fsdp_shards(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.tiny_family("llama").train()
    batch = kit.row(3, "forest", seed=2)
    task = {"model": deepcopy(model), "batch": batch}
    policy = PackedPolicy(use_packed_attention(model, "reference"))
    expected = gradients_of(policy, batch)
    for gradients in launch(__file__, task, 2, tmp_path):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-9 * expected[name].norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": 5.0}, "soft-capped"),
        ({"chunk": 4}, "chunks"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"head_size": 12}, "multiple of 8"),
        ({"head_size": 264}, "up to 256"),
        ({"value_size": 16}, "one size"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"ranges": None}, "on one rank"),
    ],
)
def test_what_it_refuses(
    kit: SimpleNamespace,
    kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(flash, "DTYPES", (torch.float16, torch.bfloat16))
    layout = kit.row().layout
    size = changes.pop("head_size", 8)
    dtype = changes.pop("dtype", torch.bfloat16)
    value_size = changes.pop("value_size", size)
    if "ranges" in changes:
        layout = dataclasses.replace(layout, ranges=changes.pop("ranges"))
    q, k = torch.zeros(2, layout.num_queries, 4, size, dtype=dtype)
    v = torch.zeros(layout.num_queries, 4, value_size, dtype=dtype)
    with pytest.raises(BackendError, match=f"'ranges'.*{message}"):
        ATTENTION.load("ranges")(q, k, v, layout, Settings(0.3, **changes))


def test_without_triton(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "DTYPES", (torch.float64,))
    monkeypatch.setitem(sys.modules, range_kernels.MODULE, None)
    layout = kit.row().layout
    *qkv, _ = draw(layout)
    with pytest.raises(MissingExtraError, match="triton"):
        ATTENTION.load("ranges")(*qkv, layout, Settings(0.3))


@pytest.mark.parametrize(
    ("backend", "changes", "expected"),
    [
        ("auto_ranges", {}, "ranges"),
        ("auto_ranges", {"softcap": 5.0}, "flex"),
        ("auto_ranges", {"ranges": None}, "torch_varlen"),
        ("auto_varlen", {}, "torch_varlen"),
        ("auto", {}, "torch_varlen"),
    ],
)
def test_what_is_chosen(
    kit: SimpleNamespace,
    kernels: None,
    backend: str,
    changes: dict[str, Any],
    expected: str,
) -> None:
    from packstore.torch.attention.auto import calls_on

    layout = kit.row().layout
    if "ranges" in changes:
        layout = dataclasses.replace(layout, ranges=changes.pop("ranges"))
    *qkv, _ = draw(layout)
    with torch.no_grad(), calls_on(torch.device("cuda")) as calls:
        ATTENTION.load(backend)(*qkv, layout, Settings(0.3, 4, **changes))
    (call,) = calls
    assert call.backend == expected
    assert call[1:] == (4, 2, 8, torch.float64, 0.3, 4)
