"""Losses by the names that users type."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from packstore.config.settings import check_names
from packstore.errors import ConfigError, sentence
from packstore.registry import Registry
from packstore.torch.losses.distill import DistillLoss
from packstore.torch.losses.formulas import LOSSES
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import StepLoss
from packstore.torch.losses.terms import LOSS_ALIASES, UNSUPPORTED_LOSSES

DISTILL = "distill"

LOSS_NAMES: Registry[Any] = Registry(
    "loss", {**LOSSES, DISTILL: f"{DistillLoss.__module__}:{DistillLoss.__name__}"}
)
"""Names of all losses: those of :class:`PreferenceLoss`, and ``distill``."""


def make_loss(loss: Any, parameters: Mapping[str, Any]) -> StepLoss:
    """Return a loss object as it is, or make one from a name, a mix or a function.

    Args:
        loss: ``distill``; or a loss as for :class:`PreferenceLoss`; or a loss object.
        parameters: keywords of :class:`DistillLoss` or :class:`PreferenceLoss`.

    Raises:
        UnknownNameError: the loss, or a parameter of it, is unknown.
        ConfigError: a value is out of range, or a loss object has parameters.
    """
    if isinstance(loss, StepLoss):
        if parameters:
            raise ConfigError(
                sentence(
                    where="argument loss_parameters",
                    rule="it must be left out with a loss object",
                    found=repr(loss),
                    remedy="Pass them to the loss",
                )
            )
        return loss
    if loss == DISTILL:
        names = signature(DistillLoss).parameters
        check_names(parameters, names, "docs/losses.md", "parameter of loss 'distill'")
        return DistillLoss(**parameters)
    if isinstance(loss, str) and loss not in {*LOSS_ALIASES, *UNSUPPORTED_LOSSES}:
        LOSS_NAMES.check(loss)
    return PreferenceLoss(loss, **parameters)
