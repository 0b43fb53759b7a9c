"""Finds the Hugging Face model inside its wrappers, and asks about its parts.

Wrappers are DDP, FSDP, ``torch.compile`` and PEFT, in any order. Parts are its config,
its backbone (the causal LM without the head), and its PEFT adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from packstore.config.settings import check_class
from packstore.errors import BackendError, CompatibilityError, sentence
from packstore.torch.models.mask import PREFIX
from packstore.torch.models.replaced import replaced_forward

ROW_LOCAL = {
    "LORA",
    "ADALORA",
    "ADAPTION_PROMPT",
    "BEFT",
    "BOFT",
    "C3A",
    "DEFT",
    "DELORA",
    "FOURIERFT",
    "FROD",
    "GLORA",
    "GRALORA",
    "HIRA",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "MISS",
    "OFT",
    "OSF",
    "PEANUT",
    "PSOFT",
    "PVERA",
    "RANDLORA",
    "ROAD",
    "SHIRA",
    "SUPERTUNING",
    "TINYLORA",
    "TRAINABLE_TOKENS",
    "UNILORA",
    "VBLORA",
    "VERA",
    "WAVEFT",
}
"""PEFT types whose adapters have the same effect in a packed row as on a sequence
alone: each token's output depends only on that token and on tokens that it attends to.

``tests/torch/models/test_adapters.py`` measures it.
"""

SCORE = "score"
"""Name of the head in transformers' sequence-classification models of decoders."""


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside DDP, FSDP, ``torch.compile`` and PEFT, in
    any order.
    """
    inner = model
    for layer in layers(model):
        inner = layer
    return inner


def is_reward_model(model: Any) -> bool:
    """Return True for a sequence-classification model, optionally inside wrappers."""
    return isinstance(getattr(unwrapped(model), SCORE, None), nn.Module)


def peft_model_of(model: Any) -> Any | None:
    """Return the PEFT model among the wrappers, which holds the adapters; None without
    PEFT.
    """
    for layer in layers(model):
        if _is_peft(layer):
            return layer
    return None


def layers(model: Any) -> Iterator[Any]:
    """Yield the model, then the model inside each wrapper; the last one has no
    wrapper.
    """
    outer = None
    inner = model
    while inner is not None and inner is not outer:
        yield inner
        outer = inner
        inner = _inside(outer)


def _inside(model: Any) -> Any | None:
    """Return the model inside a wrapper, or None.

    Wrappers pass on the attributes of their model, so only class and direct children
    identify them.
    """
    if _is_peft(model):
        return model.get_base_model()
    children = getattr(model, "_modules", {})
    for name in (
        "_orig_mod",  # of torch.compile
        "_fsdp_wrapped_module",  # of FSDP1
        "module",  # of DDP and others
    ):
        if name in children:
            return children[name]
    return None


def check_adapters(model: Any) -> None:
    """Raise for adapters that do not work on packed rows, see :data:`ROW_LOCAL`.

    Prompt tuning, for example, adds tokens at the start of the row, not of each
    sequence.
    """
    for layer in layers(model):
        for config in (getattr(layer, "peft_config", None) or {}).values():
            peft_type = str(getattr(config.peft_type, "value", config.peft_type))
            if getattr(config, "alora_invocation_tokens", None) is not None:
                # Such a LoRA searches the row for the tokens: it is not row-local.
                peft_type += " with alora_invocation_tokens"
            if peft_type not in ROW_LOCAL:
                raise CompatibilityError(
                    sentence(
                        where=f"adapter of {type(layer).__name__}",
                        rule="it must change each token of a packed row by that token "
                        "alone",
                        found=peft_type,
                        remedy="Train it unpacked, with "
                        "batch.model_inputs(style='padded')",
                    )
                )


def _is_peft(model: Any) -> bool:
    return hasattr(type(model), "get_base_model")


def backbone_of(model: Any) -> Any:
    """Return a causal LM without its head; the model itself if it has no such part."""
    backbone = getattr(model, "base_model", model)
    if backbone is not model:
        return backbone
    # Llama 4's base_model_prefix names its part of a multimodal model instead.
    return getattr(model, "model", model)


def check_not_compiled(model: nn.Module) -> None:
    """Raise for a compiled model.

    Log-probs are computed without logits: backbone and head are called one by one,
    which would bypass the compiled forward call.
    """
    check_class("argument model", model, nn.Module, "load_model(path) loads one")
    for layer in layers(model):
        if layer._compiled_call_impl or "_orig_mod" in layer._modules:
            raise CompatibilityError(
                f"log-probs of {type(model).__name__}: the forward call must not be "
                "compiled, as its parts are called one by one; found a compiled model. "
                "Compile the module that makes log-probs: "
                "torch.compile(PackedPolicy(model))."
            )


def check_prepared(model: Any) -> None:
    """Raise for a model without packed attention: it may mix the segments of a row."""
    if torch.compiler.is_compiling():
        return
    inner = unwrapped(model)
    state = getattr(replaced_forward(backbone_of(inner)), "state", None)
    attention = str(text_config(inner)._attn_implementation)
    if state is not None and (state.reason or attention.startswith(PREFIX)):
        return
    raise BackendError(
        sentence(
            where=f"packed row: {type(inner).__name__}",
            rule="it must have packed attention",
            found=attention,
            remedy="Prepare the model: use_packed_attention(model)",
        )
    )


def check_direct_call(model: nn.Module, name: str) -> None:
    """Raise if the parts of a model must not be called one by one.

    That is for a compiled model, and with gradients enabled for one inside DDP or FSDP.

    Args:
        model: the model.
        name: the function that calls its parts, for the error.
    """
    check_not_compiled(model)
    if torch.is_grad_enabled() and _reduces_gradients(model):
        raise CompatibilityError(
            sentence(
                where=f"{name}({type(model).__name__})",
                rule="gradients must be reduced by the wrapper, which does not see "
                "this call",
                found="a wrapped model",
                remedy="Wrap the other way round: DDP(PackedPolicy(model)), and call "
                "that with the batch",
            )
        )


def _reduces_gradients(model: nn.Module) -> bool:
    """Return True for DDP, FSDP1 and their like."""
    if not isinstance(getattr(model, "module", None), nn.Module):
        return False
    return any(
        kind.__module__.startswith(("torch.nn.parallel", "torch.distributed"))
        for kind in type(model).__mro__
    )


def has_compiled_layers(model: nn.Module) -> bool:
    """Return True if a module inside a model is compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run uncompiled.

    For calls on a few tokens, which are not worth a graph of their own.
    """
    if torch.compiler.is_compiling() or not has_compiled_layers(model):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def check_parts(model: nn.Module) -> None:
    """Raise if the parts of a model compute differently outside its forward call.

    They do if Accelerate has wrapped the forward call for mixed precision. Also raise
    for adapters that do not work on packed rows.
    """
    check_adapters(model)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return  # the parts run in the precision of the forward call
    for layer in layers(model):
        if "_original_forward" in vars(layer):  # set by Accelerate
            raise CompatibilityError(
                f"log-probs of {type(model).__name__}: its parts must compute as its "
                "forward call does; found a model whose forward call Accelerate runs "
                "in mixed precision. Prepare PackedPolicy(model) in its place; or take "
                "the model out of it with "
                "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
            )


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode for a block; restore the mode of each module."""
    modes = [
        (module, module.training) for model in models for module in model.modules()
    ]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


REF_ADAPTER = "ref"
"""Name of a frozen adapter that serves as reference; also TRL's."""


@contextmanager
def as_reference(policy: nn.Module, peft_model: Any) -> Iterator[None]:
    """Make a PEFT policy its own reference model for a block.

    The reference is the base model with the adapter `REF_ADAPTER`, if there is one, and
    else without adapters. Afterwards the active adapters are as before, and so is which
    parameters are trained: PEFT makes all parameters of an adapter trainable when it
    becomes active again.

    Args:
        policy: the policy, which is in evaluation mode inside the block.
        peft_model: the PEFT model among its wrappers.
    """
    parameters = [
        (parameter, parameter.requires_grad) for parameter in peft_model.parameters()
    ]
    if REF_ADAPTER in peft_model.peft_config:
        without_policy = _only_ref_adapter(peft_model)
    else:
        without_policy = peft_model.disable_adapter()
    with evaluating(policy):
        try:
            with without_policy:
                yield
        finally:
            for parameter, was_trained in parameters:
                parameter.requires_grad_(was_trained)


@contextmanager
def _only_ref_adapter(peft_model: Any) -> Iterator[None]:
    """Make the frozen adapter the only active one for a block."""
    tuner = peft_model.base_model
    adapter = peft_model.active_adapter
    active_adapters = list(peft_model.active_adapters)
    is_enabled = peft_model.get_model_status().enabled
    tuner.enable_adapter_layers()
    peft_model.set_adapter(REF_ADAPTER, inference_mode=True)
    try:
        yield
    finally:
        tuner.set_adapter(active_adapters)
        peft_model.active_adapter = adapter
        if is_enabled is False:  # it may also be "irregular"
            tuner.disable_adapter_layers()


def text_config(model: Any) -> Any:
    """Return the text config of a model or of a config; the object itself if it has
    none.
    """
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rope_parts(config: Any) -> list[Mapping[str, Any]]:
    """Return the RoPE settings of a text config, as a list of mappings.

    Some configs nest a mapping per kind of layer, as ``{"full_attention": {"rope_type":
    ...}}``: the result is the outer mapping, then the nested ones.
    """
    settings = getattr(config, "rope_parameters", None)
    # Before transformers 5 it was rope_scaling.
    settings = settings or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in settings.values() if isinstance(part, Mapping)]
    return [settings, *parts]


def rope_kinds(config: Any) -> list[str]:
    """Return the types of RoPE of a text config, such as ``default`` or ``yarn``."""
    return [
        str(part.get("rope_type", part.get("type", "default")))
        for part in rope_parts(config)
        if part
    ]


def depends_on_length(kind: object) -> bool:
    """Return True if tables of this type of RoPE depend on the longest position of the
    call.
    """
    return "dynamic" in str(kind) or "longrope" in str(kind)
