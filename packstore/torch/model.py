"""Hugging Face causal LMs on packed rows: one attention function, registered with transformers.

The function takes the layout of the row as a keyword of the model's forward call, which the model
hands through to every layer. What would let segments see each other, and what the function could
not honour, is refused: no layout, a mask, a cache with a past, attention sinks, dropout.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from packstore.errors import BackendError, CompatibilityError, sentence
from packstore.io.dataset import Dataset
from packstore.io.manifest import Manifest
from packstore.registry import missing_extra
from packstore.torch.attention import ATTENTION
from packstore.torch.layout import AttentionLayout

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers, as model configs name them, in which tokens meet in causal attention only."""

NOT_SUPPORTED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Keywords by which models ask for more than softmax over the visible keys."""


def use_packed_attention(model: Model, backend: str = "auto") -> Model:
    """Makes `model` attend inside segments only; call it with ``**batch.model_inputs()``.

    The model is changed in place: its attention implementation becomes ours, whatever its config
    says of caches and masks. Weights and everything else stay.

    Args:
        model: a Hugging Face causal LM, or a wrapper that hands attributes through (PEFT).
        backend: a name of :data:`~packstore.torch.attention.ATTENTION`, or ``auto``: by what the
            model needs; the choice is logged.

    Returns:
        `model`.

    Raises:
        UnknownNameError: no such backend.
        BackendError: the model mixes tokens other than by attention (recurrent layers,
            convolutions), or does not take its attention from transformers' registry.
        MissingExtraError: transformers is not installed.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise _unfit(model, "it must be a Hugging Face model", "none of its methods")
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())}
    kinds |= {*(getattr(text, "layers_block_type", None) or ())}
    if getattr(model, "_is_stateful", False) or not kinds <= LAYER_TYPES:
        found = ", ".join(sorted(kinds - LAYER_TYPES)) or "recurrent layers"
        raise _unfit(model, "tokens must meet in causal attention only", found)
    name = _register(_auto(text) if backend == "auto" else backend)
    model.set_attn_implementation(name)  # type: ignore[operator]
    if text._attn_implementation != name:
        must = "its attention must come from transformers' attention registry"
        raise _unfit(model, must, "an attention of its own")
    return model


def check_model(data: Dataset | Manifest, model: Any) -> None:
    """Refuses a model whose vocabulary does not hold the dataset's token ids.

    A larger vocabulary is fine: heads are often padded.

    Args:
        data: the dataset, or its manifest.
        model: a Hugging Face model, or its config.

    Raises:
        CompatibilityError: the ids do not fit.
    """
    manifest = data.manifest if isinstance(data, Dataset) else data
    config = getattr(model, "config", model).get_text_config()
    if manifest.vocab_size is not None and manifest.vocab_size > config.vocab_size:
        raise CompatibilityError(
            sentence(
                "dataset and model",
                f"token ids must be below the model's vocab_size of {config.vocab_size}",
                f"a tokenizer of {manifest.vocab_size} ids",
                "Use the model that belongs to the tokenizer, or pack again with the model's own",
            )
        )


def _auto(text_config: Any) -> str:
    """The fastest backend that does what the model needs."""
    capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    return _logged("reference" if capped else "sdpa")


@cache
def _logged(backend: str) -> str:
    logger.info("packed attention: backend 'auto' is %r", backend)
    return backend


@cache
def _register(backend: str) -> str:
    """The name under which transformers knows our function with this backend."""
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
        attention_mask: Tensor | None,
        *,
        packed_layout: AttentionLayout | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layout = _checked(query_1NTH, key_1KTH, packed_layout)
        _refuse_mask(attention_mask)
        _refuse_extras(module, others)
        output = attend(
            query_1NTH[0].transpose(0, 1),
            key_1KTH[0].transpose(0, 1),
            value_1KTH[0].transpose(0, 1),
            layout,
            scale=query_1NTH.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        return output.unsqueeze(0), None

    # Not by the backend's own name: transformers reads meaning into "flash", "flex" and "sdpa".
    name = f"packstore_{ATTENTION.names().index(backend)}"
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """What transformers calls to build the mask, once a forward pass: there is none."""
    _refuse_mask(attention_mask)


def _checked(query: Tensor, key: Tensor, layout: AttentionLayout | None) -> AttentionLayout:
    """The layout, if it is that of the tokens."""
    if layout is None:
        raise _refusal("the call must name the segments", "no layout")
    expected = layout.num_queries
    if query.shape[0] != 1 or query.shape[2] != expected:
        found = f"{query.shape[0]} rows of {query.shape[2]} tokens"
        raise _refusal(f"the layout is of one row of {expected} tokens", found)
    if key.shape[2] != expected:
        found = f"{key.shape[2]} keys"
        raise _refusal(f"keys must be those of the {expected} tokens, without a past", found)
    return layout


def _refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        found = f"attention_mask of shape {tuple(mask.shape)}"
        raise _refusal("the layout alone says which tokens see which", found)


def _refuse_extras(module: nn.Module, extras: dict[str, Any]) -> None:
    for name in NOT_SUPPORTED:
        if extras.get(name) is not None:
            raise _refusal(
                "attention must be a softmax over the visible keys", f"a model with {name}"
            )
    if extras.get("dropout"):
        found = f"dropout {extras['dropout']}"
        raise _refusal("attention must be without dropout (config.attention_dropout = 0)", found)
    if extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _refusal("attention must be causal", "a model that looks ahead")


def _refusal(must: str, found: str) -> BackendError:
    do = "Call the model with **batch.model_inputs(), and nothing that changes attention"
    return BackendError(sentence("packed attention", must, found, do))


def _unfit(model: nn.Module, must: str, found: str) -> BackendError:
    where = f"use_packed_attention({type(model).__name__})"
    do = "Train it unpacked, with batch.model_inputs(style='padded')"
    return BackendError(sentence(where, must, found, do))
