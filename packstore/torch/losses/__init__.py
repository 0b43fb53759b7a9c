"""Losses in which each pair weighs the same in any pack or batch; see ``README.md``."""

from packstore.torch.losses.distill import DistillLoss
from packstore.torch.losses.formulas import LOSSES
from packstore.torch.losses.loss import FirstStepCheck, PreferenceLoss
from packstore.torch.losses.pairs import Pairs
from packstore.torch.losses.policy import PolicyLoss, Tokens
from packstore.torch.losses.step_loss import LossOutput, StepDivisor, count_step

__all__ = [
    "LOSSES",
    "DistillLoss",
    "FirstStepCheck",
    "LossOutput",
    "Pairs",
    "PolicyLoss",
    "PreferenceLoss",
    "StepDivisor",
    "Tokens",
    "count_step",
]
