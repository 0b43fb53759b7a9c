"""Gradients of a model by name."""

from __future__ import annotations

from torch import Tensor, nn


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of all parameters, and clears them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def recompute_layers(model: nn.Module, reentrant: bool = False) -> None:
    """Enables gradient checkpointing, under the name that transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": reentrant})
