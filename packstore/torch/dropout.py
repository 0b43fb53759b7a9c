"""Dropout, which preference training does without: it would part policy and reference at random."""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

logger = logging.getLogger("packstore")


def disable_dropout(model: nn.Module) -> None:
    """Sets the dropout of a model to 0, in place, and logs it; that of its adapters stays.

    Other than TRL's function of the name, it also reaches models that call dropout with a number of
    their own, and those that leave out whole layers. The config stays as it is.
    """
    changed: dict[str, float] = {}
    for path, module in model.named_modules():
        if any(part.startswith("lora_") for part in path.split(".")):
            continue  # asked for where the adapter was made
        for name, value in list(vars(module).items()):
            drops = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
            if drops and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed[path.rsplit(".", 1)[-1] if name == "p" else name] = value
    if changed:
        found = ", ".join(f"{name} {value:g}" for name, value in sorted(changed.items()))
        logger.info("dropout is disabled (disable_dropout=False keeps it): %s", found)
