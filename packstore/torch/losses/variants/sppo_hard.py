"""SPPO with hard labels."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def sppo_hard(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(u - 1 / (2 b))^2 + (v + 1 / (2 b))^2``.

    Source: Wu et al. 2024, arXiv 2405.00675.
    """
    target = 1 / (2 * beta)
    return (pairs.u - target) ** 2 + (pairs.v + target) ** 2
