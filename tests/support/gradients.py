"""Gradients of a model by name."""

from __future__ import annotations

from torch import Tensor, nn


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of all parameters, and clears them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
