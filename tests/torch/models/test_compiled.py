"""Layers compiled one by one: the same numbers, few graphs, and none that is broken."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import range_kernels
import torch
import varlen_kernels
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    compile_layers,
    train,
    use_packed_attention,
)
from packstore.torch.attention import flash
from packstore.torch.models import (
    compile_if_requested,
    compiled,
    has_compiled_layers,
    warn_about_uncompiled,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # the compiler's

SHAPES = (5, 1, 2, 3, 4)
"""Pairs of each batch.

A first batch of up to 5 segments may cost one more graph with `ranges`: torch takes
their number and the 2, 3 or 5 rows of a list of KeyRanges for one size.
"""


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` chooses `torch_varlen`, `auto_ranges` chooses `ranges`; their kernels
    compute by definition.
    """
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flash, "runs_on", lambda _: True)
    torch._dynamo.reset()
    counters.clear()
    with varlen_kernels.on_cpu(), range_kernels.backend_on_cpu(monkeypatch):
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
    return [
        logits,
        *torch.autograd.grad((logits * upstream).sum(), list(model.parameters())),
    ]


@pytest.mark.parametrize(
    ("name", "settings", "kinds", "recomputes", "backend"),
    [
        ("llama", {}, 1, False, "auto"),
        ("llama", {}, 1, False, "auto_ranges"),
        pytest.param("llama", {}, 1, True, "auto", marks=pytest.mark.slow),
        pytest.param("llama", {}, 1, True, "auto_ranges", marks=pytest.mark.slow),
        pytest.param(  # windows beyond the longest sequence are none
            "mistral", {"sliding_window": 20}, 2, False, "auto", marks=pytest.mark.slow
        ),
        pytest.param(
            "mistral",
            {"sliding_window": 20},
            2,
            False,
            "auto_ranges",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_graph_for_all_layers_and_shapes(
    kit: SimpleNamespace,
    as_on_a_gpu: None,
    name: str,
    settings: dict[str, Any],
    kinds: int,
    recomputes: bool,
    backend: str,
) -> None:
    plain = use_packed_attention(kit.tiny_family(name, **settings))
    model = use_packed_attention(kit.tiny_family(name, **settings), backend).train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found, compiler = graphs()
    compile_layers(model, backend=compiler)
    layouts = (("concat", kinds), ("shared_prefix", 2 * kinds), ("forest", 2 * kinds))
    for layout, limit in layouts:
        shapes = set()
        for seed, pairs in enumerate(SHAPES):
            batch = kit.row(pairs, layout, seed=seed)
            shapes.add((batch.num_tokens, batch.num_segments))
            for a, b in zip(
                gradients(model, batch), gradients(plain, batch), strict=True
            ):
                assert (a - b).abs().max() <= 1e-9 * b.abs().max()
        assert len(shapes) == len(SHAPES)
        assert len(found) <= limit
    assert not counters["graph_break"]
    operator = "packstore.ranges" if backend == "auto_ranges" else "varlen"
    assert all(operator in graph.print_readable(print_output=False) for graph in found)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.filterwarnings(
    "ignore:.*not a leaf Tensor.*:UserWarning"
)  # torch's own, in dynamo
def test_a_compiled_model_serves_every_batch(kit: SimpleNamespace) -> None:
    """And compiles no more after the first few: no graph holds the segments of one
    batch.
    """
    torch._dynamo.reset()
    model = use_packed_attention(kit.tiny_family("llama", num_hidden_layers=1)).train()
    compiled = torch.compile(model, backend="aot_eager")
    for seed, layout in product(range(4), ("concat", "shared_prefix", "forest")):
        batch = kit.row(2 + seed, layout, seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=seed >= 2):
            found = gradients(compiled, batch)
        for a, b in zip(found, gradients(model, batch), strict=True):
            assert (a - b).abs().max() < 1e-10


def failing(*_: Any) -> Any:
    raise RuntimeError("no C compiler")


def wrong(graph: Any, _: Any) -> Any:
    def scaled(x: Any) -> Any:
        return 1.1 * x if isinstance(x, Tensor) and x.is_floating_point() else x

    return make_boxed_func(lambda *args: tuple(map(scaled, graph(*args))))


OTHER = r"outputs and gradients of a compiled one differ by \d\.\d+ of their norm"
COMPILERS: dict[str, tuple[Any, str]] = {
    "right": (aot_autograd(fw_compiler=nop), ""),
    "no graph": (failing, "no C compiler"),
    "no backward graph": (
        aot_autograd(fw_compiler=nop, bw_compiler=failing),
        "no C compiler",
    ),
    "wrong": (aot_autograd(fw_compiler=wrong, bw_compiler=nop), OTHER),
    "wrong backward": (aot_autograd(fw_compiler=nop, bw_compiler=wrong), OTHER),
}


FAST = {"no graph"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in COMPILERS],
)
def test_auto_compiles_what_is_proved(
    kit: SimpleNamespace,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """A compiler that fails in either direction, or computes something else, costs
    speed alone.
    """
    backend, reason = COMPILERS[name]
    own = nn.Module.compile
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)
    monkeypatch.setattr(
        nn.Module, "compile", lambda m, **how: own(m, **how, backend=backend)
    )
    caplog.set_level(logging.INFO, logger="packstore")
    model, cpu = use_packed_attention(kit.tiny_model()).train(), torch.device("cpu")
    expected = gradients(model, kit.row())
    with torch._dynamo.config.patch(suppress_errors=False):
        assert compile_if_requested("auto", model, cpu) == (not reason)
        assert compile_if_requested("none", model, cpu) is False
        assert all(map(torch.equal, gradients(model, kit.row()), expected))
    assert re.search(reason or "compile 'auto' is 'layers'", caplog.text)
    assert has_compiled_layers(model) == (not reason)
    assert not [p for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fw_compiler", "bw_compiler"])
def test_a_graph_that_fails_later_runs_uncompiled(
    kit: SimpleNamespace,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Of other sizes than those of the proof; in the backward pass too, which was too
    late once.
    """
    own, proved = nn.Module.compile, []
    given = {"fw_compiler": nop, "bw_compiler": nop}

    def later(graph: Any, examples: Any) -> Any:
        return failing() if proved else nop(graph, examples)

    backend = aot_autograd(**{**given, direction: later})
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)
    monkeypatch.setattr(
        nn.Module, "compile", lambda m, **how: own(m, **how, backend=backend)
    )
    model = use_packed_attention(kit.tiny_model()).train()
    expected = gradients(model, kit.row())
    with torch._dynamo.config.patch(suppress_errors=False):
        assert compile_if_requested("auto", model, torch.device("cpu"))
        proved.append(1)
        torch._dynamo.reset()
        assert all(map(torch.equal, gradients(model, kit.row()), expected))


TWO_KINDS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": TWO_KINDS,
    "olmo3": TWO_KINDS,
}

RUNS = product(FAMILIES, (True, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        [("llama", True, 2)],
        [(*run, 2 - i % 2) for i, run in enumerate(RUNS)],
    ],
    ids=["one", "many"],
)
def test_training_compiles_policy_reference_and_validation(
    kit: SimpleNamespace,
    as_on_a_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    runs: list[tuple[str, bool, int]],
) -> None:
    """No layer attends uncompiled, whatever else was compiled in the process.

    A run has one model, with LoRA, or two.
    """
    found, backend = graphs()
    compiled, uncompiled = [], []
    own, check = nn.Module.compile, flash.check

    def compile_it(layer: nn.Module, **options: Any) -> None:
        compiled.append(layer)
        own(layer, backend=backend, **options)

    def counted(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            uncompiled.append(args)
        check(*args)

    monkeypatch.setattr(nn.Module, "compile", compile_it)
    monkeypatch.setattr(flash, "check", counted)
    settings = kit.short_run(tmp_path, "shared_prefix") | {
        "dtype": "float64",
        "max_steps": 2,
    }
    other = kit.packed(random_examples(9, seed=5), [2, 3, 4], "concat")
    settings["eval_dataset"] = kit.write(str(tmp_path / "held-out"), other).url
    for number, (name, recomputes, models) in enumerate(runs):
        kit.tiny_family(name, **FAMILIES[name]).save_pretrained(settings["model"])
        uncompiled.clear()
        before, output = len(found), str(tmp_path / f"run-{number}")
        how = {"compile": "layers", "gradient_checkpointing": recomputes}
        train(
            **settings,
            **how,
            output_dir=output,
            peft_config={"r": 2} if models == 1 else {},
        )
        assert len(found) - before <= 12  # none, where those of another model do
        # Two layers: the probe in both layouts, and the proof of each head.
        assert len(uncompiled) == 2 * (2 + models)
    assert len(compiled) == len(set(compiled)) == 2 * sum(models for *_, models in runs)
    assert found
    assert "uncompiled" not in caplog.text


def test_what_is_not_compiled_is_told(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = use_packed_attention(kit.tiny_family("llama"))
    compile_layers(model, backend="eager", recompile_limit=1)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            model(**kit.row().model_inputs())
    for _ in range(2):
        warn_about_uncompiled()
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("packstore")
    ]
    assert len(told) == 2
    assert any("recompile limit" in text for text in told)
    assert any("sdpa" in text for text in told)


@pytest.mark.slow
def test_layers_that_pass_no_layout_on(
    kit: SimpleNamespace, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """They find it in the thread, which breaks the graph: the same numbers, and a line
    on it.
    """
    plain = use_packed_attention(kit.tiny_family("stablelm"))
    model = use_packed_attention(kit.tiny_family("stablelm"))
    compile_layers(model, backend="eager")
    batch = kit.row(2, "shared_prefix")
    for a, b in zip(gradients(model, batch), gradients(plain, batch), strict=True):
        assert (a - b).abs().max() <= 1e-9 * b.abs().max()
    warn_about_uncompiled()
    assert "ContextVar" in caplog.text


def test_a_model_without_named_layers_is_refused(kit: SimpleNamespace) -> None:
    model = kit.tiny_family("llama")
    model._no_split_modules = None
    with pytest.raises(BackendError, match="decoder layers"):
        compile_layers(model)
