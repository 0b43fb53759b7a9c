"""What a loss needs of a reference model."""

from __future__ import annotations

import logging
from typing import Any

from packstore.errors import display

logger = logging.getLogger("packstore")


def needs_reference(loss_fn: Any) -> bool:
    """Returns True for a loss that compares with a reference model."""
    return bool(getattr(loss_fn, "reference", False) or getattr(loss_fn, "kl_weight", 0))


def tell_unused(loss_fn: Any, *given: str | None) -> None:
    """Warns of references that are `given` to a loss without one."""
    names = ", ".join(map(display, filter(None, given)))
    if names and not needs_reference(loss_fn):
        logger.warning("the loss has no reference; not used: %s", names)
