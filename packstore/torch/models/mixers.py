"""Runs layers that mix tokens by other means than attention once per sequence.

Linear attention, Mamba, RG-LRU, xLSTM and short convolutions carry a state along the row, which
must start at zero in each sequence. So these modules alone are called once per logical sequence,
with the kernels of unpacked training. A shared prefix is computed again for each of its responses,
in these modules only.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from packstore.errors import BackendError, sentence
from packstore.torch.models.mask import PREFIX
from packstore.torch.models.row import LAYOUT, Replaced, run_each

STATES = frozenset(
    {
        *("attention_mask", "conv_mask", "mask", "seq_idx", "state"),
        *("cache_params", "past_key_value", "past_key_values"),
    }
)
"""Arguments of modules that look at other tokens: a cache, a state, or a mask."""

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Name by which modules find their attention in transformers' registry."""


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that mix tokens without attention from transformers' registry, by path.

    They are found by their arguments: innermost modules that take a cache, a state or a mask.
    """
    takers = {path: module for path, module in model.named_modules() if path and _takes(module)}
    inner = {
        path: module
        for path, module in takers.items()
        if not any(other.startswith(f"{path}.") for other in takers)
    }
    return {path: module for path, module in inner.items() if not _attends(module)}


def run_per_sequence(model: nn.Module, config: Any) -> list[str]:
    """Makes the mixers of a model run once per sequence while its attention is ours.

    Args:
        model: the Hugging Face model, changed in place.
        config: config of its text model.

    Returns:
        The classes of the mixers.
    """
    found = mixers(model)
    for module in found.values():
        if not isinstance(vars(module).get("forward"), _Mixer):
            module.forward = _Mixer(module, config)
    return sorted({type(module).__name__ for module in found.values()})


class _Mixer(Replaced):
    """The forward call of a mixer."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__(module)
        self.config = config

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, packed_layout: Any = None, **kwargs: Any) -> Any:
        if not str(self.config._attn_implementation).startswith(PREFIX):
            return self.own(*args, **kwargs)
        layout = LAYOUT.get() if packed_layout is None else packed_layout
        if layout is None:
            must = f"{type(self.module).__name__} must know the segments"
            do = (
                "Call the model with **batch.model_inputs(), and recompute layers by "
                "gradient_checkpointing_enable(); to generate, give the model back its own "
                "attention: model.set_attn_implementation('sdpa')"
            )
            raise BackendError(sentence("packed row", must, "no layout", do))
        return run_each(self.own, layout, args, kwargs)


def _takes(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding) or hasattr(type(module), "gradient_checkpointing"):
        return False  # positions from a mask; and whole layers
    return not STATES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _attends(module: nn.Module) -> bool:
    """Returns True if the module finds its attention in transformers' registry."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and REGISTRY in code.co_names
