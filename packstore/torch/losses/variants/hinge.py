"""Hinge loss on the implicit margin."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``max(0, 1 - b d)``.

    Source: Zhao et al. 2023 (SLiC-HF), arXiv 2305.10425; on the normalised likelihood, Liu et al.
    2023 (RSO), arXiv 2309.06657.
    """
    return (1 - beta * pairs.d).clamp(min=0)
