"""Anchored preference optimisation, zero: raises the chosen response, lowers the rejected one."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``s(-b u) + s(b v)``.

    Source: D'Oosterlinck et al. 2024, arXiv 2408.06266.
    """
    return (-beta * pairs.u).sigmoid() + (beta * pairs.v).sigmoid()
