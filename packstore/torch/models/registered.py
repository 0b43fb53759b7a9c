"""The attention function of packed rows, registered with transformers for each backend.

transformers calls it in each layer, with queries, keys and values of the one packed
row, and with the layout of the row, see ``mask.py``. A call raises if segments could
see each other, or if the backend would compute something else than the model wants: no
layout, a mask, a cache, several rows, dropout, or non-causal attention.

Suffixes of tensors name their axes: N heads, T queries, K keys, H size of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

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

PER_SEQUENCE = "per_sequence"
"""Name of the backend that runs the whole model once per sequence."""

NOT_SUPPORTED = ("sinks", "position_bias", "indices", "block_indices")
"""Keywords by which models ask for more than a softmax over the visible keys.

Attention sinks are supported only under the keyword `s_aux`, as of gpt-oss.
"""

# Remedies, as parts of error messages.
CALL = "Call the model with **batch.model_inputs()"
UNPACKED_CALL = (
    "; for calls without packs, give it back its own attention: "
    "model.set_attn_implementation('sdpa')"
)
UNPACKED = "Train it unpacked, with batch.model_inputs(style='padded')"


@cache
def register(backend: str) -> str:
    """Register packed attention with transformers; return its name in the registry."""
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
        **extras: Any,
    ) -> tuple[Tensor, None]:
        layout = layout_of(packed_layout)
        layout = _check_layout(query_1NTH, key_1KTH, layout)
        mask = attention_mask if isinstance(attention_mask, RequestedMask) else None
        if mask is None:
            _refuse_mask(attention_mask)
        _refuse_extras(module, extras)
        q = _to_autocast_dtype(query_1NTH[0].transpose(0, 1))
        k = _to_autocast_dtype(key_1KTH[0].transpose(0, 1))
        v = _to_autocast_dtype(value_1KTH[0].transpose(0, 1))
        settings = Settings(
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window_of(mask, sliding_window),
            softcap=softcap,
            chunk=None if mask is None else mask.chunk,
            sinks=s_aux,
        )
        output = attend(q, k, v, layout, settings).unsqueeze(0)
        return output, None  # no attention weights

    # Not the backend's own name: transformers treats names with "flash", "flex", "sdpa"
    # specially.
    name = f"{PREFIX}{list(ATTENTION).index(backend)}"
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, _requested_mask)
    skip_row_search()
    return name


def _to_autocast_dtype(values: Tensor) -> Tensor:
    """Convert queries, keys or values to the dtype of autocast.

    torch does so for its own attention, but not for kernels of others.
    """
    device_type = values.device.type
    if values.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return values
    return values.to(torch.get_autocast_dtype(device_type))


def _requested_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **__: Any,
) -> RequestedMask:
    """Return the placeholder for a mask; transformers calls it per kind of layer.

    Args:
        attention_mask: the user's mask, which is refused.
        local_size: size of a window or of a chunk in tokens.
        use_vmap: True if the model adds a mask function of its own.
        config: the model's config.
    """
    _refuse_mask(attention_mask)
    if use_vmap:
        raise _unserved_call(
            "masks must be causal, in a window at most; found a model's own mask"
        )
    # transformers passes the size of a window and of a chunk by the same name.
    chunk_size = getattr(config, "attention_chunk_size", None)
    if local_size is None or chunk_size != local_size:
        return RequestedMask(window=local_size)
    if getattr(config, "sliding_window", None) == local_size:
        raise _unserved_call(
            f"window and chunk of a layer must differ; found {local_size} twice"
        )
    return RequestedMask(window=None, chunk=local_size)


def _check_layout(
    query_1NTH: Tensor, key_1KTH: Tensor, layout: AttentionLayout | None
) -> AttentionLayout:
    """Return the layout, or raise if it does not fit the tokens."""
    if layout is None:
        raise BackendError(
            "packed attention: the call must name the segments; found no layout. "
            f"{CALL}{UNPACKED_CALL}. If you did call it so, its layers keep keywords "
            "from attention: train it unpacked."
        )
    num_tokens = layout.num_queries
    num_rows, _, num_queries, _ = query_1NTH.shape
    if num_rows != 1 or num_queries != num_tokens:
        raise BackendError(
            f"packed attention: the layout is of one row of {num_tokens} tokens; found "
            f"{num_rows} rows of {num_queries} tokens. {CALL}, and nothing else."
        )
    num_keys = key_1KTH.shape[2]
    if num_keys != num_tokens:
        raise BackendError(
            f"packed attention: keys must be those of the {num_tokens} tokens, without "
            f"a past; found {num_keys} keys. {CALL}, and nothing else."
        )
    return layout


def _refuse_mask(mask: Any) -> None:
    if mask is None:
        return
    # transformers 5.17 makes a mask to generate, later releases leave it out.
    raise _unserved_call(
        "the layout alone says which tokens see which; found attention_mask of shape "
        f"{tuple(mask.shape)}",
        further_remedy=UNPACKED_CALL,
    )


def _refuse_extras(module: nn.Module, extras: dict[str, Any]) -> None:
    for name in NOT_SUPPORTED:
        if extras.get(name) is not None:
            raise _unserved_call(
                f"attention must be a softmax over visible keys; found {name}"
            )
    if extras.get("dropout"):
        raise BackendError(
            "packed attention: it must be without dropout; found dropout "
            f"{extras['dropout']}. Prepare the model anew: disable_dropout=False "
            "leaves it on."
        )
    if extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise BackendError(
            "packed attention: it must be causal; found a model that looks ahead. "
            f"{UNPACKED}."
        )


def _unserved_call(rule: str, further_remedy: str = "") -> UnservedError:
    """Return an error after which the whole model runs once per sequence."""
    remedy = f"Use backend={PER_SEQUENCE!r}{further_remedy}"
    return UnservedError(f"packed attention: {rule}. {remedy}.")
