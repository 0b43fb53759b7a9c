"""Compiles the decoder layers of a model one by one with ``torch.compile``.

Half to two thirds of the time of a small model on a GPU goes to elementwise kernels between its
matrix products, which the compiler fuses. Layers share their graphs, as they run the same code:
one for training and one without gradients, for each kind of layer and each layout of the data.
Sizes are dynamic, so other batches need no further graph.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from packstore.errors import BackendError, sentence
from packstore.torch.models.unwrap import unwrapped

Model = TypeVar("Model", bound=nn.Module)


def compile_layers(model: Model, **options: Any) -> Model:
    """Compiles each decoder layer of `model` in place, at its first call.

    Attention by `torch_varlen`, or by `auto` where it chooses that, is part of the graph; other
    backends run outside it. Weights and their names stay. Call it after :func:`check_isolation`,
    whose small batches would be compiled too, and before DDP or FSDP wrap the model.

    Args:
        model: a Hugging Face causal LM prepared by :func:`use_packed_attention`, optionally inside
            wrappers.
        options: of ``torch.compile``, besides `dynamic`, which is True.

    Returns:
        `model`.

    Raises:
        BackendError: transformers does not name the model's decoder layers.
    """
    inner = unwrapped(model)
    names = set(getattr(inner, "_no_split_modules", None) or ())
    layers = [layer for layer in inner.modules() if type(layer).__name__ in names]
    if not layers:
        where = f"compile_layers({type(inner).__name__})"
        must = "transformers must name the model's decoder layers (_no_split_modules)"
        do = "Train it without compiled layers"
        raise BackendError(sentence(where, must, ", ".join(sorted(names)) or "none", do))
    for layer in layers:
        layer.compile(dynamic=True, **options)
    return model
