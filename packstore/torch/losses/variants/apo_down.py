"""Anchored preference optimisation, down: lowers both responses, the rejected one more."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``s(b u) + s(-b d)``.

    Source: D'Oosterlinck et al. 2024, arXiv 2408.06266.
    """
    return (beta * pairs.u).sigmoid() + (-beta * pairs.d).sigmoid()
