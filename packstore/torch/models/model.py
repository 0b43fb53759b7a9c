"""Hugging Face causal LMs on packed rows: one attention function, registered with transformers.

The function gets the layout of the row as a keyword of the model's forward call, which most models
pass through to every layer (``row.py`` reaches the layers of others). Layers that mix tokens
otherwise run once per sequence, and so do whole models whose attention is not in the registry
(``row.py``). Anything else that would let segments see each other raises: a missing
layout, a mask, a cache, several rows, dropout, non-causal attention.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from packstore.errors import BackendError
from packstore.registry import missing_extra
from packstore.torch.attention import ATTENTION, Settings
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models.mask import (
    PREFIX,
    RequestedMask,
    UnservedError,
    layout_of,
    skip_row_search,
    window_of,
)
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
"""Layer types, as in model configs, of registered attention, of mixers, and of none of both."""

PER_SEQUENCE = "per_sequence"
"""Name of the backend that runs the whole model once per sequence."""

NOT_SUPPORTED = ("sinks", "position_bias", "indices", "block_indices")
"""Keywords of models that need more than a softmax over the visible keys."""

CALL = "Call the model with **batch.model_inputs()"
GENERATE = "; to generate, give it back its own attention: model.set_attn_implementation('sdpa')"
OWN_MODEL = "Any other module trains on packs as docs/own-model.md shows"
UNPACKED = "Train it unpacked, with batch.model_inputs(style='padded')"


def use_packed_attention(
    model: Model, backend: str = "auto", *, disable_dropout: bool = True
) -> Model:
    """Makes `model` attend inside segments only; call it with ``**batch.model_inputs()``.

    Changes the model in place: replaces its attention implementation and sets its dropout to 0.
    Weights and everything else stay.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP or ``torch.compile``.
        backend: a name of :data:`~packstore.torch.attention.ATTENTION`, of which ``auto`` chooses
            by device, dtype and the model's needs and logs the choice (``attention/auto.py``); or
            ``per_sequence``, which runs the whole model once per sequence with its own attention.
            Models that packed attention cannot serve run so under any name, which is logged.
        disable_dropout: sets the model's dropout to 0 and logs it, as TRL does; adapters keep
            theirs. False keeps dropout outside attention; in attention it raises.

    Returns:
        `model`.

    Raises:
        UnknownNameError: `backend` is unknown.
        BackendError: the model is no Hugging Face model, or not a decoder alone.
        CompatibilityError: a PEFT adapter reads the row, see :func:`check_adapters`.
        MissingExtraError: transformers, or the package of the backend, is not installed.
    """
    check_adapters(model)
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    where = f"use_packed_attention({type(model).__name__})"
    if config is None or not hasattr(inner, "set_attn_implementation"):
        raise BackendError(
            f"{where}: it must be a Hugging Face model; found none of its methods. {OWN_MODEL}."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise BackendError(
            f"{where}: it must be a decoder alone; found an encoder and a decoder. {UNPACKED}."
        )
    text = config.get_text_config()
    # Imported late, as they load torch's compiler, which takes a second.
    from packstore.torch.models.row import install_packed_forward, run_mixers_per_sequence

    state = install_packed_forward(inner, config._attn_implementation)
    reason = "you asked for it" if backend == PER_SEQUENCE else _unserved(inner, text)
    if not reason:
        name = _register(backend)
        inner.set_attn_implementation(name)
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
    if any(map(depends_on_length, [module.rope_type for module in rotary] or rope_kinds(text))):
        return "its RoPE tables depend on the longest position of a call"
    return ""


def _forget_calls(module: Any, _: Any) -> None:
    """Resets a rotary module, as `dynamic` RoPE keeps the tables of the longest call so far."""
    for name in [*vars(module), *module._buffers]:
        if name.endswith("original_inv_freq"):
            kind = name.removesuffix("original_inv_freq")
            now = getattr(module, f"{kind}inv_freq")
            setattr(module, f"{kind}inv_freq", getattr(module, name).to(now.device, copy=True))
            setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


def _disable_dropout(model: nn.Module) -> None:
    """Sets each dropout rate that a module stores, but of adapters, to 0, in place; logs it."""
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
        rates = ", ".join(f"{name} {value:g}" for name, value in sorted(changed.items()))
        logger.info("dropout is disabled (disable_dropout=False keeps it): %s", rates)


@cache
def _register(backend: str) -> str:
    """Registers our function with this backend in transformers; returns its name there."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise missing_extra("use_packed_attention", "train", error) from error
    attend = ATTENTION.load(backend)

    def packed_attention(
        module: nn.Module,
        query_1NTH: Tensor,
        key_1KTH: Tensor,
        value_1KTH: Tensor,
        attention_mask: RequestedMask | Tensor | None,
        *,
        packed_layout: AttentionLayout | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layout = _checked(query_1NTH, key_1KTH, layout_of(packed_layout))
        mask = attention_mask if isinstance(attention_mask, RequestedMask) else None
        if mask is None:
            _refuse_mask(attention_mask)
        _refuse_extras(module, others)
        q, k, v = (x[0].transpose(0, 1) for x in (query_1NTH, key_1KTH, value_1KTH))
        kind = q.device.type
        if torch.is_autocast_enabled(kind):  # as torch's own attention does
            lower = torch.get_autocast_dtype(kind)
            q, k, v = (x if x.dtype == torch.float64 else x.to(lower) for x in (q, k, v))
        settings = Settings(
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window_of(mask, sliding_window),
            softcap=softcap,
            chunk=None if mask is None else mask.chunk,
            sinks=s_aux,
        )
        return attend(q, k, v, layout, settings).unsqueeze(0), None

    # Not the backend's own name: transformers treats names with "flash", "flex", "sdpa" specially.
    name = f"{PREFIX}{list(ATTENTION).index(backend)}"
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, _requested_mask)
    skip_row_search()
    return name


def _requested_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **__: Any,
) -> RequestedMask:
    """Replaces the mask that transformers would build, once per kind of layer."""
    _refuse_mask(attention_mask)
    if use_vmap:
        raise _unserved_call("masks must be causal, in a window at most; found a model's own mask")
    if local_size is None or getattr(config, "attention_chunk_size", None) != local_size:
        return RequestedMask(local_size)
    if getattr(config, "sliding_window", None) == local_size:
        raise _unserved_call(f"window and chunk of a layer must differ; found {local_size} twice")
    return RequestedMask(None, local_size)


def _checked(query: Tensor, key: Tensor, layout: AttentionLayout | None) -> AttentionLayout:
    """Returns the layout, checked against the tokens."""
    if layout is None:
        raise BackendError(
            f"packed attention: the call must name the segments; found no layout. {CALL}"
            f"{GENERATE}. If you did call it so, its layers keep keywords from attention: "
            "train it unpacked."
        )
    (rows, _, tokens, _), expected = query.shape, layout.num_queries
    if (rows, tokens) != (1, expected):
        raise BackendError(
            f"packed attention: the layout is of one row of {expected} tokens; found {rows} rows "
            f"of {tokens} tokens. {CALL}, and nothing else."
        )
    if key.shape[2] != expected:
        raise BackendError(
            f"packed attention: keys must be those of the {expected} tokens, without a past; "
            f"found {key.shape[2]} keys. {CALL}, and nothing else."
        )
    return layout


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        # transformers 5.17 makes a mask to generate, later releases leave it out.
        shape = tuple(mask.shape)
        rule = "the layout alone says which tokens see which; found attention_mask of shape"
        raise _unserved_call(f"{rule} {shape}", GENERATE)


def _refuse_extras(module: nn.Module, extras: dict[str, Any]) -> None:
    for name in NOT_SUPPORTED:
        if extras.get(name) is not None:
            raise _unserved_call(f"attention must be a softmax over visible keys; found {name}")
    if extras.get("dropout"):
        raise BackendError(
            f"packed attention: it must be without dropout; found dropout {extras['dropout']}. "
            "Prepare the model anew: disable_dropout=False leaves it on."
        )
    if extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise BackendError(
            f"packed attention: it must be causal; found a model that looks ahead. {UNPACKED}."
        )


def _unserved_call(rule: str, also: str = "") -> UnservedError:
    """The error on which the model runs once per sequence instead (``row.py``)."""
    return UnservedError(f"packed attention: {rule}. Use backend={PER_SEQUENCE!r}{also}.")
