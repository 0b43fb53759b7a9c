"""Gives each packed sequence the RoPE table that it would have alone.

transformers chooses the tables of ``longrope`` and ``dynamic`` RoPE by the longest position of a
call, and ``dynamic`` also by earlier calls. In a packed row that position may belong to another
sequence. So a prepared model computes such tables per sequence length, as if the sequence came
alone and first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models import row

LAYOUT = "_packed_layout"
"""Attribute of a rotary module that holds the row's layout while its parent module runs."""

CONFIG = "_packed_config"
"""Attribute of a rotary module with the config of the prepared model, which names its attention."""


def use_own_tables(model: nn.Module) -> None:
    """Adds hooks to the rotary modules whose tables depend on the longest position, if any.

    The hooks do nothing without the layout of a packed row in the call, or with another attention
    implementation than ours.

    Args:
        model: the Hugging Face model, changed in place.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for parent in model.modules():
        rotary = [child for child in parent.children() if _depends(child)]
        for child in rotary:
            setattr(child, CONFIG, config)
            if _per_sequence not in child._forward_hooks.values():
                child.register_forward_hook(_per_sequence, with_kwargs=True)
        if rotary and _note_layout not in parent._forward_pre_hooks.values():
            parent.register_forward_pre_hook(_note_layout, with_kwargs=True)
            parent.register_forward_hook(_forget_layout, always_call=True)


def has_unknown_tables(model: nn.Module, config: Any) -> bool:
    """Returns True if the config needs such tables, and no module of transformers makes them."""
    kinds = [str(part.get("rope_type", part.get("type"))) for part in rope_parts(config)]
    # HunYuan's config calls its fixed tables dynamic; its module does not.
    known = any(hasattr(module, "rope_type") for module in model.modules())
    return any(map(by_length, kinds)) and not known


def rope_parts(config: Any) -> list[Mapping[str, Any]]:
    """Returns the RoPE settings of a text config: one mapping, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [given, *(part for part in given.values() if isinstance(part, Mapping))]


def by_length(kind: str) -> bool:
    """Returns True for a type of RoPE whose tables depend on the longest position."""
    return "dynamic" in kind or kind == "longrope"


def _depends(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(name, str) and by_length(name) for name in names)


def _note_layout(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    for child in module.children():
        if _depends(child):
            setattr(child, LAYOUT, kwargs.get("packed_layout"))


def _forget_layout(module: nn.Module, _: Any, __: Any) -> None:
    for child in module.children():
        if _depends(child):
            setattr(child, LAYOUT, None)


def _per_sequence(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Replaces the tables `[…, T, D]` of a packed row by those of its single sequences."""
    config = getattr(module, CONFIG, None) or module.config
    ours = str(getattr(config, "_attn_implementation", "")).startswith("packstore_")
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False), **kwargs)
    layer_type = given.get("layer_type")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    # A module in a list has no parent that is called, so the layout is that of the thread, which a
    # graph of torch.compile cannot read.
    layout: AttentionLayout | None = getattr(module, LAYOUT, None) or row.LAYOUT.get()
    if not (ours or row.LAYOUT.get() is not None) or not by_length(kind):
        return None
    if layout is None:
        must = f"RoPE of type {kind!r} must know the segments"
        do = (
            "Call the model with **batch.model_inputs(); to generate, give it back its own "
            "attention: model.set_attn_implementation('sdpa'); if it is compiled, run it without "
            "torch.compile"
        )
        raise BackendError(sentence("packed attention", must, "no layout", do))
    tables = _Tables(module, kind, given)
    sizes = tables.sizes(layout)
    size_T = _of_tokens(sizes, layout)
    joined: tuple[Tensor, ...] | None = None
    for size in sorted({*sizes}):
        made = tables.of(size, size_T == size)
        mine = (size_T == size)[:, None]
        joined = (
            made if joined is None else tuple(map(torch.where, [mine] * len(made), made, joined))
        )
    assert joined is not None
    return joined[0] if isinstance(output, Tensor) else type(output)(joined)


class _Tables:
    """The tables of one rotary module.

    Args:
        module: the rotary module.
        kind: its type of RoPE.
        given: arguments of the call.
    """

    def __init__(self, module: Any, kind: str, given: dict[str, Any]) -> None:
        self.module, self.given, self.dynamic = module, given, "dynamic" in kind
        self.kind, layer_type = kind, given.get("layer_type")
        self.prefix = "" if layer_type is None else f"{layer_type}_"
        if self.dynamic:
            self.limit = int(module.original_max_seq_len)
        else:
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            self.limit = int(parameters["original_max_position_embeddings"])

    def sizes(self, layout: AttentionLayout) -> list[int]:
        """The length that each segment's table is made for; 0: any length up to the limit."""
        shortest, longest = layout.sequence_lengths
        for few, many in zip(shortest, longest, strict=True):
            if self._size(few) != self._size(many):
                must = f"sequences that share a prefix must share the tables of RoPE {self.kind!r}"
                found = f"{few} and {many} tokens, and other tables beyond {self.limit}"
                do = "Pack with layout='concat'"
                raise BackendError(sentence("packed attention", must, found, do))
        return [self._size(length) for length in longest]

    def _size(self, length: int) -> int:
        if length <= self.limit:
            return 0
        return length if self.dynamic else self.limit + 1

    def of(self, size: int, mine_T: Tensor) -> tuple[Tensor, ...]:
        """The tables for sequences of `size` tokens, `[…, T, D]`, valid where `mine_T` is True."""
        positions = self.given["position_ids"]
        own = torch.where(mine_T, positions, 0)
        if not size or self.dynamic:  # padding comes after the sequence
            own = own.clamp(max=(size or self.limit) - 1)
        # One more token, as this row may hold only the first part of a long sequence.
        last = torch.full_like(own[..., :1], max(size - 1, 0))
        self._forget()
        made = self.module.forward(**{**self.given, "position_ids": torch.cat([own, last], -1)})
        self._forget()
        made = (made,) if isinstance(made, Tensor) else tuple(made)
        tokens = len(mine_T)
        if any(table.ndim < 2 or table.shape[-2] != tokens + 1 for table in made):
            must = "rotary modules must give tables [..., T, D]"
            found = " and ".join(str(tuple(table.shape)) for table in made)
            raise BackendError(sentence("packed attention", must, found, "Train it unpacked"))
        return tuple(table.narrow(-2, 0, tokens) for table in made)

    def _forget(self) -> None:
        """Resets the module to its state before any call."""
        if self.dynamic:
            first = getattr(self.module, f"{self.prefix}original_inv_freq")
            here = getattr(self.module, f"{self.prefix}inv_freq").device
            setattr(self.module, f"{self.prefix}inv_freq", first.to(here, copy=True))
            setattr(
                self.module, f"{self.prefix}max_seq_len_cached", self.module.original_max_seq_len
            )


def _of_tokens(sizes: list[int], layout: AttentionLayout) -> Tensor:
    """The size of the segment of each token, `[T]`."""
    of_segments = torch.tensor(sizes, device=layout.cu_seqlens_q.device)
    return of_segments.repeat_interleave(layout.cu_seqlens_q.diff(), output_size=layout.num_queries)
