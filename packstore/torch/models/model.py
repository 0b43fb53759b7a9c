"""Hugging Face causal LMs on packed rows: one attention function, registered with
transformers.

The function (``registered.py``) gets the layout of the row as a keyword of the model's
forward call, which most models pass through to every layer (``row.py`` reaches the
layers of others). Layers that mix tokens otherwise run once per sequence, and so do
whole models whose attention is not in the registry (``row.py``).
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
    *("attention", "chunked_attention", "full_attention", "sliding_attention"),
    *("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mlp", "moe"),
}
"""Layer types, as in model configs, of registered attention, of mixers, and of none of
both.
"""

OWN_MODEL = "Any other module trains on packs as docs/own-model.md shows"


def use_packed_attention(
    model: Model, backend: str = "auto", *, disable_dropout: bool = True
) -> Model:
    """Makes `model` attend inside segments only; call it with
    ``**batch.model_inputs()``.

    Changes the model in place: replaces its attention implementation and sets its
    dropout to 0. Weights and everything else stay. ``model.generate`` runs with the
    attention from before.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP or
            ``torch.compile``.
        backend: a name of :data:`~packstore.torch.attention.ATTENTION`, of which
            ``auto`` chooses by device, dtype and the model's needs and logs the choice
            (``attention/auto.py``); or ``per_sequence``, which runs the whole model
            once per sequence with its own attention. Models that packed attention
            cannot serve run so under any name, which is logged.
        disable_dropout: sets the model's dropout to 0 and logs it, as TRL does;
            adapters keep theirs. False keeps dropout outside attention; in attention it
            raises.

    Returns:
        `model`.

    Raises:
        UnknownNameError: `backend` is unknown.
        BackendError: the model is no Hugging Face model, or not a decoder alone.
        CompatibilityError: a PEFT adapter reads the row, see :func:`check_adapters`.
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
    text = config.get_text_config()
    # Imported late, as they load torch's compiler, which takes a second.
    from packstore.torch.models.row import (
        install_packed_forward,
        run_mixers_per_sequence,
    )

    state = install_packed_forward(inner)
    reason = "you asked for it" if backend == PER_SEQUENCE else _unserved(inner, text)
    if not reason:
        name = register(backend)
        state.backend = backend
        set_attention(inner, name)
        if text._attn_implementation != name:
            reason = "its attention does not come from transformers' attention registry"
    if reason:
        state.run_whole(reason)
    else:
        run_mixers_per_sequence(inner, text)
    if disable_dropout:
        _disable_dropout(inner)
    return model


def _unserved(model: Any, text: Any) -> str:
    """The reason why packed attention cannot serve a model, or nothing."""
    names = ("layer_types", "layers_block_type")
    kinds = {kind for name in names for kind in getattr(text, name, None) or ()}
    if not kinds <= LAYER_TYPES:
        return f"it has layers of type {', '.join(sorted(kinds - LAYER_TYPES))}"
    if any(
        "position" in path and getattr(module, "padding_idx", None) is not None
        for path, module in model.named_modules()
    ):
        return "its table of positions begins behind padding"
    # HunYuan's config calls its fixed tables dynamic; its module does not.
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    for module in rotary:
        known = _forget_calls in module._forward_pre_hooks.values()
        if "dynamic" in str(module.rope_type) and not known:
            module.register_forward_pre_hook(_forget_calls)
    if any(
        map(
            depends_on_length,
            [module.rope_type for module in rotary] or rope_kinds(text),
        )
    ):
        return "its RoPE tables depend on the longest position of a call"
    return ""


def _forget_calls(module: Any, _: Any) -> None:
    """Resets a rotary module, as `dynamic` RoPE keeps the tables of the longest call so
    far.
    """
    for name in [*vars(module), *module._buffers]:
        if name.endswith("original_inv_freq"):
            kind = name.removesuffix("original_inv_freq")
            now = getattr(module, f"{kind}inv_freq")
            setattr(
                module,
                f"{kind}inv_freq",
                getattr(module, name).to(now.device, copy=True),
            )
            setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


def _disable_dropout(model: nn.Module) -> None:
    """Sets each dropout rate that a module stores, but of adapters, to 0, in place;
    logs it.
    """
    changed: dict[str, float] = {}
    for path, module in model.named_modules():
        if any(part.startswith("lora_") for part in path.split(".")):
            continue  # the user chose it when making the adapter
        for name, value in list(vars(module).items()):
            drops = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
            if drops and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed[path.rsplit(".", 1)[-1] if name == "p" else name] = value
    if changed:
        rates = ", ".join(
            f"{name} {value:g}" for name, value in sorted(changed.items())
        )
        logger.info("dropout is disabled (disable_dropout=False keeps it): %s", rates)
