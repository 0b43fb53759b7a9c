"""Refuses models whose forward call does more than its backbone and head do.

Log-probs without logits call the backbone and then the head, so a wrapper around the forward call
of the whole model does not run: a compiler, or Accelerate's mixed precision.
"""

from __future__ import annotations

from torch import nn

from packstore.errors import CompatibilityError, sentence
from packstore.torch.models.unwrap import layers


def check_not_compiled(model: nn.Module) -> None:
    """Refuses a model whose forward call is compiled, also in place or inside wrappers.

    Raises:
        CompatibilityError: the forward call is compiled.
    """
    for layer in layers(model):
        in_place = getattr(layer, "_compiled_call_impl", None) is not None
        if in_place or "_orig_mod" in layer._modules:
            must = "the forward call must not be compiled, as its parts are called one by one"
            do = "Compile the module that makes log-probs: torch.compile(PackedPolicy(model))"
            raise CompatibilityError(sentence(_name(model), must, "a compiled model", do))


def check_own_precision(model: nn.Module) -> None:
    """Refuses a model whose forward call Accelerate has put under autocast.

    Raises:
        CompatibilityError: the forward call runs under Accelerate's autocast.
    """
    if any("_original_forward" in vars(layer) for layer in layers(model)):  # Accelerate's name
        must = "its parts must compute as its forward call does"
        found = "a model whose forward call Accelerate runs in mixed precision"
        do = (
            "Prepare PackedPolicy(model) in its place; or take the model out of it with "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
        raise CompatibilityError(sentence(_name(model), must, found, do))


def _name(model: nn.Module) -> str:
    return f"log-probs of {type(model).__name__}"
