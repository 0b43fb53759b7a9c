"""Prepares Hugging Face causal LMs for packed rows.

A packed row holds the segments of many sequences, and a token must see only its own
sequence. So the model's attention is replaced by a function that is registered with
transformers (``registered.py``). It gets the layout of the row, that is the lengths of
its segments, as a keyword of the forward call.

Layers that mix tokens by other means than attention, such as Mamba or convolutions, run
once per sequence (``row.py``). So does the whole model if transformers' registry does
not choose its attention.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from packstore.errors import BackendError
from packstore.torch.models.implementations import set_attention
from packstore.torch.models.registered import PER_SEQUENCE, UNPACKED, register
from packstore.torch.models.unwrap import (
    check_adapters,
    depends_on_length,
    rope_kinds,
    unwrapped,
)

logger = logging.getLogger("packstore")

Model = TypeVar("Model", bound=nn.Module)

LAYER_TYPES = {
    # attention by transformers' registry
    "attention",
    "chunked_attention",
    "full_attention",
    "sliding_attention",
    # mixers, which run per sequence
    "conv",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mamba",
    # neither
    "mlp",
    "moe",
}
"""Layer types of model configs that packed attention supports."""

OWN_MODEL = "Any other module trains on packs as docs/own-model.md shows"
"""Remedy for models that are not of transformers."""


def use_packed_attention(
    model: Model, backend: str = "auto", *, disable_dropout: bool = True
) -> Model:
    """Make `model` attend inside segments only; call it with
    ``**batch.model_inputs()``.

    Changes the model in place: replaces its attention implementation and sets its
    dropout to 0. Weights and everything else stay. ``model.generate`` runs with the
    attention from before.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP or
            ``torch.compile``.
        backend: a name of :data:`~packstore.torch.attention.ATTENTION`; ``auto``
            chooses by device, dtype and the model's needs and logs the choice
            (``attention/auto.py``); ``per_sequence`` runs the whole model once per
            sequence with its original attention. A model that packed attention cannot
            serve runs per sequence whatever the backend; the reason is logged.
        disable_dropout: set the model's dropout to 0 and log it, as TRL does; adapters
            keep theirs. False keeps dropout outside attention; in attention it raises.

    Returns:
        `model`.

    Raises:
        UnknownNameError: `backend` is unknown.
        BackendError: the model is no Hugging Face model, or not a decoder alone.
        CompatibilityError: a PEFT adapter mixes tokens, see :func:`check_adapters`.
        MissingExtraError: transformers, or the package of the backend, is not
            installed.
    """
    check_adapters(model)
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    where = f"use_packed_attention({type(model).__name__})"
    if config is None or not hasattr(inner, "set_attn_implementation"):
        raise BackendError(
            f"{where}: it must be a Hugging Face model; found none of its methods. "
            f"{OWN_MODEL}."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise BackendError(
            f"{where}: it must be a decoder alone; found an encoder and a decoder. "
            f"{UNPACKED}."
        )
    # Imported late, as it loads torch's compiler, which takes a second.
    from packstore.torch.models.row import (
        install_packed_forward,
        run_mixers_per_sequence,
    )

    state = install_packed_forward(inner)
    text_config = config.get_text_config()  # multimodal models have several configs
    if backend == PER_SEQUENCE:
        reason = "you asked for it"
    else:
        _reset_dynamic_rope_at_calls(inner)
        reason = _reason_against_packing(inner, text_config)
    if not reason:
        name = register(backend)
        state.backend = backend
        set_attention(inner, name)
        if text_config._attn_implementation != name:
            reason = "its attention does not come from transformers' attention registry"
    if reason:
        state.run_whole(reason)
    else:
        run_mixers_per_sequence(inner, text_config)
    if disable_dropout:
        _disable_dropout(inner)
    return model


def _reason_against_packing(model: Any, text_config: Any) -> str:
    """Return the reason why packed attention cannot serve a model; empty if it can."""
    layer_types = {
        *(getattr(text_config, "layer_types", None) or ()),
        *(getattr(text_config, "layers_block_type", None) or ()),
    }
    unsupported = layer_types - LAYER_TYPES
    if unsupported:
        return f"it has layers of type {', '.join(sorted(unsupported))}"
    for path, module in model.named_modules():
        # As RoBERTa's, where the first position is padding_idx + 1.
        if "position" in path and getattr(module, "padding_idx", None) is not None:
            return "its table of positions begins behind padding"
    # The modules before the config: HunYuan's config calls its fixed tables dynamic.
    kinds = [module.rope_type for module in _rotary_modules(model)]
    kinds = kinds or rope_kinds(text_config)
    if any(depends_on_length(kind) for kind in kinds):
        return "its RoPE tables depend on the longest position of a call"
    return ""


def _rotary_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]


def _reset_dynamic_rope_at_calls(model: Any) -> None:
    for module in _rotary_modules(model):
        has_hook = _reset_dynamic_rope in module._forward_pre_hooks.values()
        if "dynamic" in str(module.rope_type) and not has_hook:
            module.register_forward_pre_hook(_reset_dynamic_rope)


def _reset_dynamic_rope(module: Any, _: Any) -> None:
    """Restore the frequencies of a rotary module with `dynamic` RoPE.

    It rescales them to the longest call so far, and later, shorter calls would keep
    these.
    """
    for name in [*vars(module), *module._buffers]:
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            device = getattr(module, f"{prefix}inv_freq").device
            original = getattr(module, name).to(device, copy=True)
            setattr(module, f"{prefix}inv_freq", original)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _disable_dropout(model: nn.Module) -> None:
    """Set the dropout rates of all modules but adapters to 0, in place; log them."""
    rates: dict[str, float] = {}  # name -> the rate before
    for path, module in model.named_modules():
        if any(part.startswith("lora_") for part in path.split(".")):
            continue  # the user chose it when making the adapter
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
            if is_rate and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                shown_name = path.rsplit(".", 1)[-1] if name == "p" else name
                rates[shown_name] = value
    if rates:
        listed = ", ".join(f"{name} {rate:g}" for name, rate in sorted(rates.items()))
        logger.info("dropout is disabled (disable_dropout=False keeps it): %s", listed)
