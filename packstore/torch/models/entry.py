"""The forward call of a prepared model: tells its modules the layout of the row.

Most models pass ``packed_layout`` on to their attention. Some drop it on the way, and some call
modules without it, so it is also set for the thread, and set again where gradient checkpointing
recomputes a layer. Models that packed attention cannot serve run whole, once per sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models.mask import LAYOUT, PREFIX, UnservedError, computing
from packstore.torch.models.row import Replaced, run_each
from packstore.torch.models.unwrap import backbone_of, evaluating

logger = logging.getLogger("packstore")

CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes that hold the checkpoint function: of transformers' layers, of torch's wrapper."""


OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "mm_encoder_outputs")
"""Arguments of models that take images, videos or sound beside text."""


@dataclass
class Serving:
    """How a prepared model computes packed rows.

    Attributes:
        model: the Hugging Face model.
        attention: the attention implementation that it had before.
        reason: why the whole model runs once per sequence, with that attention; empty: it does not.
        causal: it was seen that no token changes the output of those before it.
    """

    model: Any
    attention: str
    reason: str = ""
    causal: bool = False

    @property
    def packed(self) -> bool:
        """True while the model has packed attention, not one of its own again."""
        name = self.model.config.get_text_config()._attn_implementation
        return str(name).startswith(PREFIX)

    def run_whole(self, reason: str) -> None:
        """Runs the whole model once per sequence from now on, and logs why."""
        self.reason = reason
        self.model.set_attn_implementation(self.attention)
        text = "%s runs whole once per sequence, so packing saves padding only: %s"
        logger.warning(text, type(self.model).__name__, reason)


def enter(model: Any, attention: str) -> Serving:
    """Replaces the forward calls of a model and of what `find_head` calls, in place.

    Args:
        model: the Hugging Face model.
        attention: its own attention implementation.
    """
    current = vars(model).get("forward")
    if isinstance(current, _Entry):
        current.serving.reason = ""
        return current.serving
    serving, backbone = Serving(model, attention), backbone_of(model)
    for module in {model, backbone, getattr(backbone, "decoder", backbone)}:
        module.forward = _Entry(module, serving)
    return serving


class _Entry(Replaced):
    """The forward call of a model or backbone."""

    def __init__(self, module: nn.Module, serving: Serving) -> None:
        super().__init__(module)
        self.serving = serving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("packed_layout")
        if layout is None:
            return self.own(*args, **kwargs)
        _refuse_images(kwargs)
        if self.serving.reason:
            return self._each(layout, args, kwargs)
        # In a graph, a variable of the thread would break it.
        if torch.compiler.is_compiling() or not self.serving.packed:
            return self.own(*args, **kwargs)
        if self.module.training and LAYOUT.get() is None:
            _carry(self.module)
        try:
            with computing(layout):
                return self.own(*args, **kwargs)
        except UnservedError as error:
            if kwargs.get("attention_mask") is not None or LAYOUT.get() is not None:
                raise
            self.serving.run_whole(str(error).partition(". ")[0])
            return self._each(layout, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _each(self, layout: AttentionLayout, args: Any, kwargs: dict[str, Any]) -> Any:
        # Without positions, so that the model counts them itself.
        dropped = ("packed_layout", "position_ids")
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        if not self.serving.causal and "input_ids" in kwargs:
            _check_causal(self.own, self.serving.model, kwargs["input_ids"])
            self.serving.causal = True
        return run_each(self.own, layout, args, kwargs)


def _refuse_images(kwargs: dict[str, Any]) -> None:
    for name in OTHER_INPUTS:
        if kwargs.get(name) is not None:
            do = "Call the model with **batch.model_inputs(), and nothing else"
            raise BackendError(sentence("packed row", "inputs must be text", name, do))


@torch.no_grad()
def _check_causal(forward: Callable[..., Any], model: nn.Module, ids_1T: Tensor) -> None:
    """Refuses a model whose output changes with later tokens: in one call, the last of a few."""
    first = ids_1T[:, :8]
    other = first.clone()
    other[:, -1] = other[:, -1] - 1 if bool(other[0, -1] > 0) else other[:, -1] + 1
    with evaluating(model):
        a, b = (
            next(iter(forward(input_ids=ids, use_cache=False).values())) for ids in (first, other)
        )
    a, b = a[:, :-1].float(), b[:, :-1].float()
    if bool((a - b).abs().max() > 1e-2 * a.abs().max()):
        raise BackendError(
            sentence(
                f"use_packed_attention({type(model).__name__})",
                "a token must not see those after it",
                "a model that looks ahead",
                "Set is_decoder=True in its config if it has such a mode, or choose a causal LM",
            )
        )


class _Carrying:
    """A checkpoint function that sets the layout of the first run also in the second."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout = LAYOUT.get()

        def run(*args: Any, **kwargs: Any) -> Any:
            with computing(layout):
                return function(*args, **kwargs)

        return self.checkpoint(run, *args, **kwargs)


def _carry(model: nn.Module) -> None:
    """Wraps the checkpoint functions that were set since the last call."""
    for module in model.modules():
        for name in CHECKPOINTS:
            checkpoint = vars(module).get(name)
            if checkpoint is not None and not isinstance(checkpoint, _Carrying):
                setattr(module, name, _Carrying(checkpoint))
