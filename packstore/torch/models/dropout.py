"""Disables dropout, for good or for a while: policy and reference would differ at random."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

logger = logging.getLogger("packstore")


def disable_dropout(model: nn.Module) -> None:
    """Sets the dropout of a model to 0, in place, and logs it; adapters keep theirs.

    Unlike TRL's function of this name, it also covers functional dropout with a rate stored on a
    module, and LayerDrop. The config is not changed.
    """
    changed: dict[str, float] = {}
    for path, module in model.named_modules():
        if any(part.startswith("lora_") for part in path.split(".")):
            continue  # the user chose it when making the adapter
        for name, value in list(vars(module).items()):
            drops = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
            if drops and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed[path.rsplit(".", 1)[-1] if name == "p" else name] = value
    if changed:
        found = ", ".join(f"{name} {value:g}" for name, value in sorted(changed.items()))
        logger.info("dropout is disabled (disable_dropout=False keeps it): %s", found)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts models into evaluation mode while a block runs, and then back."""
    before = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)
