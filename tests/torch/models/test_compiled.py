"""Layers compiled one by one: the same numbers, few graphs, and none that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import varlen_kernels
from torch import Tensor, nn
from torch._dynamo.utils import counters

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import PackedBatch, collate, compile_layers, train, use_packed_attention
from packstore.torch.attention import flash

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's

SHAPES = (1, 2, 5, 3, 4, 2, 6, 1)
"""Pairs of each batch."""


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` chooses `torch_varlen`, whose kernels compute by definition."""
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flash, "runs_on", lambda _: True)
    torch._dynamo.reset()
    counters.clear()
    with varlen_kernels.on_cpu():
        yield
    torch._dynamo.reset()


def graphs() -> tuple[list[Any], Callable[..., Any]]:
    """The graphs that are made from now on, and a backend that lists and runs them."""
    made: list[Any] = []

    def run(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    return made, run


def gradients(model: nn.Module, batch: PackedBatch) -> list[Tensor]:
    logits = model(**batch.model_inputs()).logits
    upstream = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return [logits, *torch.autograd.grad((logits * upstream).sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("name", "settings", "kinds"),
    [
        ("llama", {}, 1),
        pytest.param(  # windows beyond the longest sequence are none
            "mistral", {"sliding_window": 20}, 2, marks=pytest.mark.slow
        ),
    ],
)
def test_one_graph_for_all_layers_and_shapes(
    kit: SimpleNamespace, as_on_a_gpu: None, name: str, settings: dict[str, Any], kinds: int
) -> None:
    plain = use_packed_attention(kit.tiny_family(name, **settings))
    model = use_packed_attention(kit.tiny_family(name, **settings))
    found, backend = graphs()
    compile_layers(model, backend=backend)
    for layout, limit in (("concat", kinds), ("shared_prefix", 2 * kinds)):
        shapes = set()
        for seed, pairs in enumerate(SHAPES):
            packs = kit.packed(random_examples(pairs, seed=seed), [pairs], layout)
            batch = collate(packs, "preference")
            shapes.add((batch.num_tokens, batch.num_segments))
            for a, b in zip(gradients(model, batch), gradients(plain, batch), strict=True):
                assert (a - b).abs().max() <= 1e-9 * b.abs().max()
        assert len(shapes) == len(SHAPES)
        assert len(found) <= limit
    assert not counters["graph_break"]
    assert all("varlen" in graph.print_readable(print_output=False) for graph in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")  # torch's own, in dynamo
def test_a_compiled_model_serves_every_batch(kit: SimpleNamespace) -> None:
    """And compiles no more after the first few: no graph holds the segments of one batch."""
    torch._dynamo.reset()
    model = use_packed_attention(kit.tiny_family("llama", num_hidden_layers=1)).train()
    compiled = torch.compile(model, backend="aot_eager")
    for seed, layout in product(range(4), ("concat", "shared_prefix")):
        batch = kit.row(2 + seed, layout, seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=seed >= 2):
            found = gradients(compiled, batch)
        for a, b in zip(found, gradients(model, batch), strict=True):
            assert (a - b).abs().max() < 1e-10


def test_training_compiles_policy_and_reference(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="training needs accelerate")
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **_: compiled.append(layer))
    settings = kit.short_run(tmp_path)
    train(**settings, output=str(tmp_path / "run"), max_steps=1, compile="layers")
    assert [type(layer).__name__ for layer in compiled] == ["LlamaDecoderLayer"] * 4
    assert len(set(compiled)) == 4
    assert {layer.training for layer in compiled[:2]} == {True}


def test_a_model_without_named_layers_is_refused(kit: SimpleNamespace) -> None:
    model = kit.tiny_family("llama")
    model._no_split_modules = None
    with pytest.raises(BackendError, match="must name the model's decoder layers"):
        compile_layers(model)
