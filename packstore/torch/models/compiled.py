"""Compiles decoder layers, where a proof on a few tokens shows that they compute the
same.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from packstore.errors import BackendError, quote, sentence
from packstore.registry import choice
from packstore.torch.attention import flash
from packstore.torch.metrics import all_reduce_sums
from packstore.torch.models.model import Model
from packstore.torch.models.probe import two_layouts
from packstore.torch.models.unwrap import evaluating, unwrapped

logger = logging.getLogger(__name__)

GRAPHS = 64
"""Graphs at most of one function, beyond which torch.compile leaves it uncompiled.
transformers has one for all layers, of which a run needs one a kind of layer, layout,
and sort of call: up to 12.
"""

ROUNDING = 2e-2
"""Norm of what outputs and gradients of a compiled layer may differ by, relative to
their own.
"""

_TOLD: set[str] = set()
"""What :func:`warn_about_uncompiled` has logged."""


def compile_layers(model: Model, **options: Any) -> Model:
    """Compiles each decoder layer of `model` in place, at its first call.

    The compiler fuses the elementwise kernels between matrix products. Layers share
    their graphs, of dynamic sizes: one for training and one without gradients, for each
    kind of layer and layout, also under gradient checkpointing. Attention by
    `torch_varlen`, or by `auto` where it chooses that, is part of the graph; other
    backends run outside it. Weights and their names stay. Call it after
    :func:`check_isolation`, whose small batches would be compiled too, and before DDP
    or FSDP wrap the model.

    Args:
        model: a Hugging Face causal LM prepared by :func:`use_packed_attention`,
            optionally inside wrappers.
        options: of ``torch.compile``, besides `dynamic`, which is True.

    Returns:
        `model`.

    Raises:
        BackendError: transformers does not name the model's decoder layers.
    """
    layers = _layers(model)
    if not layers:
        inner = unwrapped(model)
        where = f"compile_layers({type(inner).__name__})"
        rule = "transformers must name the model's decoder layers (_no_split_modules)"
        names = sorted(getattr(inner, "_no_split_modules", None) or ())
        found = ", ".join(names) or "none"
        raise BackendError(
            sentence(where, rule, found, "Train it without compiled layers")
        )
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options.setdefault("recompile_limit", GRAPHS)
    else:  # an older torch has one limit for all
        limits = torch._dynamo.config
        limits.recompile_limit = max(GRAPHS, limits.recompile_limit)
    for layer in layers:
        layer.compile(dynamic=True, **options)
    return model


def compile_if_requested(
    asked: str,
    model: Model,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Compiles the layers of a model, or not; returns whether. A collective call.

    ``layers`` compiles them. ``auto`` does on a CUDA device with Triton if they then
    compute what they do: a copy of the first layer of each kind runs forward and
    backward on a few packed tokens of both layouts, on `device` and in the precision of
    `autocast`, compiled beside uncompiled. What fails to compile later, at other sizes,
    runs uncompiled after torch's warning.
    """
    choice("compile", asked, ("auto", "layers", "none"))
    runs = flash.runs_on(device) and find_spec("triton")
    if asked == "none" or (asked == "auto" and not (runs and _layers(model))):
        return False
    if asked == "auto":
        torch._dynamo.config.suppress_errors = True
        if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
            # Backward graphs are then compiled with forward graphs, whose errors are
            # suppressed.
            torch._functorch.config.force_non_lazy_backward_lowering = True
        reason = _failure(model, device, autocast)
        failed = all_reduce_sums([float(bool(reason))], device=device)[0]
        if failed:
            found = reason or "another rank failed"
            logger.warning("layers stay uncompiled, which is slower: %s", found)
            return False
        logger.info("compile 'auto' is 'layers': the first steps take longer")
    compile_layers(model)
    return True


def _failure(
    model: Any,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Why a compiled layer does not serve; empty if it does."""
    try:
        gap = max(_gap(*call, device, autocast) for call in _calls(model))
    except Exception as error:  # a compiler fails in any way
        return (
            f"a compiled one ends with {quote(f'{type(error).__name__}: {error}', 300)}"
        )
    if gap <= ROUNDING:
        return ""
    return f"outputs and gradients of a compiled one differ by {gap:.2g} of their norm"


def _layers(model: Any) -> list[nn.Module]:
    """The decoder layers that transformers names."""
    names = set(getattr(unwrapped(model), "_no_split_modules", None) or ())
    return [layer for layer in model.modules() if type(layer).__name__ in names]


def _calls(model: Any) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The first layer of each kind, and what it is called with on a few tokens of each
    layout.
    """
    first: dict[object, nn.Module] = {}
    for layer in _layers(model):
        kind = getattr(layer, "attention_type", getattr(layer, "layer_type", None))
        first.setdefault((type(layer), kind), layer)
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((layer, args, kwargs))

    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for layer in first.values()
    ]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in two_layouts(next(model.parameters()).device):
                model(**batch.model_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _gap(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> float:
    """The largest difference of output and gradients, compiled and not, relative to
    their norm.
    """
    copied = copy.deepcopy(layer).to(device).train().requires_grad_(True)
    weights = list(copied.parameters())
    found: list[list[Tensor]] = []
    with torch._dynamo.config.patch(suppress_errors=False), torch.enable_grad():
        for compiled in (False, True):
            if compiled:
                copied.compile(dynamic=True)
            moved, named = tree_map(lambda x: _moved(x, device), (args, kwargs))
            with autocast():
                output = copied(*moved, **named)
            output = output[0] if isinstance(output, tuple) else output
            upstream = torch.linspace(
                -1, 1, output.numel(), device=device, dtype=output.dtype
            )
            inputs = [
                x for x in moved if isinstance(x, Tensor) and x.requires_grad
            ] + weights
            loss = (output * upstream.view_as(output)).sum()
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
            found.append([x.detach() for x in (output, *grads) if x is not None])
    norms = [torch.stack([x.double().norm() for x in each]).norm() for each in found]
    apart = [(a.double() - b.double()).norm() for a, b in zip(*found, strict=True)]
    gap = float(torch.stack(apart).norm() / norms[0].clamp(min=1e-30))
    return gap if gap == gap else float("inf")  # nan


def _moved(value: Any, device: torch.device) -> Any:
    """An argument of a layer on the device; hidden states have gradients."""
    if not isinstance(value, Tensor):
        return value.to(device) if hasattr(value, "to") else value
    moved = value.detach().to(device, copy=True)
    return moved.requires_grad_(moved.is_floating_point())


def warn_about_uncompiled() -> None:
    """Logs, once for each reason, which code in compiled layers has run uncompiled so
    far.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    counts = dynamo.counters if dynamo else {"graph_break": (), "unimplemented": ()}
    for reason in {*counts["graph_break"], *counts["unimplemented"]} - _TOLD:
        _TOLD.add(reason)
        what = " ".join(reason.split("\n")[:2])
        logger.warning(
            "compiled layers run in part uncompiled, which is slower: %s", what[:300]
        )
