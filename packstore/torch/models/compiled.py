"""Decoder layers compiled one by one with ``torch.compile``.

The setting `compile` is ``layers``, ``none`` or ``auto``. With ``auto``, a trial
decides: a copy of a layer runs compiled and uncompiled on the same few packed tokens,
and layers are compiled only if outputs and gradients agree on all ranks.

The loss stays uncompiled. A graph of `dpo` and its metrics saved 0.1 ms of the host a
batch on a CPU, and took 15 s to compile: the time of 150,000 batches.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
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

MAX_GRAPHS = 64
"""Maximum graphs of one function, beyond which torch.compile leaves it uncompiled.

All layers of a class share one function, and torch counts graphs by function. A run
needs one per kind of layer (full or sliding attention, …), per layout, and per mode
(training or without gradients): up to 12.
"""

ROUNDING = 2e-2
"""Accepted difference of a compiled layer: ``|compiled - uncompiled| / |uncompiled|``,
with the Euclidean norm over all outputs and gradients.
"""

_warned_reasons: set[str] = set()
"""Reasons that :func:`warn_about_uncompiled` has logged."""

Autocast = Callable[[], AbstractContextManager[Any]]
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A layer, and the arguments of a call."""


def compile_layers(model: Model, **options: Any) -> Model:
    """Compile each decoder layer of `model` in place, at its first call.

    The compiler fuses the elementwise kernels between matrix products. Layers share
    their graphs, of dynamic sizes: one for training and one without gradients, for each
    kind of layer and layout, also under gradient checkpointing. Attention of the
    backend `torch_varlen` (also if `auto` chose it) is part of the graph; other
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
        names = sorted(getattr(inner, "_no_split_modules", None) or ())
        raise BackendError(
            sentence(
                where=f"compile_layers({type(inner).__name__})",
                rule="transformers must name the model's decoder layers "
                "(_no_split_modules)",
                found=", ".join(names) or "none",
                remedy="Train it without compiled layers",
            )
        )
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options.setdefault("recompile_limit", MAX_GRAPHS)
    else:  # an older torch has one limit for all functions
        limits = torch._dynamo.config
        limits.recompile_limit = max(MAX_GRAPHS, limits.recompile_limit)
    for layer in layers:
        layer.compile(dynamic=True, **options)
    return model


def compile_if_requested(
    setting: str,
    model: Model,
    device: torch.device,
    autocast: Autocast = nullcontext,
) -> bool:
    """Compile the layers of a model if `setting` asks for it. A collective call.

    With ``auto`` the device must be CUDA with Triton, and a trial must show that
    compiled layers compute the same: a copy of the first layer of each kind runs
    forward and backward on a few packed tokens of both layouts, on `device` and in the
    precision of `autocast`, compiled and uncompiled. If a layer fails to compile later,
    at other sizes, it runs uncompiled after torch's warning.

    Args:
        setting: ``auto``, ``layers`` or ``none``.
        model: as for :func:`compile_layers`.
        device: device of the training, where the trial runs, too.
        autocast: returns the autocast context of the training.

    Returns:
        True if the layers are compiled.
    """
    choice("compile", setting, ("auto", "layers", "none"))
    if setting == "none":
        return False
    if setting == "auto":
        has_compiler = flash.runs_on(device) and find_spec("triton")
        if not (has_compiler and _layers(model)):
            return False
        _suppress_compiler_errors()
        if not _all_ranks_compute_the_same(model, device, autocast):
            return False
        logger.info("compile 'auto' is 'layers': the first steps take longer")
    compile_layers(model)
    return True


def _suppress_compiler_errors() -> None:
    torch._dynamo.config.suppress_errors = True
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        # Backward graphs are then compiled with forward graphs, and errors of the
        # latter are suppressed.
        torch._functorch.config.force_non_lazy_backward_lowering = True


def _all_ranks_compute_the_same(
    model: Model, device: torch.device, autocast: Autocast
) -> bool:
    """Return True if the trial succeeds on every rank; else log the reason."""
    reason = _reason_against_compiling(model, device, autocast)
    num_failed = all_reduce_sums([float(bool(reason))], device=device)[0]
    if not num_failed:
        return True
    logger.warning(
        "layers stay uncompiled, which is slower: %s", reason or "another rank failed"
    )
    return False


def _reason_against_compiling(
    model: Any, device: torch.device, autocast: Autocast
) -> str:
    """Return why the layers cannot be compiled; empty if they can."""
    try:
        differences = [
            _difference(layer, args, kwargs, device, autocast)
            for layer, args, kwargs in _calls(model)
        ]
        largest = max(differences)
    except Exception as error:  # a compiler fails in any way
        text = quote(f"{type(error).__name__}: {error}", 300)
        return f"a compiled one ends with {text}"
    if largest <= ROUNDING:
        return ""
    return (
        f"outputs and gradients of a compiled one differ by {largest:.2g} of their norm"
    )


def _layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers, by their classes' names in transformers."""
    names = set(getattr(unwrapped(model), "_no_split_modules", None) or ())
    return [layer for layer in model.modules() if type(layer).__name__ in names]


def _calls(model: Any) -> list[Call]:
    """Return the calls of the first layer of each kind, on a few tokens per layout."""
    layers: dict[object, nn.Module] = {}
    for layer in _layers(model):
        kind = getattr(layer, "attention_type", getattr(layer, "layer_type", None))
        layers.setdefault((type(layer), kind), layer)
    calls: list[Call] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((layer, args, kwargs))

    hooks = [
        layer.register_forward_pre_hook(record, with_kwargs=True)
        for layer in layers.values()
    ]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in two_layouts(next(model.parameters()).device):
                model(**batch.model_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _difference(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    autocast: Autocast,
) -> float:
    """Return the difference of a compiled layer, as :data:`ROUNDING` defines it."""
    copied = copy.deepcopy(layer).to(device).train().requires_grad_(True)
    with torch._dynamo.config.patch(suppress_errors=False), torch.enable_grad():
        expected = _output_and_gradients(copied, args, kwargs, device, autocast)
        copied.compile(dynamic=True)
        compiled = _output_and_gradients(copied, args, kwargs, device, autocast)

    differences = [
        (a.double() - b.double()).norm()
        for a, b in zip(expected, compiled, strict=True)
    ]
    norms = [values.double().norm() for values in expected]
    norm = torch.stack(norms).norm().clamp(min=1e-30)
    difference = float(torch.stack(differences).norm() / norm)
    return float("inf") if math.isnan(difference) else difference


def _output_and_gradients(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    autocast: Autocast,
) -> list[Tensor]:
    """Run a layer forward and backward; return its output and all gradients there are.

    The gradients are of the hidden states and of the weights.
    """

    def copy_argument(value: Any) -> Any:
        return _copy_to(value, device)

    layer_args, layer_kwargs = tree_map(copy_argument, (args, kwargs))
    with autocast():
        output = layer(*layer_args, **layer_kwargs)
    if isinstance(output, tuple):
        output = output[0]  # the hidden states; then come attention weights
    # A plain sum has the same gradient at each element, which could hide swapped ones.
    weights = torch.linspace(-1, 1, output.numel(), device=device, dtype=output.dtype)
    loss = (output * weights.view_as(output)).sum()

    inputs = [
        value
        for value in layer_args
        if isinstance(value, Tensor) and value.requires_grad
    ]
    inputs.extend(layer.parameters())
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    values = [output, *gradients]
    return [value.detach() for value in values if value is not None]


def _copy_to(value: Any, device: torch.device) -> Any:
    """Return an argument of a layer on a device; hidden states with gradients."""
    if isinstance(value, Tensor):
        copied = value.detach().to(device, copy=True)
        return copied.requires_grad_(copied.is_floating_point())
    return value.to(device) if hasattr(value, "to") else value


def warn_about_uncompiled() -> None:
    """Log, once for each reason, which code in compiled layers has run uncompiled so
    far.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return  # nothing was compiled
    counters = dynamo.counters
    reasons = {*counters["graph_break"], *counters["unimplemented"]}
    for reason in reasons - _warned_reasons:
        _warned_reasons.add(reason)
        # Hints and a stack trace follow.
        first_lines = " ".join(reason.split("\n")[:2])
        logger.warning(
            "compiled layers run in part uncompiled, which is slower: %s",
            first_lines[:300],
        )
