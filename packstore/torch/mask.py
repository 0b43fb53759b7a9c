"""The mask that transformers asks for: packed attention needs its window only.

transformers makes a mask for each kind of layer and hands each layer its own. Its plain attention
follows the mask; its flash attention follows the keyword ``sliding_window``. Some models set only
one of the two, so a window that stands in the mask alone is taken from there.
"""

from __future__ import annotations

from typing import Any, NoReturn

from packstore.errors import BackendError, sentence


class _TouchedMaskError(BackendError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` is answered with False."""


class RequestedMask:
    """Stands where transformers puts a mask: causal, and within a window if there is one.

    Layers must hand it to attention as it is. Any use of it as a tensor is refused, as packed
    attention would not see what became of it.

    Attributes:
        window: tokens that a query sees, itself included; None: all before it.
    """

    __slots__ = ("window",)

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __repr__(self) -> str:
        return f"RequestedMask(window={self.window})"

    def __getattr__(self, name: str) -> NoReturn:
        raise _TouchedMaskError(_touched(f"a model that reads its {name}"))

    def __getitem__(self, key: Any) -> NoReturn:
        raise BackendError(_touched("a model that cuts it"))

    def __reduce__(self) -> tuple[type[RequestedMask], tuple[int | None]]:
        return type(self), (self.window,)


def window_of(mask: RequestedMask | None, keyword: int | None) -> int | None:
    """The window of a layer, from its mask and its keyword ``sliding_window``.

    Raises:
        BackendError: the keyword names another window than the mask.
    """
    if mask is None or mask.window == keyword:
        return keyword
    if keyword is None:
        return mask.window
    must = "the window of a layer must be that of its mask"
    found = f"a window of {keyword}, and {mask.window or 'none'} in the mask"
    do = "Set config.sliding_window and config.layer_types so that both agree, or train it unpacked"
    raise BackendError(sentence("packed attention", must, found, do))


def _touched(found: str) -> str:
    must = "layers must hand the mask to attention as it is"
    do = "Train it unpacked, with batch.model_inputs(style='padded')"
    return sentence("packed attention", must, found, do)
