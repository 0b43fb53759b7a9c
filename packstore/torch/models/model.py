"""Hugging Face causal LMs on packed rows: one attention function, registered with transformers.

The function gets the layout of the row as a keyword of the model's forward call, which the model
passes through to every layer, also when gradient checkpointing recomputes a layer. Anything that
would let segments see each other, or that the function does not support, raises: a missing layout,
a mask, a cache, several rows, attention sinks, dropout, non-causal attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.registry import missing_extra
from packstore.torch.attention import ATTENTION, Attend
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models import dropout
from packstore.torch.models.mask import PREFIX, RequestedMask, skip_row_search, window_of
from packstore.torch.models.rope import use_own_tables
from packstore.torch.models.unwrap import unwrapped

Model = TypeVar("Model", bound=nn.Module)

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types, as in model configs, that mix tokens by causal attention only."""

NOT_SUPPORTED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Keywords of models that need more than a softmax over the visible keys."""

CALL = "Call the model with **batch.model_inputs()"
UNPACKED = "Train it unpacked, with batch.model_inputs(style='padded')"


def use_packed_attention(
    model: Model, backend: str = "auto", *, disable_dropout: bool = True
) -> Model:
    """Makes `model` attend inside segments only; call it with ``**batch.model_inputs()``.

    Changes the model in place: replaces its attention implementation and sets its dropout to 0.
    Weights and everything else stay.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP or ``torch.compile``.
        backend: a name of :data:`~packstore.torch.attention.ATTENTION`; or ``auto``, which chooses
            by device, dtype and the model's needs and logs the choice (``attention/_auto.py``).
        disable_dropout: sets the model's dropout to 0 and logs it, as TRL does; adapters keep
            theirs. False keeps dropout outside attention; in attention it raises.

    Returns:
        `model`.

    Raises:
        UnknownNameError: `backend` is unknown.
        BackendError: the model mixes tokens other than by attention (recurrent layers,
            convolutions), is not decoder-only, does not take its attention from transformers'
            registry, has an unknown length-dependent RoPE, or does not count positions from 0.
        MissingExtraError: transformers, or the package of the backend, is not installed.
    """
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "set_attn_implementation"):
        raise _unfit(model, "it must be a Hugging Face model", "none of its methods")
    if getattr(config, "is_encoder_decoder", False):
        raise _unfit(model, "it must be a decoder alone", "an encoder and a decoder")
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())}
    kinds |= {*(getattr(text, "layers_block_type", None) or ())}
    # The flag belongs to the class: a hybrid configured with attention layers only has it too.
    stateful = getattr(inner, "_is_stateful", False) and not kinds
    if stateful or not kinds <= LAYER_TYPES:
        found = ", ".join(sorted(kinds - LAYER_TYPES)) or "recurrent layers"
        raise _unfit(inner, "tokens must meet in causal attention only", found)
    if any(
        "position" in path and getattr(module, "padding_idx", None) is not None
        for path, module in inner.named_modules()
    ):
        must = "positions must count from 0"
        raise _unfit(inner, must, "a table of positions that begins behind padding")
    name = _register(backend)
    inner.set_attn_implementation(name)
    if text._attn_implementation != name:
        must = "its attention must come from transformers' attention registry"
        raise _unfit(inner, must, "an attention of its own")
    use_own_tables(inner, text)
    if disable_dropout:
        dropout.disable_dropout(inner)
    return model


@cache
def _register(backend: str) -> str:
    """Registers our function with this backend in transformers; returns its name there."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise missing_extra("use_packed_attention", "train", error) from error
    attend = _load(backend)

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
        **others: Any,
    ) -> tuple[Tensor, None]:
        layout = _checked(query_1NTH, key_1KTH, packed_layout)
        mask = attention_mask if isinstance(attention_mask, RequestedMask) else None
        if mask is None:
            _refuse_mask(attention_mask)
        _refuse_extras(module, others)
        q, k, v = _autocast(query_1NTH, key_1KTH, value_1KTH)
        output = attend(
            q[0].transpose(0, 1),
            k[0].transpose(0, 1),
            v[0].transpose(0, 1),
            layout,
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=window_of(mask, sliding_window),
            softcap=softcap,
        )
        return output.unsqueeze(0), None

    # Not the backend's own name: transformers treats names with "flash", "flex", "sdpa" specially.
    number = ATTENTION.names().index(backend) if backend in ATTENTION else "auto"
    name = f"{PREFIX}{number}"
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, _requested_mask)
    skip_row_search()
    return name


def _load(backend: str) -> Attend:
    if backend != "auto":
        return ATTENTION.load(backend)
    # Imported late, as it loads torch's compiler, which takes a second.
    from packstore.torch.attention import _auto

    return _auto.attend


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to the dtype of active autocast, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    lower = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(lower) for x in tensors)


def _requested_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **__: Any,
) -> RequestedMask:
    """Replaces the mask that transformers would build, once per kind of layer."""
    _refuse_mask(attention_mask)
    if use_vmap:
        must = "masks must be causal, within a window at most"
        raise _refusal(must, "a model with a mask function of its own", UNPACKED)
    return RequestedMask(local_size)


def _checked(query: Tensor, key: Tensor, layout: AttentionLayout | None) -> AttentionLayout:
    """Returns the layout, checked against the tokens."""
    if layout is None:
        do = (
            f"{CALL}; to generate, give it back its own attention: "
            "model.set_attn_implementation('sdpa'). If you did call it so, its layers keep "
            "keywords from attention: train it unpacked"
        )
        raise _refusal("the call must name the segments", "no layout", do)
    expected = layout.num_queries
    if query.shape[0] != 1 or query.shape[2] != expected:
        found = f"{query.shape[0]} rows of {query.shape[2]} tokens"
        raise _refusal(f"the layout is of one row of {expected} tokens", found)
    if key.shape[2] != expected:
        found = f"{key.shape[2]} keys"
        raise _refusal(f"keys must be those of the {expected} tokens, without a past", found)
    return layout


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        found = f"attention_mask of shape {tuple(mask.shape)}"
        do = f"{CALL}, and nothing else; if you did, it makes masks of its own: train it unpacked"
        raise _refusal("the layout alone says which tokens see which", found, do)


def _refuse_extras(module: nn.Module, extras: dict[str, Any]) -> None:
    for name in NOT_SUPPORTED:
        if extras.get(name) is not None:
            must = "attention must be a softmax over the visible keys"
            raise _refusal(must, f"a model with {name}", UNPACKED)
    if extras.get("dropout"):
        must, found = "attention must be without dropout", f"dropout {extras['dropout']}"
        do = "Prepare the model anew: disable_dropout=False leaves it on"
        raise _refusal(must, found, do)
    if extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _refusal("attention must be causal", "a model that looks ahead", UNPACKED)


def _refusal(must: str, found: str, do: str = f"{CALL}, and nothing else") -> BackendError:
    return BackendError(sentence("packed attention", must, found, do))


def _unfit(model: nn.Module, must: str, found: str) -> BackendError:
    where = f"use_packed_attention({type(model).__name__})"
    return BackendError(sentence(where, must, found, UNPACKED))
