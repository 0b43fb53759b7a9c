"""The replacement of a mask in packed attention: a layout, and the window of a layer.

transformers makes one mask per kind of layer and passes it to those layers. Its eager
attention follows the mask; its flash attention follows the keyword ``sliding_window``.
Some models set only one of the two, so a window that is only in the mask is read from
its placeholder.
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
    """Return the layout of the row: :data:`LAYOUT`, or the keyword in a graph and where
    no layout is set.

    FSDP2 may pass a copy to each layer, and a copy has neither the sizes nor the mask
    that another layer has waited for.
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
    """Replaces transformers' mask; use as a tensor raises.

    Packed attention takes the layout instead, so nothing that a model does to a mask
    would have an effect.
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

    It looks for packed rows in the positions of a call without a mask, and the host
    waits for the device. There is no setting: a mask that is passed instead is read by
    gpt2, biogpt and others.
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
    """Return the window of a layer, by its mask and the keyword ``sliding_window``."""
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
