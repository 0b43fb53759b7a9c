"""Refuses models whose forward call does more than its backbone and head do.

Log-probs without logits call the backbone and then the head, so a wrapper around the forward call
of the whole model does not run: a compiler, or Accelerate's mixed precision.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from packstore.errors import CompatibilityError, sentence


def check_not_compiled(model: nn.Module) -> None:
    """Refuses a model whose forward call is compiled, also in place or inside wrappers.

    Raises:
        CompatibilityError: the forward call is compiled.
    """
    layer: Any = model
    while layer is not None:
        in_place = getattr(layer, "_compiled_call_impl", None) is not None
        if in_place or hasattr(layer, "_orig_mod"):
            must = "the forward call must not be compiled, as its parts are called one by one"
            do = "Compile the module that makes log-probs: torch.compile(PackedPolicy(model))"
            raise CompatibilityError(sentence(_name(model), must, "a compiled model", do))
        layer = _inside(layer)


def check_own_precision(model: nn.Module) -> None:
    """Refuses a model whose forward call Accelerate has put under autocast.

    Raises:
        CompatibilityError: the forward call runs under Accelerate's autocast.
    """
    if "_original_forward" in vars(model):  # Accelerate's name for what it replaced
        must = "its parts must compute as its forward call does"
        found = "a model whose forward call Accelerate runs in mixed precision"
        do = (
            "Prepare PackedPolicy(model) in its place; or take the model out of it with "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
        raise CompatibilityError(sentence(_name(model), must, found, do))


def _inside(model: Any) -> Any:
    """The model inside a wrapper (DDP, PEFT); None if there is no wrapper."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    module = getattr(model, "module", None)
    return module if isinstance(module, nn.Module) else None


def _name(model: nn.Module) -> str:
    return f"log-probs of {type(model).__name__}"
