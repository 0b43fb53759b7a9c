"""Passes the layout to packed attention, which reads it in place of a mask.

The layout (`AttentionLayout`) holds the segments of a packed row. It travels as the
keyword ``packed_layout``, and in a context variable for modules that drop the keyword.

The window of a layer (sliding attention) does travel with the mask: transformers makes
one mask per kind of layer and passes it to those layers. Packed attention has it make a
placeholder instead, :class:`RequestedMask`, which remembers the window. Some models
state a window only in the mask (as eager attention reads it), others only in the
keyword ``sliding_window`` (as flash attention reads it), so both are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn

import torch

from packstore.errors import BackendError
from packstore.torch.batch.layout import AttentionLayout

PREFIX = "packstore_"
"""Start of the names of packstore's attention functions in transformers."""

LAYOUT: ContextVar[AttentionLayout | None] = ContextVar("packed_layout", default=None)
"""The layout of the row that this thread computes, for modules whose callers do not
pass it on.
"""


@contextmanager
def using_layout(layout: AttentionLayout | None) -> Iterator[None]:
    """Set :data:`LAYOUT` for a block."""
    token = LAYOUT.set(layout)
    try:
        yield
    finally:
        LAYOUT.reset(token)


def layout_of(keyword: AttentionLayout | None) -> AttentionLayout | None:
    """Return the layout of the row: :data:`LAYOUT` if it is set, else the keyword.

    Under torch.compile the keyword comes first.

    FSDP2 may pass each layer a copy of the keyword. A layout caches its sizes and
    masks, which wait for the device; a copy would wait for them again in each layer.
    """
    if keyword is not None and torch.compiler.is_compiling():
        return keyword  # a ContextVar breaks a graph
    current = LAYOUT.get()
    return keyword if current is None else current


class UnservedError(BackendError):
    """The model needs something that packed attention does not compute."""


class _TouchedMaskError(UnservedError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` returns False."""

    def __init__(self, use: str) -> None:
        super().__init__(
            "packed attention: layers must hand the mask to attention as it is; "
            f"found a model that {use}. Use backend='per_sequence'."
        )


class RequestedMask:
    """Stands in for the mask that transformers would make; use as a tensor raises.

    Packed attention ignores masks, so a model that changes its mask would have no
    effect.

    Attributes:
        window: tokens that a query sees, its own included; None: all before it.
        chunk: a query sees only keys of its own chunk of this many tokens; None: no
            chunks.
    """

    __slots__ = ("chunk", "window")

    def __init__(self, window: int | None, chunk: int | None = None) -> None:
        self.window = window
        self.chunk = chunk

    def __getattr__(self, name: str) -> NoReturn:
        raise _TouchedMaskError(f"reads its {name}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise _TouchedMaskError("cuts it")

    def __reduce__(self) -> tuple[type[RequestedMask], tuple[int | None, int | None]]:
        return type(self), (self.window, self.chunk)


@cache
def skip_row_search() -> None:
    """Stop transformers from reading `position_ids` in calls with packed attention.

    In a call without a mask it looks for packed rows in the positions, for which the
    host waits for the device. No setting turns this off, and a mask that is passed to
    avoid it would be read by gpt2, biogpt and others.
    """
    from transformers import masking_utils

    prepare = masking_utils._preprocess_mask_arguments

    def without_positions(
        config: Any,
        embeds: Any,
        mask: Any,
        past: Any,
        positions: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if str(config._attn_implementation).startswith(PREFIX):
            positions = None
        return prepare(config, embeds, mask, past, positions, *args, **kwargs)

    masking_utils._preprocess_mask_arguments = without_positions


def window_of(mask: RequestedMask | None, keyword: int | None) -> int | None:
    """Return the window of a layer in tokens; None without.

    Args:
        mask: the placeholder that the layer got for its mask.
        keyword: the model's keyword ``sliding_window``; it may differ from the mask's
            window only if one of them is None.
    """
    if mask is None or mask.window == keyword:
        return keyword
    if keyword is None:
        return mask.window
    raise BackendError(
        "packed attention: the window of a layer must be that of its mask; found a "
        f"window of {keyword}, and {mask.window or 'none'} in the mask. Set "
        "config.sliding_window and config.layer_types so that both agree, or train it "
        "unpacked."
    )
