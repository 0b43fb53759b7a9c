"""Finds the Hugging Face model inside its wrappers, and reads its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from packstore.config.settings import check_class
from packstore.errors import BackendError, CompatibilityError, sentence
from packstore.torch.models.mask import PREFIX
from packstore.torch.models.replaced import replaced_forward

ROW_LOCAL = {
    *(
        "LORA",
        "ADALORA",
        "ADAPTION_PROMPT",
        "BEFT",
        "BOFT",
        "C3A",
        "DEFT",
        "DELORA",
        "FOURIERFT",
    ),
    *(
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
    ),
    *(
        "OSF",
        "PEANUT",
        "PSOFT",
        "PVERA",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "SUPERTUNING",
        "TINYLORA",
    ),
    *("TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
"""PEFT types whose effect on a token depends on that token and what attention shows it,
as measured (``tests/torch/models/test_adapters.py``): packed, they do what they do to
the sequence alone.
"""


SCORE = "score"
"""Name of the head in transformers' sequence-classification models of decoders."""


def unwrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside DDP, FSDP, ``torch.compile`` and PEFT, in
    any order.
    """
    *_, inner = model, *layers(model)
    return inner


def is_reward_model(model: Any) -> bool:
    """Returns True for a sequence-classification model, optionally inside wrappers."""
    return isinstance(getattr(unwrapped(model), SCORE, None), nn.Module)


def peft_model_of(model: Any) -> Any | None:
    """Returns the PEFT model among the wrappers, which knows the adapters; None without
    PEFT.
    """
    return next((layer for layer in layers(model) if _is_peft(layer)), None)


def layers(model: Any) -> Iterator[Any]:
    """Yields the model, then the model inside each wrapper; the last one has no
    wrapper.
    """
    outer, inner = None, model
    while inner is not None and inner is not outer:
        yield inner
        outer = inner
        # Wrappers pass the attributes of their model through, so classes and own
        # children decide.
        if _is_peft(outer):
            inner = outer.get_base_model()
        else:
            children = getattr(outer, "_modules", {})
            names = (
                "_orig_mod",
                "_fsdp_wrapped_module",
                "module",
            )  # compile; FSDP1; DDP, others
            inner = next((children[name] for name in names if name in children), None)


def check_adapters(model: Any) -> None:
    """Refuses adapters that read the row: tokens of other sequences, or added ones,
    would count.
    """
    for layer in layers(model):
        for config in (getattr(layer, "peft_config", None) or {}).values():
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            if getattr(config, "alora_invocation_tokens", None) is not None:
                kind += " with alora_invocation_tokens"
            if kind not in ROW_LOCAL:
                where = f"adapter of {type(layer).__name__}"
                rule = "it must change each token of a packed row by that token alone"
                remedy = "Train it unpacked, with batch.model_inputs(style='padded')"
                raise CompatibilityError(sentence(where, rule, kind, remedy))


def _is_peft(model: Any) -> bool:
    return hasattr(type(model), "get_base_model")


def backbone_of(model: Any) -> Any:
    """Returns a causal LM without its head; the model itself if it has no such part."""
    backbone = getattr(model, "base_model", model)
    # The name that Llama 4 gives for it is that of a larger model.
    return getattr(model, "model", model) if backbone is model else backbone


def check_not_compiled(model: nn.Module) -> None:
    """Refuses a compiled model, whose whole forward call log-probs without logits do
    not run.
    """
    check_class("argument model", model, nn.Module, "load_model(path) loads one")
    if any(x._compiled_call_impl or "_orig_mod" in x._modules for x in layers(model)):
        raise CompatibilityError(
            f"log-probs of {type(model).__name__}: the forward call must not be "
            "compiled, as its "
            "parts are called one by one; found a compiled model. "
            "Compile the module that makes log-probs: "
            "torch.compile(PackedPolicy(model))."
        )


def check_prepared(model: Any) -> None:
    """Refuses a model with attention of its own, which may mix the segments of a row in
    silence.
    """
    if torch.compiler.is_compiling():
        return
    inner = unwrapped(model)
    state = getattr(replaced_forward(backbone_of(inner)), "state", None)
    attention = str(text_config(inner)._attn_implementation)
    if state is None or not (state.reason or attention.startswith(PREFIX)):
        where, rule = (
            f"packed row: {type(inner).__name__}",
            "it must have packed attention",
        )
        remedy = "Prepare the model: use_packed_attention(model)"
        raise BackendError(sentence(where, rule, attention, remedy))


def check_direct_call(model: nn.Module, name: str) -> None:
    """Refuses a compiled model, and with gradients one inside DDP or FSDP, in function
    `name`.
    """
    check_not_compiled(model)
    wrapped = isinstance(getattr(model, "module", None), nn.Module) and any(
        kind.__module__.startswith(("torch.nn.parallel", "torch.distributed"))
        for kind in type(model).__mro__
    )
    if torch.is_grad_enabled() and wrapped:
        where = f"{name}({type(model).__name__})"
        rule = "gradients must be reduced by the wrapper, which does not see this call"
        remedy = (
            "Wrap the other way round: DDP(PackedPolicy(model)), and call that "
            "with the batch"
        )
        raise CompatibilityError(sentence(where, rule, "a wrapped model", remedy))


def has_compiled_layers(model: nn.Module) -> bool:
    """Returns True if a module inside a model is compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Runs compiled layers as they are while a block runs: a few tokens need no
    graph.
    """
    if torch.compiler.is_compiling() or not has_compiled_layers(model):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def check_parts(model: nn.Module) -> None:
    """Refuses a model whose parts, called one by one, do not compute what its forward
    call does.

    Such are adapters that read the row, and outside of autocast what Accelerate puts
    under it.
    """
    check_adapters(model)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return  # its parts compute as its forward call does
    if any(
        "_original_forward" in vars(layer) for layer in layers(model)
    ):  # Accelerate's name
        raise CompatibilityError(
            f"log-probs of {type(model).__name__}: its parts must compute as its "
            "forward call "
            "does; found a model whose forward call Accelerate runs in mixed "
            "precision. "
            "Prepare PackedPolicy(model) in its place; or take the model out of it "
            "with "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
        )


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts models into evaluation mode while a block runs, and then each module
    back.
    """
    before = [
        (module, module.training) for model in models for module in model.modules()
    ]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


REF_ADAPTER = "ref"
"""Name of a frozen adapter that serves as reference; also TRL's."""


@contextmanager
def as_reference(policy: nn.Module, peft_model: Any) -> Iterator[None]:
    """Makes a PEFT policy its own reference: by its frozen adapter, else without any
    adapter.

    Afterwards the active adapters, and what is trained of the model, are as before:
    PEFT itself makes all of an adapter trainable when it becomes active again.
    """
    trained = [
        (parameter, parameter.requires_grad) for parameter in peft_model.parameters()
    ]
    has_own = REF_ADAPTER in peft_model.peft_config
    with evaluating(policy), ExitStack() as stack:
        stack.callback(
            lambda: [p.requires_grad_(is_trained) for p, is_trained in trained]
        )
        stack.enter_context(
            _frozen(peft_model) if has_own else peft_model.disable_adapter()
        )
        yield


@contextmanager
def _frozen(peft_model: Any) -> Iterator[None]:
    """Makes the frozen adapter the only active one while a block runs."""
    tuner, named = peft_model.base_model, peft_model.active_adapter
    active, enabled = (
        list(peft_model.active_adapters),
        peft_model.get_model_status().enabled,
    )
    tuner.enable_adapter_layers()
    peft_model.set_adapter(REF_ADAPTER, inference_mode=True)
    try:
        yield
    finally:
        tuner.set_adapter(active)
        peft_model.active_adapter = named
        if enabled is False:
            tuner.disable_adapter_layers()


def text_config(model: Any) -> Any:
    """Returns the text config of a model or of a config; what has none is returned as
    it is.
    """
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rope_parts(config: Any) -> list[Mapping[str, Any]]:
    """Returns the RoPE settings of a text config: one mapping, or one per kind of
    layer.
    """
    settings = (
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None)
        or {}
    )
    return [
        settings,
        *(part for part in settings.values() if isinstance(part, Mapping)),
    ]


def rope_kinds(config: Any) -> list[str]:
    """Returns the types of RoPE of a text config."""
    return [
        str(p.get("rope_type", p.get("type", "default")))
        for p in rope_parts(config)
        if p
    ]


def depends_on_length(kind: object) -> bool:
    """Returns True for a type of RoPE whose tables depend on the longest position of a
    call.
    """
    return any(name in str(kind) for name in ("dynamic", "longrope"))
