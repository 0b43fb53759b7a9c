"""Reports that packed training does not compute the load-balancing loss of experts.

transformers computes it over all tokens of a call. Over a packed row it would depend on the
sequences that share the row, and on padding. TRL adds it over its padded batches.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from torch import nn

from packstore.errors import CompatibilityError, sentence
from packstore.torch.models.unwrap import unwrapped

logger = logging.getLogger("packstore")

_TOLD: WeakSet[nn.Module] = WeakSet()


def check_router_loss(model: Any) -> None:
    """Logs, once per model, that the load-balancing loss of its experts is not computed.

    Args:
        model: a Hugging Face causal LM, optionally inside wrappers; one without trainable
            weights is skipped.

    Raises:
        CompatibilityError: the model's config enables the loss (`output_router_logits`).
    """
    model = unwrapped(model)
    if model in _TOLD or not any(p.requires_grad for p in model.parameters()):
        return
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    where = f"experts of {type(model).__name__}"
    if getattr(text, "output_router_logits", False):
        must = "packed training computes no load-balancing loss of routers"
        found = "output_router_logits=True in the model's config"
        do = "Set it to False to train without that loss; or train unpacked, for example with TRL"
        raise CompatibilityError(sentence(where, must, found, do))
    _TOLD.add(model)
    weight = getattr(text, "router_aux_loss_coef", None)
    if weight and hasattr(text, "output_router_logits"):
        logger.warning(
            "%s: the load-balancing loss of their router (router_aux_loss_coef %g in the config), "
            "which TRL adds to DPO, is not part of the loss here",
            where,
            weight,
        )
